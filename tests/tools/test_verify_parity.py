"""verify_parity: equal layouts pass, and every planted fault is found, named by the numbers that it spoils."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_lite.arguments.expert_checks import check_experts
from megatron_lite.arguments.parse import parse_arguments
from megatron_lite.arithmetic.costs import model_costs
from megatron_lite.config.optimizers import FULL, OPTIMIZERS, SCALAR, OptimizerRow
from megatron_lite.distributed.environment import Environment
from megatron_lite.distributed.mesh import ParallelMesh
from megatron_lite.model import router as router_module
from megatron_lite.model.gpt import GPTChunk
from megatron_lite.parallel import fsdp as fsdp_module
from megatron_lite.parallel import pipeline as pipeline_module
from megatron_lite.parallel.miniature import miniature
from megatron_lite.parallel.tied import TiedWeights
from megatron_lite.rehearsal import one_process, parity
from megatron_lite.training import gradients as gradients_module
from megatron_lite.training import run as run_module
from tests.ranks import run_ranks
from tools import verify_parity

ROOT = Path(__file__).resolve().parents[2]
FLAGS = """
    --cpu --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1
    --global-batch-size 8 --train-iters 5 --lr 1e-3 --normalization RMSNorm --swiglu --disable-bias-linear
    --position-embedding-type rope --tokenizer-type NullTokenizer --vocab-size 61 --mock-data
    --make-vocab-size-divisible-by 64
"""
LAYOUT = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"


def config_of(flags, world_size=4, precision="fp32"):
    config = parse_arguments(flags.split(), Environment(world_size=world_size, launched=True))
    return parity.comparable(verify_parity.with_any_vocabulary(config), precision)


def _verify(config, fault=None):
    """On every rank: plant the fault in the code that only the layout's side runs, then verify."""
    if fault is not None:
        FAULTS[fault]()
    return verify_parity.verify(config, torch.device("cpu"), 2, verify_parity.FACTOR)


def scaled_gradients():
    """The default of torch's schedules: gradients divided by the number of microbatches."""
    for name, kind in list(pipeline_module.SCHEDULE_CLASSES.items()):
        pipeline_module.SCHEDULE_CLASSES[name] = type(
            kind.__name__,
            (kind,),
            {"__init__": lambda self, *a, k=kind, **o: k.__init__(self, *a, **_scaled(o))},
        )


def _scaled(options):
    return options | {"scale_grads": True}


def dropped_layer():
    """A split that forgets the last layer of stage 1."""
    whole = run_module.plan_from_config
    run_module.plan_from_config = lambda config: [
        replace(plan, layers=() if plan.stage == 1 else plan.layers) for plan in whole(config)
    ]


def doubled_tied_gradient():
    """The tied gradient exchanged once too often."""
    once = TiedWeights.sum_gradients
    TiedWeights.sum_gradients = lambda self: (once(self), once(self))


def labels_of_the_wrong_microbatch():
    """The last stage's labels are those of the next sample."""
    right = pipeline_module.Pipeline._run

    def wrong(self, step, batch):
        return right(self, step, batch | {"labels": batch["labels"].roll(1, 0)})

    pipeline_module.Pipeline._run = wrong


def norm_of_one_shard():
    """The norm of the gradient's local piece only."""
    gradients_module.sum_over_model = lambda values, mesh: sum(value for _, value in values)


def weights_seeded_by_rank():
    """Each pipeline rank starts from its own random numbers."""
    right, rank = GPTChunk.initial_rows, torch.distributed.get_rank()
    verify_parity.run_layout = _with_seed(verify_parity.run_layout, right, rank)


def _with_seed(run, right, rank):
    def run_layout(*arguments):
        GPTChunk.initial_rows = lambda self, name, shape, rows, seed: right(
            self, name, shape, rows, seed + rank
        )
        try:
            return run(*arguments)
        finally:
            GPTChunk.initial_rows = right

    return run_layout


