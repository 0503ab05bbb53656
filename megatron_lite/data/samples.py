"""From token ids to what a model is fed: tokens, labels, positions, document numbers. Pure numpy.

A dataset of samples reads rows of token ids; everything else is made from these rows, for many rows at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_lite.config.data import IGNORED_LABEL
from megatron_lite.config.declare import ConfigError

_PAD = -1  # no token: behind the end of a short last sample

Rows = dict[str, np.ndarray]  # by the name of what is in them


@dataclass(frozen=True)
class SampleOptions:
    """How a sample is cut and masked.

    Attributes:
        eod: id of the end-of-document token; needed by the three options below.
        vocab_size: number of ids the model knows; None = ids are not checked.
        extra_token: a sample reads one token more than sequence_length, so that every token has a label. Without
            it the last label of each sample is masked.
    """

    sequence_length: int
    eod: int | None = None
    vocab_size: int | None = None
    extra_token: bool = True
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    @property
    def text_length(self) -> int:
        """Tokens that a sample reads."""
        return self.sequence_length + self.extra_token


class Samples(ABC):
    """A dataset: `len`, `[index]`, and `batch`, which makes many samples at once.

    Attributes:
        name: for people, e.g. "train".
        read_once: batches beyond the end are masked padding (--full-validation); else reading starts over.
        fingerprint: equal for two datasets that give the same samples in the same order.
    """

    options: SampleOptions
    name: str = ""
    read_once: bool = False
    fingerprint: str = ""

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @abstractmethod
    def read(self, index: int, out: np.ndarray) -> int:
        """Write the token ids of sample `index` to `out` [text_length]; returns how many there were."""

    @abstractmethod
    def find_token(self, index: int, position: int = 0) -> str:
        """Where token `position` of sample `index` comes from: file, document, place in it. For messages."""

    @property
    def source_names(self) -> list[str]:
        """What the samples are drawn from, as a log names it: path prefixes."""
        return [self.name]

    def source_of(self, index: int) -> int:
        """Which of `source_names` sample `index` comes from."""
        return 0

    def __getitem__(self, index: int) -> Rows:
        """One sample: tokens and labels, int64 [S]; position_ids, document_ids int64 [S] where asked for."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name}: sample {index} of {len(self)}")
        return {key: rows[0] for key, rows in self.batch([index]).items()}

    def batch(self, indices: Sequence[int | None]) -> Rows:
        """Samples `indices` [B], int64 [B, S]; None: one without loss. Raises ConfigError for an unknown token id."""
        options = self.options
        length, text_length = options.sequence_length, options.text_length
        # One row begins where the one before it ends: what a row reads beyond its end, the last label, is taken
        # before the next row is written over it. So a row is converted once and copied once.
        flat = np.empty(len(indices) * length + options.extra_token, dtype=np.int64)
        tokens = flat[: len(indices) * length].reshape(len(indices), length)
        labels = np.empty_like(tokens)
        whole = options.extra_token
        for row, index in enumerate(indices):
            text = flat[row * length : row * length + text_length]
            filled = 0 if index is None else self.read(index, text)
            if filled < text_length:
                text[filled:] = _PAD
                whole = False
            labels[row, : text_length - 1] = text[1:]
        if not options.extra_token:
            labels[:, -1] = _PAD
        if options.vocab_size is not None:
            self._check(indices, tokens, labels)
        return mask(tokens, labels, options, whole)

    def _check(self, indices: Sequence[int | None], tokens: np.ndarray, labels: np.ndarray) -> None:
        vocab_size = self.options.vocab_size
        # As unsigned numbers the negative ones are huge: one pass finds both kinds, and padding.
        if all(ids.view(np.uint64).max(initial=0) < vocab_size for ids in (tokens, labels[:, -1])):
            return
        text = np.empty(self.options.text_length, dtype=np.int64)
        for index in indices:
            filled = 0 if index is None else self.read(index, text)
            bad = np.flatnonzero(text[:filled].view(np.uint64) >= vocab_size)
            if len(bad):
                raise ConfigError(
                    f"{self.find_token(index, int(bad[0]))} is token id {text[bad[0]]:,}, wanted 0 to "
                    f"{vocab_size - 1:,}: the data was made with another tokenizer"
                )


def mask(tokens: np.ndarray, labels: np.ndarray, options: SampleOptions, whole: bool = False) -> Rows:
    """tokens, labels and, where asked for, position_ids and document_ids, int64 [B, S] each.

    Args:
        tokens, labels: int64 [B, S], changed in place; -1 where a short sample has none.
        whole: there is no such place.
    """
    is_eod = None
    if options.eod_mask_loss or options.reset_position_ids or options.reset_attention_mask:
        is_eod = tokens == options.eod
    if options.eod_mask_loss:
        labels[is_eod] = IGNORED_LABEL
    if not whole:
        labels[labels == _PAD] = IGNORED_LABEL
        tokens[tokens == _PAD] = 0  # any id that the embedding has
    batch = {"tokens": tokens, "labels": labels}
    if options.reset_position_ids:
        # The token after an eod is position 0: each takes the place of the last such start from its own.
        places = np.arange(options.sequence_length, dtype=np.int64)
        starts = np.zeros_like(tokens)
        starts[:, 1:] = np.where(is_eod[:, :-1], places[1:], 0)
        batch["position_ids"] = places - np.maximum.accumulate(starts, axis=1)
    if options.reset_attention_mask:
        # An eod belongs to the document it ends.
        batch["document_ids"] = np.cumsum(is_eod, axis=1, dtype=np.int64) - is_eod
    return batch
