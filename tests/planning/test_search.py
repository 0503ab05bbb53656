"""What the search proposes: runnable, fitting, the best there is."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_lite.arguments.parse import parse_arguments
from megatron_lite.config import ConfigError
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


def test_the_flags_mean_the_config_that_was_planned():
    flags = flags_of_model()
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
