"""The embedding's weight and its copy that serves as the head, when first and last stage are different chunks.

Both start from the same bits (a parameter is seeded by its global name), get the same summed gradient and so the
same update: the copies stay equal without ever being sent. They count once in the gradient norm.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from megatron_lite.distributed.mesh import ParallelMesh
from megatron_lite.distributed.tensors import local_part


class TiedWeights:
    """My rank's share of the tied weight: the embedding's own, the head's copy, both, or none.

    Args:
        chunks: my chunks, with `.tied`, `.embedding`, `.lm_head`, `.has_tied_copy`.
        first_rank, last_rank: pipeline ranks of the first and the last stage.
    """

    def __init__(
        self, chunks: Iterable[nn.Module], mesh: ParallelMesh, first_rank: int, last_rank: int
    ) -> None:
        self.mesh = mesh
        self.peer = last_rank if mesh.rank("pp") == first_rank else first_rank
        self.copy = next((c.lm_head.weight for c in chunks if c.has_tied_copy), None)
        holders = (c for c in chunks if c.tied and c.embedding is not None and c.lm_head is None)
        self.own = next((c.embedding.word_embeddings.weight for c in holders), None)

    def begin(self) -> None:
        """Before a backward: the copy's gradient collects from zero, what was summed before lies in the own one."""
        if self.copy is not None:
            self.copy.grad = None

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """After the last backward of a step: each copy's gradient becomes the sum of both.

        Two messages between two ranks: no group of its own. a + b is b + a in floating point too, so both ranks
        get the same bits.
        """
        if self.own is not None and self.copy is not None:
            mine, other = local_part(self.own.grad), local_part(self.copy.grad)
            mine.add_(other)
            other.copy_(mine)
        elif self.own is not None or self.copy is not None:
            mine = local_part((self.own if self.own is not None else self.copy).grad)
            if mine.numel():
                mine.add_(self._exchange(mine))

    def _exchange(self, mine: torch.Tensor) -> torch.Tensor:
        """Send my gradient's piece to the other stage's rank and return that rank's."""
        outgoing = mine.to(
            self.mesh.device
        ).contiguous()  # with CPU offload the gradient is not on the device
        incoming = torch.empty_like(outgoing)
        group = self.mesh.group("pp")
        operations = [
            dist.P2POp(dist.isend, outgoing, group=group, group_peer=self.peer),
            dist.P2POp(dist.irecv, incoming, group=group, group_peer=self.peer),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return incoming.to(mine.device)


def counted_parameters(chunks: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """(global name, parameter) of every parameter that my chunks own; copies of tied weights are left out."""
    return (
        pair for chunk in chunks for pair in chunk.named_global_parameters() if not _is_copy(chunk, pair[1])
    )


def copied_parameters(chunks: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """The others: a tied head on another stage than the embedding, by the embedding's name."""
    return (pair for chunk in chunks for pair in chunk.named_global_parameters() if _is_copy(chunk, pair[1]))


def _is_copy(chunk: nn.Module, parameter: nn.Parameter) -> bool:
    return chunk.has_tied_copy and parameter is chunk.lm_head.weight
