"""Suite schedules: real runs of each pipeline schedule against what arithmetic/pipeline_schedule.py simulates.

Two kinds of stages: real layers (as many ranks as there are cores, or they wait for a core and not for a neighbour),
and stages that only sleep, which any number of ranks can do at once: they show the order of the actions and what the
engine adds to it, undisturbed by who shares a core or a cache.
"""

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_lite.arithmetic.partition import plan_from_config, stages_of_rank
from megatron_lite.arithmetic.pipeline_schedule import schedule_timeline
from megatron_lite.distributed.mesh import build_mesh
from megatron_lite.parallel.clock import Span
from megatron_lite.parallel.pipeline import Pipeline
from megatron_lite.planning.trace import Trace, measured_times, trace_of
from megatron_lite.training.run import build_run
from tools.benchmarks.baseline_model import Sizes, random_batches
from tools.benchmarks.comparison import Options, Row, Table, row_of
from tools.benchmarks.ours import run_config
from tools.benchmarks.ranks import run_ranks

# Schedule -> chunks a rank.
SCHEDULES = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved-1f1b": 2,
    "interleaved-zero-bubble": 2,
    "zbv": 2,
    "dualpipev": 2,
}
MICROBATCHES_A_RANK = 4
# A vocabulary so small that the embedding and the head take nothing beside the layers: stages are equal.
REAL = Sizes(vocabulary=256, micro_batch=2)
QUICK = Sizes(layers=8, hidden=32, heads=2, ffn=64, seq_length=16, vocabulary=128, micro_batch=1)
SLEEP = 0.04  # seconds of each of a rank's forward, gradient of the input, gradient of the weights
SAME = (
    "Ratio: the step's time as simulated with the measured times of each stage's actions / as measured, from the "
    "common start to the last action's end. Idle: the share of all ranks' time outside of actions."
)


def run(options: Options) -> list[Table]:
    """Step and idle share (bubble) of every pipeline schedule, measured, against what the simulator predicts."""
    sizes, sleep = (QUICK, SLEEP / 10) if options.quick else (REAL, SLEEP)
    real = f"{sizes}, a thread a rank. Ranks that compute share the processor's cache and memory."
    asleep = (
        f"stages that SLEEP and compute nothing ({3000 * sleep:.0f} ms for a rank's part of a microbatch, a third of "
        "it forward): the pure order of the schedule, without contention for cores."
    )
    cases = [("real layers", 2, None, real)]
    cases += [("sleeping stages", ranks, sleep, asleep) for ranks in ((2,) if options.quick else (2, 4))]
    tables = []
    for title, ranks, seconds, note in cases:
        microbatches = MICROBATCHES_A_RANK * ranks
        traces = run_ranks(measure_all, ranks, sizes, seconds, microbatches, options.repeats)[0]
        rows = [row_of_trace(name, traces[name]) for name in SCHEDULES]
        facts = [f"{microbatches} microbatches; {note}", SAME]
        tables.append(Table(f"Schedules, {title}, {ranks} ranks", rows, facts))
    return tables


def row_of_trace(name: str, trace: Trace) -> Row:
    """The schedule simulated with the measured times against the measured steps."""
    sizes = trace.sizes(trace.passes[0])
    predicted = schedule_timeline(*sizes, measured_times(trace))
    idle = statistics.median(one.timeline.bubble_fraction for one in trace.passes)
    note = f"idle {100 * idle:.1f} %, simulator {100 * predicted.bubble_fraction:.1f} %"
    ratios = [predicted.seconds / one.timeline.end for one in trace.passes]
    return row_of(name, "simulator", ratios, at_least=0.9, note=note)


def measure_all(
    sizes: Sizes, sleep: float | None, microbatches: int, repeats: int
) -> dict[str, Trace | None]:
    """On every rank: run each schedule `repeats` times after one unmeasured step; rank 0 gets all ranks' clocks."""
    return {
        name: measure(name, chunks, sizes, sleep, microbatches, repeats) for name, chunks in SCHEDULES.items()
    }


def measure(
    name: str, chunks: int, sizes: Sizes, sleep: float | None, microbatches: int, repeats: int
) -> Trace | None:
    """Steps of one schedule, of stages that sleep or of real layers."""
    size = dist.get_world_size()
    config = run_config(
        sizes,
        f"--pipeline-model-parallel-size {size} --num-virtual-stages-per-pipeline-rank {chunks}",
        f"--pipeline-schedule {name} --global-batch-size {microbatches * sizes.micro_batch}",
        world_size=size,
    )
    mesh = build_mesh(config, torch.device("cpu"))
    if sleep is None:
        pipeline = build_run(config, mesh).pipeline
    else:
        plans = plan_from_config(config)
        mine = stages_of_rank(plans, mesh.rank("pp"))
        asleep = [
            SleepingChunk(sizes.hidden, plan.has_embedding, plan.has_lm_head, sleep / chunks) for plan in mine
        ]
        pipeline = Pipeline(config, plans, asleep, mesh)
    batch = random_batches(sizes, microbatches * sizes.micro_batch, 1)[0]
    for step in range(1 + repeats):
        pipeline.clock.keeping = step > 0
        pipeline.train_step(batch, microbatches, 1.0)
        for chunk in pipeline.chunks:
            chunk.zero_grad()
    everyone: list[Any] = [None] * size
    dist.gather_object(pipeline.clock.take_spans(), everyone if dist.get_rank() == 0 else None)
    return trace_of(config, "cpu", list(map(steps_of, everyone))) if dist.get_rank() == 0 else None


def steps_of(spans: list[list[Span]]) -> list[tuple[int, list[Span]]]:
    """(iteration, actions); R, the reduction of gradients over data-parallel ranks, is none of the schedule's."""
    return [(number, [span for span in step if span.kind != "R"]) for number, step in enumerate(spans)]


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradient.contiguous(), None, None  # the gradient of a sum is one element, expanded


class SleepingChunk(nn.Module):
    """A chunk by contract that only sleeps; the gradients of input and weight are two nodes, so they can part."""

    tied = has_tied_copy = False
    embedding = lm_head = None

    def __init__(self, width: int, first: bool, last: bool, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.width, self.first, self.last, self.seconds = width, first, last, seconds

    def forward(self, x: torch.Tensor, *, labels: torch.Tensor | None = None) -> torch.Tensor:
        """tokens [B, S] or hidden [B, S, H] -> hidden, or on the last stage a scalar."""
        if self.first:
            x = x[..., None].float().expand(-1, -1, self.width).requires_grad_()
        hidden = _Sleep.apply(x, self.seconds, self.seconds)
        out = hidden + _Sleep.apply(self.weight, 0.0, self.seconds)
        return out.sum() if self.last else out
