"""The timetable of a run's pipeline as text or picture: its bubble, what it keeps in flight, and what a run really did.

    python tools/show_schedule.py --world-size 4 --check <the flags of pretrain_gpt.py> [--microbatches 8]
    ... --output schedule.svg                       a picture (.svg or .png) besides the text
    ... --times 1/2 1/2 1/2 1.5/3                   forward/backward of each stage instead of equal ones; three
                                                    numbers: forward/input gradient/weight gradient
    python tools/show_schedule.py --from-trace t.json [--output run.svg]
                                                    what a run with --timeline t.json did, beside the ideal; which stage
                                                    is slowest; a better --pipeline-model-parallel-layout and its gain

One row a rank, one cell a unit of time. a3: forward of microbatch 3 on the rank's chunk a (b, c, ... further chunks);
A3: its backward; w3: a weight gradient that runs apart; .. : idle. Without --times a full backward takes twice a
forward, and all stages the same time.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_lite.arguments.parse import parse_or_exit
from megatron_lite.arithmetic.costs import model_costs
from megatron_lite.arithmetic.pipeline_layout import write_layout
from megatron_lite.arithmetic.pipeline_schedule import (
    Action,
    StageTimes,
    Timeline,
    build_schedule,
    check_microbatches,
    peak_in_flight,
    placement_of,
    runnable_schedule,
    schedule_timeline,
    simulate,
)
from megatron_lite.config import Config, ConfigError
from megatron_lite.config.declare import flag_name
from megatron_lite.distributed.environment import Environment
from megatron_lite.files.command_line import Parser, make_folder_of, number, run
from megatron_lite.planning.balance import Proposal, propose
from megatron_lite.planning.memory import microbatches_of
from megatron_lite.planning.picture import Panel, draw, write_picture
from megatron_lite.planning.trace import MeasuredTimes, RecordedPass, Trace, measured_times, read_trace

Sizes = tuple[str, int, int, int]  # schedule, pipeline ranks, microbatches, chunks a rank
SIGNS = "0123456789abcdefghijklmnopqrstuvwxyz"
MOST_CELLS = 120
# Less than this share of a pass is not worth another layout.
LEAST_GAIN = 0.01
# The flags that --pipeline-model-parallel-layout takes the place of.
SPLIT_FLAGS = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "num_layers_per_virtual_pipeline_stage",
)


def rows(timeline: Timeline, pipeline_size: int, unit: float = 1.0) -> str:
    """The timetable as text, a cell for each `unit` of time: what runs in the middle of it."""
    lines = []
    for rank, events in enumerate(timeline.events):
        cells = [".."] * round(timeline.seconds / unit)
        for event in events:
            start, end = (round((time - timeline.start) / unit) for time in (event.start, event.end))
            part = slice(max(0, start), max(0, end))
            cells[part] = [_cell(event.action, pipeline_size)] * len(cells[part])
        lines.append(f"rank {rank}  " + " ".join(cells))
    return "\n".join(lines)


def _cell(action: Action, pipeline_size: int) -> str:
    chunk = "abcdefgh"[min(action.stage // pipeline_size, 7)]
    sign = {"F": chunk, "W": "w"}.get(action.kind, chunk.upper())
    return "rr" if action.kind == "R" else sign + SIGNS[action.microbatch % len(SIGNS)]


def headline(sizes: Sizes) -> str:
    """Schedule and sizes in words."""
    name, pipeline_size, microbatches, chunks = sizes
    return f"{name}: {pipeline_size} ranks x {chunks} chunks, {microbatches} microbatches"


def in_flight(sizes: Sizes) -> tuple[float, ...]:
    """The most activations at once of each rank, in microbatches of its layers."""
    return tuple(peak_in_flight(actions) / sizes[3] for actions in build_schedule(*sizes))


def simulated(sizes: Sizes, times: StageTimes | None = None) -> Timeline:
    """The schedule simulated with these times, or equal ones. Raises ConfigError for a wrong microbatch count."""
    name, pipeline_size, microbatches, chunks = sizes
    reason = check_microbatches(name, pipeline_size, chunks, microbatches)
    if reason is not None:
        raise ConfigError(reason)
    return schedule_timeline(*sizes, times)


def describe_schedule(sizes: Sizes, timeline: Timeline, unit: float = 1.0) -> str:
    """The timetable and the two numbers that follow from it."""
    held = ", ".join(f"{n:g}" for n in in_flight(sizes))
    return (
        f"{headline(sizes)}\n{rows(timeline, sizes[1], unit)}\nidle {timeline.bubble_fraction:.1%}; "
        f"most activations at once, in microbatches of a rank's layers: {held}"
    )


def stage_times(words: Sequence[str], stages: int) -> StageTimes:
    """--times as StageTimes: an entry for each stage, or one for all. Raises ConfigError for anything else."""
    times = []
    for word in words:
        try:
            first, *rest = map(number(0, float), word.split("/"))
        except argparse.ArgumentTypeError:
            first, rest = 0.0, []
        if len(rest) not in (1, 2) or not all(0 < n < float("inf") for n in (first, *rest)):
            raise ConfigError(f"--times '{word}' wants forward/backward or forward/input/weight, e.g. 1/2")
        times.append((first, *(rest if len(rest) == 2 else (rest[0] / 2, rest[0] / 2))))
    times *= stages if len(times) == 1 else 1
    if len(times) != stages:
        raise ConfigError(f"--times has {len(times)} entries, wanted one for each of {stages} stages, or one")
    return StageTimes(*zip(*times, strict=True))


def ideal_times(measured: MeasuredTimes, stages: int) -> Callable[[Action], float]:
    """The measured work dealt out to all stages equally: each kind of action takes its mean over the stages."""
    kinds = {kind for kind, _ in measured.seconds}
    mean = {k: sum(s for (kind, _), s in measured.seconds.items() if kind == k) / stages for k in kinds}
    if "B" in kinds and "I" in kinds:  # some stages ran one, some the other, some both
        whole = sum(measured.of_stage(stage) for stage in range(stages)) / stages - mean["F"]
        mean |= {"B": whole, "I": whole / 2, "W": whole / 2}
    return lambda action: mean[action.kind]


class Comparison:
    """The typical pass of a trace; the same schedule simulated with the stages' measured times, and with equal ones."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.measured = trace, measured_times(trace)
        self.one: RecordedPass = trace.typical
        self.sizes = trace.sizes(self.one)
        self.counts = tuple(len(plan.layers) for plan in trace.plans)
        schedule, placement = build_schedule(*self.sizes), placement_of(self.sizes[0])
        self.simulated = simulate(schedule, self.measured, placement)
        self.ideal = simulate(schedule, ideal_times(self.measured, len(self.counts)), placement)

    def rows(self) -> list[tuple[str, Timeline]]:
        """What is printed and drawn, and how each is called."""
        return [
            (f"measured, step {self.one.iteration:,}", self.one.timeline),
            ("simulated with the measured stage times", self.simulated),
            ("ideal: the same work in equal stages", self.ideal),
        ]

    def shares(self) -> list[float]:
        """What each stage takes for a microbatch, as a multiple of the mean stage."""
        whole = [self.measured.of_stage(plan.stage) for plan in self.trace.plans]
        return [seconds * len(whole) / sum(whole) for seconds in whole]

    @property
    def slowest(self) -> str:
        """The stage that takes longest for a microbatch, by name."""
        share, plan = max(zip(self.shares(), self.trace.plans, strict=True), key=lambda pair: pair[0])
        return f"stage {plan.stage} on rank {plan.rank} ({plan.holds}), {share:.2f} times the mean stage"

    def proposal(self) -> Proposal:
        config = self.trace.config
        costs = model_costs(config.model, config.data.seq_length)
        mean = sum(layer.flops for layer in costs.layers) / len(costs.layers)
        weights = [layer.flops / mean for layer in costs.layers]
        return propose(*self.sizes, self.measured, self.counts, costs.head.flops / mean, weights)


