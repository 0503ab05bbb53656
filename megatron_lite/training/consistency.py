"""Replicas of the same weights hold the same bits (where a flag asks), so do tied copies; nothing saved is a NaN."""

import hashlib
import math
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from megatron_lite.arithmetic.mesh_sizes import AXES
from megatron_lite.distributed.collectives import gathered_objects
from megatron_lite.distributed.mesh import ParallelMesh
from megatron_lite.distributed.tensors import local_part
from megatron_lite.training.named_tensors import named_tensors, tied_copies

_CHECKSUM_ELEMENTS = 1 << 22  # elements whose products are held at once


class ReplicaError(RuntimeError):
    """Replicas of the same weights differ: a rank computes wrongly, or memory is faulty."""


def weight_hash(chunks: list[nn.Module]) -> str:
    """sha256 over the bytes of this rank's parts of all parameters and buffers, in the order of their names."""
    digest = hashlib.sha256()
    for chunk in chunks:
        for name, tensor in sorted((*chunk.named_global_parameters(), *chunk.named_global_buffers())):
            digest.update(name.encode())
            content = local_part(tensor.detach()).contiguous().view(torch.uint8)
            digest.update(content.cpu().numpy().tobytes())
    return digest.hexdigest()


def check_replicas(chunks: list[nn.Module], mesh: ParallelMesh, iteration: int) -> None:
    """Compare the weights along dp_replicate (collective; nothing to do where there are no replicas).

    Raises:
        ReplicaError: on every rank of the group, naming the replicas that differ from the first.
    """
    if mesh.size("dp_replicate") == 1:
        return
    hashes = gathered_objects(weight_hash(chunks), mesh.group("dp_replicate"))
    different = [replica for replica, value in enumerate(hashes) if value != hashes[0]]
    if different:
        place = {axis: position for axis, position in mesh.coordinates.items() if axis != "dp_replicate"}
        raise ReplicaError(
            f"after iteration {iteration} the weights of replicas {different} differ from replica 0's at {place}"
        )


@torch.no_grad()
def check_tied_copies(
    chunks: list[nn.Module], optimizer: torch.optim.Optimizer, mesh: ParallelMesh, iteration: int
) -> None:
    """Compare the embedding's weight and its copy in the head, with their optimizer state (all-reduces of one number).

    Both are read once: little beside a save, which calls this.

    Raises:
        ReplicaError: on every rank: the copies have drifted apart.
    """
    if mesh.size("pp") == 1 or not any(chunk.tied for chunk in chunks):
        return
    copies = tied_copies(chunks, optimizer)
    holders = [chunk for chunk in chunks if chunk.embedding is not None and chunk.lm_head is None]
    own = named_tensors(
        [("embedding", chunk.embedding.word_embeddings.weight) for chunk in holders], optimizer
    )
    difference = _checksum(own.values(), mesh.device) - _checksum(copies.values(), mesh.device)
    differ = mesh.sum_over(difference, "pp") != 0
    # All ranks raise: those of other pipelines would wait for these in the save.
    if mesh.sum_over(differ.float(), *AXES).item():
        raise ReplicaError(
            f"after iteration {iteration} the embedding's weight and its tied copy in the head differ, in value or "
            f"optimizer state{f', at {mesh.coordinates}' if differ.item() else ''}: the checkpoint is not written"
        )


def _checksum(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """A sum over the bits of this rank's parts that knows their order; int64, which wraps around alike everywhere."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        whole = local_part(tensor.detach()).contiguous().reshape(-1)
        bits = whole.view(torch.int32 if whole.element_size() == 4 else torch.int16)
        for part in bits.split(_CHECKSUM_ELEMENTS):
            weights = torch.arange(1, 2 * len(part), 2, device=part.device)
            total = total * 31 + (part * weights).sum().to(device)
    return total


@torch.no_grad()
def nonfinite_tensors(tensors: Mapping[str, torch.Tensor], mesh: ParallelMesh) -> list[str]:
    """Names of the tensors that hold a NaN or an infinity on any rank, the same list everywhere (collective).

    One pass over this rank's parts: the largest magnitude of each, little beside writing them.
    """
    parts = {
        name: local_part(tensor.detach())
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and local_part(tensor).numel()
    }
    norms = torch._foreach_norm(list(parts.values()), math.inf) if parts else []
    # Norms of offloaded tensors are on the host; all are brought together, so that a device is waited for once.
    nothing = torch.zeros((), device=mesh.device)
    bad = ~torch.stack([nothing, *(norm.to(nothing) for norm in norms)])[1:].isfinite()
    if not mesh.sum_over(bad.sum().float(), *AXES).item():
        return []
    mine = [name for name, is_bad in zip(parts, bad.tolist(), strict=True) if is_bad]
    return sorted({name for names in gathered_objects(mine) for name in names})
