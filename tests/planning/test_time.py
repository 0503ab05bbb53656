"""The step's parts against hand-made numbers and the simulator; published runs within a stated error."""

import shlex

import pytest

from megatron_lite.arithmetic.partition import plan_from_config
from megatron_lite.arithmetic.pipeline_schedule import StageTimes, schedule_timeline
from megatron_lite.planning.devices import DEVICES, Cluster, custom_device
from megatron_lite.planning.search import Layout
from megatron_lite.planning.time import message_seconds, stage_times, step_time, strides
from tests.planning.layouts import EXPERTS, cluster, config
from tools.plan import read_model


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved-1f1b", 2), ("zbv", 2)])
def test_the_bubble_is_the_simulators(schedule, chunks):
    machine = cluster(16)
    found = config(
        num_gpus=16,
        pipeline_model_parallel_size=4,
        pipeline_schedule=schedule,
        num_virtual_stages_per_pipeline_rank=chunks,
    )
    times = stage_times(found, machine, plan_from_config(found))
    simulated = schedule_timeline(schedule, 4, 64, chunks, times, message_seconds(found, machine))
    assert step_time(found, machine).bubble == simulated.bubble_fraction


def test_equal_stages_without_messages_have_the_textbooks_bubble():
    """(p - 1) / (m + p - 1), Narayanan et al. 2021."""
    times = StageTimes.equal(4)
    assert schedule_timeline("1f1b", 4, 64, 1, times).bubble_fraction == pytest.approx(3 / 67)


def test_collectives_by_hand():
    machine = Cluster(custom_device(80, 1000, 400, 10), 16, 8, link_efficiency=1.0, latency=0.0, hop=0.0)
    assert machine.gather_seconds(8e9, 8, 1) == pytest.approx(8e9 * 7 / 8 / 400e9)
    assert machine.gather_seconds(8e9, 16, 1) == pytest.approx(8e9 * 1 / 2 / (8 * 10e9))  # eight ports a node
    assert machine.gather_seconds(8e9, 2, 8) == pytest.approx(8e9 * 1 / 2 / 10e9)
    assert machine.reduce_seconds(8e9, 8, 1) == 2 * machine.gather_seconds(8e9, 8, 1)
    assert machine.gather_seconds(8e9, 1, 1) == 0.0
    # All-to-all over two nodes: 7 of 16 parts to the node's others, 8 of 16 through the GPU's own port.
    assert machine.exchange_seconds(16e9, 16, 1) == pytest.approx(8e9 / 10e9)
    assert machine.exchange_seconds(8e9, 8, 1) == pytest.approx(7e9 / 400e9)
    assert machine.exchange_seconds(8e9, 1, 1) == 0.0
    assert machine.send_seconds(4e8, 8) == pytest.approx(4e-2)


def test_neighbours_are_those_of_the_mesh():
    found = config(
        num_gpus=64, tensor_model_parallel_size=2, context_parallel_size=2, pipeline_model_parallel_size=4
    )
    assert strides(found) == {"tp": 1, "cp": 2, "dp_shard": 4, "dp_replicate": 16, "pp": 16}


@pytest.mark.parametrize("experts", [[], EXPERTS])
def test_a_plain_step_is_flops_over_speed(experts):
    """One process, no element-wise work, no optimizer: three times the forward at the stated efficiency.

    Of a mixture the products of the K experts and the shared one, as in the FLOPs of MFU.
    """
    device = DEVICES["h100"]
    endless = Cluster(device.__class__("x", device.memory, 1e15, 1e30, 1e30, 1e30, 0.5), 1, 8, latency=0.0)
    found = config(num_gpus=1, extra=[*experts, "--seq-length", "16"])
    step = step_time(found, endless)
    assert step.mfu == pytest.approx(0.5, rel=2e-3)  # attention, 0.1% of the work here, is slower
    assert step.bubble == 0.0 and step.exposed == pytest.approx(0.0, abs=1e-9)


def test_what_costs_time():
    base = step_time(config(num_gpus=8), cluster()).seconds
    assert step_time(config(num_gpus=8, recompute_granularity="full"), cluster()).seconds > 1.2 * base
    assert step_time(config(num_gpus=8, tensor_model_parallel_size=8), cluster()).seconds > base
    assert step_time(config(num_gpus=8, fsdp_cpu_offload=True), cluster()).seconds > base
    assert step_time(config(num_gpus=8), cluster(device="b200")).seconds < base
    mixture, again = (
        step_time(config(num_gpus=8, recompute_granularity=kind, extra=[*EXPERTS, *MOE]), cluster()).seconds
        for kind in ("none", "selective")
    )
    assert mixture < again < 1.3 * mixture


MOE = ["--recompute-modules", "moe"]
GPT = shlex.split("""
    --train-iters 1 --lr 1e-4 --tokenizer-type NullTokenizer --vocab-size 51199 --mock-data --bf16 --seq-length 2048
    --max-position-embeddings 2048 --hidden-dropout 0 --attention-dropout 0
""")
# Narayanan et al. 2021 (https://arxiv.org/abs/2104.04473), table 1: layers, hidden, heads, tp, pp, GPUs, batch, and
# achieved TFLOP/s a GPU (A100), recomputed work counted.
PAPER = [
    (40, 6144, 48, 8, 1, 256, 1024, 135),
    (48, 8192, 64, 8, 2, 512, 1536, 138),
    (60, 10240, 80, 8, 4, 1024, 1792, 140),
    (80, 12288, 96, 8, 8, 1536, 2304, 148),
    (96, 16384, 128, 8, 16, 1920, 2160, 155),
    (105, 20480, 128, 8, 35, 2520, 2520, 163),
    (128, 25600, 160, 8, 64, 3072, 3072, 163),
]


@pytest.mark.parametrize("row", PAPER, ids=lambda row: f"{row[1]}")
def test_megatrons_table_within_15_percent(row):
    layers, hidden, heads, tensor, pipeline, gpus, batch, achieved = row
    flags = f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --global-batch-size {batch}"
    plain = Layout(
        tensor, 1, pipeline, 1, "1f1b", 1, recompute_granularity="full", reshard_after_forward="never"
    )
    found = plain.applied_to(read_model([*GPT, *flags.split()]), gpus)
    seconds = step_time(found, Cluster(DEVICES["a100"], gpus, 8)).seconds
    work = 96 * batch * 2048 * layers * hidden**2 * (1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden))
    assert work / seconds / gpus / 1e12 == pytest.approx(achieved, rel=0.15)
