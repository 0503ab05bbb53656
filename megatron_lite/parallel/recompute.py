"""Activation recomputation (Chen et al. 2016; selective: Korthikanti et al. 2022) by torch's non-reentrant checkpoint.

A wrapped module keeps its name and its parameters' names: only its forward is replaced.
"""

import functools

from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_lite.config import ParallelConfig


def apply_recompute(chunk: nn.Module, parallel: ParallelConfig) -> None:
    """Make blocks of the chunk recompute their activations in backward, as --recompute-* say.

    full/uniform: every block (unit of --recompute-num-layers blocks is one block here: each block keeps its
    own input, so memory is that of num-layers 1). full/block: only the first --recompute-num-layers blocks
    of the chunk. selective: only the core attention of each block.
    """
    layers = list(chunk.layers.values())
    if parallel.recompute_granularity == "selective":
        for layer in layers:
            recompute_forward(layer.attention.core)
    elif parallel.recompute_granularity == "full":
        count = parallel.recompute_num_layers if parallel.recompute_method == "block" else len(layers)
        for layer in layers[:count]:
            recompute_forward(layer)


def recompute_forward(module: nn.Module) -> None:
    """Replace module.forward by its checkpointed form."""
    module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
