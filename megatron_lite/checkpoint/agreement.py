"""What one rank does for all, or all do alike, so that an error on any rank is the same error on every rank."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_lite.config.declare import ConfigError
from megatron_lite.distributed.collectives import from_first_rank, gathered_objects

Result = TypeVar("Result")


class Ranks:
    """The ranks of a group, or this process alone (None without a default group)."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        return [value] if self.group is None else gathered_objects(value, self.group)

    def rank0_only(self, function: Callable[[], Result]) -> Result:
        """Rank 0's result, on every rank. Raises what rank 0 raised there as a ConfigError of one sentence."""
        outcome = _attempt(function) if self.rank == 0 else None
        result, problem = outcome if self.group is None else from_first_rank(outcome, self.group)
        if problem is not None:
            raise ConfigError(problem)
        return result

    def all_ranks(self, function: Callable[[], Result]) -> Result:
        """This rank's result, once every rank has one. Raises, on all, the first failing rank's as a ConfigError."""
        result, problem = _attempt(function)
        for text in self.gather(problem):
            if text is not None:
                raise ConfigError(text)
        return result


def _attempt(function: Callable[[], Result]) -> tuple[Result | None, str | None]:
    try:
        return function(), None
    except (ConfigError, OSError) as error:
        return None, sentence(error)


def sentence(error: BaseException) -> str:
    """An error in one line, for people; DCP's collection of errors is its first rank's."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = min(error.failures.items())
        return f"{sentence(cause)} (rank {rank})"
    if isinstance(error, ConfigError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
