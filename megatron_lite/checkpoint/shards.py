"""Which part of a global tensor lies on this rank."""

from dataclasses import dataclass

import torch

from megatron_lite.distributed.tensors import local_part, local_slices

Ints = tuple[int, ...]


@dataclass(frozen=True)
class LocalShard:
    """local [*sizes] lies at `offsets` in a tensor of `shape`. It may be empty: see local_slices."""

    local: torch.Tensor
    shape: Ints
    offsets: Ints

    @property
    def sizes(self) -> Ints:
        """Elements along each dim."""
        return tuple(self.local.shape)


def shard_of(tensor: torch.Tensor) -> LocalShard:
    """This rank's shard. A plain tensor is whole, and the same on every rank that has its name."""
    tensor = tensor.detach()
    offsets = tuple(part.start for part in local_slices(tensor))
    return LocalShard(local_part(tensor), tuple(tensor.shape), offsets)
