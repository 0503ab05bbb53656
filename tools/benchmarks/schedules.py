"""Suite schedules: real runs of each pipeline schedule against what arithmetic/pipeline_schedule.py simulates.

Two kinds of stages: real layers (as many ranks as there are cores, or they wait for a core and not for a neighbour),
and stages that only sleep, which any number of ranks can do at once: they show the order of the actions and what the
engine adds to it, undisturbed by who shares a core or a cache.
"""

import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_lite.arithmetic.partition import plan_from_config, stages_of_rank
from megatron_lite.arithmetic.pipeline_schedule import Action, Timeline, schedule_timeline
from megatron_lite.config import Config
from megatron_lite.distributed.mesh import ParallelMesh, build_mesh
from megatron_lite.parallel.clock import Span
from megatron_lite.parallel.pipeline import Pipeline
from megatron_lite.training.run import build_run
from tools.benchmarks.baseline_model import Sizes, random_batches
from tools.benchmarks.comparison import Options, Row, Table, quartiles
from tools.benchmarks.our_run import run_config
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
WANTED = 0.9
# A vocabulary so small that the embedding and the head take nothing beside the layers: stages are equal.
REAL = Sizes(vocabulary=256, micro_batch=2)
REAL_QUICK = Sizes(layers=8, hidden=32, heads=2, ffn=64, seq_length=16, vocabulary=128, micro_batch=1)


@dataclass(frozen=True)
class Sleeps:
    """Seconds that a whole rank's stages sleep: forward, gradient of the input, gradient of the weights."""

    forward: float = 0.04
    backward_input: float = 0.04
    backward_weight: float = 0.04


@dataclass(frozen=True)
class Measured:
    """One schedule's steps: the pipeline's seconds and the idle share of each, and seconds of (kind, stage)."""

    seconds: list[float]
    idle: list[float]
    times: dict[tuple[str, int], float]


def run(options: Options) -> list[Table]:
    """Step and idle share (bubble) of every pipeline schedule, measured, against what the simulator predicts."""
    sleeps = Sleeps(0.004, 0.004, 0.004) if options.quick else Sleeps()
    real = REAL_QUICK if options.quick else REAL
    tables = [
        _table(
            "real layers, 2 ranks",
            2,
            real,
            options,
            f"{real.layers} layers of {real.hidden}, microbatches of {real.micro_batch} samples of {real.seq_length} "
            "tokens, a thread a rank. Ranks that compute share the processor's cache and memory.",
        )
    ]
    for size in (2,) if options.quick else (2, 4):
        total = sum((sleeps.forward, sleeps.backward_input, sleeps.backward_weight)) * 1000
        note = (
            f"stages that SLEEP and compute nothing ({total:.0f} ms for a rank's part of a microbatch, a third of it "
            "forward): the pure order of the schedule, without contention for cores."
        )
        tables.append(_table(f"sleeping stages, {size} ranks", size, sleeps, options, note))
    return tables


def _table(title: str, size: int, work: Sizes | Sleeps, options: Options, note: str) -> Table:
    microbatches = MICROBATCHES_A_RANK * size
    answers = run_ranks(measure_all, size, work, microbatches, options.repeats)
    rows = []
    for name, chunks in SCHEDULES.items():
        found: Measured = answers[0][name]
        predicted = predict(name, size, microbatches, chunks, found.times)
        values = quartiles([predicted.seconds / seconds for seconds in found.seconds])
        shares = f"idle {100 * statistics.median(found.idle):.1f} %, simulator {100 * predicted.bubble_fraction:.1f} %"
        rows.append(Row(name, "simulator", *values, at_least=WANTED, note=shares))
    facts = [
        f"{microbatches} microbatches; {note}",
        "Ratio: the step's time as simulated with the measured times of each stage's actions / as measured, from the "
        "common start to the last action's end. Idle: the share of all ranks' time outside of actions.",
    ]
    return Table(f"Schedules, {title}", rows, facts)


