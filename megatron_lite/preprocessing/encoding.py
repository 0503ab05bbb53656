"""A chunk of documents -> token arrays: what one worker process of the preprocessing does."""

from dataclasses import dataclass

import numpy as np

from megatron_lite.config.data import DataConfig
from megatron_lite.config.declare import ConfigError
from megatron_lite.data.tokenizer import build_tokenizer
from megatron_lite.data.unicode_text import utf8_size
from megatron_lite.distributed.environment import set_default
from megatron_lite.preprocessing.records import BadDocument, Records, parse
from megatron_lite.preprocessing.text_files import Chunk


@dataclass(frozen=True)
class EncodingOptions:
    """All that decides the tokens of a document.

    Attributes:
        tokenizer, vocab_size: arguments of build_tokenizer.
        keys: of a JSON line or columns of a row; each gives a dataset of its own.
        append_eod: end each document that has tokens with eod.
        dtype: numpy name of the token type, wide enough for the vocabulary.
        max_document_bytes: longer texts are bad documents.
    """

    tokenizer: DataConfig
    vocab_size: int | None
    keys: tuple[str, ...]
    append_eod: bool
    dtype: str
    max_document_bytes: int


@dataclass(frozen=True)
class Encoded:
    """The documents of a chunk, in order.

    Attributes:
        tokens: for each key the tokens of all documents, one after the other, [tokens].
        lengths: for each key the number of tokens of each document, int32 [documents]; 0 = no text in it.
        bad: the documents left out.
        text_bytes: of the encoded texts, in UTF-8.
    """

    tokens: list[np.ndarray]
    lengths: list[np.ndarray]
    bad: list[BadDocument]
    text_bytes: int


class ChunkEncoder:
    """Turns chunks into tokens; holds the tokenizer, so it is built in the process that uses it."""

    def __init__(self, options: EncodingOptions) -> None:
        # The processes are the parallelism: a thread pool in each of them would only make them wait.
        set_default("TOKENIZERS_PARALLELISM", "false")
        self._options = options
        self._tokenizer = build_tokenizer(options.tokenizer, options.vocab_size)

    def __call__(self, chunk: Chunk) -> Encoded:
        """Tokens of the chunk's good documents, and the bad ones. Raises nothing for bad input."""
        options = self._options
        records = parse(chunk, options.keys, options.max_document_bytes)
        eod = self._tokenizer.eod if options.append_eod else None
        columns = [_ended(*column, eod, np.dtype(options.dtype)) for column in self._encode(records)]
        return Encoded(
            tokens=[tokens for tokens, _ in columns],
            lengths=[lengths for _, lengths in columns],
            bad=sorted(records.bad, key=lambda bad: bad.line),
            text_bytes=sum(utf8_size(text) for values in records.texts for text in values),
        )

    def _encode(self, records: Records) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each key all ids, and how many each document has. What the tokenizer refuses moves to records.bad."""
        while True:
            try:
                return [
                    self._tokenizer.encode_flat([values[key] for values in records.texts])
                    for key in range(len(self._options.keys))
                ]
            except ConfigError:
                self._drop_refused(records)

    def _drop_refused(self, records: Records) -> None:
        good = []
        for values, line in zip(records.texts, records.lines):
            try:
                self._tokenizer.encode_batch(values)
                good.append((values, line))
            except ConfigError as error:
                bad = BadDocument("refused by the tokenizer", f"cannot be encoded: {error}", line)
                records.bad.append(bad)
        records.texts, records.lines = [values for values, _ in good], [line for _, line in good]


def _ended(
    ids: np.ndarray, lengths: np.ndarray, eod: int | None, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """ids in `dtype` with an eod behind each document that has any; lengths, int32, that count it."""
    if eod is None:
        return ids.astype(dtype), lengths.astype(np.int32)
    ended = lengths + (lengths > 0)
    tokens = np.full(int(ended.sum()), eod, dtype)
    is_text = np.ones(len(tokens), bool)
    is_text[np.cumsum(ended)[lengths > 0] - 1] = False
    tokens[is_text] = ids
    return tokens, ended.astype(np.int32)
