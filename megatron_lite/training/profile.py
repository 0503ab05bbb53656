"""--profile: torch's profiler over a window of steps, one Chrome trace a rank."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron_lite.arguments.input_checks import profile_folder
from megatron_lite.config import Config, ConfigError
from megatron_lite.distributed.mesh import ParallelMesh


@contextmanager
def profiled(config: Config, mesh: ParallelMesh, iteration: int) -> Iterator[Callable[[int], None]]:
    """Gives a function to call after every step with the number of steps done.

    Steps from --profile-step-start to before --profile-step-end are traced on the ranks of --profile-ranks; the
    trace lies in FOLDER/trace_rank{rank}.json, FOLDER = --tensorboard-dir, --save or the working folder. A run that
    goes on within the window traces the rest of it.

    Args:
        iteration: steps done when the run starts.

    Raises:
        ConfigError: the folder cannot be made.
    """
    logging, rank = config.logging, dist.get_rank()
    if not logging.profile or rank not in logging.profile_ranks:
        yield lambda iteration: None
        return
    path = profile_folder(config) / f"trace_rank{rank}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--profile writes to {path.parent}, which cannot be made: {error.strerror}"
        ) from None
    activities = [torch.profiler.ProfilerActivity.CPU]
    if mesh.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities, record_shapes=True)
    start, end = logging.profile_step_start, logging.profile_step_end
    done, first, running = iteration, None, False  # first: where the trace began

    def on_step(iteration: int) -> None:
        nonlocal done, first, running
        done = iteration
        if first is None and start <= done < end:
            profiler.start()
            first, running = done, True
        elif running and done >= end:
            finish()

    def finish() -> None:
        nonlocal running
        running = False
        profiler.stop()
        profiler.export_chrome_trace(str(path))
        print(f"trace of steps {first} to {done} in {path}", flush=True)

    on_step(iteration)
    yield on_step
    if running:
        finish()
    elif first is None:
        how = "ended before" if done < start else "began at or after the end of"
        print(
            f"warning: --profile traced nothing: the run, now at iteration {done}, {how} the steps from "
            f"--profile-step-start {start} to --profile-step-end {end}",
            flush=True,
        )
