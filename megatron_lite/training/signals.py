"""When to stop early: signals, minutes, steps. All ranks agree on the step before they leave."""

import signal
import time

import torch
import torch.distributed as dist

from megatron_lite.config import TrainingConfig

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopWatch:
    """Decides after each step whether the run ends now, the same way on every rank."""

    def __init__(self, training: TrainingConfig, device: torch.device, started: float | None = None) -> None:
        """started: time.monotonic() of the program's start, for --exit-duration-in-mins."""
        self._training = training
        self._device = device
        self._started = time.monotonic() if started is None else started
        self._received: int | None = None
        if training.exit_signal_handler:
            for number in _SIGNALS:
                signal.signal(number, self._receive)

    def _receive(self, number: int, frame: object) -> None:
        self._received = number

    def asked(self) -> str | None:
        """Why the run has to stop as soon as it can (collective: one small all-reduce), or None.

        A signal that reached any rank, or minutes that ran out on any rank, counts for all.
        """
        limit = self._training.exit_duration_in_mins
        if not self._training.exit_signal_handler and limit is None:
            return None
        minutes = (time.monotonic() - self._started) / 60
        mine = [float(self._received or 0), float(limit is not None and minutes >= limit)]
        seen = torch.tensor(mine, device=self._device)
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        number, expired = (int(value) for value in seen.tolist())
        if number:
            return f"received {signal.Signals(number).name}"
        return f"ran for {minutes:.1f} of --exit-duration-in-mins {limit}" if expired else None

    def due(self, iteration: int) -> str | None:
        """Why the run stops after this step, or None: `asked`, and --exit-interval."""
        reason = self.asked()
        interval = self._training.exit_interval
        if reason is None and interval and iteration % interval == 0:
            return f"reached a multiple of --exit-interval {interval}"
        return reason
