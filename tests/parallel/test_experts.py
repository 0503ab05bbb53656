"""A mixture of experts in every layout: losses, gradients, loads, logged losses and biases of one process."""

import pytest
import torch

from megatron_lite.distributed.mesh import build_mesh
from megatron_lite.rehearsal.parity import PreparedBatches
from megatron_lite.training.experts import Balance
from megatron_lite.training.run import build_run
from tests.parity import (
    SEQ_LENGTH,
    assert_equals_one_process,
    make_batches,
    make_config,
    train_in_layout,
)
from tests.ranks import run_ranks

SOFTMAX = {
    "num_layers": 4,
    "num_experts": 8,
    "moe_ffn_hidden_size": 16,
    "moe_aux_loss_coeff": (0.05,),
    "moe_z_loss_coeff": 1e-3,
}
DEEPSEEK = {
    "num_layers": 4,
    "num_experts": 16,
    "moe_ffn_hidden_size": 16,
    "moe_layer_freq": (0, 1, 1, 1),
    "moe_router_topk": 4,
    "moe_router_score_function": "sigmoid",
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.05,
    "moe_router_load_balancing_type": ("seq_aux_loss",),
    "moe_aux_loss_coeff": (0.05,),
    "moe_shared_expert_intermediate_size": 24,
    "moe_shared_expert_gate": True,
}
BIASED = SOFTMAX | {"disable_bias_linear": False, "swiglu": False, "num_layers": 2}
V = {"pp": 2, "chunks": 2, "model": SOFTMAX}
MOE = {"recompute_granularity": "selective", "recompute_modules": ("moe",)}
FULL = {"recompute_granularity": "full"}

LAYOUTS = {
    "one process": {"model": SOFTMAX},
    "dp": {"dp": 2, "model": SOFTMAX},
    "dp 4, bias": {"dp": 4, "microbatches": 2, "model": DEEPSEEK},
    "hsdp": {"dp": 4, "num_distributed_optimizer_instances": 2, "microbatches": 2, "model": SOFTMAX},
    "no_shard": {"dp": 2, "data_parallel_sharding_strategy": "no_shard", "model": DEEPSEEK},
    "cpu offload": {"dp": 2, "fsdp_cpu_offload": True, "model": DEEPSEEK},
    "experts uneven over ranks": {"dp": 4, "microbatches": 1, "model": SOFTMAX | {"num_experts": 3}},
    "one expert": {
        "dp": 2,
        "model": SOFTMAX | {"num_experts": 1, "moe_router_topk": 1, "moe_router_pre_softmax": True},
    },
    "two samples a microbatch": {"dp": 2, "micro_batch_size": 2, "model": SOFTMAX},
    "linear biases": {"dp": 2, "pp": 2, "model": BIASED},
    "pp": {"pp": 2, "model": SOFTMAX},
    "pp x dp, bias": {"pp": 2, "dp": 2, "model": DEEPSEEK},
    "two passes a step": {"pp": 2, "microbatches": 8, "max_microbatches_per_step": 4, "model": DEEPSEEK},
    "interleaved": V,
    "zero bubble": V | {"schedule": "interleaved-zero-bubble", "dp": 2},
    "zbv": V | {"schedule": "zbv"},
    "dualpipev, bias": V | {"schedule": "dualpipev", "model": DEEPSEEK},
    "zero bubble, recompute moe": V | {"schedule": "interleaved-zero-bubble"} | MOE,
    "cp": {"cp": 2, "model": SOFTMAX},
    "cp, loss over sequences": {"cp": 2, "micro_batch_size": 2, "model": DEEPSEEK},
    "cp x dp x pp, recompute moe": {"cp": 2, "dp": 2, "pp": 2, "model": DEEPSEEK} | MOE,
    "recompute": {"dp": 2, "model": SOFTMAX} | FULL,
    "recompute, bias": {"pp": 2, "model": DEEPSEEK} | FULL,
    "each microbatch": {
        "dp": 2,
        "reduce_gradients": "each-microbatch",
        "reshard_after_forward": "always",
        "model": SOFTMAX,
    },
    "muon": {"dp": 2, "pp": 2, "optimizer": "muon", "model": DEEPSEEK},
}


@pytest.mark.parametrize("row", LAYOUTS)
def test_layout_equals_one_process(row):
    """Losses and gradient norms of up to three steps; every gradient; evaluation after the updates.

    One step where a choice of many experts is close enough for rounding to flip it later: gradients jump then.
    """
    config = make_config(**LAYOUTS[row])
    batches = make_batches(config.training.global_batch_size, 3 if LAYOUTS[row]["model"] is SOFTMAX else 1)
    outcomes = run_ranks(train_in_layout, config.parallel.world_size, config, batches, init=True)
    assert_equals_one_process(outcomes, config, batches)


def set_up(config, batches):
    run = build_run(config, build_mesh(config, torch.device("cpu")))
    return run, PreparedBatches(config, run.mesh, batches)


