"""What is in a tokenized dataset, checked in full: counts, lengths, every token id, documents as text.

    python data_prep/inspect_data.py corpus_text_document --tokenizer-type SentencePieceTokenizer \\
        --tokenizer-model tokenizer.model --samples 3

Several prefixes, with or without weights as for --data-path, give a line each and their shares of all tokens. A
damaged file, or a token id beyond the vocabulary, is one sentence with file and document, and exit code 2.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lite.config import ConfigError
from megatron_lite.data.blends import (
    DEFAULT_SPLIT,
    SPLITS,
    parse_blend,
    parse_split,
    split_bounds,
    split_range,
)
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.data.tokenizer import Tokenizer, add_tokenizer_flags, given_tokenizer
from megatron_lite.files.command_line import Parser, number, run
from megatron_lite.files.writing import write_aside

PIECE = 1 << 22  # tokens looked at in one go
BAR = 40  # characters of the longest bar of a histogram
MAX_COUNTED_ID = 1 << 24  # ids beyond are of no vocabulary; counting them would take memory without bound


def document_lengths(dataset: IndexedDataset) -> np.ndarray:
    """Tokens of each document, int64 [documents]."""
    ends = np.zeros(len(dataset) + 1, np.int64)
    np.cumsum(dataset.sequence_lengths, out=ends[1:])
    return np.diff(ends[dataset.document_indices])


def pieces(dataset: IndexedDataset) -> Iterator[tuple[int, np.ndarray]]:
    """All tokens of a dataset in order, in pieces: (number of the first token, tokens [<= PIECE])."""
    with Path(dataset.bin_path).open("rb") as file:
        first = 0
        while data := file.read(PIECE * dataset.dtype.itemsize):
            tokens = np.frombuffer(data, dataset.dtype)
            yield first, tokens
            first += len(tokens)


def check_tokens(
    dataset: IndexedDataset, lengths: np.ndarray, vocab_size: int | None, eod: int | None
) -> tuple[np.ndarray, int]:
    """Count token ids, int64 [highest id + 1], and documents ended by eod. Raises ConfigError for a wrong id."""
    counts = np.zeros(0, np.int64)
    limit, ends, ended = vocab_size or MAX_COUNTED_ID, np.cumsum(lengths), 0
    last = ends[lengths > 0] - 1
    for first, tokens in pieces(dataset):
        wrong = (tokens < 0) | (tokens >= limit)
        if tokens.dtype.kind == "f":
            wrong |= tokens != np.floor(tokens)
        if wrong.any():
            position = first + int(np.argmax(wrong))
            document = int(np.searchsorted(ends, position, side="right"))
            inside = position - int(ends[document] - lengths[document])
            of = "the vocabulary" if vocab_size else "any vocabulary; give --vocab-size or a tokenizer"
            raise ConfigError(
                f"{dataset.bin_path}: document {document:,}, token {inside:,} is {tokens[position - first]:,}, "
                f"wanted 0 to {limit - 1:,}, the ids of {of}"
            )
        piece = np.bincount(tokens.astype(np.int64), minlength=len(counts))
        piece[: len(counts)] += counts
        counts = piece
        inside = last[np.searchsorted(last, first) : np.searchsorted(last, first + len(tokens))] - first
        ended += int(np.count_nonzero(tokens[inside] == eod))
    return counts, ended


def unigram_loss(dataset: IndexedDataset, vocab_size: int, split: str) -> tuple[float, str]:
    """Loss on the validation part of a model that knows only how frequent each token is in the training part.

    Nats per token; every id of the vocabulary is counted once more than it occurs, so that none is impossible. What
    is learnt has to do better than this. Returns (loss, the split it was measured on).
    """
    bounds = split_bounds(parse_split(split))
    counts = {name: np.zeros(vocab_size, np.int64) for name in SPLITS}
    ends = np.concatenate([[0], np.cumsum(dataset.sequence_lengths, dtype=np.int64)])
    ranges = {name: ends[list(split_range(bounds[name] or (0, 0), len(dataset)))] for name in SPLITS}
    for position, tokens in pieces(dataset):
        for name, (low, high) in ranges.items():
            part = tokens[max(low - position, 0) : max(high - position, 0)]
            counts[name] += np.bincount(part.astype(np.int64), minlength=vocab_size)
    measured = "valid" if counts["valid"].any() else "train"
    probabilities = (counts["train"] + 1) / (counts["train"].sum() + vocab_size)
    return float(-(counts[measured] * np.log(probabilities)).sum() / counts[measured].sum()), measured


def histogram(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(first length of each class, documents in it): 0, 1, 2-3, 4-7, ... up to the longest."""
    counts = np.bincount(np.frexp(lengths)[1], minlength=1)  # by the exponent of two above the length
    starts = np.concatenate([[0], 1 << np.arange(len(counts) - 1)])
    return starts, counts


