"""--check-weight-hash-across-dp-replicas-interval: do ranks that hold the same weights hold the same bits?"""

import hashlib

import torch
import torch.distributed as dist
from torch import nn

from megatron_lite.mesh import ParallelMesh, local_part


class ReplicaError(RuntimeError):
    """Replicas of the same weights differ: a rank computes wrongly, or memory is faulty."""


def weight_hash(chunks: list[nn.Module]) -> str:
    """sha256 over the bytes of this rank's parts of all parameters, in the order of their names."""
    digest = hashlib.sha256()
    for chunk in chunks:
        for name, parameter in sorted(chunk.named_global_parameters()):
            digest.update(name.encode())
            content = local_part(parameter.detach()).contiguous().view(torch.uint8)
            digest.update(content.cpu().numpy().tobytes())
    return digest.hexdigest()


def check_replicas(chunks: list[nn.Module], mesh: ParallelMesh, iteration: int) -> None:
    """Compare the weights along dp_replicate (collective; nothing to do where there are no replicas).

    Raises:
        ReplicaError: on every rank of the group, naming the replicas that differ from the first.
    """
    size = mesh.size("dp_replicate")
    if size == 1:
        return
    hashes: list[str] = [""] * size
    dist.all_gather_object(hashes, weight_hash(chunks), group=mesh.group("dp_replicate"))
    different = [replica for replica, value in enumerate(hashes) if value != hashes[0]]
    if different:
        place = {axis: position for axis, position in mesh.coordinates.items() if axis != "dp_replicate"}
        raise ReplicaError(
            f"after iteration {iteration} the weights of replicas {different} differ from replica 0's at {place}"
        )
