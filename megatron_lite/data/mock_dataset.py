"""Made-up tokens for --mock-data: a source like a file, with the document lengths of Megatron-core's."""

import hashlib
from typing import Any

import numpy as np

_SEQUENCES = 100_000
_LONGEST = 4096


class MockSource:
    """100,000 documents of 1 to 4,095 tokens that count up from 1 (skipping the eod) and end with eod."""

    path_prefix = "mock"

    def __init__(self, vocab_size: int, eod: int):
        """vocab_size: ids run from 0 to vocab_size - 1, at least 2 of them; eod: one of them."""
        assert 0 <= eod < vocab_size and vocab_size >= 2
        self._vocab_size, self._eod = vocab_size, eod
        random = np.random.default_rng(seed=0)
        self.sequence_lengths = random.integers(1, _LONGEST, size=_SEQUENCES, dtype=np.int32)
        self.document_indices = np.arange(_SEQUENCES + 1, dtype=np.int64)
        self.lengths_hash = hashlib.blake2b(self.sequence_lengths.data, digest_size=16).hexdigest()
        counted = np.arange(1, _LONGEST, dtype=np.int64) % (vocab_size - 1)
        self._counted = counted + (counted >= eod)

    def gather(self, sequences: np.ndarray, offset: int, out: np.ndarray) -> int:
        """As IndexedDataset.gather."""
        filled = 0
        for length in self.sequence_lengths[sequences].tolist():
            taken = min(length - offset, len(out) - filled)
            out[filled : filled + taken] = self._counted[offset : offset + taken]
            if offset + taken == length and taken:
                out[filled + taken - 1] = self._eod
            filled += taken
            offset = 0
        return filled

    def document_of(self, index: int) -> int:
        """A document is one sequence."""
        return index

    def identity(self) -> dict[str, Any]:
        """As IndexedDataset.identity."""
        return {"path": "mock", "files": [self._vocab_size, self._eod]}
