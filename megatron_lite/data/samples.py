"""From token ids to what a model is fed: tokens, labels, positions, document numbers. Pure numpy.

A dataset of samples reads rows of token ids; everything else is made from these rows, for many rows at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_lite.config import ConfigError

IGNORED_LABEL = -100  # no loss here; torch's cross entropy ignores it too
_PAD = -1  # no token: behind the end of a short last sample

Batch = dict[str, np.ndarray]


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
    def locate(self, index: int) -> str:
        """Where sample `index` comes from: file, sequence, token. For messages."""

    @abstractmethod
    def find_token(self, index: int, position: int) -> str:
        """Where token `position` of sample `index` comes from: file, document, place in it. For messages."""

    @property
    def source_names(self) -> list[str]:
        """What the samples are drawn from, as a log names it: path prefixes."""
        return [self.name]

    def source_of(self, index: int) -> int:
        """Which of `source_names` sample `index` comes from."""
        return 0

    def __getitem__(self, index: int) -> Batch:
        """One sample: tokens and labels, int64 [S]; position_ids, document_ids int64 [S] where asked for."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name}: sample {index} of {len(self)}")
        return {key: rows[0] for key, rows in self.batch([index]).items()}

    def batch(self, indices: Sequence[int | None]) -> Batch:
        """The samples `indices` [B], each array int64 [B, S]; None stands for a sample without any loss.

        Raises:
            ConfigError: a token id beyond the vocabulary; names file and document.
        """
        options = self.options
        texts = np.empty((len(indices), options.text_length), dtype=np.int64)
        for row, index in enumerate(indices):
            text = texts[row]
            filled = 0 if index is None else self.read(index, text)
            if filled < len(text):
                text[filled:] = _PAD
                text = text[:filled]
            if options.vocab_size is not None:
                self._check(index, text)
        return assemble(texts, options)

    def _check(self, index: int | None, text: np.ndarray) -> None:
        vocab_size = self.options.vocab_size
        # As unsigned numbers the negative ones are huge: one pass finds both kinds.
        if not len(text) or text.view(np.uint64).max() < vocab_size:
            return
        position = int(np.argmax(text.view(np.uint64) >= vocab_size))
        raise ConfigError(
            f"{self.find_token(index, position)} is token id {text[position]:,}, wanted 0 to {vocab_size - 1:,}: "
            "the data was made with another tokenizer"
        )


def assemble(texts: np.ndarray, options: SampleOptions) -> Batch:
    """tokens, labels and, where asked for, position_ids and document_ids, int64 [B, S] each.

    Args:
        texts: int64 [B, text_length], -1 behind the end of a short sample.
    """
    length = options.sequence_length
    tokens = texts[:, :length].copy()
    if options.extra_token:
        labels = texts[:, 1:].copy()
    else:
        labels = np.full_like(tokens, _PAD)
        labels[:, :-1] = tokens[:, 1:]
    is_eod = None
    if options.eod_mask_loss or options.reset_position_ids or options.reset_attention_mask:
        is_eod = tokens == options.eod
    if options.eod_mask_loss:
        labels[is_eod] = IGNORED_LABEL
    if (labels[:, -1] == _PAD).any():  # padding is always at the end
        labels[labels == _PAD] = IGNORED_LABEL
        tokens[tokens == _PAD] = 0  # any id that the embedding has
    batch = {"tokens": tokens, "labels": labels}
    if options.reset_position_ids:
        # The token after an eod is position 0: each takes the place of the last such start from its own.
        places = np.arange(length, dtype=np.int64)
        starts = np.zeros_like(tokens)
        starts[:, 1:] = np.where(is_eod[:, :-1], places[1:], 0)
        batch["position_ids"] = places - np.maximum.accumulate(starts, axis=1)
    if options.reset_attention_mask:
        # An eod belongs to the document it ends.
        batch["document_ids"] = np.cumsum(is_eod, axis=1, dtype=np.int64) - is_eod
    return batch
