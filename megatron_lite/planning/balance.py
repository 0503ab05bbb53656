"""A better split of the layers over pipeline stages, from what the stages of a real run took. Imports no torch.

A stage's time is measured whole. What one layer takes is estimated from the stages between the first and the last,
which hold nothing else; a stage that gets layers or loses some then takes that much more or less, and the schedule is
played with the new times.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lite.arithmetic.partition import placement_of, plan_stages, unit_costs
from megatron_lite.arithmetic.pipeline_schedule import Schedule, build_schedule, simulate
from megatron_lite.planning.trace import MeasuredTimes

# Actions played before the search stops with the best split found: a few seconds.
MOST_ACTIONS = 600_000
# Layers are taken from so many of the busiest stages, and given to as many of the others.
_STAGES_TRIED = 6
# A split has to be faster by more than this share to be taken for better.
_LEAST_GAIN = 1e-3


@dataclass(frozen=True)
class Proposal:
    """Layers per stage as they were and as proposed, and the seconds of one pass with both, played.

    block, embedding, head: seconds of one microbatch, forward and backward, of one layer, and of what the first and
    the last stage hold besides their layers.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    seconds_before: float
    seconds_after: float
    block: float
    embedding: float
    head: float

    @property
    def gain(self) -> float:
        """The share of the pass that the proposal saves, 0 to 1."""
        return 1 - self.seconds_after / self.seconds_before


def propose(
    schedule_name: str,
    pipeline_size: int,
    microbatches: int,
    chunks: int,
    measured: MeasuredTimes,
    counts: Sequence[int],
    head_blocks: float,
) -> Proposal:
    """The split with the shortest pass that moving single layers finds, from the present and a balanced one.

    Args:
        counts: layers of each stage in the measured run.
        head_blocks: the head's work in layers' work by count, for the case that the times alone cannot tell them apart.
    """
    counts, placement = tuple(counts), placement_of(schedule_name)
    schedule = build_schedule(schedule_name, pipeline_size, microbatches, chunks)
    split = SplitTimes(measured, counts, head_blocks)
    balanced = plan_stages(
        sum(counts),
        pipeline_size,
        chunks,
        placement,
        costs=unit_costs(split.block, split.embedding, split.head),
    )
    search = _Search(schedule, split, placement)
    found = [search.climb(counts), search.climb(tuple(len(plan.layers) for plan in balanced))]
    after = min(found, key=search.play)
    if search.play(after) > (1 - _LEAST_GAIN) * search.play(counts):
        after = counts
    return Proposal(
        counts, after, search.play(counts), search.play(after), split.block, split.embedding, split.head
    )


class SplitTimes:
    """The measured times, carried over to other splits of the same layers."""

    def __init__(self, measured: MeasuredTimes, counts: Sequence[int], head_blocks: float) -> None:
        self._measured, self._counts = measured, tuple(counts)
        kinds = sorted({kind for kind, _ in measured.seconds})
        self._blocks = {}
        for kind in kinds:
            found = {stage: s for (k, stage), s in measured.seconds.items() if k == kind}
            if kind in "IW":
                found.pop(0, None)  # torch leaves all of stage 0's backward to W: see `times`
            self._blocks[kind] = block_seconds(self._counts, found, head_blocks)
        backward = [kind for kind in ("I", "W") if kind in kinds] or ["B"]
        self.block = sum(self._blocks[kind] for kind in ["F", *backward])
        last = len(self._counts) - 1
        self.embedding = max(0.0, measured.of_stage(0) - self._counts[0] * self.block)
        self.head = max(0.0, measured.of_stage(last) - self._counts[last] * self.block)

    def times(self, counts: Sequence[int]) -> MeasuredTimes:
        """With `counts` layers per stage: a layer more or less on a stage is one block's time more or less.

        Stage 0's input gradient stays as measured, next to nothing: torch computes no gradient of its input, and the
        whole backward in W.
        """
        seconds = {}
        for (kind, stage), measured in self._measured.seconds.items():
            block = self._blocks[kind]
            if stage == 0 and kind in "IW":
                block = self._blocks["I"] + self._blocks["W"] if kind == "W" else 0.0
            seconds[kind, stage] = max(0.0, measured + (counts[stage] - self._counts[stage]) * block)
        return MeasuredTimes(seconds)


def block_seconds(counts: Sequence[int], seconds: dict[int, float], head_blocks: float) -> float:
    """What one layer takes: least squares of seconds = layers x block over the stages that hold layers only.

    The first and the last stage may take longer, for embedding and head, but not shorter: one that does is taken into
    the fit, as one without embedding or head. Of two stages the first is taken as layers only (an embedding is a
    look-up), and where the layers all lie on the last one, the head counts as `head_blocks` layers.

    Args:
        seconds: stage -> seconds of one kind of action.
    """
    ends = {0, len(counts) - 1}
    fitted = {stage for stage in seconds if stage not in ends and counts[stage]}
    if not fitted and counts[0] and 0 in seconds:
        fitted = {0}
    if not fitted:
        last = len(counts) - 1
        return seconds[last] / (counts[last] + head_blocks)
    while True:
        block = sum(counts[s] * seconds[s] for s in fitted) / sum(counts[s] ** 2 for s in fitted)
        short = {s for s in ends & set(seconds) if counts[s] and seconds[s] < counts[s] * block}
        if short <= fitted:
            return block
        fitted |= short


class _Search:
    """Plays splits, each once, until the actions are used up."""

    def __init__(self, schedule: Schedule, split: SplitTimes, placement: str) -> None:
        self._schedule, self._split, self._placement = schedule, split, placement
        self._left = MOST_ACTIONS
        self._actions = sum(len(rank) for rank in schedule)
        self._played: dict[tuple[int, ...], float] = {}

    def play(self, counts: tuple[int, ...]) -> float:
        """Seconds of a pass."""
        if counts not in self._played:
            self._left -= self._actions
            timeline = simulate(self._schedule, self._split.times(counts), self._placement)
            self._played[counts] = timeline.seconds
        return self._played[counts]

    def climb(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Move the one layer that helps most, again and again."""
        best = counts
        while True:
            around = []
            for candidate in self._neighbours(best):
                if self._left <= 0:
                    break
                around.append(candidate)
                self.play(candidate)
            faster = min(around, key=self.play, default=best)
            if self.play(faster) >= self.play(best) * (1 - _LEAST_GAIN):
                return best
            best = faster

    def _neighbours(self, counts: tuple[int, ...]) -> list[tuple[int, ...]]:
        """One layer moved; from the busiest ranks' stages first. Only the two ends may be left without a layer."""
        last, times = len(counts) - 1, self._split.times(counts)
        load = [times.of_stage(stage) for stage in range(len(counts))]
        of_rank = [sum(load[s] for s in {a.stage for a in rank}) for rank in self._schedule]
        stages = {
            action.stage: of_rank[rank] for rank, actions in enumerate(self._schedule) for action in actions
        }
        order = sorted(stages, key=lambda stage: (-stages[stage], -load[stage], stage))
        taken = [stage for stage in order if counts[stage] > (0 if stage in (0, last) else 1)]
        moved = []
        for source in taken[:_STAGES_TRIED]:
            for target in reversed(order[-_STAGES_TRIED:]):
                if target != source:
                    changed = list(counts)
                    changed[source] -= 1
                    changed[target] += 1
                    moved.append(tuple(changed))
        return moved
