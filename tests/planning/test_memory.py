"""Bytes by hand, and that they fall where they should."""

from dataclasses import replace

import pytest

from megatron_lite.arithmetic.partition import plan_from_config, stages_of_rank
from megatron_lite.arithmetic.pipeline_schedule import build_schedule, peak_in_flight
from megatron_lite.planning.activations import block_activations, stage_activations
from megatron_lite.planning.memory import rank_memory
from megatron_lite.planning.moments import moments_of
from tests.planning.layouts import EXPERTS, SMALL, config, layout
from tools.plan import read_model

MATRICES = 2048 * (2048 + 2 * 1024) + 2048 * 2048 + 3 * 2048 * 5632
NORMS = 2 * 2048
ROWS = 32000 * 2048
TOTAL = 16 * (MATRICES + NORMS) + 2 * ROWS + 2048


def parts(**values):
    return rank_memory(config(**values))[0].parts


def total(**values):
    return max(one.total for one in rank_memory(config(**values)))


def test_states_are_the_closed_forms_of_zero_3():
    """4 bytes of parameter, 8 of Adam's averages, 4 of gradient: 16 P in one process, 16 P / n in n."""
    alone = parts(num_gpus=1)
    assert alone["parameters"] == 4 * TOTAL and alone["optimizer state"] == 8 * TOTAL
    assert alone["gradient shards"] == 4 * TOTAL
    assert alone["unsharded gradients"] == 0  # the worst moment is the loss's backward: none is there yet
    one_microbatch = parts(num_gpus=1, extra=["--global-batch-size", "1"])
    assert (
        alone["workspace"] - one_microbatch["workspace"] == 4 * ROWS
    )  # what the microbatch before reduced last
    many = parts(num_gpus=64)
    assert many["parameters"] == 4 * TOTAL / 64 and many["optimizer state"] == 8 * TOTAL / 64
    copies = parts(num_gpus=64, num_distributed_optimizer_instances=8)
    assert copies["parameters"] == 4 * TOTAL / 8


def test_plain_parameters_are_gathered_nowhere_and_never_copied():
    """One process in fp32 leaves fully_shard out: 4 P of weights, 8 P of averages, 4 P of gradients, no other copy."""
    fp32 = [word for word in SMALL if word != "--bf16"]
    found = rank_memory(layout().applied_to(read_model(fp32), 1))[0].parts
    assert found["parameters"] == 4 * TOTAL and found["optimizer state"] == 8 * TOTAL
    assert found["gathered weights"] == 0 and found.get("gradient shards", 0) == 0
    assert found["unsharded gradients"] <= 4 * TOTAL


def test_a_second_pass_finds_the_first_ones_gradient_shards():
    values = {"num_gpus": 4, "pipeline_model_parallel_size": 2, "micro_batch_size": 1}
    one, several = (rank_memory(config(**values, max_microbatches_per_step=n))[0] for n in (128, 64))
    held = {name: several.parts.get(name, 0) - one.parts.get(name, 0) for name in one.parts}
    assert held["gradient shards"] == pytest.approx(one.parts["parameters"])


def test_tensor_ranks_cut_matrices_and_vocabulary_but_not_norms():
    found = parts(num_gpus=8, tensor_model_parallel_size=4)
    local = 16 * (MATRICES / 4 + NORMS) + 2 * ROWS / 4 + 2048
    assert found["parameters"] == pytest.approx(4 * local / 2)


@pytest.mark.parametrize(
    ("optimizer", "per_matrix", "per_other"), [("adam", 8, 8), ("sgd", 4, 4), ("muon", 4, 8)]
)
def test_optimizer_state(optimizer, per_matrix, per_other):
    found = rank_memory(config(num_gpus=8, extra=["--optimizer", optimizer]))[0].parts["optimizer state"]
    assert found == pytest.approx((per_matrix * 16 * MATRICES + per_other * (TOTAL - 16 * MATRICES)) / 8)


def test_all_pipeline_ranks_together_hold_the_model():
    for schedule, chunks in (("1f1b", 1), ("interleaved-1f1b", 2), ("zbv", 2)):
        ranks = rank_memory(
            config(
                num_gpus=4,
                pipeline_model_parallel_size=4,
                pipeline_schedule=schedule,
                num_virtual_stages_per_pipeline_rank=chunks,
            )
        )
        assert sum(one.parts["parameters"] for one in ranks) == 4 * TOTAL


def test_a_gpt_block_is_korthikantis_34_less_two_masks():
    """Without dropout masks and with the tanh GELU: 32 s b h bytes and the statistics of norms and softmax."""
    gpt = ["--normalization", "LayerNorm", "--num-query-groups", "16", "--ffn-hidden-size", "8192"]
    found = config(extra=gpt)
    found = block_activations(_without_swiglu(found), None)
    assert found == 4096 * (32 * 2048 + 2 * 8 + 4 * 16)


def _without_swiglu(found):
    return replace(found, model=replace(found.model, swiglu=False))


EXPERT = 3 * 2048 * 1408
ATTENTION = MATRICES - 3 * 2048 * 5632
MIXTURES = 15 * (ATTENTION + NORMS + 16 * EXPERT + 3 * 2048 * 2816 + 16 * 2048)
WITH_EXPERTS = MATRICES + NORMS + MIXTURES + 2 * ROWS + 2048


