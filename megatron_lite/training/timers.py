"""Timers of the parts of a step, by Megatron's names and levels, reduced over all ranks."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron_lite.config.output import LoggingConfig
from megatron_lite.distributed.collectives import gathered

# Timer -> the --timing-log-level from which it is kept.
LEVELS = {
    "batch-generator": 1,
    "forward-backward": 1,
    "optimizer": 1,
    "grads-reduce-norm": 2,
    "optimizer-clip": 2,
    "optimizer-inner-step": 2,
}
# --timing-log-option -> what is shown of the ranks' milliseconds.
SHOWN: dict[str, tuple[str, Callable[[Sequence[float]], str]]] = {
    "minmax": ("(min, max) time", lambda times: f"({min(times):.2f}, {max(times):.2f})"),
    "max": ("max time", lambda times: f"{max(times):.2f}"),
    "all": ("times", lambda times: " ".join(f"{rank}: {ms:.2f}" for rank, ms in enumerate(times))),
}


class Timers:
    """Seconds spent in each part since the last report.

    On a GPU a timer that is kept waits for the device at both ends, so levels 1 and 2 cost some overlap; level 0
    keeps none and costs nothing.
    """

    def __init__(self, logging: LoggingConfig, device: torch.device) -> None:
        self._level = logging.timing_log_level
        self._option = logging.timing_log_option
        self._device = device
        self._seconds = {name: 0.0 for name, level in LEVELS.items() if level <= self._level}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block under this name, if its level is kept."""
        if name not in self._seconds:
            yield
            return
        self._wait()
        started = time.perf_counter()
        yield
        self._wait()
        self._seconds[name] += time.perf_counter() - started

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def report(self, num_steps: int) -> tuple[str, dict[str, float]]:
        """(lines for the log, {"NAME-time": largest seconds a step}) and start anew; collective when any is kept.

        --timing-log-option: minmax and max over the ranks, or all ranks' times.
        """
        if not self._seconds:
            return "", {}
        mine = torch.tensor([value / num_steps for value in self._seconds.values()], device=self._device)
        table = gathered(mine).mul(1000).tolist()  # [ranks][timers], milliseconds
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        columns = dict(zip(self._seconds, zip(*table)))
        head, shown = SHOWN[self._option]
        lines = [f"    {name} {'.' * (40 - len(name))}: {shown(times)}" for name, times in columns.items()]
        records = {f"{name}-time": max(times) / 1000 for name, times in columns.items()}
        return "\n".join([f"{head} across ranks (ms):", *lines]), records