def predict(
    name: str, size: int, microbatches: int, chunks: int, times: dict[tuple[str, int], float]
) -> Timeline:
    """The simulated step; `times` are seconds of each kind of action of each stage, as measured."""

    def seconds(action: Action) -> float:
        return times[action.kind, action.stage]

    return schedule_timeline(name, size, microbatches, chunks, seconds)


def measure_all(work: Sizes | Sleeps, microbatches: int, repeats: int) -> dict[str, Measured]:
    """On every rank: run each schedule `repeats` times after one unmeasured step."""
    return {name: measure(name, chunks, work, microbatches, repeats) for name, chunks in SCHEDULES.items()}


def measure(name: str, chunks: int, work: Sizes | Sleeps, microbatches: int, repeats: int) -> Measured | None:
    """Steps of one schedule; rank 0 gets what all ranks' clocks saw."""
    sizes = work if isinstance(work, Sizes) else REAL_QUICK
    size = dist.get_world_size()
    config = run_config(
        sizes,
        f"--pipeline-model-parallel-size {size} --num-virtual-stages-per-pipeline-rank {chunks}",
        f"--pipeline-schedule {name} --global-batch-size {microbatches * sizes.micro_batch}",
        world_size=size,
    )
    mesh = build_mesh(config, torch.device("cpu"))
    if isinstance(work, Sizes):
        run = build_run(config, mesh)
        chunks_of_rank, pipeline = run.chunks, run.pipeline
    else:
        chunks_of_rank, pipeline = _sleeping_model(config, mesh, work)
    batch = random_batches(sizes, microbatches * sizes.micro_batch, 1)[0]
    for step in range(1 + repeats):
        pipeline.clock.keeping = step > 0
        pipeline.train_step(batch, microbatches, 1.0)
        for chunk in chunks_of_rank:
            chunk.zero_grad()
    everyone: list[Any] = [None] * size
    dist.gather_object(pipeline.clock.take_spans(), everyone if dist.get_rank() == 0 else None)
    return summarise(everyone) if dist.get_rank() == 0 else None


def summarise(ranks: list[list[list[Span]]]) -> Measured:
    """From spans[rank][step] to the seconds and idle share of each step and the median time of each action's kind.

    R, the reduction of gradients over data-parallel ranks, is none of the schedule's actions.
    """
    seconds, idle = [], []
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    for step in zip(*ranks, strict=True):
        actions = [span for spans in step for span in spans if span.kind != "R"]
        end = max(span.end for span in actions)
        busy = sum(span.end - span.start for span in actions)
        seconds.append(end)
        idle.append(1 - busy / (len(ranks) * end))
        for span in actions:
            times[span.kind, span.stage].append(span.end - span.start)
    return Measured(seconds, idle, {key: statistics.median(values) for key, values in times.items()})


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

    def __init__(self, width: int, first: bool, last: bool, sleeps: Sleeps) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.width, self.first, self.last, self.sleeps = width, first, last, sleeps

    def forward(self, x: torch.Tensor, *, labels: torch.Tensor | None = None) -> torch.Tensor:
        """tokens [B, S] or hidden [B, S, H] -> hidden, or on the last stage a scalar."""
        if self.first:
            x = x[..., None].float().expand(-1, -1, self.width).requires_grad_()
        hidden = _Sleep.apply(x, self.sleeps.forward, self.sleeps.backward_input)
        out = hidden + _Sleep.apply(self.weight, 0.0, self.sleeps.backward_weight)
        return out.sum() if self.last else out


def _sleeping_model(config: Config, mesh: ParallelMesh, sleeps: Sleeps) -> tuple[list[nn.Module], Pipeline]:
    """Each stage of a rank sleeps its share."""
    plans = plan_from_config(config)
    mine = stages_of_rank(plans, mesh.rank("pp"))
    share = replace(sleeps, **{name: seconds / len(mine) for name, seconds in vars(sleeps).items()})
    width = config.model.hidden_size
    chunks = [SleepingChunk(width, plan.has_embedding, plan.has_lm_head, share) for plan in mine]
    return chunks, Pipeline(config, plans, chunks, mesh)
