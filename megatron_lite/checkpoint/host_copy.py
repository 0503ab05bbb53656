"""The state of a step, copied to host memory so that training can change the original."""

import mmap
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace

import torch

from megatron_lite.checkpoint.shards import LocalShard
from megatron_lite.config.declare import ConfigError

Layout = dict[str, tuple[torch.Size, torch.dtype]]


class HostCopy:
    """One region of host memory for one rank's shards, kept from save to save (pinned, where they come from a GPU).

    It is as large as the state: torch's own pinned tensors are rounded up to powers of two, each, and never given back.
    """

    def __init__(self) -> None:
        self._layout: Layout = {}
        self._views: dict[str, torch.Tensor] = {}
        self._pinned: int | None = None

    def copy(self, shards: dict[str, LocalShard], ready: torch.cuda.Event | None) -> dict[str, LocalShard]:
        """The same shards in host memory; overwritten by the next call. May run in a thread of its own.

        ready: what `mark` returned when the shards had the values to copy.

        Raises:
            ConfigError: there is not enough memory.
        """
        layout = {name: (shard.local.shape, shard.local.dtype) for name, shard in shards.items()}
        device = device_of(shards.values())
        if device is not None:
            # A new thread's CUDA calls go to GPU 0: a context of 0.5 GB from each rank.
            torch.cuda.set_device(device)
        if layout != self._layout:
            self._allocate(layout, pinned=device is not None)
        stream = torch.cuda.Stream(device) if device is not None else None
        # A stream of its own: the copy waits for the step before it, and no later kernel waits for the copy.
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            if stream is not None:
                stream.wait_event(ready)
            for name, shard in shards.items():
                self._views[name].copy_(shard.local, non_blocking=True)
        if stream is not None:
            stream.synchronize()
        return {name: replace(shard, local=self._views[name]) for name, shard in shards.items()}

    def _allocate(self, layout: Layout, pinned: bool) -> None:
        """Make the region, with a view of it for each shard; the one before is given back first."""
        if self._pinned is not None:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._pinned))
        self._layout, self._views, self._pinned = {}, {}, None
        sizes = {name: shape.numel() * dtype.itemsize for name, (shape, dtype) in layout.items()}
        try:
            memory = mmap.mmap(-1, max(1, sum(sizes.values())), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if pinned:
                start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(start, len(memory), 0))
                self._pinned = start
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"--async-save: no host memory for a copy of the state ({sum(sizes.values()):,} bytes): "
                f"{str(error).splitlines()[0]}"
            ) from None
        offset = 0
        # Wide elements first: every shard then starts at a multiple of its element's size, without gaps. Each view has
        # a storage of its own, or torch.save would write the whole region with each.
        for name, (shape, dtype) in sorted(layout.items(), key=lambda item: -item[1][1].itemsize):
            count = shape.numel()
            flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset) if count else None
            self._views[name] = torch.empty(shape, dtype=dtype) if flat is None else flat.view(shape)
            offset += sizes[name]
        self._layout = layout


def device_of(shards: Iterable[LocalShard]) -> torch.device | None:
    """The GPU that the shards lie on; None on a CPU."""
    return next((shard.local.device for shard in shards if shard.local.is_cuda), None)


def mark(shards: Iterable[LocalShard]) -> torch.cuda.Event | None:
    """The moment on the device's queue at which the shards are as they are now; None on a CPU."""
    device = device_of(shards)
    return None if device is None else torch.cuda.current_stream(device).record_event()
