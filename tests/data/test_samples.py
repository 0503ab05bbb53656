"""From token rows to tokens, labels, positions and document numbers, against one row at a time by hand."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.data.samples import SampleOptions, assemble


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


@settings(max_examples=300, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 3), min_size=0, max_size=9), min_size=1, max_size=4),
    eod=st.integers(0, 3),
    flags=st.tuples(*[st.booleans()] * 4),
)
def test_assemble(rows, eod, flags):
    options = SampleOptions(8, eod, None, *flags)
    rows = [row[: options.text_length] for row in rows]
    texts = np.array([row + [-1] * (options.text_length - len(row)) for row in rows], dtype=np.int64)
    kept = texts.copy()
    batch = assemble(texts, options)
    for index, text in enumerate(kept.tolist()):
        wanted = by_hand(text, options)
        assert set(batch) == set(wanted)
        for key, value in wanted.items():
            assert batch[key].dtype == np.int64
            assert batch[key][index].tolist() == value, key
    assert not any(np.shares_memory(a, b) for a in batch.values() for b in batch.values() if a is not b)
