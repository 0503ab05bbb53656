"""What the search proposes: runnable, fitting, the best there is."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_lite.arguments.parse import parse_arguments
from megatron_lite.config import CommandConfig, ConfigError
from megatron_lite.distributed.environment import Environment
from megatron_lite.planning.search import Found, fitting, nothing_fits, search
from megatron_lite.planning.time import step_time
from tests.planning.layouts import SMALL, cluster
from tools.plan import read_model, refusal


def flags_of_model(layers=8, heads=8, batch=64, seq=2048):
    sizes = {"--num-layers": layers, "--hidden-size": 128 * heads, "--num-attention-heads": heads}
    sizes |= {"--num-query-groups": heads, "--global-batch-size": batch, "--seq-length": seq}
    return [*SMALL, *(str(word) for pair in sizes.items() for word in pair)]


@settings(max_examples=4, suppress_health_check=list(HealthCheck))
@given(
    layers=st.integers(2, 13),
    heads=st.sampled_from([4, 6, 8]),
    batch=st.sampled_from([8, 12, 30, 64]),
    gpus=st.sampled_from([1, 2, 4, 6, 8, 16]),
    ramp=st.booleans(),
)
def test_every_planned_layout_passes_check(layers, heads, batch, gpus, ramp):
    flags = flags_of_model(layers, heads, batch)
    if ramp and batch == 64:
        flags += ["--rampup-batch-size", "32", "32", "320"]
        flags[flags.index("--train-iters") : flags.index("--train-iters") + 2] = ["--train-samples", "1000"]
    machine = cluster(gpus)
    found = Found()
    fits = list(fitting(read_model(flags), machine, {}, found, offload=False))
    assert len(fits) == found.fitting
    for layout, applied in fits[:: max(1, len(fits) // 8)]:
        assert refusal(layout, flags, gpus) is None, layout
        assert applied.parallel.data_parallel_size * applied.parallel.model_parallel_size == gpus


SIXTEEN = ["--num-experts", "16", "--moe-ffn-hidden-size", "512", "--moe-router-topk", "4"]


@pytest.mark.parametrize("experts", [[], SIXTEEN])
def test_the_flags_mean_the_config_that_was_planned(experts):
    flags = flags_of_model() + experts
    found = search(read_model(flags), cluster(16), {"pipeline_model_parallel_size": 4}, 3)
    for plan in found.plans:
        words = ["--check", "--world-size", "16", *flags, *plan.layout.flags()]
        assert parse_arguments(words, Environment()).parallel == plan.config.parallel


def test_nothing_that_was_left_out_is_faster():
    config, machine = read_model(flags_of_model(layers=6, batch=16)), cluster(4)
    best = search(config, machine, {}, 3).plans
    every = sorted(step_time(c, machine).seconds for _, c in fitting(config, machine, {}, Found(), False))
    assert [plan.time.seconds for plan in best] == pytest.approx(every[:3])


def test_more_gpus_never_make_the_best_step_slower():
    config = read_model(flags_of_model(layers=4, heads=16, batch=64, seq=4096))
    steps = [search(config, cluster(gpus), {}, 1).plans[0].time.seconds for gpus in (1, 2, 4, 8, 16)]
    assert steps == sorted(steps, reverse=True)


def test_what_is_held_is_held():
    found = search(
        read_model(flags_of_model()), cluster(8), {"tensor_model_parallel_size": 2, "micro_batch_size": 2}, 4
    )
    assert {(p.layout.tensor_model_parallel_size, p.layout.micro_batch_size) for p in found.plans} == {(2, 2)}


def test_experts_lie_on_every_number_of_ranks_that_a_run_accepts():
    """--expert-model-parallel-size divides the experts and the ranks with other tokens; tensor ranks are such."""
    flags = [*flags_of_model(layers=2, batch=16), *SIXTEEN]
    found = Found()
    held = {"pipeline_model_parallel_size": 1, "micro_batch_size": 1, "context_parallel_size": 1}
    fits = [layout for layout, _ in fitting(read_model(flags), cluster(8), held, found, offload=False)]
    sizes = {(one.tensor_model_parallel_size, one.expert_model_parallel_size) for one in fits}
    assert sizes == {(tensor, expert) for tensor in (1, 2, 4, 8) for expert in (1, 2, 4, 8)}
    for layout in fits[::5]:
        assert refusal(layout, flags, 8) is None, layout
    copies = {"num_distributed_optimizer_instances": 4, "tensor_model_parallel_size": 1}
    fits = fitting(read_model(flags), cluster(8), held | copies, found, offload=False)
    assert {layout.expert_model_parallel_size for layout, _ in fits} == {1, 2}
    with pytest.raises(StopIteration):
        next(
            fitting(
                read_model(flags), cluster(8), held | {"expert_model_parallel_size": 3}, found, offload=False
            )
        )
    assert (
        "--expert-model-parallel-size 3 does not divide the experts, or the ranks of a replica"
        in found.refused
    )


def test_an_uneven_routing_costs_memory_and_time():
    flags = [*flags_of_model(layers=4, batch=64), *SIXTEEN]
    config, held = read_model(flags), {"expert_model_parallel_size": 8, "pipeline_model_parallel_size": 1}
    full = replace(config, command=CommandConfig(imbalance=2.0))
    [even], [uneven] = (search(one, cluster(8), held, 1).plans for one in (config, full))
    assert uneven.time.seconds > 1.05 * even.time.seconds


def test_offload_only_where_nothing_else_fits():
    big = [*SMALL, "--num-layers", "96", "--hidden-size", "3072", "--ffn-hidden-size", "8192"]
    big += ["--num-attention-heads", "24", "--seq-length", "1024", "--global-batch-size", "1"]
    found = search(read_model(big), cluster(1), {}, 1)
    assert found.plans[0].layout.fsdp_cpu_offload and found.plans[0].worst.host > 0
    assert not search(read_model(flags_of_model()), cluster(1), {}, 1).plans[0].layout.fsdp_cpu_offload


def test_nothing_fits_is_said_with_what_is_missing():
    huge = [*SMALL, "--num-layers", "126", "--hidden-size", "16384", "--ffn-hidden-size", "53248"]
    found = search(read_model(huge), cluster(8), {"pipeline_model_parallel_size": 1}, 1)
    error = nothing_fits(found)
    assert isinstance(error, ConfigError) and "GiB more on a GPU" in str(error)
