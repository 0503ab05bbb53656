"""What is planned runs: any layout that the planner lets through, and the one it puts first, gets through --dry-run."""

import shlex

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_lite.planning.search import Found, fitting, search
from megatron_lite.rehearsal.dry_run import rehearse_rank
from tests.planning.layouts import cluster
from tools.plan import parse_checked, read_model

MODEL = shlex.split("""
    --hidden-size 64 --num-attention-heads 8 --group-query-attention --ffn-hidden-size 96 --swiglu
    --normalization RMSNorm --position-embedding-type rope --seq-length 32 --max-position-embeddings 32
    --train-iters 10 --lr 1e-4 --tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 8
    --mock-data --bf16
""")


def rehearse_some(data):
    """A drawn model on a drawn cluster: the best layout with two of its degrees given, or any; a drawn rank of it."""
    numbers = {"--num-layers": st.integers(2, 6), "--num-query-groups": st.sampled_from([2, 4, 8])}
    numbers["--global-batch-size"] = st.sampled_from([4, 8, 12])
    drawn = {name: data.draw(values, label=name) for name, values in numbers.items()}
    flags = [*MODEL, *(str(word) for pair in drawn.items() for word in pair)]
    if data.draw(st.booleans(), label="tied"):
        flags += ["--add-qkv-bias", "--disable-bias-linear"]
    else:
        flags += ["--untie-embeddings-and-output-weights"]
    if data.draw(st.booleans(), label="experts"):
        flags += shlex.split(
            "--num-experts 8 --moe-ffn-hidden-size 64 --moe-layer-freq 2 --moe-aux-loss-coeff 0.01"
        )
    gpus = data.draw(st.sampled_from([2, 4, 8]), label="gpus")
    held = {
        "context_parallel_size": st.sampled_from([1, 2]),
        "recompute_granularity": st.sampled_from(["none", "selective", "full"]),
        "fsdp_cpu_offload": st.just(True),
        "micro_batch_size": st.sampled_from([1, 2]),
        "num_distributed_optimizer_instances": st.just(2),
    }
    names = data.draw(st.sets(st.sampled_from(sorted(held)), max_size=2), label="held")
    fixed = {name: data.draw(held[name], label=name) for name in sorted(names)}
    config, machine, found = read_model(flags), cluster(gpus), Found()
    if data.draw(st.booleans(), label="the best"):
        layouts = [plan.layout for plan in search(config, machine, fixed, 1).plans]
    else:
        offload = "fsdp_cpu_offload" in fixed
        layouts = [layout for layout, _ in fitting(config, machine, fixed, found, offload)]
    if not layouts:
        return
    layout = data.draw(st.sampled_from(layouts), label="layout")
    checked = parse_checked(["--world-size", str(gpus), *flags, *layout.flags()])
    rehearse_rank(checked, data.draw(st.integers(0, gpus - 1), label="rank"))


LIMITS = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=2, derandomize=True, **LIMITS)
@given(st.data())
def test_some_planned_layouts_pass_dry_run(data):
    rehearse_some(data)


@pytest.mark.slow
@settings(max_examples=80, **LIMITS)
@given(st.data())
def test_planned_layouts_pass_dry_run(data):
    rehearse_some(data)
