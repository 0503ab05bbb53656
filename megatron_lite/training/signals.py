"""When to stop early: signals, minutes, steps. All ranks agree on the step before they leave."""

import signal
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_lite.config.training import TrainingConfig

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopConditions:
    """Decides after each step whether the run ends now, the same way on every rank.

    What this rank has seen (`flags`) is part of the tensor of the step's loss, so a step has no message and no host
    wait for it. A signal that comes after a step has sent its loss is seen by the next one: at most one step later.
    """

    def __init__(self, training: TrainingConfig, device: torch.device, started: float | None = None) -> None:
        """started: time.monotonic() of the program's start, for --exit-duration-in-mins."""
        self._training = training
        self._device = device
        self._started = time.monotonic() if started is None else started
        self._received: int | None = None
        self.reason: str | None = None  # what all ranks agreed on
        if training.exit_signal_handler:
            for number in _SIGNALS:
                signal.signal(number, self._receive)

    def _receive(self, number: int, frame: object) -> None:
        self._received = number

    @property
    def _minutes(self) -> float:
        return (time.monotonic() - self._started) / 60

    def flags(self) -> torch.Tensor:
        """[3] what this rank has seen, 0 or 1: each signal, minutes that ran out. [0] when no flag asks for any.

        Filled on the device, without a copy that the host would wait for.
        """
        limit = self._training.exit_duration_in_mins
        if not self._training.exit_signal_handler and limit is None:
            return torch.zeros(0, device=self._device)
        flags = torch.zeros(len(_SIGNALS) + 1, device=self._device)
        if self._received is not None:
            flags[_SIGNALS.index(self._received)].fill_(1)
        if limit is not None and self._minutes >= limit:
            flags[-1].fill_(1)
        return flags

    def agree(self, sums: Sequence[float]) -> None:
        """Take in the flags summed over all ranks: what any rank has seen counts for all."""
        if not any(sums):
            return
        *signals, _ = sums
        received = [number.name for number, count in zip(_SIGNALS, signals) if count]
        limit = (
            f"ran for {self._minutes:.1f} of --exit-duration-in-mins {self._training.exit_duration_in_mins}"
        )
        self.reason = f"received {received[0]}" if received else limit

    def asked(self) -> str | None:
        """Why the run has to stop as soon as it can, or None, asked outside a step (collective when a flag asks)."""
        flags = self.flags()
        if len(flags):
            dist.all_reduce(flags)
            self.agree(flags.tolist())
        return self.reason

    def due(self, iteration: int) -> str | None:
        """Why the run stops after this step, or None: what the ranks agreed on, and --exit-interval."""
        interval = self._training.exit_interval
        if self.reason is None and interval and iteration % interval == 0:
            return f"reached a multiple of --exit-interval {interval}"
        return self.reason
