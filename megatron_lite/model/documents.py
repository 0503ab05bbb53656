"""What a query may see besides the causal rule: worked out once a microbatch, read by every layer.

Shapes: B micro batch, S sequence.
"""

from collections.abc import Sequence

import torch
from torch.nn.attention.flex_attention import BlockMask

from megatron_lite.config.model import ModelConfig
from megatron_lite.model.kernels import attention_kernel, block_mask, gpu_generation

# Queries and keys of one call of core attention: the queries are the last of the first `keys` positions.
Part = tuple[int, int]


class Documents:
    """The documents of each sample, that attention does not leave, lie one after the other.

    Attributes:
        ids: int64 [B, S], equal inside a document; None: each sample is one document.
        block_masks: for FlexAttention where it runs, for each part of the sequence that has queries here; no dense
            mask is made.
        by_length: else attention runs document by document (a flag beside the lengths, for dynamo would make a graph
            for each list that it looks at).
        lengths: the documents' lengths, a list for each row.
    """

    def __init__(self, ids: torch.Tensor | None) -> None:
        self.ids = ids
        self.block_masks: dict[Part, BlockMask] = {}
        self.by_length = False
        self.lengths: list[list[int]] = []


def documents_by_length(ids: torch.Tensor, config: ModelConfig) -> torch.Tensor | Documents:
    """The documents of ids [B, S] by their lengths, or the ids where FlexAttention runs: on a GPU without dropout.

    The host reads the lengths: it would wait for ids that lie on a GPU.
    """
    if config.attention_dropout == 0 and gpu_generation(ids.device):
        return ids
    documents = Documents(ids)
    documents.by_length = True
    documents.lengths = [torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in ids]
    return documents


def find_documents(
    ids: torch.Tensor | None, config: ModelConfig, parts: Sequence[Part], x: torch.Tensor
) -> Documents | None:
    """The documents of a microbatch whose hidden state is x; None where core attention needs to know nothing.

    Args:
        ids: [B, S] under --reset-attention-mask, else None.
    """
    window, generation, dropout = window_of(config), gpu_generation(x.device), config.attention_dropout > 0
    if ids is None:
        whole = all(queries == keys and not bounds(window, keys) for queries, keys in parts)
        if attention_kernel(config, x.dtype, generation, whole, dropout) != "flex":
            return None
    else:
        ids = documents_by_length(ids, config)
        if isinstance(ids, Documents):
            return ids
    documents = Documents(ids)
    documents.block_masks = {part: block_mask(ids, window, *part, x.device) for part in parts}
    return documents


def window_of(config: ModelConfig) -> int | None:
    """How many positions back a query sees. Megatron's (left, right): right is 0, left -1 means no limit."""
    return config.window_size[0] if config.window_size and config.window_size[0] >= 0 else None


def bounds(window: int | None, num_keys: int) -> bool:
    """Whether a window is narrower than the causal triangle of so many keys."""
    return window is not None and window < num_keys - 1
