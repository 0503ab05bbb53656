"""Context parallelism: the ranks of the cp axis share each sequence; keys and values are all-gathered, queries are not.

The sequence is cut into 2 * cp chunks; rank r holds chunks r and 2 * cp - 1 - r, so every rank has one cheap and
one expensive part of the causal triangle and all compute the same (Dubey et al. 2024, section 3.3.2: all-gathered keys
and values, for they are small with grouped query heads). What a rank holds at once: S/cp positions of everything,
and the keys and values of all S positions of one layer.

Shapes: B micro batch, N query heads, G key/value heads, S the whole sequence, D head width, L = S / (2 cp).
"""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_lite.distributed.mesh import ParallelMesh

Batch = dict[str, torch.Tensor]

# torch 2.13 calls them *_single and warns at the names that 2.11 has.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def positions_of_rank(
    seq_length: int, rank: int, size: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """The positions [S / size] that one context rank holds, ascending: chunks rank and 2 * size - 1 - rank.

    Made on the device: the host would wait for a copy to a GPU.
    """
    assert seq_length % (2 * size) == 0, f"--seq-length {seq_length} in {2 * size} equal chunks"
    chunks = torch.arange(seq_length, device=device).chunk(2 * size)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]))


def my_part_of_sequence(batch: Batch, mesh: ParallelMesh) -> Batch:
    """My positions of a batch of whole sequences [B, S]; document_ids stay whole, for the keys are.

    Positions are given to the model from now on: they are not 0..S/cp-1.
    """
    size = mesh.size("cp")
    if size == 1:
        return batch
    rows, seq_length = batch["tokens"].shape
    mine = positions_of_rank(seq_length, mesh.rank("cp"), size, batch["tokens"].device)
    out = {key: t if key == "document_ids" else t[:, mine] for key, t in batch.items()}
    out.setdefault("position_ids", mine.expand(rows, -1))
    return out


def apply_context_parallel(chunk: nn.Module, mesh: ParallelMesh) -> None:
    """Put the exchange of keys and values in front of every block's core attention."""
    size, rank = mesh.size("cp"), mesh.rank("cp")
    chunk.attention_parts = functools.partial(attention_parts, size=size, rank=rank)
    for layer in chunk.layers.values():
        layer.attention.core = ContextAttention(layer.attention.core, mesh.group("cp"))


def attention_parts(length: int, size: int, rank: int) -> tuple[tuple[int, int], ...]:
    """(queries, keys) of the calls of core attention of a rank that holds `length` positions: its two chunks'."""
    half = length // 2
    return tuple((half, (chunk + 1) * half) for chunk in (rank, 2 * size - 1 - rank))


class ContextAttention(nn.Module):
    """Causal attention of my query chunks over the keys and values of all ranks.

    Args:
        core: (q [B, N, Q, D], k and v [B, G, K, D], documents of all S positions | None) -> [B, N, Q, D], causal,
            where the Q queries are the last Q of the first K positions.
    """

    def __init__(self, core: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.core = core
        self.group = group

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Any = None
    ) -> torch.Tensor:
        """q [B, N, S/cp, D], k and v [B, G, S/cp, D], documents of all S positions -> [B, N, S/cp, D]."""
        size, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        keys, values = _GatherSequence.apply(torch.stack((k, v)), self.group)  # [B, G, S, D] each
        outs = []
        for queries, (_, end) in zip(q.chunk(2, dim=2), attention_parts(q.shape[2], size, rank)):
            outs.append(self.core(queries, keys[:, :, :end], values[:, :, :end], documents))
        return torch.cat(outs, dim=2)


class _GatherSequence(torch.autograd.Function):
    """[..., S/cp, D] on each rank -> [..., S, D] in the order of the sequence; backward sums over the ranks."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        size = dist.get_world_size(group)
        flat = mine.new_empty(size * mine.shape[0], *mine.shape[1:])
        _all_gather(flat, mine.contiguous(), group=group)
        ranks = flat.view(size, *mine.shape)
        halves = [part.chunk(2, dim=-2) for part in ranks]  # per rank: its chunks r and 2 * size - 1 - r
        ordered = [first for first, _ in halves] + [second for _, second in reversed(halves)]
        return torch.cat(ordered, dim=-2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        size = dist.get_world_size(ctx.group)
        chunks = gradient.chunk(2 * size, dim=-2)
        ranks = torch.cat([torch.cat((chunks[r], chunks[2 * size - 1 - r]), dim=-2) for r in range(size)])
        mine = ranks.new_empty(
            gradient.shape[0], *chunks[0].shape[1:-2], 2 * chunks[0].shape[-2], ranks.shape[-1]
        )
        _reduce_scatter(mine, ranks, group=ctx.group)
        return mine, None