def print_histogram(lengths: np.ndarray) -> None:
    """Bars of characters, one line for each class of lengths."""
    starts, counts = histogram(lengths)
    print("document length (tokens)   documents")
    for index in range(int(np.argmax(counts > 0)), len(counts)):
        start = int(starts[index])
        last = max(start, 2 * start - 1)
        label = f"{start:,}" if last == start else f"{start:,} - {last:,}"
        bar = "#" * round(BAR * counts[index] / max(1, counts.max()))
        print(f"{label:>25s} {counts[index]:>11,} {bar}".rstrip())


def draw_histogram(lengths: np.ndarray, path: Path) -> None:
    """The same as a picture."""
    import matplotlib  # optional: slow to import, needed for the picture only
    import matplotlib.figure

    starts, counts = histogram(lengths)
    figure = matplotlib.figure.Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.add_subplot(
        xlabel="document length in tokens", ylabel="documents", title=f"{len(lengths):,} documents"
    )
    axes.bar(range(len(counts)), counts, width=0.9)
    axes.set_xticks(range(len(counts)), [f"{start:,}" for start in starts], rotation=45, ha="right")
    figure.savefig(path, format="png", dpi=120)


def print_samples(
    dataset: IndexedDataset, lengths: np.ndarray, tokenizer: Tokenizer, number: int, most: int
) -> None:
    """The beginnings of `number` documents, evenly spaced over those with text, at most `most` tokens each."""
    filled = np.flatnonzero(lengths)
    for document in filled[np.unique(np.linspace(0, len(filled) - 1, min(number, len(filled))).astype(int))]:
        first, stop = dataset.document_indices[document : document + 2]
        tokens = np.concatenate([dataset.get(sequence) for sequence in range(first, stop)])[:most]
        cut = f", the first {most:,} of them" if lengths[document] > most else ""
        print(f"document {document:,}: {lengths[document]:,} tokens{cut}: {tokens[:12].tolist()}")
        print("    " + tokenizer.decode(tokens.tolist()).replace("\n", "\n    "))


