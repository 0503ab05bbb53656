"""--timeline: when each of the pipeline's actions ran in a few steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_lite.arithmetic.mesh_sizes import AXES
from megatron_lite.config import Config
from megatron_lite.distributed.collectives import gathered_objects
from megatron_lite.distributed.mesh import ParallelMesh
from megatron_lite.parallel.clock import ActionClock, Span
from megatron_lite.planning.trace import trace_of, write_trace


@contextmanager
def timeline(config: Config, mesh: ParallelMesh, clock: ActionClock) -> Iterator[Callable[[int], None]]:
    """Gives a function to call after every step with the number of steps done.

    The steps from --timeline-step-start to before --timeline-step-end, counted from where this run starts, are
    recorded on the first data-parallel rank's pipeline (rank 0 of every other axis), and written by rank 0.
    """
    logging = config.logging
    if logging.timeline is None:
        yield lambda iteration: None
        return
    mine = all(mesh.rank(axis) == 0 for axis in AXES if axis != "pp")
    done = 0
    steps: list[tuple[int, list[Span]]] = []

    def on_step(iteration: int) -> None:
        nonlocal done
        steps.extend((iteration, spans) for spans in clock.take_spans())
        clock.keeping = mine and logging.timeline_step_start <= done < logging.timeline_step_end
        if done == logging.timeline_step_end:
            finish()
        done += 1

    def finish() -> None:
        clock.keeping = False
        if not mine:
            return
        ranks = gathered_objects(steps, mesh.group("pp"))
        steps.clear()
        if dist.get_rank() == 0:
            _write(config, mesh.device, ranks)

    on_step(0)
    yield on_step
    if done <= logging.timeline_step_end:
        finish()


def _write(config: Config, device: torch.device, ranks: list[list[tuple[int, list[Span]]]]) -> None:
    """Write the file, or say why not: a disk must not stop a run."""
    path = Path(config.logging.timeline)
    if not ranks[0]:
        print(
            f"warning: --timeline {path} is not written: no step ran after the first "
            f"{config.logging.timeline_step_start} (--timeline-step-start)",
            flush=True,
        )
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    try:
        write_trace(path, trace_of(config, name, ranks))
    except OSError as error:
        print(f"warning: --timeline {path} cannot be written: {error}", flush=True)
        return
    print(
        f"timeline of {len(ranks[0])} steps in {path}: python tools/show_schedule.py --from-trace {path}",
        flush=True,
    )
