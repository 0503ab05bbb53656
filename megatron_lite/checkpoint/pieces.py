"""Which box of a global tensor lies on this rank. A box is a start and a size per tensor dim."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

Ints = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """The part of a global tensor that this rank holds.

    local [*sizes] lies at `offsets` in a tensor of `shape`. It may be empty: torch.chunk gives the last ranks
    nothing when there are fewer rows than ranks.
    """

    local: torch.Tensor
    shape: Ints
    offsets: Ints

    @property
    def sizes(self) -> Ints:
        """Lengths of the box."""
        return tuple(self.local.shape)


def piece_of(tensor: torch.Tensor) -> Piece:
    """This rank's piece. A plain tensor is whole, and the same on every rank that has its name.

    FSDP over tensor parallelism cuts along one dim twice, the inner mesh axis first; DTensor calls the outer cut
    strided. Every cut is torch.chunk's, so a piece is always one box.
    """
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return Piece(tensor, tuple(tensor.shape), (0,) * tensor.dim())
    sizes, offsets = list(tensor.shape), [0] * tensor.dim()
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is outside the tensor's mesh"
    for axis, dim in _cuts(tensor.placements):
        length = -(-sizes[dim] // tensor.device_mesh.size(axis))
        start = min(coordinate[axis] * length, sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(length, sizes[dim] - start)
    local = tensor.to_local()
    assert tuple(local.shape) == tuple(sizes), (
        f"{tuple(local.shape)} is not the box {sizes} of {tensor.placements}"
    )
    return Piece(local, tuple(tensor.shape), tuple(offsets))


def _cuts(placements: Iterable[Placement]) -> list[tuple[int, int]]:
    """(mesh axis, tensor dim) of every cut in the order they are made: outer axes first, strided ones last."""
    plain, strided = [], []
    for axis, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            strided.insert(0, (axis, placement.dim))
        elif isinstance(placement, Shard):
            plain.append((axis, placement.dim))
        else:
            assert isinstance(placement, Replicate), f"{placement} has no place in a checkpoint"
    return plain + strided