def loss_of_my_samples_only():
    """A loss that is not added up over the data-parallel ranks."""
    ParallelMesh.sum_over = _without("dp_shard", ParallelMesh.sum_over)


def _without(axis, right):
    return lambda self, value, *axes: right(self, value, *(a for a in axes if a != axis))


def in_the_layout_only(owner, name, wrong):
    """Plant wrong(right) while the layout runs: the one process may run the same code."""
    run, right = verify_parity.run_layout, getattr(owner, name)

    def run_layout(*arguments):
        setattr(owner, name, wrong(right))
        try:
            return run(*arguments)
        finally:
            setattr(owner, name, right)

    verify_parity.run_layout = run_layout


def replicas_of_experts_not_summed():
    """Experts sharded over edp without the axis of replicas."""
    fsdp_module._other_meshes = lambda layer, mesh: [(layer.mlp.experts, mesh.expert_mesh["edp"])]


def experts_counted_by_tp():
    """A norm in which tensor ranks are taken for copies of the experts, which they are not."""
    gradients_module.replication = lambda tensor, mesh: mesh.size("tp")


def routers_losses_scaled_twice():
    """By the number of microbatches, once more."""
    in_the_layout_only(
        router_module,
        "attach_losses",
        lambda right: (
            lambda weights, total, router, *more: right(weights, total * router.loss_factor, router, *more)
        ),
    )


def tokens_counted_in_forward():
    """Which a recomputed layer runs twice."""

    def wrong(right):
        def attach(weights, total, router, tokens, losses):
            router.tally.add(tokens, losses)
            return right(
                weights, total, router, tokens * 0, {name: loss * 0 for name, loss in losses.items()}
            )

        return attach

    in_the_layout_only(router_module, "attach_losses", wrong)


def tokens_left_out_on_one_rank():
    """Those of the first expert, as if they were padding, and on rank 1 alone."""
    if torch.distributed.get_rank() == 1:

        def wrong(right):
            def attach(weights, total, router, tokens, losses):
                tokens = tokens.clone()
                tokens[0] = 0
                return right(weights, total, router, tokens, losses)

            return attach

        in_the_layout_only(router_module, "attach_losses", wrong)


FAULTS = {
    function.__name__: function
    for function in (
        replicas_of_experts_not_summed,
        experts_counted_by_tp,
        routers_losses_scaled_twice,
        tokens_counted_in_forward,
        tokens_left_out_on_one_rank,
        scaled_gradients,
        dropped_layer,
        doubled_tied_gradient,
        labels_of_the_wrong_microbatch,
        norm_of_one_shard,
        weights_seeded_by_rank,
        loss_of_my_samples_only,
    )
}
# What the report has to mark as different, and one number that stays right.
MARKS = {
    "scaled_gradients": ("gradient norm of step 0", "loss of step 0"),
    "dropped_layer": ("loss of step 0", None),
    "doubled_tied_gradient": ("gradient of embedding.word_embeddings.weight", "loss of step 0"),
    "labels_of_the_wrong_microbatch": ("loss of step 0", None),
    "norm_of_one_shard": ("gradient norm of step 0", "loss of step 0"),
    "weights_seeded_by_rank": ("loss of step 0", None),
    "loss_of_my_samples_only": ("loss of step 0", None),
    "replicas_of_experts_not_summed": ("loss of step 1", "loss of step 0"),
    "experts_counted_by_tp": ("gradient norm of step 0", "loss of step 0"),
    "routers_losses_scaled_twice": ("gradient of layers.0.mlp.router.weight", "loss of step 0"),
    "tokens_counted_in_forward": ("tokens routed of step 0", "loss of step 0"),
    "tokens_left_out_on_one_rank": ("tokens routed of step 0", "loss of step 0"),
}


def _line(report, name):
    return next((line for line in report.splitlines() if line.startswith(name)), "")


