"""Tokenized pairs for tests, written from plain lists."""

from collections.abc import Sequence

import numpy as np

from megatron_lite.data.indexed_dataset import write_pair


def write_documents(
    prefix: object, documents: Sequence[Sequence], dtype: str | type = "uint16", nested: bool = False
) -> str:
    """Write PREFIX.bin and .idx; a document is its tokens, or when `nested` a list of sequences. Returns the prefix."""
    documents = documents if nested else [[tokens] for tokens in documents]
    tokens = [np.asarray(sequence, np.dtype(dtype)) for sequences in documents for sequence in sequences]
    lengths = np.array([len(sequence) for sequence in tokens], np.int32)
    ends = np.cumsum([len(sequences) for sequences in documents], dtype=np.int64)
    write_pair(str(prefix), np.dtype(dtype), [t.data for t in tokens], lambda: [lengths], lambda: [ends])
    return str(prefix)
