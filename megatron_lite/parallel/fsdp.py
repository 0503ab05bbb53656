"""FSDP2 (`fully_shard`) per block: parameters, gradients and optimizer state cut over the data-parallel ranks."""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from megatron_lite.arithmetic.sharding import reduces_each_microbatch, reshards
from megatron_lite.config import Config, ParallelConfig, PrecisionConfig
from megatron_lite.distributed.mesh import ParallelMesh


def compute_dtype(precision: PrecisionConfig) -> torch.dtype:
    """The dtype of activations and of all-gathered parameters; the shards stay fp32."""
    if precision.bf16:
        return torch.bfloat16
    return torch.float16 if precision.fp16 else torch.float32


def apply_fsdp(chunk: nn.Module, mesh: ParallelMesh, config: Config) -> None:
    """Shard a model chunk in place: each block a unit, embedding a unit, final norm and head a unit.

    A mixture of experts is a unit of its own where tensor ranks give it other tokens than the block, its experts are
    one where they are spread over ranks: other ranks share their weights.

    Args:
        chunk: has `.embedding`, `.layers` (ModuleDict), `.mixtures`, `.final_norm`, `.lm_head`, `.tied`.

    Gradients are SUMMED over ranks: the loss is divided by the global token count already. gloo has no
    PREMUL_SUM, which a divide factor alone would ask for, hence the forced sum.
    """
    parallel, precision = config.parallel, config.precision
    dtype = compute_dtype(precision)
    settings = {
        "mesh": mesh.fsdp_mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.bfloat16 if precision.grad_reduce_in_bf16 else torch.float32
        ),
        "offload_policy": _offload_policy(parallel),
    }
    settings["ignored_params"] = _held_alone(chunk, mesh, config)
    layers, units = list(chunk.layers.values()), []
    for position, layer in enumerate(layers):
        reshard = {"reshard_after_forward": _reshards(position, len(layers), config)}
        units.append([layer])
        for module, other_mesh in _other_meshes(layer, mesh):
            if settings["ignored_params"].issuperset(module.parameters()):
                continue
            own = {"mesh": other_mesh, "shard_placement_fn": _placement(other_mesh)}
            fully_shard(module, **settings | reshard | own)
            units[-1].insert(1, module)
        fully_shard(layer, shard_placement_fn=_placement(mesh.fsdp_mesh), **settings | reshard)
    tied_here = chunk.tied and chunk.embedding is not None and chunk.lm_head is not None
    if not tied_here:  # a weight that two modules share has to lie in one unit: then it stays in the root's
        if chunk.embedding is not None:
            fully_shard(chunk.embedding, reshard_after_forward=_reshards(0, 1, config), **settings)
        if chunk.lm_head is not None:
            # Backward starts with the head: freeing it after forward would only gather it again at once.
            fully_shard([chunk.final_norm, chunk.lm_head], reshard_after_forward=False, **settings)
    fully_shard(chunk, reshard_after_forward=False, **settings)
    for module in chunk.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    own_unit = chunk.embedding is not None and not tied_here
    _prefetch(units, chunk.embedding if own_unit else None, parallel.fsdp_prefetch_depth)


def _held_alone(chunk: nn.Module, mesh: ParallelMesh, config: Config) -> set[nn.Parameter]:
    """Experts that a rank alone has, and computes with in their own format: FSDP would only copy them."""
    alone = mesh.size("ep") > 1 and all(size == 1 for size in mesh.expert_mesh.shape[:-1])
    if not alone or compute_dtype(config.precision) != torch.float32 or config.parallel.fsdp_cpu_offload:
        return set()
    return {parameter for mixture in chunk.mixtures.values() for parameter in mixture.experts.parameters()}


def _other_meshes(layer: nn.Module, mesh: ParallelMesh) -> list[tuple[nn.Module, DeviceMesh]]:
    """(part of a layer, the mesh it is sharded over) where that is another than the layer's, inner parts first."""
    if not hasattr(layer.mlp, "router"):
        return []
    edp = mesh.expert_mesh[*mesh.expert_mesh.mesh_dim_names[:-1]] if mesh.size("ep") > 1 else mesh.token_mesh
    parts = [(layer.mlp.experts, edp)] if mesh.size("ep") > 1 else []
    return parts + ([(layer.mlp, mesh.token_mesh)] if mesh.size("tp") > 1 else [])


def _placement(mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard | None]:
    """Experts that do not divide by the ranks are cut along their rows, or some ranks would hold one more, or all."""
    shards = mesh.size(mesh.ndim - 1)

    def place(parameter: nn.Parameter) -> Shard | None:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        uneven = local.dim() == 3 and local.shape[0] % shards and local.shape[1] % shards == 0
        return Shard(1) if uneven else None

    return place


def _offload_policy(parallel: ParallelConfig) -> OffloadPolicy:
    if not parallel.fsdp_cpu_offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=torch.cuda.is_available())


def _reshards(position: int, num_layers: int, config: Config) -> bool:
    """Whether a layer reshards its parameters after forward (ZeRO-3) or keeps them all-gathered (ZeRO-2)."""
    parallel = config.parallel
    if reshards(config) and parallel.reshard_after_forward == "keep-last":
        return position < num_layers - parallel.reshard_keep_last_blocks
    return reshards(config)


def prepare_backward(chunk: nn.Module, config: Config, last: bool) -> None:
    """Before the backward of a microbatch: what FSDP does with each layer when it is through (arithmetic/sharding.py).

    Weights are freed and gradients reduced behind the backward of the layers before, or both wait for the last
    microbatch. Replicas are summed over once a step in any case.
    """
    if not isinstance(chunk, FSDPModule):
        return
    chunk.set_is_last_backward(last)
    chunk.set_reshard_after_backward(last or reshards(config))
    chunk.set_requires_gradient_sync(last or reduces_each_microbatch(config))
    chunk.set_requires_all_reduce(last)


def _prefetch(units: list[list[nn.Module]], embedding: nn.Module | None, depth: int) -> None:
    """Gather `depth` layers ahead, forward and backward; FSDP2's own choice is one unit ahead.

    Where experts are a unit, that is theirs: it would be gathered when the host, which waits for their counts, comes
    to it. The unit that backward reaches last names itself. Left to FSDP2 it would gather what ran before it in
    forward, and from the second microbatch on that is the head of the microbatch before: for nothing.

    Args:
        units: those of each layer in the order in which forward takes them.
    """
    if depth > 1 or (depth and any(len(layer) > 1 for layer in units)):
        for position, (layer, *parts) in enumerate(units):
            after = units[position + 1 : position + 1 + depth]
            before = units[max(0, position - depth) : position][::-1]
            layer.set_modules_to_forward_prefetch(sum(after, parts))
            layer.set_modules_to_backward_prefetch(sum(before, parts))
            for part in parts:
                part.set_modules_to_backward_prefetch([part])
    last = [embedding] if embedding is not None else next(iter(units), [])
    if last:
        last[0].set_modules_to_backward_prefetch(last)