def inspect(prefix: str, arguments: Namespace, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Check one dataset in full and print what is in it; returns the facts for --json. Raises ConfigError."""
    dataset = IndexedDataset(prefix)
    lengths = document_lengths(dataset)
    vocab_size = tokenizer.vocab_size if tokenizer else arguments.vocab_size
    eod = tokenizer.eod if tokenizer else None
    counts, ended = check_tokens(dataset, lengths, vocab_size, eod)
    filled = lengths[lengths > 0] if lengths.any() else np.zeros(1, np.int64)
    facts = {
        "prefix": prefix,
        "dtype": dataset.dtype.name,
        "documents": len(lengths),
        "empty_documents": int(np.count_nonzero(lengths == 0)),
        "sequences": len(dataset),
        "tokens": int(lengths.sum()),
        "max_token_id": len(counts) - 1 if len(counts) else None,
        "shortest": int(filled.min()),  # document, in tokens
        "median": float(np.median(filled)),
        "mean": float(filled.mean()),
        "longest": int(filled.max()),
        "documents_ended_by_eod": ended if tokenizer else None,
        "eod_inside_documents": int(counts[eod : eod + 1].sum()) - ended if tokenizer else None,
    }
    print_facts(facts)
    if arguments.unigram_loss:
        loss, measured = unigram_loss(dataset, vocab_size or len(counts), arguments.split)
        where = f"on the {measured} part of --split {arguments.split}"
        print(f"unigram loss          {loss:.4f} nats a token {where}")
    print_histogram(lengths)
    if arguments.png:
        draw_histogram(lengths, arguments.png)
        print(f"histogram             {arguments.png}")
    if tokenizer and arguments.samples:
        print_samples(dataset, lengths, tokenizer, arguments.samples, arguments.sample_tokens)
    return facts


def print_facts(facts: dict[str, Any]) -> None:
    """The counts, a line each."""
    lines = [
        "{prefix}.bin, .idx: whole, every token id looked at",
        "documents             {documents:,}{empty}, {sequences:,} sequences",
        "tokens                {tokens:,} of {dtype}, highest id {highest}",
        "tokens in a document  {shortest:,} to {longest:,}, median {median:,.1f}, mean {mean:,.1f}",
    ]
    if facts["documents_ended_by_eod"] is not None:
        lines.append(
            "ended by eod          {documents_ended_by_eod:,} documents; {eod_inside_documents:,} eods stand elsewhere"
        )
    empty = f", {facts['empty_documents']:,} of them without tokens" if facts["empty_documents"] else ""
    highest = "none" if facts["max_token_id"] is None else f"{facts['max_token_id']:,}"
    print("\n".join(lines).format(**facts, empty=empty, highest=highest))


def print_shares(facts: Sequence[dict[str, Any]], weights: Sequence[float] | None) -> None:
    """Tokens of each source, its part of the whole and its weight in the blend."""
    total = sum(item["tokens"] for item in facts)
    print(f"{'tokens':>17s} {'share':>7s} {'weight':>7s} source")
    for index, item in enumerate(facts):
        weight = f"{weights[index]:.4f}" if weights else "-"
        print(f"{item['tokens']:>17,} {item['tokens'] / max(total, 1):>7.2%} {weight:>7s} {item['prefix']}")
    print(f"{total:>17,} {'':>7s} {'':>7s} together")


def main(argv: Sequence[str]) -> None:
    """Parse `argv`, inspect each dataset."""
    parser = Parser("Check tokenized datasets in full and show what is in them.")
    flag = parser.add_argument
    flag("data_path", nargs="+", help="PREFIX ... or WEIGHT PREFIX ..., without .bin or .idx")
    flag("--samples", type=number(0), default=3, help="documents shown as text (default: 3)")
    flag("--sample-tokens", type=number(1), default=64, help="tokens shown of each (default: 64)")
    flag("--png", type=Path, help="draw the histogram of one dataset's lengths into this file")
    flag("--json", type=Path, help="write what was found to this file")
    flag("--unigram-loss", action="store_true", help="print the loss that token frequencies alone give")
    flag("--split", default=DEFAULT_SPLIT, help=f"parts for --unigram-loss (default: {DEFAULT_SPLIT})")
    add_tokenizer_flags(parser)
    arguments = parser.parse_args(argv)
    blend = parse_blend(arguments.data_path, "the data path")
    if arguments.png and len(blend.prefixes) > 1:
        raise ConfigError(f"--png draws one dataset, wanted one prefix instead of {len(blend.prefixes)}")
    tokenizer = given_tokenizer(arguments, arguments.vocab_size)
    if tokenizer:
        print(f"tokenizer             {tokenizer.name}, {tokenizer.vocab_size:,} tokens, eod {tokenizer.eod}")
    prefixes = [prefix.removesuffix(".bin").removesuffix(".idx") for prefix in blend.prefixes]
    facts = [inspect(prefix, arguments, tokenizer) for prefix in prefixes]
    if len(facts) > 1:
        print_shares(facts, blend.weights)
    if arguments.json:
        write_aside(arguments.json, facts)


if __name__ == "__main__":
    run(main)
