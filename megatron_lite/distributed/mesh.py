"""The grid of ranks: axes pp, dp_replicate, dp_shard, cp, tp, outermost first, and ep across them. The only maker of
groups.

Ranks that differ only in the last axes sit next to each other: tensor, context and FSDP traffic stays inside
a node, the pipeline crosses nodes (its messages are the smallest). Megatron-LM's default order, tp-cp-dp-pp,
is the same.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_lite.arithmetic.mesh_sizes import AXES, mesh_sizes
from megatron_lite.config import Config
from megatron_lite.distributed.collectives import patient_barrier
from megatron_lite.distributed.torch_private import set_group_timeout


@dataclass(frozen=True)
class ParallelMesh:
    """Sizes, ranks and groups of every axis, made once and handed down.

    FSDP shards parameters over dp_shard x cp (context ranks hold the same parameters and different tokens, so
    for parameters they are data-parallel ranks) and replicates them over dp_replicate. Sizes, coordinates and groups
    lie ready in dicts: slicing a DeviceMesh takes torch half a millisecond, and a step asks hundreds of times.

    fsdp_mesh: [dp_replicate,] dp_shard x cp. token_mesh: the same x tp, for what works on other tokens on each tensor
    rank. expert_mesh: [dp_replicate,] edp, ep: token_mesh's ranks in groups of ep neighbours, which share the experts.
    """

    root: DeviceMesh
    device: torch.device
    fsdp_mesh: DeviceMesh
    token_mesh: DeviceMesh
    expert_mesh: DeviceMesh
    host_group: dist.ProcessGroup | None
    sizes: Mapping[str, int]
    coordinates: Mapping[str, int]
    groups: Mapping[str, dist.ProcessGroup]

    def size(self, axis: str) -> int:
        """Number of ranks along one of AXES, or along ep."""
        return self.sizes[axis]

    def rank(self, axis: str) -> int:
        """This rank's position along one of AXES, or along ep."""
        return self.coordinates[axis]

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group along one of AXES, or along ep."""
        return self.groups[axis]

    @property
    def data_parallel_size(self) -> int:
        """How many ways the batch is cut: replicas x shards."""
        return self.size("dp_replicate") * self.size("dp_shard")

    @property
    def data_parallel_rank(self) -> int:
        """Which cut of the batch is mine."""
        return self.rank("dp_replicate") * self.size("dp_shard") + self.rank("dp_shard")

    def wait_for_all_hosts(self) -> None:
        """A barrier of all ranks that waits as long as one of them builds an index."""
        patient_barrier(self.host_group)

    def sum_over(self, value: torch.Tensor, *axes: str) -> torch.Tensor:
        """All-reduce value in place, by sum, over the given axes; returns it."""
        for axis in axes:
            if self.size(axis) > 1:
                dist.all_reduce(value, group=self.group(axis))
        return value


def build_mesh(config: Config, device: torch.device) -> ParallelMesh:
    """Make the mesh and every group. torch.distributed must be up with the world size the config says."""
    sizes = mesh_sizes(config.parallel)
    root = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=AXES)
    sizes["ep"] = config.parallel.expert_model_parallel_size
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    # Hosts talk over it (a background save too) while the device's groups are busy with training; a dry run has none.
    host_group = dist.new_group(backend="gloo", timeout=timeout) if dist.get_backend() != "fake" else None
    axes = {axis: root[axis] for axis in AXES}
    fsdp_mesh = _sharding_mesh(root, ("dp_shard", "cp"), "fsdp")
    token_mesh = fsdp_mesh
    if config.model.num_experts and sizes["tp"] > 1:
        token_mesh = _sharding_mesh(root, ("dp_shard", "cp", "tp"), "tokens")
    expert_mesh, experts = token_mesh, {}
    if sizes["ep"] > 1:
        expert_mesh = _expert_mesh(sizes, device)
        axes["ep"] = expert_mesh["ep"]
        experts = {"edp": expert_mesh.get_group("edp")}
    groups = {axis: mesh.get_group() for axis, mesh in axes.items()}
    sharded = {
        " x ".join(names): mesh.get_group(mesh.ndim - 1)
        for names, mesh in ((("dp_shard", "cp"), fsdp_mesh), (("dp_shard", "cp", "tp"), token_mesh))
    }
    _connect(groups | sharded | experts, device, timeout)
    return ParallelMesh(
        root,
        device,
        fsdp_mesh,
        token_mesh,
        expert_mesh,
        host_group,
        sizes,
        coordinates={axis: mesh.get_local_rank() for axis, mesh in axes.items()},
        groups=groups,
    )


def _connect(groups: Mapping[str, dist.ProcessGroup], device: torch.device, timeout: timedelta) -> None:
    """Give every group --distributed-timeout-minutes, and make its communicator by one number all-reduced.

    DeviceMesh leaves groups with torch's own timeout, and a communicator that cannot be made is better known by its
    axis now than in the middle of the first step.
    """
    for axis, group in groups.items():
        if dist.get_backend(group) != "fake":  # a rehearsal's groups wait for nobody
            set_group_timeout(timeout, group)
        if dist.get_world_size(group) == 1:
            continue
        try:
            one = torch.ones((), device=device)
            dist.all_reduce(one, group=group)
            one.item()  # waits for the device
        except RuntimeError as error:
            error.add_note(f"(the first message along {axis}, ranks {dist.get_process_group_ranks(group)})")
            raise


def _sharding_mesh(root: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh:
    """The axes that FSDP shards over, flattened to one, behind the axis of replicas where there are any."""
    replicas = root["dp_replicate"].size() > 1
    if all(root[axis].size() == 1 for axis in axes[1:]):
        return root["dp_replicate", axes[0]] if replicas else root[axes[0]]
    shard = root[axes]._flatten(name)
    if not replicas:
        return shard
    with (
        warnings.catch_warnings()
    ):  # torch 2.13 warns at slicing a flattened axis and has no public other way
        warnings.simplefilter("ignore")
        return root["dp_replicate", name]


def _expert_mesh(sizes: Mapping[str, int], device: torch.device) -> DeviceMesh:
    """[dp_replicate,] edp, ep. A mesh of its own: FSDP wants both from one, and edp x ep is no axis of the root's."""
    ranks = sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
    shape = (sizes["pp"], sizes["dp_replicate"], ranks // sizes["ep"], sizes["ep"])
    names = ("pp", "dp_replicate", "edp", "ep")
    root = init_device_mesh(device.type, shape, mesh_dim_names=names)
    return root[names[1:]] if sizes["dp_replicate"] > 1 else root[names[2:]]
