"""From token rows to tokens, labels, positions and document numbers, against one row at a time by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.config import ConfigError
from megatron_lite.data.samples import SampleOptions, Samples


def by_hand(text, options):
    """One token after the other; -1 is padding."""
    length = options.sequence_length
    tokens = list(text[:length])
    labels = list(text[1:]) if options.extra_token else [*text[1:], -1]
    positions, documents, position, document = [], [], 0, 0
    for place, token in enumerate(tokens):
        positions.append(position)
        documents.append(document)
        position += 1
        if token == options.eod:
            position, document = 0, document + 1
            if options.eod_mask_loss:
                labels[place] = -1
    sample = {
        "tokens": [max(token, 0) for token in tokens],
        "labels": [-100 if label == -1 else label for label in labels],
    }
    if options.reset_position_ids:
        sample["position_ids"] = positions
    if options.reset_attention_mask:
        sample["document_ids"] = documents
    return sample


class Rows(Samples):
    """Sample i is the i-th of the given rows, which may be short."""

    def __init__(self, rows, options):
        self.rows, self.options = rows, options

    def __len__(self):
        return len(self.rows)

    def read(self, index, out):
        out[: len(self.rows[index])] = self.rows[index]
        return len(self.rows[index])

    def find_token(self, index, position=0):
        return f"row {index}, token {position}"


@settings(max_examples=300)
@given(
    rows=st.lists(st.lists(st.integers(0, 3), min_size=0, max_size=9), min_size=1, max_size=4),
    eod=st.integers(0, 3),
    flags=st.tuples(*[st.booleans()] * 4),
)
def test_batch(rows, eod, flags):
    options = SampleOptions(8, eod, 4, *flags)
    rows = [row[: options.text_length] for row in rows]
    batch = Rows(rows, options).batch([*range(len(rows)), None])
    for index, row in enumerate([*rows, []]):
        wanted = by_hand(row + [-1] * (options.text_length - len(row)), options)
        assert set(batch) == set(wanted)
        for key, value in wanted.items():
            assert batch[key].dtype == np.int64 and batch[key].flags.c_contiguous
            assert batch[key][index].tolist() == value, key
    assert not any(np.shares_memory(a, b) for a in batch.values() for b in batch.values() if a is not b)


@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("row, position", [(0, 0), (1, 3), (2, 7), (0, -1), (2, -1)])
@pytest.mark.parametrize("bad", [4, -7])
def test_an_id_beyond_the_vocabulary_is_named_wherever_it_stands(extra, row, position, bad):
    options = SampleOptions(8, vocab_size=4, extra_token=extra)
    rows = [[1] * options.text_length for _ in range(3)]
    rows[row][position] = bad
    place = position % options.text_length
    with pytest.raises(ConfigError, match=f"row {row}, token {place} is token id {bad}, wanted 0 to 3"):
        Rows(rows, options).batch([0, 1, 2])