def test_a_mixture_holds_all_its_experts_and_the_first_layer_none():
    found = parts(num_gpus=8, extra=EXPERTS)
    assert found["parameters"] == 4 * WITH_EXPERTS / 8 and found["optimizer state"] == 8 * WITH_EXPERTS / 8
    muon = parts(num_gpus=8, extra=[*EXPERTS, "--optimizer", "muon"])["optimizer state"]
    vectors = WITH_EXPERTS - MATRICES - 15 * (ATTENTION + 16 * EXPERT + 3 * 2048 * 2816)
    assert muon == pytest.approx((4 * (WITH_EXPERTS - vectors) + 8 * vectors) / 8)
    stages = rank_memory(config(num_gpus=4, pipeline_model_parallel_size=4, extra=EXPERTS))
    assert sum(one.parts["parameters"] for one in stages) == 4 * WITH_EXPERTS


def test_experts_lie_on_ranks_of_expert_parallelism():
    """ZeRO-3 over 8 ranks: 1/8 of everything whatever ep is; gathered is E / ep of a layer's experts."""
    spread = parts(num_gpus=8, expert_model_parallel_size=4, extra=EXPERTS)
    assert spread["parameters"] == 4 * WITH_EXPERTS / 8 and spread["optimizer state"] == 8 * WITH_EXPERTS / 8
    stages = {"num_gpus": 16, "pipeline_model_parallel_size": 4, "extra": EXPERTS}
    one, two, four = (
        parts(expert_model_parallel_size=ep, **stages)["unsharded gradients"] for ep in (1, 2, 4)
    )
    layers = (one - four) / (4 * 12 * EXPERT)  # fp32 sums of 16 experts a layer less those of 4
    assert layers == round(layers) >= 3 and one - two == 4 * 8 * EXPERT * layers
    # 16 experts on 32 ranks are cut along their rows.
    few, many = (parts(num_gpus=n, extra=EXPERTS)["parameters"] for n in (16, 32))
    assert many == few / 2


def test_activations_of_a_mixture_by_hand():
    """Per token K rows: the token, five tensors of an expert's width, a weight; 16 bytes of order, 12 of the choice."""
    found = config(extra=EXPERTS)
    dense, mixture = (block_activations(found, None, mixture=kind) for kind in (False, True))
    rows = 4 * (2 * (2048 + 5 * 1408 + 1) + 16 + 12) + 4 * 16 * 2
    assert mixture - dense == 4096 * (rows + 2 * 4 * 2816 - 2 * 4 * 5632)
    wide = config(extra=[*EXPERTS, "--moe-router-dtype", "fp32"])
    assert block_activations(wide, None, mixture=True) - mixture == 4 * 2048 * (4096 + 16)
    made_again = config(
        recompute_granularity="selective", extra=[*EXPERTS, "--recompute-modules", "shared_experts"]
    )
    assert block_activations(made_again, "selective", mixture=True) == dense - 4096 * 2 * 4 * 5632
    assert block_activations(made_again, "selective", mixture=False) == dense


def test_recompute_and_sharding_lower_memory():
    for values in ({"num_gpus": 8}, {"num_gpus": 16, "pipeline_model_parallel_size": 4}):
        none, selective, full = (
            total(recompute_granularity=name, **values) for name in ("none", "selective", "full")
        )
        assert full < selective < none
    assert total(num_gpus=64) < total(num_gpus=8) < total(num_gpus=1)
    assert total(num_gpus=8, tensor_model_parallel_size=4) < total(num_gpus=8)
    assert total(num_gpus=8, context_parallel_size=2, micro_batch_size=4) < total(
        num_gpus=8, micro_batch_size=4
    )
    assert total(num_gpus=8) <= total(num_gpus=8, reshard_after_forward="never")
    offloaded = rank_memory(config(num_gpus=8, fsdp_cpu_offload=True))[0]
    assert offloaded.total < total(num_gpus=8) and offloaded.host == 16 * TOTAL / 8


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [
        ("1f1b", 1),
        ("interleaved-1f1b", 2),
        ("interleaved-1f1b", 4),
        ("interleaved-zero-bubble", 2),
        ("zbv", 2),
    ]
    + [("dualpipev", 2)],
)
@pytest.mark.parametrize("num_gpus", [4, 16])
def test_in_flight_is_the_schedules_peak(schedule, chunks, num_gpus):
    """Against peak_in_flight over the whole pass, where the planner looks at its first rounds only."""
    found = config(
        num_gpus=num_gpus,
        pipeline_model_parallel_size=4,
        pipeline_schedule=schedule,
        num_virtual_stages_per_pipeline_rank=chunks,
    )
    plans = plan_from_config(found)
    microbatches = 256 * 4 // num_gpus
    actions = build_schedule(schedule, 4, microbatches, chunks)
    weights = [stage_activations(found, plan) for plan in plans]
    for rank in range(4):
        mine = [weights[plan.stage] for plan in stages_of_rank(plans, rank)]
        moments = moments_of(schedule, 4, microbatches, chunks, rank)
        peak = max(sum(n * one for n, one in zip(moment.live, mine)) for moment in moments)
        assert peak == pytest.approx(peak_in_flight(actions[rank], weights))