MIXTURE = """--num-experts 8 --moe-ffn-hidden-size 16 --moe-aux-loss-coeff 0.1 --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"""
LAYOUTS = {
    "replicas_of_experts_not_summed": f"{MIXTURE} --num-distributed-optimizer-instances 2",
    "experts_counted_by_tp": f"{MIXTURE} --tensor-model-parallel-size 2 --sequence-parallel",
    "routers_losses_scaled_twice": f"{MIXTURE} --context-parallel-size 2",
    "tokens_counted_in_forward": f"{MIXTURE} --recompute-granularity full --recompute-method uniform",
    "tokens_left_out_on_one_rank": MIXTURE,
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=range(len(LAYOUTS)))
def test_a_mixture_s_right_layout_is_equal(layout):
    report, equal = run_ranks(_verify, 4, config_of(f"{FLAGS} {layout}"), init=True)[0]
    assert equal and "the closest choice of a router: by" in report, report


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    config = config_of(f"{FLAGS} {LAYOUTS.get(fault, LAYOUT)}")
    report, equal = run_ranks(_verify, 4, config, fault, init=True)[0]
    assert not equal, report
    assert "DIFFERENT" in report
    marked, right = MARKS[fault]
    assert _line(report, marked).endswith("<-- differs"), report
    if right is not None:
        assert not _line(report, right).endswith("differs"), report


@pytest.mark.parametrize(
    ("fault", "marked"),
    [
        ("norm_of_one_shard", "gradient norm of step 0"),
        ("doubled_tied_gradient", "gradient of embedding.word_embeddings.weight"),
    ],
)
def test_a_half_format_hides_no_fault(fault, marked):
    """bf16 rounds by 0.4%: no reason to take a norm of one shard, 30% or 40% off, for equal."""
    report, equal = run_ranks(
        _verify, 4, config_of(f"{FLAGS} {LAYOUT} --bf16", precision="keep"), fault, init=True
    )[0]
    assert not equal and _line(report, marked).endswith("<-- differs"), report


@pytest.mark.parametrize(
    "layout",
    [
        LAYOUT,
        "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 --optimizer sgd"
        " --reset-attention-mask --reset-position-ids",
        "--pipeline-model-parallel-size 2 --pipeline-schedule zbv --optimizer muon",
    ],
)
def test_a_right_layout_is_equal(layout):
    report, equal = run_ranks(_verify, 4, config_of(f"{FLAGS} {layout}"), init=True)[0]
    assert equal, report


def test_a_large_run_keeps_its_layout_and_loses_its_size():
    flags = """
        --num-layers 30 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64
        --group-query-attention --num-query-groups 8 --seq-length 8192 --micro-batch-size 4
        --global-batch-size 2048 --train-iters 5 --lr 1e-4 --tokenizer-type NullTokenizer --vocab-size 128256
        --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --context-parallel-size 2
        --tensor-model-parallel-size 4 --sequence-parallel --swiglu --position-embedding-type rope --mock-data
    """
    given = verify_parity.with_any_vocabulary(
        parse_arguments(flags.split(), Environment(world_size=64, launched=True))
    )
    small = miniature(given, 20_000_000, 16_384)
    assert small.parallel == replace(given.parallel, recompute_num_layers=small.parallel.recompute_num_layers)
    assert small.model.num_layers == 16 + 30 % 8  # still uneven over 8 stages
    assert small.model.num_attention_heads % 4 == small.model.num_query_groups % 4 == 0
    assert small.model.num_attention_heads > small.model.num_query_groups
    assert small.model.padded_vocab_size % 4 == 0 and small.model.padded_vocab_size > small.model.vocab_size
    assert small.data.seq_length % 16 == 0
    assert small.training.global_batch_size % (small.training.micro_batch_size * 2) == 0
    assert miniature(small, 20_000_000, 16_384) == small


