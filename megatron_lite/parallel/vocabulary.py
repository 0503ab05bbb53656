"""The cross-entropy over logits whose vocabulary is split over ranks: no rank ever holds a whole row.

Three numbers per token are communicated (maximum, sum of exponentials, the label's logit) instead of V logits, as in
Megatron-LM's vocab_parallel_cross_entropy. Shapes: T tokens, V/p columns on each of p ranks.
"""

from typing import Any

import torch
import torch.distributed as dist

from megatron_lite.config.data import IGNORED_LABEL


class _VocabularyParallelLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        first: int,
        vocab_size: int,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        """logits [T, V/p] -> scalar fp32, the same on every rank of the group."""
        columns = logits.shape[1]
        wide = logits.float()
        true_columns = min(max(vocab_size - first, 0), columns)
        if true_columns < columns:
            wide = wide.clone() if wide is logits else wide
            wide[:, true_columns:] = -torch.inf
        maximum = wide.amax(dim=1)  # [T]
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        shifted = wide - maximum[:, None]
        local_label = labels - first
        mine = (local_label >= 0) & (local_label < columns)
        index = local_label.clamp(0, columns - 1)[:, None]
        target = torch.where(mine, shifted.gather(1, index)[:, 0], 0.0)  # [T]
        exponentials = shifted.exp_()
        sums = torch.stack((exponentials.sum(dim=1), target))  # [2, T]
        dist.all_reduce(sums, group=group)
        counted = labels != IGNORED_LABEL
        losses = torch.where(counted, sums[0].log() - sums[1], 0.0)
        probabilities = exponentials.div_(sums[0][:, None])
        ctx.save_for_backward(probabilities.to(logits.dtype), index, mine, counted)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """(softmax - one-hot of the label) * gradient, zero for masked tokens."""
        probabilities, index, mine, counted = ctx.saved_tensors
        out = probabilities.scatter_add(1, index, -mine[:, None].to(probabilities.dtype))
        scale = (counted * gradient).to(out.dtype)  # [T]
        return out.mul_(scale[:, None]), None, None, None, None


def vocabulary_parallel_loss_sum(
    logits: torch.Tensor, labels: torch.Tensor, first: int, vocab_size: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """The sum of token losses.

    Args:
        logits: this rank's columns [T, V/p].
        labels: [T], global token ids; -100 counts nothing.
        first: global number of this rank's first column.
        vocab_size: columns from here on are padding and take no part.

    Returns:
        Scalar fp32, the same on every rank.
    """
    return _VocabularyParallelLoss.apply(logits, labels, first, vocab_size, group)
