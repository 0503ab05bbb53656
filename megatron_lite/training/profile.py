"""--profile: torch's profiler over a window of steps, one Chrome trace a rank."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megatron_lite.config import Config


@contextmanager
def profiled(config: Config, rank: int, device: torch.device) -> Iterator[Callable[[int], None]]:
    """Gives a function to call after every step with the number of steps done.

    Steps from --profile-step-start to before --profile-step-end are traced on the ranks of --profile-ranks; the
    trace lies in FOLDER/trace_rank{rank}.json, FOLDER = --tensorboard-dir, --save or the working folder.
    """
    logging = config.logging
    if not logging.profile or rank not in logging.profile_ranks:
        yield lambda iteration: None
        return
    folder = Path(logging.tensorboard_dir or config.checkpoint.save or ".")
    folder.mkdir(parents=True, exist_ok=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities, record_shapes=True)
    running = False

    def on_step(iteration: int) -> None:
        nonlocal running
        if iteration == logging.profile_step_start:
            profiler.start()
            running = True
        elif running and iteration >= logging.profile_step_end:
            finish()

    def finish() -> None:
        nonlocal running
        running = False
        profiler.stop()
        path = folder / f"trace_rank{rank}.json"
        profiler.export_chrome_trace(str(path))
        print(
            f"trace of steps {logging.profile_step_start} to {logging.profile_step_end} in {path}", flush=True
        )

    if logging.profile_step_start == 0:
        on_step(0)
    yield on_step
    if running:
        finish()
