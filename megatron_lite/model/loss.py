"""Token losses. Always a SUM over tokens, in fp32: the caller divides by the global token count.

Shapes: T tokens (B*S flattened), H hidden, V padded vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from megatron_lite.config.data import IGNORED_LABEL

# Rows of logits held at once with --cross-entropy-loss-fusion: large enough for full-speed matmuls.
LOSS_CHUNK_TOKENS = 1024

LogitsLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def token_loss_sum(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Sum of the cross-entropies of logits [T, V] against labels [T]; label -100 counts nothing.

    Only the first vocab_size columns take part, so the padding of the vocabulary never changes the loss.
    Returns a scalar, fp32.
    """
    return F.cross_entropy(
        logits[:, :vocab_size].float(), labels, ignore_index=IGNORED_LABEL, reduction="sum"
    )


def chunked_loss_sum(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    project: Callable[[torch.Tensor], torch.Tensor],
    loss_sum: LogitsLoss,
    chunk_tokens: int,
) -> torch.Tensor:
    """Loss of hidden [T, H] without ever holding all logits: chunks of chunk_tokens rows, recomputed in backward.

    Peak memory is chunk_tokens * V instead of T * V, for one more head matmul in the backward pass.
    Returns a scalar, fp32.
    """

    def chunk_loss(rows: torch.Tensor, row_labels: torch.Tensor) -> torch.Tensor:
        return loss_sum(project(rows), row_labels)

    total = hidden.new_zeros((), dtype=torch.float32)
    for rows, row_labels in zip(hidden.split(chunk_tokens), labels.split(chunk_tokens)):
        total = total + checkpoint(
            chunk_loss, rows, row_labels, use_reentrant=False, preserve_rng_state=False
        )
    return total
