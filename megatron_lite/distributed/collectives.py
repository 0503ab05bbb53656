"""What every rank gives, on every rank: the messages that are no part of a step's arithmetic."""

from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
# The index of a corpus of trillions of tokens takes an hour; a rank that dies is noticed at once.
INDEX_TIMEOUT = timedelta(hours=24)


def gathered(value: torch.Tensor) -> torch.Tensor:
    """value [...] of all ranks, [R, ...] in the order of ranks."""
    every = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(every, value)
    return torch.stack(every)


def gathered_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The values of all ranks of a group (None: of the world), in its order; small ones, that pickle takes."""
    every: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(every, value, group=group)
    return every


def from_first_rank(value: T, group: dist.ProcessGroup | None = None) -> T:
    """Rank 0's value, on every rank of a group (None: of the world)."""
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def patient_barrier(group: dist.ProcessGroup) -> None:
    """Wait for all ranks of a gloo group longer than a collective may take: one may be building a large index.

    An all-reduce, which is a ring: gloo's own barrier talks to log(n) ranks each way, a socket for each.
    """
    options = dist.AllreduceOptions()
    options.timeout = INDEX_TIMEOUT
    group.allreduce([torch.zeros(1)], options).wait()