def describe_trace(comparison: Comparison) -> str:
    """What the run did, where the time goes, the slowest stage, and the proposal."""
    trace, timeline = comparison.trace, comparison.one.timeline
    lines = [f"{headline(comparison.sizes)}, {len(trace.passes)} passes on {trace.device}"]
    lines += [rows(timeline, comparison.sizes[1], timeline.seconds / MOST_CELLS), ""]
    lines += [
        f"{name:<39} {1000 * timeline.seconds:10.2f} ms  idle {timeline.bubble_fraction:6.1%}"
        for name, timeline in comparison.rows()
    ]
    lines += [
        "",
        f"{'stage':>5} {'rank':>4}  {'holds':<26} {'forward':>9} {'backward':>9} {'of the mean':>11}",
    ]
    for plan, share in zip(trace.plans, comparison.shares(), strict=True):
        forward = comparison.measured.seconds["F", plan.stage]
        backward = comparison.measured.of_stage(plan.stage) - forward
        lines.append(
            f"{plan.stage:>5} {plan.rank:>4}  {plan.holds:<26} {1000 * forward:9.2f} {1000 * backward:9.2f} "
            f"{share:11.2f}"
        )
    lines += [f"slowest: {comparison.slowest}; times in ms a microbatch", ""]
    return "\n".join([*lines, describe_proposal(comparison.proposal(), comparison)])


