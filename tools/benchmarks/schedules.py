"""Suite schedules: real runs of each pipeline schedule against what arithmetic/pipeline_schedule.py simulates.

Stages of real layers, as many ranks as there are cores, or they wait for a core and not for a neighbour. With stages
that only wait, tests/parallel/test_bubble.py compares the two.
"""

import statistics
from typing import Any

import torch
import torch.distributed as dist

from megatron_lite.arithmetic.pipeline_schedule import SCHEDULES, schedule_timeline
from megatron_lite.distributed.mesh import build_mesh
from megatron_lite.parallel.clock import Span
from megatron_lite.planning.trace import Trace, measured_times, trace_of
from megatron_lite.training.run import build_run
from tools.benchmarks.baseline_model import Sizes, random_batches
from tools.benchmarks.comparison import Options, Row, Table, row_of
from tools.benchmarks.ours import run_config
from tools.benchmarks.ranks import run_ranks

CHUNKS = {name: 1 if name in ("gpipe", "1f1b") else 2 for name in SCHEDULES}  # of a rank
MICROBATCHES_A_RANK = 4
# A vocabulary so small that the embedding and the head take nothing beside the layers: stages are equal.
REAL = Sizes(vocabulary=256, micro_batch=2)
QUICK = Sizes(layers=8, hidden=32, heads=2, ffn=64, seq_length=16, vocabulary=128, micro_batch=1)
RANKS = 2


def run(options: Options) -> list[Table]:
    """Step and idle share (bubble) of every pipeline schedule, measured, against what the simulator predicts."""
    sizes, microbatches = QUICK if options.quick else REAL, MICROBATCHES_A_RANK * RANKS
    traces = run_ranks(measure_all, RANKS, sizes, microbatches, options.repeats)[0]
    facts = [
        f"{microbatches} microbatches; {sizes}, a thread a rank. Ranks that compute share the processor's cache and "
        "memory.",
        "Ratio: the step's time as simulated with the measured times of each stage's actions / as measured, from the "
        "common start to the last action's end. Idle: the share of all ranks' time outside of actions.",
    ]
    rows = [row_of_trace(name, traces[name]) for name in SCHEDULES]
    return [Table(f"Schedules, real layers, {RANKS} ranks", rows, facts)]


def row_of_trace(name: str, trace: Trace) -> Row:
    """The schedule simulated with the measured times against the measured steps."""
    sizes = trace.sizes(trace.passes[0])
    predicted = schedule_timeline(*sizes, measured_times(trace))
    idle = statistics.median(one.timeline.bubble_fraction for one in trace.passes)
    note = f"idle {100 * idle:.1f} %, simulator {100 * predicted.bubble_fraction:.1f} %"
    ratios = [predicted.seconds / one.timeline.end for one in trace.passes]
    return row_of(name, "simulator", ratios, at_least=0.9, note=note)


def measure_all(sizes: Sizes, microbatches: int, repeats: int) -> dict[str, Trace | None]:
    """On every rank: run each schedule `repeats` times after one unmeasured step; rank 0 gets all ranks' clocks."""
    return {name: measure(name, chunks, sizes, microbatches, repeats) for name, chunks in CHUNKS.items()}


def measure(name: str, chunks: int, sizes: Sizes, microbatches: int, repeats: int) -> Trace | None:
    """Steps of one schedule."""
    config = run_config(
        sizes,
        f"--pipeline-model-parallel-size {RANKS} --num-virtual-stages-per-pipeline-rank {chunks}",
        f"--pipeline-schedule {name} --global-batch-size {microbatches * sizes.micro_batch}",
        world_size=RANKS,
    )
    pipeline = build_run(config, build_mesh(config, torch.device("cpu"))).pipeline
    batch = random_batches(sizes, microbatches * sizes.micro_batch, 1)[0]
    for step in range(1 + repeats):
        pipeline.clock.keeping = step > 0
        pipeline.train_step(batch, microbatches, 1.0)
        for chunk in pipeline.chunks:
            chunk.zero_grad()
    everyone: list[Any] = [None] * RANKS
    dist.gather_object(pipeline.clock.take_spans(), everyone if dist.get_rank() == 0 else None)
    return trace_of(config, "cpu", list(map(steps_of, everyone))) if dist.get_rank() == 0 else None


def steps_of(spans: list[list[Span]]) -> list[tuple[int, list[Span]]]:
    """(iteration, actions); R, the reduction of gradients over data-parallel ranks, is none of the schedule's."""
    return [(number, [span for span in step if span.kind != "R"]) for number, step in enumerate(spans)]
