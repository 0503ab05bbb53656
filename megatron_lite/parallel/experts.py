"""Experts over ranks: each has E/ep of a layer's experts, and tokens travel to their experts and back.

The ep axis divides the ranks that hold other tokens of one replica, dp_shard x cp x tp (with tensor ranks a mixture
works on the positions that sequence parallelism leaves a rank, and none of its weights is split by tp). What is left of
them, edp, holds the same experts: FSDP shards over it. A rank's experts see the tokens of the ep ranks it shares a
layer with, so the gradients that edp sums are those of all tokens; nothing is averaged anywhere.

Shapes: H hidden, E experts, P = ep ranks, R rows that this rank sends, A rows that arrive.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from megatron_lite.distributed.mesh import ParallelMesh

Splits = tuple[list[int], list[int]]


def apply_expert_parallel(chunk: nn.Module, mesh: ParallelMesh) -> None:
    """Spread a chunk's experts over the ep axis, in place, and have its routers add up their choices over a sequence.

    Args:
        chunk: on meta, with `.mixtures`: {global layer number: a module with `.router`, `.exchange` and `.experts`,
            whose modules with weights have `.local`}.
    """
    for mixture in chunk.mixtures.values():
        mixture.router.sequence_ranks = mesh.size("cp") * mesh.size("tp")
        mixture.router.sum_over_sequence = lambda counts: mesh.sum_over(counts, "cp", "tp")
        if mesh.size("ep") > 1:
            for module in mixture.experts.modules():
                if hasattr(module, "local"):
                    _spread_experts(module, mesh.expert_mesh["ep"])
            mixture.exchange = Exchange(mesh.group("ep"))


def _spread_experts(linear: nn.Module, mesh: DeviceMesh) -> None:
    """Leave a rank its run of E/ep neighbouring experts."""
    for name, parameter in list(linear.named_parameters(recurse=False)):
        mine = torch.empty(
            parameter.shape[0] // mesh.size(),
            *parameter.shape[1:],
            dtype=parameter.dtype,
            device=parameter.device,
        )
        setattr(linear, name, nn.Parameter(DTensor.from_local(mine, mesh, [Shard(0)], run_check=False)))
    linear.local = DTensor.to_local


class Exchange:
    """Rows to the ranks of their experts, and outputs back, by all_to_all_single with uneven splits.

    Set from outside:
        read_splits: what `_read_splits` does, where nothing can be read (a rehearsal has no values).
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.read_splits: Callable[[torch.Tensor, torch.Tensor], Splits] = _read_splits

    def __call__(
        self, rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor
    ) -> Callable[[Callable[..., torch.Tensor]], torch.Tensor]:
        """rows [R, H] and weights [R, 1] by expert, which end at ends [E], on their way (see model/experts.py)."""
        ranks = dist.get_world_size(self.group)
        counts = ends.diff(prepend=ends.new_zeros(1)).view(ranks, -1)
        arriving, (sent, received) = self.exchange_counts(counts)
        messages = [_Message(self.group, sent, received) for _ in range(2)]
        coming = [_Send.apply(part, message) for part, message in zip((rows, weights), messages)]
        return functools.partial(self._through, messages, coming, arriving)

    def exchange_counts(self, counts: torch.Tensor) -> tuple[torch.Tensor, Splits]:
        """counts [P, E/P] of rows for each rank's experts -> ([P, E/P] that come from each, (sent, received))."""
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        return arriving, self.read_splits(counts, arriving)

    def _through(
        self,
        messages: list["_Message"],
        coming: list[torch.Tensor],
        arriving: torch.Tensor,
        compute: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        """The outputs [R, H] of the rows that were sent."""
        # [A, H] and [A, 1]
        rows, weights = (_Receive.apply(part, message) for part, message in zip(coming, messages))
        mine = arriving.shape[1]
        numbers = torch.arange(mine, device=rows.device).repeat(len(arriving))
        numbers = numbers.repeat_interleave(arriving.flatten(), output_size=len(rows))
        back = messages[0].back()
        return _Receive.apply(_Send.apply(compute(rows, weights, numbers, mine), back), back)


def _read_splits(counts: torch.Tensor, arriving: torch.Tensor) -> Splits:
    """(sent, received) rows of each rank, from counts and arriving [P, E/P].

    The one time in a layer that the host waits for the device.
    """
    sent, received = torch.stack([counts.sum(dim=1), arriving.sum(dim=1)]).tolist()
    return sent, received


class _Message:
    """One exchange of rows: `sent` and `received` rows of each rank, and what is to be waited for."""

    def __init__(self, group: dist.ProcessGroup, sent: list[int], received: list[int]) -> None:
        self.group, self.sent, self.received = group, sent, received
        self._pending: Any = None

    @functools.cached_property
    def gradients(self) -> "_Message":
        """The message of backward."""
        return self.back()

    def back(self) -> "_Message":
        """A message of the same rows the other way."""
        return _Message(self.group, self.received, self.sent)

    def start(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [R, ...] on their way -> [A, ...], which has values after `arrived`."""
        rows = rows.contiguous()
        out = rows.new_empty(sum(self.received), *rows.shape[1:])
        work = dist.all_to_all_single(out, rows, self.received, self.sent, group=self.group, async_op=True)
        self._pending = work, rows, out
        return out

    def arrived(self) -> torch.Tensor:
        """The rows that came, [A, ...], when all have."""
        (work, _, out), self._pending = self._pending, None
        work.wait()
        return out


class _Send(torch.autograd.Function):
    """Starts a message; its backward waits for that of the gradients, which _Receive's backward has started.

    What is computed between the two, forward as backward, runs while the message is under way.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, message: _Message) -> torch.Tensor:
        ctx.message = message
        return message.start(rows)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.message.gradients.arrived(), None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, message: _Message) -> torch.Tensor:
        ctx.message = message
        message.arrived()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.message.gradients.start(gradient)
        return gradient, None  # only its shape counts: _Send's backward has what came