def test_a_large_mixture_keeps_its_layout_too():
    flags = """
        --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --seq-length 4096
        --micro-batch-size 1 --global-batch-size 1024 --train-iters 5 --lr 1e-4 --tokenizer-type NullTokenizer
        --vocab-size 129280 --mock-data --bf16 --swiglu --disable-bias-linear --position-embedding-type rope
        --pipeline-model-parallel-size 4 --expert-model-parallel-size 32 --expert-tensor-parallel-size 1
        --num-experts 256 --moe-ffn-hidden-size 2048 --moe-router-topk 8 --moe-layer-freq ([0]*3+[1]*58)
        --moe-router-score-function sigmoid --moe-router-num-groups 8 --moe-router-group-topk 4
        --moe-shared-expert-intermediate-size 2048
    """
    given = verify_parity.with_any_vocabulary(
        parse_arguments(flags.split(), Environment(world_size=128, launched=True))
    )
    small = miniature(given, 20_000_000, 16_384)
    model = small.model
    assert small.parallel == given.parallel and model.num_layers == 8 + 61 % 4
    assert model.num_experts == 64 and model.moe_layer_freq == (0, 0, 0) + (1,) * 6
    assert model_costs(model, 64).parameters < 5_000_000
    check_experts(small)
    assert miniature(small, 20_000_000, 16_384) == small


@pytest.mark.parametrize(
    ("more", "code", "text"),
    [("", 0, "EQUAL"), ("--parity-factor 1e-9", 1, "DIFFERENT"), ("--nonsense", 2, "--nonsense")],
)
def test_the_command(more, code, text):
    """One process without torchrun: the exit code and what it prints."""
    command = [sys.executable, "tools/verify_parity.py", *FLAGS.split(), *more.split()]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == code, done.stderr
    assert text in done.stdout + done.stderr


def test_a_layout_may_round_as_one_process_does_and_a_few_times_more():
    """Truth 1 everywhere: below the floor nothing fails, above it what exceeds the factor."""

    def outcome(loss, gradient):
        return one_process.Outcome([loss] * 2, [1.0] * 2, {"a": torch.full((2,), gradient)}, 1.0)

    def failed(layout, one):
        rows = parity.compare(layout, one, outcome(1.0, 1.0), factor=8)
        return [row.name for row in rows if row.fails]

    exact = outcome(1.0, 1.0)
    assert failed(outcome(1 + 7e-6, 1 + 7e-6), exact) == []
    assert failed(outcome(1 + 9e-6, 1 + 9e-6), exact) == ["loss of step 0", "loss of step 1", "gradient of a"]
    assert failed(outcome(1 + 7e-4, 1 + 7e-4), outcome(1 + 1e-4, 1 - 1e-4)) == []
    assert failed(outcome(1 + 9e-4, 1 + 9e-4), outcome(1 + 1e-4, 1 - 1e-4)) != []
    assert failed(outcome(float("nan"), 1.0), exact) == ["loss of step 0", "loss of step 1"]
    # A loss that is right by luck is judged by what the gradients show of the format's rounding.
    assert failed(outcome(1 + 7e-4, 1.0), outcome(1.0, 1 + 1e-4)) == []
    without = one_process.Outcome([1.0] * 2, [1.0] * 2, {}, 1.0)
    assert failed(without, exact) == ["gradient of a"]


def test_a_new_optimizer_is_judged_by_itself_in_one_process(monkeypatch):
    row = OptimizerRow("torch.optim:Adagrad", {"eps": "adam_eps"}, {"step": SCALAR, "sum": FULL})
    monkeypatch.setitem(OPTIMIZERS, "adagrad", row)
    config = config_of(FLAGS)
    config = replace(config, optimizer=replace(config.optimizer, optimizer="adagrad", adam_eps=1e-5))
    model = GPTChunk(config.model, range(config.model.num_layers))
    (optimizer,) = one_process.torch_optimizers(config, model)
    assert type(optimizer) is torch.optim.Adagrad and optimizer.defaults["eps"] == 1e-5
    assert [group["weight_decay"] for group in optimizer.param_groups] == [config.optimizer.weight_decay, 0.0]