def describe_proposal(proposal: Proposal, comparison: Comparison) -> str:
    """The flag to paste, what it is expected to bring, and what it costs in activations."""
    parts = (
        f"estimated: a mean layer {1000 * proposal.block:.2f} ms a microbatch, embedding "
        f"{1000 * proposal.embedding:.2f} ms, head {1000 * proposal.head:.2f} ms"
    )
    if proposal.gain < LEAST_GAIN:
        return f"{parts}\nno split of the layers is faster by {LEAST_GAIN:.0%}: keep this one"
    before, after = (
        ", ".join(f"{peak_in_flight(actions, counts):g}" for actions in build_schedule(*comparison.sizes))
        for counts in (proposal.before, proposal.after)
    )
    given = comparison.trace.config.parallel
    instead = [flag_name(name) for name in SPLIT_FLAGS if getattr(given, name)]
    lines = [
        parts,
        f"proposed{' in place of ' + ', '.join(instead) if instead else ''}:",
        f"    --pipeline-model-parallel-layout '{write_layout(proposal.after)}'",
        f"layers of the stages {', '.join(map(str, proposal.before))} -> {', '.join(map(str, proposal.after))}",
        f"the pipeline's part of a step is predicted to take {proposal.gain:.1%} less: "
        f"{1000 * proposal.seconds_before:.2f} -> {1000 * proposal.seconds_after:.2f} ms, both simulated",
        f"most activations at once of each rank, in layers: {before} -> {after}",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    """Parse, print, draw."""
    first, _, rest = __doc__.partition("\n\n")
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(first, prog="show_schedule.py", epilog=rest, formatter_class=form)
    flag = parser.add_argument
    flag("--microbatches", type=number(1), help="draw so many instead of the run's own")
    flag("--times", nargs="+", help="forward/backward of each stage, or forward/input/weight")
    flag("--from-trace", type=Path, metavar="FILE", help="a file of pretrain_gpt.py --timeline")
    flag("--output", type=Path, help="also draw to this .svg or .png file")
    own, flags = parser.parse_known_args(argv)
    if own.output is not None:
        if own.output.suffix not in (".svg", ".png"):
            raise ConfigError(f"--output {own.output} has to end in .svg or .png")
        make_folder_of(own.output, "--output")
    if own.from_trace is not None:
        if flags or own.times or own.microbatches:
            raise ConfigError("--from-trace knows the run's flags and times: give it alone, or with --output")
        _show_trace(own.from_trace, own.output)
        return
    _show_plan(parse_or_exit(flags, Environment.read()), own)


def _show_trace(path: Path, output: Path | None) -> None:
    comparison = Comparison(read_trace(path))
    print(describe_trace(comparison))
    held = in_flight(comparison.sizes)
    panels = []
    for name, timeline in comparison.rows():
        title = f"{name}: {1000 * timeline.seconds:,.1f} ms, idle {timeline.bubble_fraction:.1%}"
        slowest = "" if panels else f"slowest: {comparison.slowest}"
        panels.append(Panel(title, timeline, held, slowest))
    _draw(output, panels, comparison.sizes[1], "ms", 1000.0)


def _show_plan(config: Config, own: argparse.Namespace) -> None:
    parallel = config.parallel
    size, chunks = parallel.pipeline_model_parallel_size, parallel.num_virtual_stages_per_pipeline_rank
    microbatches = own.microbatches or microbatches_of(config)[1]
    sizes = runnable_schedule(parallel.pipeline_schedule, size, microbatches), size, microbatches, chunks
    times = stage_times(own.times, size * chunks) if own.times else None
    timeline = simulated(sizes, times)
    unit = max(min(times.forward), timeline.seconds / MOST_CELLS) if times else 1.0
    print(describe_schedule(sizes, timeline, unit))
    title = f"{headline(sizes)}, idle {timeline.bubble_fraction:.1%}"
    unit_words = "units of --times" if times else "forwards of a chunk"
    _draw(own.output, [Panel(title, timeline, in_flight(sizes))], size, unit_words)


def _draw(path: Path | None, panels: Sequence[Panel], size: int, unit: str, scale: float = 1.0) -> None:
    if path is not None:
        write_picture(path, draw(panels, size, unit, scale))
        print(f"written: {path}")


if __name__ == "__main__":
    run(main)
