"""FSDP2 (`fully_shard`) per block: parameters, gradients and optimizer state cut over the data-parallel ranks."""

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

from megatron_lite.arithmetic.sharding import reduces_each_microbatch, reshards
from megatron_lite.config import Config, ParallelConfig, PrecisionConfig


def compute_dtype(precision: PrecisionConfig) -> torch.dtype:
    """The dtype of activations and of all-gathered parameters; the shards stay fp32."""
    if precision.bf16:
        return torch.bfloat16
    return torch.float16 if precision.fp16 else torch.float32


def apply_fsdp(chunk: nn.Module, mesh: DeviceMesh, config: Config) -> None:
    """Shard a model chunk in place: each block a unit, embedding a unit, final norm and head a unit.

    Args:
        chunk: has `.embedding`, `.layers` (ModuleDict), `.final_norm`, `.lm_head`, `.tied`.
        mesh: 1-D (shards) or 2-D (replicas, shards: HSDP).

    Gradients are SUMMED over ranks: the loss is divided by the global token count already. gloo has no
    PREMUL_SUM, which a divide factor alone would ask for, hence the forced sum.
    """
    parallel, precision = config.parallel, config.precision
    dtype = compute_dtype(precision)
    settings = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.bfloat16 if precision.grad_reduce_in_bf16 else torch.float32
        ),
        "offload_policy": _offload_policy(parallel),
    }
    layers = list(chunk.layers.values())
    for position, layer in enumerate(layers):
        fully_shard(layer, reshard_after_forward=_reshards(position, len(layers), config), **settings)
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
    _prefetch(layers, chunk.embedding if own_unit else None, parallel.fsdp_prefetch_depth)


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


def _prefetch(layers: list[nn.Module], embedding: nn.Module | None, depth: int) -> None:
    """Gather `depth` layers ahead, forward and backward; FSDP2's own choice is one layer ahead.

    The unit that backward reaches last names itself. Left to FSDP2 it would gather what ran before it in forward, and
    from the second microbatch on that is the head of the microbatch before: for nothing.
    """
    for position, layer in enumerate(layers if depth > 1 else []):
        layer.set_modules_to_forward_prefetch(layers[position + 1 : position + 1 + depth])
        layer.set_modules_to_backward_prefetch(layers[max(0, position - depth) : position][::-1])
    last = embedding if embedding is not None else next(iter(layers), None)
    if last is not None:
        last.set_modules_to_backward_prefetch([last])
