"""The index arrays of GPT samples and of blends, equal to Megatron-core's to the bit, in numpy alone.

Everything is counted in int64; arrays are kept in the smallest type that holds them (an order of fewer than 2^31
sequences in int32), because half the bytes are half the time of a shuffle.
"""

from dataclasses import dataclass

import numpy as np

_PIECE = 1 << 14  # sequences: a few arrays of that length fit into a core's cache
SEPARATE_LAST_EPOCH_BELOW = 0.80  # Megatron's threshold: share of an epoch the last one has to give


@dataclass(frozen=True)
class EpochPlan:
    """How often the corpus is read and how many samples come of it.

    Attributes:
        num_epochs: passes over the sequences, at least 1.
        num_samples: whole samples in all epochs together (one more when a partial last one is kept).
        samples_before_last: samples shuffled apart from the last epoch's; None when all are shuffled together.
    """

    num_epochs: int
    num_samples: int
    samples_before_last: int | None


def plan_epochs(
    tokens_per_epoch: int,
    num_samples: int | None,
    sequence_length: int,
    extra: int,
    keep_partial: bool = False,
) -> EpochPlan:
    """Epochs and samples for `num_samples` (None: what one epoch gives), by Megatron's separate-last-epoch rule.

    Args:
        extra: 1 when a sample reads one token more than sequence_length, else 0.
        keep_partial: round the number of samples up; the last one is then short.
    """
    assert tokens_per_epoch > 0 and sequence_length > 0 and extra in (0, 1)
    epochs = max(1, -(-((num_samples or 0) * sequence_length + extra) // tokens_per_epoch))
    tokens = epochs * tokens_per_epoch - extra
    samples = -(-tokens // sequence_length) if keep_partial else tokens // sequence_length
    before_last = None
    if epochs > 1:
        without_last = ((epochs - 1) * tokens_per_epoch - extra) // sequence_length
        per_epoch = (tokens_per_epoch - extra) // sequence_length
        if num_samples - without_last < int(SEPARATE_LAST_EPOCH_BELOW * per_epoch):
            before_last = without_last
    return EpochPlan(epochs, samples, before_last)


def build_document_index(
    first: int, stop: int, plan: EpochPlan, random: np.random.RandomState
) -> np.ndarray:  # int [num_epochs * (stop - first)]
    """The sequences first .. stop, once an epoch, shuffled over all epochs (the last one apart if planned so)."""
    dtype = np.int32 if stop <= 2**31 - 1 else np.int64
    order = np.tile(np.arange(first, stop, dtype=dtype), plan.num_epochs)
    return _shuffle(order, len(order) - (stop - first), plan, random)


def build_shuffle_index(
    plan: EpochPlan, random: np.random.RandomState
) -> np.ndarray:  # uint32 | int64 [samples]
    """The order in which samples are read: a shuffle of all, or of the epochs before the last and of the last."""
    dtype = np.uint32 if plan.num_samples < np.iinfo(np.uint32).max - 1 else np.int64
    order = np.arange(plan.num_samples, dtype=dtype)
    return _shuffle(order, plan.samples_before_last, plan, random)


def _shuffle(
    order: np.ndarray, cut: int | None, plan: EpochPlan, random: np.random.RandomState
) -> np.ndarray:
    """Shuffle in place: all, or what lies before and behind `cut` apart when the last epoch is."""
    for part in [order] if plan.samples_before_last is None else [order[:cut], order[cut:]]:
        random.shuffle(part)
    return order


def build_sample_index(
    lengths: np.ndarray, order: np.ndarray, sequence_length: int, plan: EpochPlan, extra: int
) -> np.ndarray:  # int64 [samples + 1, 2]: position in the document index, token offset inside that sequence
    """Where each sample begins. Sample i reads from row i to row i + 1, with `extra` tokens at its end.

    Boundary i lies in the sequence that holds token number i * sequence_length + extra, counted from 1.
    Worked through piece by piece, so that what one step writes is still in the cache when the next one reads it.

    Args:
        lengths: int32 [sequences], tokens of each.
        order: the document index, positions in `lengths` [num_epochs * sequences].
    """
    index = np.empty((plan.num_samples + 1, 2), dtype=np.int64)
    index[0] = 0  # also when the first sequences are empty
    done, before = 1, 0  # rows written; tokens before this piece
    for first in range(0, len(order), _PIECE):
        piece = lengths[order[first : first + _PIECE]]
        ends = np.cumsum(piece, dtype=np.int64)
        stop = min(plan.num_samples, (before + int(ends[-1]) - extra) // sequence_length) + 1
        if stop > done:
            begins = np.arange(done, stop, dtype=np.int64) * sequence_length - before
            # Boundaries (counted from `done`) that lie at or before each sequence's end; how many sequences have
            # no more than b of them is the place of boundary b. Half the time of a binary search for each.
            passed = np.maximum((ends + (before - extra)) // sequence_length - (done - 1), 0)
            positions = np.cumsum(np.bincount(passed, minlength=stop - done)[: stop - done])
            index[done:stop, 0] = positions + first
            index[done:stop, 1] = begins - ends[positions] + piece[positions]
            done = stop
        before += int(ends[-1])
    if done <= plan.num_samples:  # a short last sample ends where the corpus ends
        index[-1] = len(order) - 1, int(lengths[order[-1]]) - extra
    return index


def build_blend_index(
    weights: np.ndarray, size: int, limits: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:  # int16 [size], int64 [size]
    """For each sample of a blend: the source, and the sample's number in that source.

    Sample i comes from the source with the largest weight * max(i, 1) - (samples it gave so far), the first one on
    ties. That is a loop without an end in sight for Python, so the range is cut into lanes that walk side by side,
    each beginning a little early from a guess of the state; a walk forgets its guess within a few steps. What each
    lane really began with is then compared with what the lane before it ended with, and lanes that differ walk
    again from there: the result is exact whatever the guess was worth.

    Args:
        weights: float64 [sources], summing to 1.
        limits: samples each source has, int64 [sources]; one that has given all is passed over.
    """
    assert len(weights) <= 2**15 - 1 and size >= 0
    weights = np.asarray(weights, dtype=np.float64)
    if size == 0:
        return np.empty(0, np.int16), np.empty(0, np.int64)
    # Side by side, but not more than a core's cache holds.
    lanes = max(1, min(4096, size // 1024, max(256, 2**18 // len(weights))))
    span = -(-size // lanes)
    lanes = -(-size // span)
    starts = np.arange(lanes, dtype=np.int64) * span
    picks = np.empty((span, lanes), dtype=np.int16)
    begin = np.zeros((lanes, len(weights)))
    if lanes > 1:
        early = starts[1:] - _WARM_UP
        begin[1:] = _walk(weights, early, _guess(weights, early), _WARM_UP, limits)
    end = _walk(weights, starts, begin, span, limits, picks)
    while True:
        wrong = 1 + np.flatnonzero((begin[1:] != end[:-1]).any(axis=1))
        if not len(wrong):
            break
        begin[wrong] = end[wrong - 1]
        again = np.empty((span, len(wrong)), dtype=np.int16)
        end[wrong] = _walk(weights, starts[wrong], begin[wrong], span, limits, again)
        picks[:, wrong] = again
    source = np.ascontiguousarray(picks.T).reshape(-1)[:size]
    number = np.empty(size, dtype=np.int64)
    for i in range(len(weights)):
        places = np.flatnonzero(source == i)
        number[places] = np.arange(len(places))
    return source, number


_WARM_UP = 256  # steps a lane walks before it counts; only speed depends on it


def _guess(weights: np.ndarray, steps: np.ndarray) -> np.ndarray:  # float64 [lanes, sources]
    """Samples each source may have given after `steps`: the weights' share, rounded so that the sum is right."""
    shares = steps[:, None] * weights
    counts = np.floor(shares)
    missing = (steps - counts.sum(axis=1)).astype(np.int64)
    rank = np.argsort(np.argsort(counts - shares, axis=1), axis=1)
    return counts + (rank < missing[:, None])


def _walk(
    weights: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    num_steps: int,
    limits: np.ndarray | None,
    picks: np.ndarray | None = None,
) -> np.ndarray:  # float64 [lanes, sources]
    """Walk `num_steps` from `starts` [lanes] with `counts` [lanes, sources] given so far; picks [steps, lanes]."""
    counts = counts.copy()
    rows = np.arange(len(starts))
    errors = np.empty_like(counts)
    steps = starts.astype(np.float64)[:, None]
    for step in range(num_steps):
        np.multiply(np.maximum(steps, 1.0), weights, out=errors)
        errors -= counts
        if limits is not None:
            np.copyto(errors, -np.inf, where=counts >= limits)
        best = errors.argmax(axis=1)
        counts[rows, best] += 1
        if picks is not None:
            picks[step] = best
        steps += 1
    return counts
