"""--profile: torch's profiler over a window of steps, one Chrome trace a rank."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_lite.arguments.input_checks import profile_folder
from megatron_lite.config import Config, ConfigError, LoggingConfig
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
    if not config.logging.profile or dist.get_rank() not in config.logging.profile_ranks:
        yield lambda iteration: None
        return
    folder = profile_folder(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--profile writes to {folder}, which cannot be made: {error.strerror}") from None
    window = _Window(config.logging, folder / f"trace_rank{dist.get_rank()}.json", mesh.device)
    window.on_step(iteration)
    yield window.on_step
    window.end()


class _Window:
    """The traced steps."""

    def __init__(self, logging: LoggingConfig, path: Path, device: torch.device) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
        self._start, self._end, self._path = logging.profile_step_start, logging.profile_step_end, path
        self._first: int | None = None  # where the trace began
        self._running = False
        self._iteration = 0

    def on_step(self, iteration: int) -> None:
        """Begin or end where it is due."""
        self._iteration = iteration
        if self._first is None and self._start <= iteration < self._end:
            self._profiler.start()
            self._running, self._first = True, iteration
        elif self._running and iteration >= self._end:
            self._finish()

    def end(self) -> None:
        """The run is over: write what there is, or say why there is nothing."""
        if self._running:
            self._finish()
        elif self._first is None:
            how = "ended before" if self._iteration < self._start else "began at or after the end of"
            print(
                f"warning: --profile traced nothing: the run, now at iteration {self._iteration}, {how} the steps from "
                f"--profile-step-start {self._start} to --profile-step-end {self._end}",
                flush=True,
            )

    def _finish(self) -> None:
        self._running = False
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(self._path))
        print(f"trace of steps {self._first} to {self._iteration} in {self._path}", flush=True)
