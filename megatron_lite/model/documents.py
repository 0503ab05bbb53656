"""Which positions of a sample see each other under --reset-attention-mask: worked out once, read by every layer.

Shapes: B micro batch, S sequence.
"""

import functools
from collections.abc import Callable

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from megatron_lite.config import ModelConfig


class Documents:
    """Equal ids [B, S] are one document; documents lie one after the other.

    Attributes:
        ids: int64 [B, S].
        block_mask: for FlexAttention, where it will be used (on a GPU, without dropout); no S x S mask is made.
        lengths: else the documents' lengths, a list for each row; empty for a part of a sample, whose queries are
            not all of its positions.
    """

    def __init__(self, ids: torch.Tensor, config: ModelConfig | None) -> None:
        self.ids = ids
        self.block_mask: BlockMask | None = None
        self.lengths: list[list[int]] = []
        if config is None:
            return
        if ids.is_cuda and config.attention_dropout == 0.0:
            self.block_mask = build_block_mask(_compiled_create_block_mask(), ids, window_of(config))
        else:
            self.lengths = [torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in ids]

    def first(self, count: int) -> "Documents":
        """Of the first `count` positions, for queries at their end (context parallelism)."""
        return Documents(self.ids[:, :count], None)


def window_of(config: ModelConfig) -> int | None:
    """How many positions back a query sees. Megatron's (left, right): right is 0, left -1 means no limit."""
    return config.window_size[0] if config.window_size and config.window_size[0] >= 0 else None


def build_block_mask(create: Callable[..., BlockMask], ids: torch.Tensor, window: int | None) -> BlockMask:
    """Causal, inside documents ids [B, S], inside the window: the blocks that FlexAttention computes."""

    def allowed(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        inside = (i >= j) & (ids[b, i] == ids[b, j])
        return inside if window is None else inside & (i - j <= window)

    batch, seq_length = ids.shape
    return create(allowed, batch, None, seq_length, seq_length, device=ids.device)


@functools.cache
def _compiled_create_block_mask() -> Callable[..., BlockMask]:
    """Not compiled it would hold the dense S x S mask for a moment."""
    return torch.compile(create_block_mask, dynamic=False)
