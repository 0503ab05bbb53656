"""What a pipeline rank has in flight when each kind of action runs, from the schedule's own order. Imports no torch."""

from functools import lru_cache
from typing import NamedTuple

from megatron_lite.arithmetic.pipeline_schedule import Action, build_schedule

Counts = tuple[int, ...]


class Moment(NamedTuple):
    """An action of one of a rank's chunks, and for each chunk (in order) what is in flight while it runs.

    Args:
        kind: F, B (a whole backward) or I (the gradient of the input only).
        live: microbatches whose forward has run and whose backward is not done, the action's own among them.
        waiting: of these, the ones whose input gradient is done and whose weight gradient is not.
        unadded: 1 where the newest weight gradient waits to be added to the sum, until the chunk's next backward.
        summed: 1 where there is a sum of gradients.
    """

    kind: str
    chunk: int
    live: Counts
    waiting: Counts
    unadded: Counts
    summed: Counts


def moments_of(name: str, size: int, microbatches: int, chunks: int, rank: int) -> tuple[Moment, ...]:
    """The moments of a rank's pass; of those that differ in `live` alone none holds less of everything than another."""
    return _moments(name, size, _enough(name, size, microbatches), chunks, rank)


def _enough(name: str, size: int, microbatches: int) -> int:
    """Microbatches after which a schedule holds no more than before: four rounds; gpipe holds all."""
    return min(microbatches, 4 * size) if name != "gpipe" and microbatches % size == 0 else microbatches


@lru_cache(maxsize=4096)
def _moments(name: str, size: int, microbatches: int, chunks: int, rank: int) -> tuple[Moment, ...]:
    actions: list[Action] = _schedule(name, size, microbatches, chunks)[rank]
    stages = sorted({action.stage for action in actions})
    live, waiting, unadded, summed = ([0] * len(stages) for _ in range(4))
    seen: dict[tuple, set[Counts]] = {}
    for action in actions:
        chunk, kind = stages.index(action.stage), _work_of(action)
        if kind is None:
            continue
        live[chunk] += kind == "F"
        if kind != "W":
            key = (kind, chunk, tuple(waiting), tuple(unadded), tuple(summed))
            seen.setdefault(key, set()).add(tuple(live))
        if kind == "I":
            waiting[chunk] += 1
        if kind == "B" or (kind == "I" and unadded[chunk]):
            unadded[chunk], summed[chunk] = 0, 1
        if kind == "W":
            waiting[chunk] -= 1
            unadded[chunk] = 1
        live[chunk] -= kind in "BW"
    return tuple(
        Moment(kind, chunk, one, *rest)
        for (kind, chunk, *rest), lives in seen.items()
        for one in lives
        if not any(one != other and all(x <= y for x, y in zip(one, other)) for other in lives)
    )


def _work_of(action: Action) -> str | None:
    """What torch does for an action: the first stage, whose input needs no gradient, does all of it at its W."""
    if action.stage == 0 and action.kind in "IW":
        return None if action.kind == "I" else "B"
    return action.kind


@lru_cache(maxsize=16)
def _schedule(name: str, size: int, microbatches: int, chunks: int) -> list[list[Action]]:
    return build_schedule(name, size, microbatches, chunks)
