"""The proposed split against the best of all splits, with times that are known exactly."""

from itertools import product

import pytest

from megatron_lite.arithmetic.pipeline_schedule import build_schedule, placement_of, simulate
from megatron_lite.planning.balance import SplitTimes, block_seconds, propose
from megatron_lite.planning.trace import MeasuredTimes


def exact(counts, block, embedding, head, kinds="FB", by_torch=True):
    """Times of stages whose parts are known; a backward takes twice the forward, half for either gradient.

    by_torch: stage 0 has no input gradient to compute, W is its whole backward.
    """
    seconds, last = {}, len(counts) - 1
    for stage, count in enumerate(counts):
        forward = count * block + (stage == 0) * embedding + (stage == last) * head
        for kind in kinds:
            seconds[kind, stage] = 2 * forward if kind == "B" else forward
        if "W" in kinds and stage == 0 and by_torch:
            seconds["I", 0], seconds["W", 0] = 0.0, 2 * forward
    return MeasuredTimes(seconds)


def seconds_of(schedule, size, microbatches, chunks, times):
    return simulate(
        build_schedule(schedule, size, microbatches, chunks), times, placement_of(schedule)
    ).seconds


def splits(layers, stages):
    """Every split that --pipeline-model-parallel-layout can say."""
    for counts in product(range(layers + 1), repeat=stages):
        if sum(counts) == layers and all(counts[1:-1]):
            yield counts


@pytest.mark.parametrize(
    ("schedule", "size", "chunks", "counts", "kinds"),
    [
        ("gpipe", 3, 1, (3, 3, 3), "FB"),
        ("1f1b", 2, 1, (5, 5), "FB"),
        ("1f1b", 3, 1, (3, 4, 5), "FB"),
        ("interleaved-1f1b", 2, 2, (2, 2, 2, 2), "FB"),
        ("interleaved-zero-bubble", 2, 2, (2, 2, 2, 2), "FIW"),
        ("zbv", 2, 2, (2, 2, 2, 2), "FIW"),
        ("dualpipev", 2, 2, (2, 2, 2, 2), "FBIW"),
    ],
)
@pytest.mark.parametrize(("embedding", "head"), [(0.0, 0.0), (0.0, 3.0), (0.0, 6.5)])
def test_as_good_as_the_best_of_all_splits(schedule, size, chunks, counts, kinds, embedding, head):
    """What is predicted for each split is what its own exact times give; the proposal is within 2% of the best."""
    setting = schedule, size, 8, chunks
    found = propose(*setting, exact(counts, 1.0, embedding, head, kinds), counts, head_blocks=3.0)
    every = {
        split: seconds_of(*setting, exact(split, 1.0, embedding, head, kinds))
        for split in splits(sum(counts), len(counts))
    }
    assert found.before == counts
    assert found.seconds_before == pytest.approx(every[counts])
    assert found.seconds_after == pytest.approx(every[found.after])
    assert found.seconds_after <= 1.02 * min(every.values())
    assert found.gain == pytest.approx(1 - every[found.after] / every[counts])
    assert (found.block, found.head) == pytest.approx((3.0, 3 * head))


def test_a_balanced_run_is_left_as_it_is():
    counts = (4, 4, 4, 4)
    found = propose("1f1b", 4, 8, 1, exact(counts, 1.0, 0.0, 0.0), counts, 1.0)
    assert (found.after, found.gain) == (counts, 0.0)


def test_a_heavy_head_by_hand():
    """The head costs three layers: 8 of 11 layers' work lie on the last of two stages; 6 and 5 is what is possible."""
    found = propose("1f1b", 2, 8, 1, exact((3, 5), 1.0, 0.0, 3.0), (3, 5), 3.0)
    # The last stage never waits: 8 x (8 + 16), after the first one's forward and before its last backward (3 + 6).
    assert found.seconds_before == pytest.approx(8 * 24 + 9)
    # The first one: 8 x (6 + 12). It waits for the first gradient, 5 + 10 less its second forward, and before the last
    # backward, 15 less the one before it.
    assert found.after == (6, 2)
    assert found.seconds_after == pytest.approx(8 * 18 + (15 - 6) + (15 - 12))