def train(config, batches):
    """(what each step logs of its routers, my layers' expert biases at the end) of this rank."""
    run, loader = set_up(config, batches)
    names = (*config.model.router_losses, "expert-load", "starved-experts")
    logged = []
    for _ in batches:
        routers = run.step(loader).routers
        logged.append([routers[name] for name in names])
    tokens = run.balance.tokens
    assert (
        tokens.sum(dim=1) == config.training.global_batch_size * SEQ_LENGTH * config.model.moe_router_topk
    ).all()
    biases = {name: b.tolist() for chunk in run.chunks for name, b in chunk.named_global_buffers()}
    return logged, biases


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "microbatches": 2},
        {"cp": 2},
        {"pp": 2, "chunks": 2, "schedule": "interleaved-zero-bubble"} | FULL,
        {
            "pp": 2,
            "dp": 2,
            "microbatches": 2,
            "recompute_modules": ("moe",),
            "recompute_granularity": "selective",
        },
        {"pp": 2, "max_microbatches_per_step": 2},
        {"dp": 2, "microbatches": 2, "expert_model_parallel_size": 2} | FULL,
        {"tp": 2, "sequence_parallel": True, "expert_model_parallel_size": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("model", [SOFTMAX, DEEPSEEK], ids=["softmax", "bias"])
def test_loads_logged_losses_and_biases(layout, model):
    """Counted once whatever is recomputed and however the batch is split; the same on every rank."""
    batches = make_batches(4)
    one, wanted = run_ranks(train, 1, make_config(model=model), batches, init=True)[0]
    config = make_config(model=model, **layout)
    ranks = run_ranks(train, config.parallel.world_size, config, batches, init=True)
    biases = {}
    for logged, mine in ranks:
        assert logged == ranks[0][0]
        biases |= mine
    assert torch.allclose(torch.tensor(ranks[0][0]), torch.tensor(one), rtol=1e-5)
    assert biases == wanted and all(map(any, biases.values()))


def test_the_load_of_fewer_choices_than_experts():
    """One token of two experts among eight: the fullest has four times the mean; without a token nothing is full."""
    tokens = torch.tensor([[0, 1, 0, 0, 1, 0, 0, 0], [0] * 8, [1] * 8], dtype=torch.float64)
    balance = Balance((0, 1, 2), tokens, torch.zeros(3, 0), ())
    assert balance.loads.tolist() == [4, 0, 1] and balance.starved.tolist() == [0.75, 1, 0]
    assert balance.numbers().tolist() == pytest.approx([4, 1.75 / 3])


def run_experts(config, batches):
    """How often each mixture runs for one microbatch, forward and backward."""
    run, loader = set_up(config, batches)
    calls = dict.fromkeys(run.chunks[0].mixtures, 0)
    for layer, mixture in run.chunks[0].mixtures.items():
        mixture.experts.register_forward_hook(lambda *_, layer=layer: calls.update({layer: calls[layer] + 1}))
    run.step(loader)
    return calls


@pytest.mark.parametrize(
    ("modules", "times"), [("moe", 2), ("moe_act", 2), ("shared_experts", 2), ("mlp", 1), ("core_attn", 1)]
)
def test_what_recompute_modules_recompute(modules, times):
    """moe, by any of its names, the layers with experts; mlp the dense ones."""
    config = make_config(
        microbatches=1, model=DEEPSEEK, recompute_granularity="selective", recompute_modules=(modules,)
    )
    [calls] = run_ranks(run_experts, 1, config, make_batches(1, 1), init=True)
    assert calls == {1: times, 2: times, 3: times}


def skip_a_step(config, batches):
    """The biases after a step whose gradients overflowed, and after a good one."""
    run, loader = set_up(config, batches)
    seen = []
    head = run.chunks[-1].lm_head.weight
    good = head.detach().clone()
    for factor in (float("nan"), 1.0):
        with torch.no_grad():
            head.copy_(good * factor)
        skipped = run.step(loader).nonfinite
        seen.append((skipped, [b.abs().sum().item() for b in run.chunks[0].buffers()]))
    return seen


def test_a_skipped_step_moves_no_bias():
    config = make_config(model=DEEPSEEK)
    (skipped, before), (went_on, after) = run_ranks(skip_a_step, 1, config, make_batches(4, 2), init=True)[0]
    assert skipped and not went_on and not any(before) and all(after)


HALF = {
    "bf16 x dp": {"dp": 2, "precision": "bf16"},
    "fp16 x pp x dp": {"pp": 2, "dp": 2, "precision": "fp16"},
    "bf16, recompute": {"dp": 2, "precision": "bf16"} | FULL,
    "bf16 x ep": {"dp": 4, "expert_model_parallel_size": 2, "precision": "bf16", "microbatches": 2},
    "fp16 x ep x tp": {
        "tp": 2,
        "expert_model_parallel_size": 2,
        "sequence_parallel": True,
        "precision": "fp16",
    },
}


@pytest.mark.parametrize("row", HALF)
def test_half_precision_equals_one_process_in_half_precision(row):
    """The router in fp32: in bf16 a choice may flip, and then gradients jump."""
    model = SOFTMAX | {"init_method_std": 0.05, "moe_router_dtype": "fp32", "num_layers": 2}
    config = make_config(model=model, **HALF[row])
    batches = make_batches(config.training.global_batch_size, 1)
    outcomes = run_ranks(train_in_layout, config.parallel.world_size, config, batches, init=True)
    assert_equals_one_process(outcomes, config, batches)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [{}, FULL, MOE], ids=["", "full", "moe"])
def test_compiled_layers_equal_one_process(recompute):
    model = SOFTMAX | {"num_layers": 2, "init_method_std": 0.05, "moe_router_dtype": "fp32"}
    config = make_config(dp=2, compile=True, precision="bf16", model=model, **recompute)
    batches = make_batches(config.training.global_batch_size, 1)
    outcomes = run_ranks(train_in_layout, 2, config, batches, init=True, timeout=300)
    assert_equals_one_process(outcomes, config, batches)
