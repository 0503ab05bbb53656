"""The file of --timeline: when each action of a run's pipeline ran. Imports no torch.

One JSON object. `stages` says what each stage holds, `config` all flags; `passes` holds for each recorded pass of the
pipeline (a step is one, or several with --max-microbatches-per-step) the rows [kind, stage, microbatch, start, end]
of every rank, in the order they ran, in seconds from the start of the step.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megatron_lite.arithmetic.partition import StagePlan, plan_from_config
from megatron_lite.arithmetic.pipeline_schedule import Action, Event, Timeline, runnable_schedule
from megatron_lite.config import Config, ConfigError
from megatron_lite.files.reading import read_object
from megatron_lite.files.writing import write_aside

FORMAT = "megatron_lite timeline 1"
KINDS = "FBIWR"
_DIGITS = 7  # of a second: a tenth of a microsecond


@dataclass(frozen=True)
class RecordedPass:
    """One pass of the pipeline in step `iteration`."""

    iteration: int
    microbatches: int
    timeline: Timeline


@dataclass(frozen=True)
class Trace:
    """A recorded run: device is 'cpu' or the GPU's name."""

    config: Config
    device: str
    plans: tuple[StagePlan, ...]
    passes: tuple[RecordedPass, ...]

    @property
    def typical(self) -> RecordedPass:
        """Of the passes with most microbatches, the one of median length (the shorter of the middle two)."""
        most = max(one.microbatches for one in self.passes)
        longest = [one for one in self.passes if one.microbatches == most]
        return sorted(longest, key=lambda one: one.timeline.seconds)[(len(longest) - 1) // 2]

    def sizes(self, one: RecordedPass) -> tuple[str, int, int, int]:
        """The schedule that a pass ran, pipeline ranks, microbatches, chunks a rank."""
        parallel = self.config.parallel
        size = parallel.pipeline_model_parallel_size
        name = runnable_schedule(parallel.pipeline_schedule, size, one.microbatches)
        return name, size, one.microbatches, parallel.num_virtual_stages_per_pipeline_rank


@dataclass(frozen=True)
class MeasuredTimes:
    """Seconds by (kind, stage), to simulate with; R is no action of a schedule."""

    seconds: Mapping[tuple[str, int], float]

    def __call__(self, action: Action) -> float:
        """Seconds of one action."""
        return self.seconds[action.kind, action.stage]

    def of_stage(self, stage: int) -> float:
        """Seconds of one microbatch, forward and backward."""
        found = {kind: s for (kind, at), s in self.seconds.items() if at == stage}
        split = found.get("I", 0.0) + found.get("W", 0.0)
        return found.get("F", 0.0) + (split if "W" in found else found.get("B", 0.0))


def measured_times(trace: Trace) -> MeasuredTimes:
    """The median over the microbatches of all passes: one disturbed action moves it little."""
    lengths: dict[tuple[str, int], list[float]] = {}
    for event in (e for one in trace.passes for rank in one.timeline.events for e in rank):
        if event.action.kind != "R":
            lengths.setdefault((event.action.kind, event.action.stage), []).append(event.end - event.start)
    return MeasuredTimes({key: median(values) for key, values in lengths.items()})


Row = Sequence[Any]  # kind, stage, microbatch, start, end


def trace_of(config: Config, device: str, ranks: Sequence[Sequence[tuple[int, Sequence[Row]]]]) -> Trace:
    """A trace from each pipeline rank's (iteration, rows) of the recorded steps, the same steps on every rank."""
    assert len({tuple(iteration for iteration, _ in steps) for steps in ranks}) == 1
    passes = []
    for step in zip(*ranks, strict=True):
        iteration = step[0][0]
        for rows in zip(*(_passes(rows) for _, rows in step), strict=True):
            passes.append(_recorded(iteration, rows))
    return Trace(config, device, tuple(plan_from_config(config)), tuple(passes))


def _passes(rows: Sequence[Row]) -> list[list[Row]]:
    """A step's rows pass by pass: a pass begins where an action comes again."""
    passes: list[list[Row]] = []
    seen: dict[tuple[str, int, int], int] = {}
    for row in rows:
        key = tuple(row[:3])
        index = seen[key] = seen.get(key, -1) + 1
        while index >= len(passes):
            passes.append([])
        passes[index].append(row)
    return passes


def _recorded(iteration: int, ranks: Sequence[Sequence[Row]]) -> RecordedPass:
    events = tuple(
        tuple(Event(Action(stage, kind, number), start, end) for kind, stage, number, start, end in rows)
        for rows in ranks
    )
    return RecordedPass(iteration, 1 + max(event.action.microbatch for event in events[0]), Timeline(events))


def write_trace(path: Path, trace: Trace) -> None:
    """Write aside and rename. Raises OSError."""
    content = {
        "format": FORMAT,
        "device": trace.device,
        "stages": [asdict(plan) for plan in trace.plans],
        "passes": [
            {
                "iteration": one.iteration,
                "microbatches": one.microbatches,
                "ranks": [[_row(event) for event in rank] for rank in one.timeline.events],
            }
            for one in trace.passes
        ],
        "config": trace.config.to_dict(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_aside(path, json.dumps(content) + "\n")


def _row(event: Event) -> list[Any]:
    stage, kind, microbatch, _ = event.action
    return [kind, stage, microbatch, round(event.start, _DIGITS), round(event.end, _DIGITS)]


def read_trace(path: Path) -> Trace:
    """The trace in a file of --timeline.

    Raises:
        ConfigError: the file cannot be read or is none.
    """
    content = read_object(path)
    if content.get("format") != FORMAT:
        raise ConfigError(f"{path} is no file of --timeline, wanted JSON whose format is '{FORMAT}'")
    try:
        config = Config.from_dict(content["config"])
        plans = tuple(plan_from_config(config))
        passes = tuple(_recorded(p["iteration"], _checked(p["ranks"], plans)) for p in content["passes"])
        if not passes:
            raise ValueError("no passes")
    except (AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is a damaged file of --timeline ({type(error).__name__}: {error})"
        ) from None
    return Trace(config, str(content.get("device")), plans, passes)


def _checked(ranks: Any, plans: Iterable[StagePlan]) -> Any:
    """The rows of all ranks, after a look at each."""
    owners = {plan.stage: plan.rank for plan in plans}
    if len(ranks) != 1 + max(owners.values()):
        raise ValueError(f"{len(ranks)} ranks")
    for rank, rows in enumerate(ranks):
        for kind, stage, microbatch, start, end in rows:
            if kind not in KINDS or owners.get(stage) != rank or not -1 <= microbatch < 1 << 20:
                raise ValueError(f"rank {rank} runs {kind} of stage {stage}, microbatch {microbatch}")
            if not (math.isfinite(start) and math.isfinite(end) and start <= end):
                raise ValueError(f"from {start} to {end} seconds")
    return ranks
