"""Activation recomputation (Chen et al. 2016; selective: Korthikanti et al. 2022) by torch's non-reentrant checkpoint.

A wrapped module keeps its name and its parameters' names: only its forward is replaced.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_lite.config import ParallelConfig

# --recompute-modules -> the modules of a block whose insides are made again in backward.
OPERATORS: dict[str, Callable[[nn.Module], list[nn.Module]]] = {
    "core_attn": lambda layer: [layer.attention.core],
    "layernorm": lambda layer: [layer.input_norm, layer.pre_mlp_norm],
    "mlp": lambda layer: [layer.mlp],
}


def apply_recompute(chunk: nn.Module, parallel: ParallelConfig) -> None:
    """Make a chunk recompute activations in backward, as the --recompute-* flags say.

    selective: the --recompute-modules of every block.
    full, block: the first --recompute-num-layers blocks of the chunk.
    full, uniform: units of --recompute-num-layers blocks keep only the unit's input. Units of several blocks hold
    1/n of the inputs, and while one is recomputed the activations of n blocks; each block's parameters are
    gathered once more.

    Args:
        chunk: has `.layers`, and `.run_layers(x, rotation, documents, caches)`.
    """
    layers = list(chunk.layers.values())
    count = parallel.recompute_num_layers or 1
    if parallel.recompute_granularity == "selective":
        for layer in layers:
            for module in (m for name in parallel.recompute_modules for m in OPERATORS[name](layer)):
                recompute_forward(module)
    elif parallel.recompute_granularity == "full" and parallel.recompute_method == "block":
        for layer in layers[:count]:
            recompute_forward(layer)
    elif parallel.recompute_granularity == "full" and count > 1:
        chunk.run_layers = functools.partial(_run_units, layers, count)
    elif parallel.recompute_granularity == "full":
        for layer in layers:
            recompute_forward(layer)


def recompute_forward(module: nn.Module) -> None:
    """Replace module.forward by its checkpointed form."""
    module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)


def _run_units(
    layers: list[nn.Module], count: int, x: torch.Tensor, rotation: Any, documents: Any, caches: Any
) -> torch.Tensor:
    """The layers in units of `count`, each unit one checkpoint."""
    assert caches is None, "a cache belongs to generation, which has no backward to recompute for"

    def run(unit: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
        for layer in unit:
            x = layer(x, rotation, documents, None)
        return x

    for start in range(0, len(layers), count):
        x = checkpoint(run, layers[start : start + count], x, use_reentrant=False)
    return x
