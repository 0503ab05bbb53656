"""The timetable of a run's pipeline as text, its bubble and what it keeps in flight, without any process group.

    python tools/show_schedule.py --world-size 4 --check <the flags of pretrain_gpt.py> [--microbatches 8]

One row a rank, one cell a unit of time. a3: forward of microbatch 3 on the rank's chunk a (b, c, ... further chunks);
A3: its backward; w3: a weight gradient that runs apart; .. : idle. A full backward takes twice a forward, and all
stages the same time: the ideal that a measured run is held against.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_lite.arguments import parse_or_exit
from megatron_lite.config import Config, ConfigError
from megatron_lite.data.command_line import Parser, number, run
from megatron_lite.environment import Environment
from megatron_lite.parallel.schedule import (
    Event,
    StageTimes,
    Timeline,
    build_schedule,
    check_microbatches,
    peak_in_flight,
    schedule_timeline,
)

SIGNS = "0123456789abcdefghijklmnopqrstuvwxyz"


def draw(timeline: Timeline, pipeline_size: int) -> str:
    """The rows, for unit times: every action starts and ends on a whole unit."""
    rows = []
    for rank, events in enumerate(timeline.events):
        cells = [".."] * round(timeline.seconds)
        for event in events:
            for unit in range(round(event.start), round(event.end)):
                cells[unit] = _cell(event, pipeline_size)
        rows.append(f"rank {rank}  " + " ".join(cells))
    return "\n".join(rows)


def _cell(event: Event, pipeline_size: int) -> str:
    chunk = "abcdefgh"[min(event.action.stage // pipeline_size, 7)]
    microbatch = SIGNS[event.action.microbatch % len(SIGNS)]
    if event.action.kind == "W":
        return f"w{microbatch}"
    return (chunk if event.action.kind == "F" else chunk.upper()) + microbatch


def describe_schedule(name: str, pipeline_size: int, microbatches: int, chunks: int) -> str:
    """The timetable and the two numbers that follow from it.

    Raises:
        ConfigError: the schedule cannot run so many microbatches.
    """
    reason = check_microbatches(name, pipeline_size, chunks, microbatches)
    if reason is not None:
        raise ConfigError(reason)
    times = StageTimes.equal(pipeline_size * chunks)
    timeline = schedule_timeline(name, pipeline_size, microbatches, chunks, times)
    held = [
        peak_in_flight(actions) / chunks
        for actions in build_schedule(name, pipeline_size, microbatches, chunks)
    ]
    return "\n".join(
        (
            f"{name}: {pipeline_size} ranks x {chunks} chunks, {microbatches} microbatches",
            draw(timeline, pipeline_size),
            f"idle {timeline.bubble_fraction:.1%}; most activations at once, in microbatches of a rank's layers: "
            + ", ".join(f"{n:g}" for n in held),
        )
    )


def microbatches_of(config: Config) -> int:
    """Microbatches of one pass of the run's pipeline."""
    samples = config.training.micro_batch_size * config.parallel.data_parallel_size
    count = config.training.global_batch_size // samples
    return min(count, config.parallel.max_microbatches_per_step or count)


def main(argv: Sequence[str]) -> None:
    """Parse and print."""
    parser = Parser(__doc__.splitlines()[0], prog="show_schedule.py")
    parser.add_argument("--microbatches", type=number(1), help="draw so many instead of the run's own")
    own: argparse.Namespace
    own, flags = parser.parse_known_args(argv)
    config = parse_or_exit(flags, Environment.read())
    parallel = config.parallel
    print(
        describe_schedule(
            parallel.pipeline_schedule,
            parallel.pipeline_model_parallel_size,
            own.microbatches or microbatches_of(config),
            parallel.num_virtual_stages_per_pipeline_rank,
        )
    )


if __name__ == "__main__":
    run(main)
