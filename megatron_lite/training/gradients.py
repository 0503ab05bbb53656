"""The gradient norm of the whole model, and clipping by it.

The same number on every rank and in every layout: squares are summed over this rank's shards and then
over every axis that shards the parameters (dp_shard, cp, tp, pp). A parameter that tensor ranks replicate,
and a tied weight that two stages hold, count once.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_lite.distributed.mesh import ParallelMesh
from megatron_lite.distributed.tensors import local_part
from megatron_lite.parallel.tied import counted_parameters

CLIP_EPSILON = 1e-6  # Megatron's: coefficient = clip / (norm + 1e-6)


def replication(tensor: torch.Tensor, mesh: ParallelMesh) -> int:
    """How many tensor-parallel ranks hold this same shard."""
    if not isinstance(tensor, DTensor):
        return mesh.size("tp")
    names = tensor.device_mesh.mesh_dim_names
    if "tp" not in names:  # a mixture's, which tensor ranks share with the data-parallel ranks
        return 1 if {"tokens", "edp", "ep"} & set(names) else mesh.size("tp")
    axis = names.index("tp")
    return mesh.size("tp") if tensor.placements[axis].is_replicate() else 1


@torch.no_grad()
def sum_over_model(values: Iterable[tuple[torch.Tensor, torch.Tensor]], mesh: ParallelMesh) -> torch.Tensor:
    """Sum (tensor it belongs to, its value) pairs over my shards and over all ranks; scalar fp32, on my device."""
    by_copies: dict[int, list[torch.Tensor]] = {}
    for tensor, value in values:
        by_copies.setdefault(replication(tensor, mesh), []).append(value)
    total = torch.zeros((), device=mesh.device)
    for copies, alike in by_copies.items():  # a few operators, not some for each parameter
        total += torch.stack(alike).sum().to(mesh.device) / copies
    return mesh.sum_over(total, "dp_shard", "cp", "tp", "pp")


def gradient_norm(chunks: list[nn.Module], mesh: ParallelMesh) -> torch.Tensor:
    """L2 norm of the gradient of the whole model, scalar fp32."""
    return _norm([p.grad for _, p in counted_parameters(chunks) if p.grad is not None], mesh)


def parameter_norm(chunks: list[nn.Module], mesh: ParallelMesh) -> torch.Tensor:
    """L2 norm of all parameters, scalar fp32."""
    return _norm([p for _, p in counted_parameters(chunks)], mesh)


@torch.no_grad()
def _norm(tensors: list[torch.Tensor], mesh: ParallelMesh) -> torch.Tensor:
    norms = torch._foreach_norm([local_part(tensor).float() for tensor in tensors])
    return sum_over_model(zip(tensors, torch._foreach_mul(norms, norms)), mesh).sqrt()


@torch.no_grad()
def count_zeros(chunks: list[nn.Module], mesh: ParallelMesh) -> torch.Tensor:
    """How many elements of the gradient are zero, scalar fp32."""
    gradients = [p.grad for _, p in counted_parameters(chunks) if p.grad is not None]
    return sum_over_model(((g, (local_part(g) == 0).sum().float()) for g in gradients), mesh)


@torch.no_grad()
def scale_gradients(chunks: list[nn.Module], factor: float) -> None:
    """Multiply every gradient in place."""
    shards = [local_part(p.grad) for chunk in chunks for p in chunk.parameters() if p.grad is not None]
    if shards:
        torch._foreach_mul_(shards, factor)


def clip_gradients(chunks: list[nn.Module], norm: float, max_norm: float) -> None:
    """Scale the gradients so that their norm is at most max_norm (0 = no clipping)."""
    if max_norm > 0 and norm > max_norm:
        scale_gradients(chunks, max_norm / (norm + CLIP_EPSILON))
