"""A rehearsal against closed forms, and against a real run on gloo that is measured by other code."""

import gc
import re
import resource
import subprocess
import sys
import time
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

from megatron_lite.config import CommandConfig
from megatron_lite.distributed.mesh import build_mesh
from megatron_lite.rehearsal import dry_run as rehearsal
from megatron_lite.rehearsal.dry_run import describe, ranks_to_rehearse, rehearse_rank
from megatron_lite.rehearsal.one_process import initial_model
from megatron_lite.rehearsal.parity import my_samples
from megatron_lite.training.gradients import local_part
from megatron_lite.training.named_tensors import named_state
from megatron_lite.training.run import build_run
from tests.parallel.live_bytes import LiveBytes
from tests.parity import make_batches, make_config
from tests.ranks import run_ranks
from tests.runs import MODEL, ROOT, TRAINING, run_alone

# Wide enough that activations and weights, not small change, are what is seen; every shard is of equal size.
WIDE = {"hidden_size": 64, "ffn_hidden_size": 128, "kv_channels": 16, "num_layers": 4}
EXPERTS = WIDE | {
    "num_experts": 4,
    "moe_ffn_hidden_size": 64,
    "moe_aux_loss_coeff": (0.01,),
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
LAYOUTS = {
    "alone": {},
    "dp": {"dp": 4},
    "hsdp": {"dp": 4, "num_distributed_optimizer_instances": 2},
    "no_shard": {"dp": 2, "data_parallel_sharding_strategy": "no_shard"},
    "zero-2": {"dp": 2, "reshard_after_forward": "never"},
    "offload": {"dp": 2, "fsdp_cpu_offload": True},
    "pp": {"pp": 4},
    "gpipe in passes": {"pp": 2, "schedule": "gpipe", "max_microbatches_per_step": 2, "microbatches": 8},
    "interleaved": {"pp": 2, "chunks": 2, "dp": 2},
    "zero bubble": {"pp": 2, "chunks": 2, "schedule": "interleaved-zero-bubble"},
    "zbv": {"pp": 2, "chunks": 2, "schedule": "zbv"},
    "dualpipev": {"pp": 2, "chunks": 2, "schedule": "dualpipev"},
    "tp": {"tp": 2, "model": WIDE | {"hidden_dropout": 0.1, "attention_dropout": 0.1}},
    "tp, sequence": {"tp": 2, "sequence_parallel": True, "dp": 2},
    "cp": {"cp": 2, "dp": 2},
    "all": {"pp": 2, "chunks": 2, "dp": 4, "tp": 2, "cp": 2, "num_distributed_optimizer_instances": 2},
    "tied": {"pp": 2, "model": WIDE | {"untie_embeddings_and_output_weights": False}},
    "fp16": {"dp": 2, "precision": "fp16"},
    "muon": {"dp": 2, "optimizer": "muon"},
    "full recompute": {"dp": 2, "recompute_granularity": "full"},
    "experts": {"pp": 2, "dp": 2, "cp": 2, "model": EXPERTS},
    "experts over ranks": {
        "pp": 2,
        "chunks": 2,
        "schedule": "zbv",
        "dp": 2,
        "tp": 2,
        "sequence_parallel": True,
        "expert_model_parallel_size": 4,
        "precision": "bf16",
        "model": EXPERTS,
    },
}


def slow(layout):
    """The case for when there is time."""
    return pytest.param(layout, marks=pytest.mark.slow)


def config_of(**layout):
    return make_config(**{"model": WIDE} | layout)


def total_parameters(config):
    return sum(p.numel() for p in initial_model(config).parameters())


SHORT = (
    "all",
    "offload",
    "dualpipev",
    "experts over ranks",
)  # the others are as many seconds each: run by hand


@pytest.mark.parametrize(
    "name", [n if n in SHORT else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS]
)
def test_every_degree_and_schedule_rehearses(name):
    """Two steps on the last rank, and that rank's share of parameters, gradients and optimizer state."""
    config = config_of(**LAYOUTS[name])
    parallel = config.parallel
    found = rehearse_rank(config, parallel.world_size - 1)
    replicas = parallel.num_distributed_optimizer_instances
    if parallel.data_parallel_sharding_strategy == "no_shard":
        replicas = parallel.data_parallel_size
    assert found.gradients == found.parameters
    assert found.peak > found.parameters + found.optimizer
    assert sum(found.peak_parts.values()) == found.peak
    if parallel.pipeline_model_parallel_size == 1:
        share = total_parameters(config) * 4 * replicas / parallel.world_size
        assert found.parameters == pytest.approx(share, rel=0.03)  # norms are whole on every tensor rank
    if config.optimizer.optimizer == "adam":
        assert found.optimizer == pytest.approx(2 * found.parameters, rel=0.01)  # and the step counters
    axes = {axis for message in found.messages for axis in message.axis.split(" x ")}
    sizes = {"pp": parallel.pipeline_model_parallel_size, "tp": parallel.tensor_model_parallel_size}
    sizes |= {"cp": parallel.context_parallel_size, "dp_replicate": replicas}
    assert {axis for axis, size in sizes.items() if size > 1} <= axes


def test_reduce_scatters_by_formula():
    """One for each block, the embedding and the head, fp32: together the whole gradient, with every microbatch."""
    config = config_of(dp=4, microbatches=3)
    found = rehearse_rank(config, 1)
    messages = {(m.kind, m.axis): m for m in found.messages}
    scattered = messages["reduce-scatter", "dp_shard"]
    assert scattered.count == 3 * (config.model.num_layers + 2)
    assert scattered.bytes == 3 * total_parameters(config) * 4
    assert scattered.sent == scattered.bytes * 3 // 4
    # Gathered for each forward and backward, the head once, and nothing for nothing.
    assert messages["all-gather", "dp_shard"].count == 3 * (2 * (config.model.num_layers + 1) + 1)


@pytest.mark.parametrize("imbalance", [1.0, 1.5])
def test_exchanges_of_tokens_by_formula(imbalance):
    """A layer sends K rows a token to experts and back, forward and backward; a full rank gets 1.5 times as many."""
    config = config_of(dp=4, tp=2, sequence_parallel=True, expert_model_parallel_size=4, model=EXPERTS)
    config = replace(config, command=replace(config.command, imbalance=imbalance))
    found = rehearse_rank(config, 0)
    [exchanged] = [m for m in found.messages if m.kind == "all-to-all"]
    # Of 4 microbatches and 4 layers: rows and weights there, outputs back, these three backward, and counts once.
    assert (exchanged.axis, exchanged.group_size, exchanged.count) == ("ep", 4, 4 * 4 * 7)
    rows = 2 * 16 // 2 * imbalance
    assert exchanged.bytes == 4 * 4 * (4 * rows * 64 * 4 + 2 * rows * 4 + 4 * 4)
    experts = {(m.kind, m.axis): m for m in found.messages}["reduce-scatter", "edp"]
    assert experts.bytes == 4 * 4 * (3 * 64 * 64) * 4  # once a layer and microbatch, of one expert


def test_imbalance_is_in_the_activations():
    """Each further row keeps its token, five tensors of its expert's width, a weight and its place in the order."""
    even, full = (
        rehearse_rank(
            replace(
                config_of(dp=4, expert_model_parallel_size=4, micro_batch_size=4, model=EXPERTS),
                command=CommandConfig(imbalance=imbalance),
            ),
            0,
        ).activations
        for imbalance in (1.0, 1.5)
    )
    kept = 4 * 64 * (4 * (64 + 5 * 64 + 1) + 16)
    assert kept <= full - even < 1.1 * kept  # the last layer's outputs are there too for a moment


def test_pipeline_messages_by_formula():
    """The middle of three stages gets and sends one hidden state and one gradient a microbatch."""
    found = rehearse_rank(config_of(pp=4, microbatches=12, micro_batch_size=2), 1)
    hidden = 2 * 16 * WIDE["hidden_size"] * 4
    for kind in ("send", "receive"):
        [message] = [m for m in found.messages if m.kind == kind]
        # torch 2.11's stages send each neighbour one number before the first step.
        assert message.axis == "pp" and message.count in (24, 26)
        assert message.bytes - 24 * hidden in (0, 8)
    assert found.buffers < hidden  # no buffer outlives its microbatch


@pytest.mark.parametrize("schedule", [{"pp": 4, "dp": 2}, {"pp": 2, "dp": 2, "chunks": 2}])
def test_more_microbatches_take_no_more_memory(schedule):
    """A receive buffer lives as long as its microbatch: a batch that ramps up cannot run out of memory."""
    peaks = [rehearse_all(config_of(microbatches=count, **schedule)) for count in (8, 16)]
    assert peaks[1] - peaks[0] == 8 * 2 * 16 * 8  # the batch's own tokens and labels


def rehearse_all(config):
    """Bytes at the worst moment of a pipeline rank in the middle, every microbatch run."""
    with mock.patch.object(rehearsal, "microbatches_to_run", lambda config, wanted: (wanted, wanted)):
        return rehearse_rank(config, 1).peak


class EveryByte(LiveBytes):
    """LiveBytes of my own pieces: a DTensor is no storage, the operators that it turns into make some."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        return super().__torch_dispatch__(function, types, args, kwargs)


def _measure(config, microbatches):
    """[parameters, gradients, optimizer state, peak] in bytes, of a real second step (a rank function)."""
    mesh = build_mesh(config, torch.device("cpu"))
    with EveryByte() as live:
        run = build_run(config, mesh)
        chunks, pipeline, optimizer = run.chunks, run.pipeline, run.optimizer
        batch = my_samples(make_batches(config.training.global_batch_size, 1)[0], config, mesh)
        pipeline.train_step(batch, microbatches, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        live.peak = 0
        pipeline.train_step(batch, microbatches, 1.0)
        optimizer.step()
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    states = [t for c in chunks for _, t in named_state(c.named_global_parameters(), optimizer)]
    kinds = (parameters, [p.grad for p in parameters], states)
    return [*(_bytes(tensors) for tensors in kinds), live.peak]


def _bytes(tensors):
    storages = [local_part(t).untyped_storage() for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2},
        {"pp": 2, "dp": 2, "chunks": 2},
        {"dp": 2, "model": EXPERTS},
        slow({"dp": 2, "model": EXPERTS, "precision": "bf16", "recompute_granularity": "full"}),
        slow({"dp": 2, "model": EXPERTS, "expert_model_parallel_size": 2}),
        slow({"dp": 4, "num_distributed_optimizer_instances": 2}),
        slow({"pp": 2, "microbatches": 8}),
        slow({"pp": 2, "schedule": "gpipe", "precision": "bf16"}),
        slow({"dp": 2, "recompute_granularity": "full"}),
    ],
    ids=str,
)
def test_equals_what_a_real_run_holds(layout):
    """Within 10%, measured on real gloo ranks by code that the rehearsal does not use."""
    config = config_of(**layout, micro_batch_size=4)
    microbatches = layout.get("microbatches", 4)
    real = run_ranks(_measure, config.parallel.world_size, config, microbatches, init=True)
    for rank in {0, config.parallel.world_size - 1}:
        found = rehearse_rank(config, rank)
        parameters, gradients, states, peak = real[rank]
        assert [found.parameters, found.gradients] == [parameters, gradients]
        assert found.optimizer == pytest.approx(states, rel=0.01)
        assert found.peak == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 2, "chunks": 2, "dp": 2},
        slow({"dp": 2}),
        slow({"pp": 4}),
        slow({"pp": 2, "schedule": "gpipe"}),
        slow({"pp": 2, "chunks": 2, "schedule": "zbv"}),
        slow({"pp": 2, "max_microbatches_per_step": 4}),
    ],
    ids=str,
)
def test_many_microbatches_follow_from_few(layout, monkeypatch):
    """What is said of a step of 12 from small steps is what a step of 12 has."""
    config = config_of(**layout, microbatches=12)
    few = rehearse_rank(config, 1)
    monkeypatch.setattr(rehearsal, "microbatches_to_run", lambda config, wanted: (wanted, wanted))
    all_of_them = rehearse_rank(config, 1)
    assert few.messages == all_of_them.messages
    assert few.buffers == all_of_them.buffers
    assert few.peak == pytest.approx(all_of_them.peak, rel=0.02)
    assert few.activations == pytest.approx(all_of_them.activations, rel=0.02)


def test_an_impossible_run_gives_its_error():
    """Four tensor ranks cannot share two key/value heads: the model's own error, and which rank had it."""
    config = config_of(tp=4)
    with pytest.raises(RuntimeError, match="failed to run forward") as caught:
        rehearsal.rehearse(config)
    assert "unflatten" in str(caught.value.__cause__)
    assert "rank 0 of 4" in caught.value.__notes__[0]
    assert not torch.distributed.is_initialized()
    rehearse_rank(config_of(), 0)  # what failed leaves nothing behind


def test_ranks():
    config = config_of(pp=4, dp=2)
    one = replace(config, command=replace(config.command, rank=3))
    assert ranks_to_rehearse(one) == [3]
    every = replace(config, command=replace(config.command, rank=3, all_stages=True))
    assert ranks_to_rehearse(every) == [1, 3, 5, 7]


def test_the_text_says_what_was_found():
    config = config_of(pp=2, dp=2)
    text = describe(rehearse_rank(config, 3), config)
    assert text.startswith("rank 3 of 4 (pp 1/2, dp_shard 1/2)\n  stage 1: layers 2 to 3, head")
    assert re.search(r"reduce-scatter +dp_shard +2 +3 ", text)


def test_from_the_command_line():
    """No data, no tokenizer's files, one process, each pipeline rank in turn."""
    argv = (
        f"{MODEL} {TRAINING} --dry-run --world-size 4 --pipeline-model-parallel-size 2 --all-stages".split()
    )
    done = run_alone(argv)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("rank")] == [
        "rank 0 of 4 (pp 0/2, dp_shard 0/2)",
        "rank 2 of 4 (pp 1/2, dp_shard 0/2)",
    ]


SEVENTY_BILLION = """
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention
    --num-query-groups 8 --max-position-embeddings 8192 --swiglu --normalization RMSNorm
    --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --bf16
    --hidden-dropout 0 --attention-dropout 0 --seq-length 8192 --micro-batch-size 1 --global-batch-size 1024
    --train-iters 1000 --lr 1e-4 --vocab-size 128256 --tensor-model-parallel-size 8 --sequence-parallel
    --pipeline-model-parallel-size 8 --num-virtual-stages-per-pipeline-rank 2 --dry-run --world-size 1024
"""


@pytest.mark.slow
def test_seventy_billion_on_1024_ranks():
    """Under 60 s of one core and 2 GB."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    command = [sys.executable, "pretrain_gpt.py", *SEVENTY_BILLION.split(), "--rank", "1023"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{time.monotonic() - started:.0f} s\n{done.stdout}")
    assert done.returncode == 0, done.stderr
    assert "rank 1,023 of 1,024 (pp 7/8, dp_shard 15/16, tp 7/8)" in done.stdout
    assert after.ru_utime - before.ru_utime < 60
    assert after.ru_maxrss * 1024 < 2e9
