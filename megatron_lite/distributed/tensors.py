"""What of a (possibly distributed) tensor lies on this rank, and the whole of it."""

import torch
from torch.distributed.tensor import DTensor, Replicate


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The shard of a (possibly distributed) tensor that lies on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_slices(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Where local_part lies in the whole tensor, a slice per dim. The last ranks' are empty where rows are too few.

    FSDP shards what tensor parallelism has sharded already: one dim twice, the inner mesh axis first, which DTensor
    calls strided. Each split is torch.chunk's, so a shard is contiguous along every dim.
    """
    starts, sizes = [0] * tensor.dim(), list(tensor.shape)
    if not isinstance(tensor, DTensor):
        return tuple(map(slice, starts, sizes))
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    strided = [hasattr(placement, "split_factor") for placement in placements]
    for axis in sorted(range(mesh.ndim), key=lambda axis: (1, -axis) if strided[axis] else (0, axis)):
        if placements[axis].is_replicate():
            continue
        dim = placements[axis].dim
        length = -(-sizes[dim] // mesh.size(axis))
        start = min(coordinate[axis] * length, sizes[dim])
        starts[dim] += start
        sizes[dim] = min(length, sizes[dim] - start)
    local = tuple(tensor.to_local().shape)
    assert local == tuple(sizes), f"{local} is not the slice {sizes} of {placements}"
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes))


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded tensor, on the device that the mesh communicates on."""
    if not isinstance(tensor, DTensor):
        return tensor
    tensor = tensor.to(tensor.device_mesh.device_type)
    # What is sharded twice along a dim is gathered in two steps; torch does it in one and warns at it.
    outer = [Replicate() if hasattr(p, "split_factor") else p for p in tensor.placements]
    return tensor.redistribute(placements=outer).full_tensor()
