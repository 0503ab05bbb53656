"""The state of a step, copied to host memory so that training can change the original."""

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace

import torch

from megatron_lite.checkpoint.pieces import Piece
from megatron_lite.config import ConfigError


class HostCopy:
    """Host memory for one rank's pieces, kept from save to save (pinned, where they come from a GPU)."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def copy(self, pieces: dict[str, Piece], ready: torch.cuda.Event | None) -> dict[str, Piece]:
        """The same pieces in host memory; overwritten by the next call. May run in a thread of its own.

        ready: what `mark` returned when the pieces had the values to copy.

        Raises:
            ConfigError: there is not enough memory.
        """
        if self._kept.keys() != pieces.keys():
            self._kept.clear()
        device = next((piece.local.device for piece in pieces.values() if piece.local.is_cuda), None)
        stream = torch.cuda.Stream(device) if device is not None else None
        # A stream of its own: the copy waits for the step before it, and no later kernel waits for the copy.
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            if stream is not None:
                stream.wait_event(ready)
            for name, piece in pieces.items():
                self._buffer(name, piece.local).copy_(piece.local, non_blocking=True)
        if stream is not None:
            stream.synchronize()
        return {name: replace(piece, local=self._kept[name]) for name, piece in pieces.items()}

    def _buffer(self, name: str, like: torch.Tensor) -> torch.Tensor:
        kept = self._kept.get(name)
        if kept is None or (kept.shape, kept.dtype) != (like.shape, like.dtype):
            try:
                kept = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
            except RuntimeError as error:
                lines = str(error).splitlines()
                raise ConfigError(
                    f"--async-save: no host memory for a copy of the state: {lines[0]}"
                ) from None
            self._kept[name] = kept
        return kept


def mark(pieces: Iterable[Piece]) -> torch.cuda.Event | None:
    """The moment on the device's queue at which the pieces are as they are now; None on a CPU."""
    device = next((piece.local.device for piece in pieces if piece.local.is_cuda), None)
    return None if device is None else torch.cuda.current_stream(device).record_event()