def test_the_layer_s_time_by_hand():
    # Stages between the ends decide; both ends have work of their own.
    assert block_seconds((2, 4, 2, 1), {0: 9.0, 1: 4.0, 2: 2.0, 3: 8.0}, 1.0) == 1.0
    # Least squares of 4 b = 4.4 and 2 b = 1.8: (17.6 + 3.6) / 20.
    assert block_seconds((2, 4, 2, 1), {0: 9.0, 1: 4.4, 2: 1.8, 3: 8.0}, 1.0) == pytest.approx(1.06)
    # An end that is faster than its layers has no head to pay for, so it is taken into the fit.
    assert block_seconds((2, 2, 2), {0: 9.0, 1: 2.0, 2: 1.8}, 1.0) == pytest.approx(0.95)
    # Two stages: the first is layers only ...
    assert block_seconds((4, 4), {0: 4.0, 1: 10.0}, 1.0) == 1.0
    # ... unless the last would then be faster than its layers: 4 b = 6, 4 b = 4.
    assert block_seconds((4, 4), {0: 6.0, 1: 4.0}, 1.0) == pytest.approx(1.25)
    # All layers beside the head: its counted work tells them apart.
    assert block_seconds((0, 4), {0: 0.5, 1: 12.0}, 2.0) == 2.0


def test_other_splits_take_a_layer_s_time_more_or_less():
    split = SplitTimes(exact((2, 3, 3, 2), 1.0, 0.5, 4.0, "FIW"), (2, 3, 3, 2), 1.0)
    times = split.times((4, 3, 2, 1)).seconds
    assert [times["F", stage] for stage in range(4)] == pytest.approx([4.5, 3.0, 2.0, 5.0])
    assert [times["I", stage] for stage in range(4)] == pytest.approx([0.0, 3.0, 2.0, 5.0])
    assert [times["W", stage] for stage in range(4)] == pytest.approx([9.0, 3.0, 2.0, 5.0])
    assert (split.block, split.embedding, split.head) == pytest.approx((3.0, 1.5, 12.0))


def test_dense_layers_and_mixtures_are_told_apart_by_their_counted_work():
    """Four layers of 0.5 before eight of 1.25 on stages of 4: 2, 5, 5 units; 6, 3, 3 have 4.5, 3.75, 3.75."""
    weights, counts = (0.5,) * 4 + (1.25,) * 8, (4, 4, 4)
    seconds = {
        (kind, stage): whole * work
        for kind, whole in (("F", 1.0), ("B", 2.0))
        for stage, work in enumerate((2.0, 5.0, 5.0))
    }
    split = SplitTimes(MeasuredTimes(seconds), counts, 1.0, weights)
    assert (split.block, split.embedding, split.head) == pytest.approx((3.0, 0.0, 0.0))
    found = propose("1f1b", 3, 12, 1, MeasuredTimes(seconds), counts, 1.0, weights)
    assert found.after == (6, 3, 3)
    assert [split.times(found.after).seconds["F", stage] for stage in range(3)] == pytest.approx(
        [4.5, 3.75, 3.75]
    )


def test_a_slow_rank_gives_layers_away():
    """Stage 1's device takes half as long again: its base is kept, and it is relieved."""
    counts = (4, 4, 4, 4)
    measured = exact(counts, 1.0, 0.0, 0.0).seconds
    slow = MeasuredTimes({key: s * (1.5 if key[1] == 1 else 1.0) for key, s in measured.items()})
    found = propose("1f1b", 4, 16, 1, slow, counts, 1.0)
    assert found.after[1] < 4
    assert found.gain > 0.1


def test_many_stages_are_searched_in_bounded_work():
    counts = (3,) * 32
    found = propose("interleaved-1f1b", 8, 16, 4, exact(counts, 1.0, 0.2, 6.0), counts, 3.0)
    assert sum(found.after) == 96
    assert found.gain > 0.1
