"""Samples of one tokenized file, equal to Megatron-core's GPTDataset: same tokens, same order, to the bit."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_lite.config.declare import ConfigError
from megatron_lite.data.index_cache import Arrays, IndexCache, IndexEntry
from megatron_lite.data.index_kernels import (
    build_document_index,
    build_sample_index,
    build_shuffle_index,
    plan_epochs,
)
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.data.mock_dataset import MockSource
from megatron_lite.data.samples import SampleOptions, Samples

TokenSource = IndexedDataset | MockSource  # what samples are cut from


@dataclass(frozen=True)
class Part:
    """The part of a source that a split takes, and how many samples are wanted of it (None: those of one epoch)."""

    first: int  # sequence
    stop: int
    num_samples: int | None
    keep_partial: bool = False  # a short last sample counts (validation only)


class EmptyPartError(ConfigError):
    """A split takes too little of a source."""


class GPTDataset(Samples):
    """Samples of `sequence_length` tokens, cut from the shuffled sequences of a source without regard to their ends."""

    def __init__(self, source: TokenSource, entry: IndexEntry, options: SampleOptions, name: str = ""):
        """entry: the arrays document_index, sample_index, shuffle_index, as `build_entry` makes them."""
        self.source = source
        self.options = options
        self.name = name
        self.entry = entry
        facts = {key: value for key, value in entry.about.items() if key != "documents"}
        self.fingerprint = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return self.entry.about["samples"]

    @property
    def source_names(self) -> list[str]:
        return [self.source.path_prefix]

    def read(self, index: int, out: np.ndarray) -> int:
        sequences, offset = self._span(index)
        return self.source.gather(sequences, offset, out)

    def find_token(self, index: int, position: int = 0) -> str:
        sequences, offset = self._span(index)
        lengths, boundaries = self.source.sequence_lengths, self.source.document_indices
        position += offset
        for sequence in sequences.tolist():
            if position < lengths[sequence]:
                break
            position -= int(lengths[sequence])
        document = self.source.document_of(sequence)
        before = int(lengths[int(boundaries[document]) : sequence].sum(dtype=np.int64))
        return f"{self.source.path_prefix}.bin: document {document:,}, token {before + position:,}"

    def _span(self, index: int) -> tuple[np.ndarray, int]:
        """The sequences that a sample reads from, in order, and the token of the first one where it begins."""
        arrays = self.entry.arrays  # mapped on first use
        place = int(arrays["shuffle_index"][index])
        first, offset, last, _ = arrays["sample_index"][place : place + 2].ravel().tolist()
        return arrays["document_index"][first : last + 1], offset


def build_entry(
    source: TokenSource, part: Part, options: SampleOptions, seed: int, cache: IndexCache, store: bool
) -> IndexEntry:
    """Index arrays of a part of a source, with counts in `about`. Raises EmptyPartError, which names no flag."""
    length, extra = options.sequence_length, int(options.extra_token)

    def build() -> tuple[dict[str, Any], Arrays]:
        lengths = np.ascontiguousarray(source.sequence_lengths)
        tokens = int(lengths[part.first : part.stop].sum(dtype=np.int64))
        _check_size(part, tokens, options)
        plan = plan_epochs(tokens, part.num_samples, length, extra, part.keep_partial)
        random = np.random.RandomState(seed)
        order = build_document_index(part.first, part.stop, plan, random)
        samples = build_sample_index(lengths, order, length, plan, extra)
        shuffle = build_shuffle_index(plan, random)
        about = {
            "sequences": [part.first, part.stop],
            # Those that begin in the part; empty ones at its end are not counted.
            "documents": int(
                np.diff(np.searchsorted(source.document_indices[:-1], (part.first, part.stop)))[0]
            ),
            "tokens": tokens,
            "epochs": plan.num_epochs,
            "samples": plan.num_samples,
            "last epoch apart": plan.samples_before_last is not None,
            "seed": seed,
            "sequence length": [length, extra],
        }
        return about, {"document_index": order, "sample_index": samples, "shuffle_index": shuffle}

    description = source.identity() | {
        "kind": "samples 1",
        "part": [part.first, part.stop, part.num_samples, part.keep_partial],
        "seed": seed,
        "sequence length": [length, extra],
    }
    return cache.get(description, lambda: source.lengths_hash, build, store)


def _check_size(part: Part, tokens: int, options: SampleOptions) -> None:
    if part.stop <= part.first:
        raise EmptyPartError("has no document")
    needed = 1 + options.extra_token if part.keep_partial else options.text_length
    if tokens < needed:
        raise EmptyPartError(
            f"has {tokens:,} tokens in {part.stop - part.first:,} documents, wanted at least {needed:,} for one "
            f"sample of --seq-length {options.sequence_length:,}"
        )


def check_token_ids(source: TokenSource, vocab_size: int, places: int = 64, length: int = 4096) -> None:
    """Look for token ids beyond the vocabulary at `places` sequences spread over a source, `length` tokens each.

    A sample only: the loader checks every token it hands out, data_prep/inspect_data.py the whole file.

    Raises:
        ConfigError: one was found; names file and document.
    """
    filled = np.flatnonzero(source.sequence_lengths)
    chosen = filled[np.unique(np.linspace(0, len(filled) - 1, min(places, len(filled))).astype(np.int64))]
    for sequence in chosen.tolist():
        text = np.empty(min(length, int(source.sequence_lengths[sequence])), dtype=np.int64)
        source.gather(np.asarray([sequence]), 0, text)
        bad = np.flatnonzero((text < 0) | (text >= vocab_size))
        if len(bad):
            raise ConfigError(
                f"{source.path_prefix}.bin: document {source.document_of(sequence):,}, sequence {sequence:,}, token "
                f"{bad[0]:,} is token id {text[bad[0]]:,}, wanted 0 to {vocab_size - 1:,}: the data was made with "
                "another tokenizer"
            )
