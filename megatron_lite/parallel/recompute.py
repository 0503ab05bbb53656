"""Activation recomputation (Chen et al. 2016; selective: Korthikanti et al. 2022) by torch's non-reentrant checkpoint.

A module keeps its name and its parameters' names: only its class's forward is replaced.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_lite.config.parallel import ParallelConfig

# --recompute-modules -> the modules of a layer that are recomputed in backward.
OPERATORS: dict[str, Callable[[nn.Module], list[nn.Module]]] = {
    "core_attn": lambda layer: [layer.attention.core],
    "layernorm": lambda layer: [layer.input_norm, layer.pre_mlp_norm],
    "mlp": lambda layer: [] if _has_experts(layer) else [layer.mlp],
    "moe": lambda layer: [layer.mlp] if _has_experts(layer) else [],
}


def _has_experts(layer: nn.Module) -> bool:
    return hasattr(layer.mlp, "router")


def apply_recompute(chunk: nn.Module, parallel: ParallelConfig) -> None:
    """Make a chunk recompute activations in backward, as the --recompute-* flags say.

    selective: the --recompute-modules of every layer.
    full, block: the first --recompute-num-layers layers of the chunk.
    full, uniform: units of --recompute-num-layers layers save only the unit's input. Units of several layers save
    1/n of the inputs, and while one is recomputed the activations of n layers; each layer's parameters are
    all-gathered once more.

    Args:
        chunk: has `.layers`, and `.run_layers(x, rotation, documents, caches)`.
    """
    layers = list(chunk.layers.values())
    count = parallel.recompute_num_layers or 1
    if parallel.recompute_granularity == "selective":
        for layer in layers:
            for name in sorted(parallel.recomputed_modules):
                for module in OPERATORS[name](layer):
                    recompute_forward(module)
    elif parallel.recompute_granularity == "full":
        if parallel.recompute_method == "block":
            units, rest = [[layer] for layer in layers[:count]], layers[count:]
        else:
            units, rest = [layers[start : start + count] for start in range(0, len(layers), count)], []
        chunk.run_layers = functools.partial(_run_units, units, rest)


def recompute_forward(module: nn.Module) -> None:
    """Recompute a module's forward in backward: its class becomes a subclass whose forward is checkpointed."""
    module.__class__ = _recomputed_class(type(module))


@functools.cache
def _recomputed_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The subclass, one for all modules of a class: a forward for each object would be a graph for each layer."""

    def forward(self: nn.Module, *args: Any) -> torch.Tensor:
        return checkpoint(functools.partial(kind.forward, self), *args, use_reentrant=False)

    return type(f"Recomputed{kind.__name__}", (kind,), {"forward": forward})


def _run_units(
    units: list[list[nn.Module]],
    rest: list[nn.Module],
    x: torch.Tensor,
    rotation: Any,
    documents: Any,
    caches: Any,
) -> torch.Tensor:
    """Each unit of layers is one checkpoint, outside of what --compile makes of a layer; the rest run as they are."""
    assert caches is None, "a cache belongs to generation, which has no backward to recompute for"

    def run(layers: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x, rotation, documents, None)
        return x

    for unit in units:
        x = checkpoint(run, unit, x, use_reentrant=False)
    return run(rest, x)
