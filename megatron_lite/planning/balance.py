"""A better split of the layers over pipeline stages, from what the stages of a real run took. Imports no torch.

A stage's time is measured whole. What one layer takes is estimated from the stages between the first and the last,
which hold nothing else, dense layers and mixtures in the ratio of their counted FLOPs; a stage that gets layers or
loses some then takes that much more or less, and the schedule is simulated with the new times.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product

from megatron_lite.arithmetic.costs import ComponentCost
from megatron_lite.arithmetic.partition import plan_stages, unit_costs
from megatron_lite.arithmetic.pipeline_schedule import Schedule, build_schedule, placement_of, simulate
from megatron_lite.planning.trace import MeasuredTimes

Counts = tuple[int, ...]  # layers of each stage
# Actions simulated before the search stops with the best split found: a few seconds.
MOST_ACTIONS = 600_000
# Layers are taken from so many of the busiest stages, and given to as many of the others.
_STAGES_TRIED = 6
# A split has to be faster by more than this share to be taken for better.
_LEAST_GAIN = 1e-3


@dataclass(frozen=True)
class Proposal:
    """Layers per stage as they were and as proposed, and the seconds of one pass with both, simulated.

    block, embedding, head: seconds of one microbatch, forward and backward, of a mean layer, and of what the first
    and the last stage hold besides their layers.
    """

    before: Counts
    after: Counts
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
    weights: Sequence[float] | None = None,
) -> Proposal:
    """The split with the shortest pass that moving single layers finds, from the present and a balanced one.

    Args:
        counts: layers of each stage in the measured run.
        head_blocks: the head's work in layers' work by count, for the case that the times alone cannot tell them apart.
        weights: each layer's work as a multiple of the mean; default 1.
    """
    counts, placement = tuple(counts), placement_of(schedule_name)
    schedule = build_schedule(schedule_name, pipeline_size, microbatches, chunks)
    weights = tuple(weights or (1.0,) * sum(counts))
    split = SplitTimes(measured, counts, head_blocks, weights)
    layers = tuple(ComponentCost(1, split.block * weight) for weight in weights)
    costs = replace(unit_costs(0.0, split.embedding, split.head), layers=layers)
    balanced = plan_stages(sum(counts), pipeline_size, chunks, placement, costs=costs)
    ends = [counts, tuple(len(plan.layers) for plan in balanced)]
    seconds, left = {}, max(2, MOST_ACTIONS // sum(map(len, schedule)))  # the two ends at least

    def best_of(candidates: Sequence[Counts]) -> Counts:
        """The split with the shortest pass, of those simulated until the actions are used up."""
        nonlocal left
        for candidate in candidates:
            if candidate not in seconds and left > 0:
                left -= 1
                seconds[candidate] = simulate(schedule, split.times(candidate), placement).seconds
        return min((one for one in candidates if one in seconds), key=seconds.__getitem__)

    best_of(ends)
    for place, best in enumerate(ends):
        while True:
            faster = best_of([best, *_neighbours(best, split.times(best), schedule)])
            if seconds[faster] >= seconds[best] * (1 - _LEAST_GAIN):
                break
            best = ends[place] = faster
    after = best_of(ends)
    if seconds[after] > (1 - _LEAST_GAIN) * seconds[counts]:
        after = counts
    return Proposal(counts, after, seconds[counts], seconds[after], split.block, split.embedding, split.head)


def _neighbours(counts: Counts, times: MeasuredTimes, schedule: Schedule) -> list[Counts]:
    """One layer moved; from the busiest ranks' stages first. Only the two ends may be left without a layer."""
    last, load = len(counts) - 1, [times.of_stage(stage) for stage in range(len(counts))]
    of_rank = {}
    for actions in schedule:
        stages = {action.stage for action in actions}
        of_rank |= dict.fromkeys(stages, sum(load[stage] for stage in stages))
    order = sorted(of_rank, key=lambda stage: (-of_rank[stage], -load[stage], stage))
    movable = [stage for stage in order if counts[stage] > (0 if stage in (0, last) else 1)]
    return [
        tuple(count - (stage == source) + (stage == target) for stage, count in enumerate(counts))
        for source, target in product(movable[:_STAGES_TRIED], reversed(order[-_STAGES_TRIED:]))
        if target != source
    ]


class SplitTimes:
    """The measured times, carried over to other splits of the same layers."""

    def __init__(
        self,
        measured: MeasuredTimes,
        counts: Sequence[int],
        head_blocks: float,
        weights: Sequence[float] | None = None,
    ) -> None:
        self._before = (0.0, *accumulate(weights or (1.0,) * sum(counts)))
        self._measured, self._work = measured, self._work_of(counts)
        kinds = sorted({kind for kind, _ in measured.seconds})
        self._blocks = {}
        for kind in kinds:
            found = {stage: s for (k, stage), s in measured.seconds.items() if k == kind}
            if kind in "IW":
                found.pop(0, None)  # torch leaves all of stage 0's backward to W: see `times`
            self._blocks[kind] = block_seconds(self._work, found, head_blocks)
        backward = [kind for kind in ("I", "W") if kind in kinds] or ["B"]
        self.block = sum(self._blocks[kind] for kind in ["F", *backward])
        self.embedding = max(0.0, measured.of_stage(0) - self._work[0] * self.block)
        self.head = max(0.0, measured.of_stage(len(counts) - 1) - self._work[-1] * self.block)

    def _work_of(self, counts: Sequence[int]) -> tuple[float, ...]:
        """Work of each stage, in mean layers."""
        ends = tuple(accumulate(counts))
        return tuple(self._before[end] - self._before[end - count] for end, count in zip(ends, counts))

    def times(self, counts: Sequence[int]) -> MeasuredTimes:
        """With `counts` layers per stage: a layer more or less on a stage is one block's time more or less.

        Stage 0's input gradient stays as measured, next to nothing: torch computes no gradient of its input, and the
        whole backward in W.
        """
        seconds, work = {}, self._work_of(counts)
        for (kind, stage), measured in self._measured.seconds.items():
            block = self._blocks[kind]
            if stage == 0 and kind in "IW":
                block = self._blocks["I"] + self._blocks["W"] if kind == "W" else 0.0
            seconds[kind, stage] = max(0.0, measured + (work[stage] - self._work[stage]) * block)
        return MeasuredTimes(seconds)


def block_seconds(work: Sequence[float], seconds: dict[int, float], head_blocks: float) -> float:
    """What a mean layer takes: least squares of seconds = work x block over the stages that hold layers only.

    The first and the last stage may take longer, for embedding and head, but not shorter: one that does is taken into
    the fit, as one without embedding or head. Of two stages the first is taken as layers only (an embedding is a
    look-up), and where the layers all lie on the last one, the head counts as `head_blocks` layers.

    Args:
        work: of each stage's layers, in mean layers.
        seconds: stage -> seconds of one kind of action.
    """
    ends = {0, len(work) - 1}
    fitted = {stage for stage in seconds if stage not in ends and work[stage]}
    if not fitted and work[0] and 0 in seconds:
        fitted = {0}
    if not fitted:
        last = len(work) - 1
        return seconds[last] / (work[last] + head_blocks)
    while True:
        block = sum(work[s] * seconds[s] for s in fitted) / sum(work[s] ** 2 for s in fitted)
        short = {s for s in ends & set(seconds) if work[s] and seconds[s] < work[s] * block}
        if short <= fitted:
            return block
        fitted |= short
