"""Train a SentencePiece BPE tokenizer on text in any of the forms that preprocess_data.py reads.

    python data_prep/train_tokenizer.py --input corpus.jsonl --output tokenizer.model --vocab-size 4096

What comes out spells every text exactly: nothing is normalised, no space is added or dropped, characters outside
the vocabulary become bytes. (But for U+2581, SentencePiece's own sign for a space, which is read back as one.)
Training sees an evenly spaced sample of the input, so time and memory are bounded however large the input is, and
the same input gives the same tokenizer, byte for byte.
"""

import io
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import sentencepiece

from megatron_lite.config import ConfigError
from megatron_lite.files.command_line import Parser, make_folder_of, number, run
from megatron_lite.files.writing import write_aside
from megatron_lite.preprocessing.records import parse, refusal
from megatron_lite.preprocessing.text_files import (
    CHUNK_BYTES,
    Span,
    TextFile,
    find_files,
    identify,
    line_start,
    read_chunks,
)

NUM_BASE_PIECES = 3 + 256  # unk, bos, eos and the bytes
MAX_LINE = 1000  # characters; SentencePiece leaves out what is longer than its limit of bytes
# Characters with a meaning inside SentencePiece's trainer, which leaves out whole lines that hold them.
RESERVED = re.compile("[\0\u2581\u2585\t]")
LINE = re.compile(f"[^\n]{{1,{MAX_LINE}}}")  # a line break is a byte of its own: the library trains on lines


def sample_spans(file: TextFile, share: int) -> Iterator[Span]:
    """Parts of a file to read until `share` bytes are taken: plain JSON lines evenly spaced, others from the start."""
    if file.kind != "jsonl" or file.compression is not None or share >= file.size:
        yield Span(file)
        return
    pieces = max(1, round(share / CHUNK_BYTES))
    for piece in range(pieces):
        start = line_start(file, file.size * piece // pieces)
        stop = line_start(file, start + share // pieces)
        if start < stop:
            yield Span(file, start, stop)


def read_sample(
    files: Sequence[TextFile], keys: Sequence[str], size: int, skip_bad: bool
) -> tuple[list[str], int]:
    """Texts of about `size` bytes, from each file in proportion to its size on disk, or all there are.

    Returns (texts, number of documents left out as bad). Raises ConfigError at a bad document.
    """
    texts, bad_documents, by_path = [], 0, {file.path: file for file in files}
    total = sum(file.size for file in files)
    credit = 0.0  # bytes due from the files so far; one larger than its due makes the next ones wait
    for file in files:
        credit += file.size * min(1.0, size / total) if total else 0
        for span in sample_spans(file, int(credit)):
            for chunk in read_chunks(span, keys, 1 << 26) if credit > 0 else ():
                records = parse(chunk, keys)
                if records.bad and not skip_bad:
                    raise refusal(chunk, records.bad[0], by_path)
                bad_documents += len(records.bad)
                texts.extend(text for values in records.texts for text in values if text)
                credit -= chunk.size
                if credit <= 0 and total > size:
                    break
    return texts, bad_documents


def frequent_characters(texts: Sequence[str], vocab_size: int, coverage: float) -> tuple[set[str], int]:
    """The characters that get a piece of their own, and how many there are in all.

    The most frequent ones that make up `coverage` of the text, but at most half of the pieces: a text in many
    scripts can have more characters than the vocabulary has pieces; the rare ones are spelled by bytes.
    """
    counts = Counter(chain.from_iterable(texts))
    kept, covered, total = set(), 0, counts.total()
    for character, count in counts.most_common((vocab_size - NUM_BASE_PIECES) // 2):
        if covered >= coverage * total:
            break
        kept.add(character)
        covered += count
    return kept, len(counts)


def lines(texts: Sequence[str], characters: set[str]) -> Iterator[str]:
    """The texts as the lines that SentencePiece trains on, cut where a character is not among `characters`."""
    for text in texts:
        rare = set(text) - characters
        text = text.translate(dict.fromkeys(map(ord, rare), "\0")) if rare else text
        for part in RESERVED.split(text):
            yield from LINE.findall(part)


def train(texts: Sequence[str], vocab_size: int, characters: set[str], special: Sequence[str]) -> bytes:
    """Train on `texts`; returns the serialized model. The same texts give the same bytes."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines(texts, characters),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        hard_vocab_limit=False,  # a small corpus may not have so many pieces in it
        character_coverage=1.0,  # `lines` has cut the rare ones out; the library's own limit is 0.98 and up
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        allow_whitespace_only_pieces=True,
        control_symbols=list(special),
        max_sentence_length=1 << 20,  # `lines` has cut them
        num_threads=1,  # stands in the model file; BPE training uses one anyway
        minloglevel=2,
    )
    return model.getvalue()


def main(argv: Sequence[str]) -> None:
    """Parse `argv`, train, write the model."""
    parser = Parser("Train a SentencePiece BPE tokenizer.")
    flag = parser.add_argument
    flag("--input", nargs="+", required=True, help="files, folders or glob patterns")
    flag("--json-keys", nargs="+", default=["text"], help="keys of the texts (default: text)")
    flag("--output", type=Path, required=True, help="the .model file to write")
    pieces = {"type": number(NUM_BASE_PIECES + 2, int, 1_000_000), "default": 4096}
    flag("--vocab-size", **pieces, help="pieces, 3 special ones and 256 bytes among them (default: 4096)")
    megabytes = {"type": number(0.001, float, 1e9), "default": 50.0}
    flag("--sample-megabytes", **megabytes, help="size of the evenly spaced sample to train on (default: 50)")
    share = {"type": number(0.5, float, 1.0), "default": 0.9999}
    text = "part of the text whose characters get pieces of their own; rarer ones are bytes (default: 0.9999)"
    flag("--character-coverage", **share, help=text)
    flag("--special-tokens", nargs="*", default=[], help="further control tokens, never made from text")
    flag("--skip-bad-documents", action="store_true", help="leave out what cannot be read")
    arguments = parser.parse_args(argv)
    make_folder_of(arguments.output, "--output")
    started = time.perf_counter()
    files = [identify(path) for path in find_files(arguments.input)]
    size = int(arguments.sample_megabytes * 1e6)
    texts, bad = read_sample(files, arguments.json_keys, size, arguments.skip_bad_documents)
    characters = sum(map(len, texts))
    if not characters:
        raise ConfigError(f"--input {' '.join(arguments.input)} holds no text, wanted some to train on")
    vocab_size = arguments.vocab_size
    kept, seen = frequent_characters(texts, vocab_size, arguments.character_coverage)
    try:
        content = train(texts, vocab_size, kept, arguments.special_tokens)
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"SentencePiece cannot train --vocab-size {vocab_size:,}: {error}") from None
    write_aside(arguments.output, content)
    pieces = sentencepiece.SentencePieceProcessor(model_proto=content).GetPieceSize()
    if pieces < vocab_size:
        print(f"note: {pieces:,} pieces, fewer than --vocab-size {vocab_size:,}", file=sys.stderr)
    print(
        f"{arguments.output}: {pieces:,} pieces, {len(kept):,} of {seen:,} characters whole, the rest by bytes; "
        f"trained on {characters:,} characters of {len(texts):,} documents"
        f"{f' ({bad:,} bad ones left out)' if bad else ''} in {time.perf_counter() - started:.1f} s"
    )


if __name__ == "__main__":
    run(main)
