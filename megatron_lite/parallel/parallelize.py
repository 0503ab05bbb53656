"""What is applied to a chunk, in this order: tensor -> context -> experts -> recompute -> compile -> FSDP -> weights.

Plain modules go in on the meta device; sharded modules with their initial weights come out. Selective recompute lies
inside a layer's compiled graph, full recompute outside of compiled layers and FSDP.
"""

from collections.abc import Callable

import torch
from torch import nn

from megatron_lite.arithmetic.partition import StagePlan
from megatron_lite.arithmetic.sharding import wraps_in_fsdp
from megatron_lite.config import Config
from megatron_lite.distributed.mesh import ParallelMesh
from megatron_lite.distributed.tensors import local_part, local_slices
from megatron_lite.parallel.context import apply_context_parallel
from megatron_lite.parallel.experts import apply_expert_parallel
from megatron_lite.parallel.fsdp import apply_fsdp
from megatron_lite.parallel.recompute import apply_recompute
from megatron_lite.parallel.tensor import apply_tensor_parallel


def build_chunks(
    config: Config, stages: list[StagePlan], mesh: ParallelMesh, chunk_type: Callable[..., nn.Module]
) -> list[nn.Module]:
    """My rank's model chunks, one per stage: built on meta, parallelised, initialised.

    chunk_type is called with (config.model, global layer numbers, has the embedding, has the head). A chunk has
    `.embedding`, `.layers`, `.final_norm`, `.lm_head` (None where another stage owns it), `.tied`,
    `.named_global_parameters()` and `.initial_rows(name, shape, rows, seed)`.
    """
    chunks = []
    for stage in stages:
        with torch.device("meta"):
            chunk = chunk_type(config.model, stage.layers, stage.has_embedding, stage.has_lm_head)
        chunks.append(parallelize_chunk(chunk, config, mesh))
    return chunks


def parallelize_chunk(chunk: nn.Module, config: Config, mesh: ParallelMesh) -> nn.Module:
    """Apply every parallelism to one chunk, in place, and give it its initial weights."""
    if mesh.size("tp") > 1:
        apply_tensor_parallel(chunk, mesh.root["tp"], config.parallel)
    if mesh.size("cp") > 1:
        apply_context_parallel(chunk, mesh)
    apply_expert_parallel(chunk, mesh)
    apply_recompute(chunk, config.parallel)
    if config.parallel.compile:
        compile_layers(chunk, config, mesh.device)
    if wraps_in_fsdp(config):
        apply_fsdp(chunk, mesh, config)
        chunk.to_empty(device="cpu" if config.parallel.fsdp_cpu_offload else mesh.device)
    else:
        _leave_meta(chunk, mesh.device)
    initialize_weights(chunk, config)
    zero_buffers(chunk, mesh.device)
    return chunk


def _leave_meta(chunk: nn.Module, device: torch.device) -> None:
    """Module.to_empty that keeps a tied weight one, as FSDP does where it is, and takes fake tensors too."""
    fresh: dict[nn.Parameter, nn.Parameter] = {}
    for module in chunk.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in fresh:
                fresh[parameter] = nn.Parameter(torch.empty_like(parameter, device=device))
            setattr(module, name, fresh[parameter])


def compile_layers(chunk: nn.Module, config: Config, device: torch.device) -> None:
    """torch.compile each layer: they share one graph, and FSDP's hooks stay outside it.

    A layer that is not one graph is an error, not a slow run, but where core attention is known to run outside of it:
    document by document, or under a tensor rank's own RNG state; and where a router's losses are attached, whose
    backward does more than compute gradients.
    """
    model, parallel = config.model, config.parallel
    by_document = config.data.reset_attention_mask and (model.attention_dropout > 0 or device.type != "cuda")
    own_state = parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel
    own_state = own_state and model.attention_dropout > 0
    for number, layer in chunk.layers.items():
        layer.compile(fullgraph=not (by_document or own_state or model.has_experts(int(number))))


@torch.no_grad()
def initialize_weights(chunk: nn.Module, config: Config) -> None:
    """Fill every parameter with the part that this rank owns of its initial value."""
    for name, parameter in chunk.named_global_parameters():
        rows, *rest = local_slices(parameter)
        numbers = torch.arange(rows.start, rows.stop)
        values = chunk.initial_rows(name, tuple(parameter.shape), numbers, config.training.seed)
        local_part(parameter).copy_(values[(slice(None), *rest)])


def zero_buffers(chunk: nn.Module, device: torch.device) -> None:
    """Every buffer starts at 0, whole on each rank; on the device that computes also where weights lie on the CPU."""
    for module in chunk.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.zeros_like(buffer, device=device))
