"""The vectorised index arrays against plain loops, written as Megatron-core's helpers walk."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.data.index_kernels import (
    EpochPlan,
    build_blend_index,
    build_document_index,
    build_sample_index,
    build_shuffle_index,
    plan_epochs,
)


def epochs_by_loop(tokens, wanted, length, extra):
    epochs, total = 1, tokens
    while wanted is not None and total < wanted * length + extra:
        epochs, total = epochs + 1, total + tokens
    return epochs


def sample_index_by_loop(lengths, length, num_samples, extra):
    """One token at a time over the sequences in the order of the document index."""
    index = [(0, 0)]
    place = offset = 0
    for _ in range(num_samples):
        left = length + extra
        while left:
            here = lengths[place] - offset
            left -= here
            if left <= 0:
                offset += left + here - extra
                left = 0
            elif place == len(lengths) - 1:
                offset = lengths[place] - extra
                break
            else:
                place, offset = place + 1, 0
        index.append((place, offset))
    return index


def blend_by_loop(weights, size, limits=None):
    counts, dataset_index, sample_index = [0] * len(weights), [], []
    for i in range(size):
        best, largest = None, -np.inf
        for source, weight in enumerate(weights):
            if limits is not None and counts[source] >= limits[source]:
                continue
            error = weight * max(i, 1.0) - counts[source]
            if error > largest:
                best, largest = source, error
        dataset_index.append(best)
        sample_index.append(counts[best])
        counts[best] += 1
    return dataset_index, sample_index


@given(
    tokens=st.integers(2, 300),
    wanted=st.one_of(st.none(), st.integers(0, 400)),
    length=st.integers(1, 40),
    extra=st.integers(0, 1),
)
def test_epochs(tokens, wanted, length, extra):
    plan = plan_epochs(tokens, wanted, length, extra)
    assert plan.num_epochs == epochs_by_loop(tokens, wanted, length, extra)
    assert plan.num_samples == (plan.num_epochs * tokens - extra) // length
    assert plan.num_samples >= (wanted or 0)
    if plan.samples_before_last is not None:
        assert plan.num_epochs > 1
        assert plan.samples_before_last < wanted


@pytest.mark.parametrize("wanted, apart", [(99, None), (100, 99), (177, 99), (178, None)])
def test_the_last_epoch_is_kept_apart_below_80_percent(wanted, apart):
    # An epoch of 1,000 tokens gives 99 whole samples of 10 + 1; 80% of 99 is 79, so 79 of the last epoch are enough.
    plan = plan_epochs(1000, wanted, 10, 1)
    assert plan.num_epochs == (1 if wanted == 99 else 2)
    assert plan.samples_before_last == apart


@settings(max_examples=300)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(lambda values: sum(values) >= 2),
    length=st.integers(1, 25),
    extra=st.integers(0, 1),
    keep_partial=st.booleans(),
)
def test_sample_index_equals_the_loop(lengths, length, extra, keep_partial):
    plan = plan_epochs(sum(lengths), None, length, extra, keep_partial)
    ours = build_sample_index(np.array(lengths, dtype=np.int32), np.arange(len(lengths)), length, plan, extra)
    assert ours.dtype == np.int64
    assert [tuple(row) for row in ours.tolist()] == sample_index_by_loop(
        lengths, length, plan.num_samples, extra
    )


def test_shuffles_draw_from_one_stream_in_megatrons_order():
    plan = EpochPlan(num_epochs=3, num_samples=50, samples_before_last=35)
    random, plain = np.random.RandomState(7), np.random.RandomState(7)
    before, last = np.tile(np.arange(5, 25, dtype=np.int32), 2), np.arange(5, 25, dtype=np.int32)
    plain.shuffle(before)
    plain.shuffle(last)
    first, rest = np.arange(35, dtype=np.uint32), np.arange(35, 50, dtype=np.uint32)
    plain.shuffle(first)
    plain.shuffle(rest)
    assert build_document_index(5, 25, plan, random).tolist() == [*before, *last]
    assert build_shuffle_index(plan, random).tolist() == [*first, *rest]


def test_positions_past_2_to_the_31():
    lengths = np.full(40, 10**8, dtype=np.int32)
    plan = plan_epochs(4 * 10**9, None, 10**6, 1)
    index = build_sample_index(lengths, np.arange(40), 10**6, plan, 1)
    assert plan.num_samples == 3999
    assert index[3999].tolist() == [39, 99 * 10**6]
    assert (index[:, 0] * 10**8 + index[:, 1]).tolist() == [i * 10**6 for i in range(4000)]


@settings(max_examples=60)
@given(
    weights=st.lists(st.integers(1, 1000), min_size=1, max_size=12),
    size=st.integers(0, 3000),
)
def test_blend_equals_the_loop(weights, size):
    share = np.array(weights) / sum(weights)
    source, number = build_blend_index(share, size)
    assert (source.dtype, number.dtype) == (np.int16, np.int64)
    assert (source.tolist(), number.tolist()) == blend_by_loop(share.tolist(), size)


@settings(max_examples=60)
@given(sizes=st.lists(st.integers(1, 700), min_size=1, max_size=8))
def test_exhaustive_blend_equals_the_loop(sizes):
    share = np.array(sizes) / sum(sizes)
    source, number = build_blend_index(share, sum(sizes), np.array(sizes))
    assert (source.tolist(), number.tolist()) == blend_by_loop(share.tolist(), sum(sizes), sizes)
    assert np.bincount(source).tolist() == sizes


def test_many_lanes_and_ties_equal_the_loop():
    """Long enough for many lanes, weights that tie all the time, and one that is nearly nothing."""
    for weights in ([1 / 3, 1 / 3, 1 / 3], [0.5, 0.25, 0.125, 0.125], [1 - 2e-5, 1e-5, 1e-5]):
        source, number = build_blend_index(np.array(weights), 150_000)
        assert (source.tolist(), number.tolist()) == blend_by_loop(weights, 150_000)
