"""Index arrays against one pass over arrays of the same sizes; samples against a bare loop over a memory map."""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from megatron_lite.config import Config, DataConfig, TrainingConfig
from megatron_lite.data.gpt_dataset import GPTDataset, Part, build_entry
from megatron_lite.data.index_cache import IndexCache
from megatron_lite.data.index_kernels import build_blend_index
from megatron_lite.data.indexed_dataset import IndexedDataset, write_index
from megatron_lite.data.loader import Loader
from megatron_lite.data.samples import SampleOptions
from tools.benchmarks.comparison import (
    Options,
    Row,
    Table,
    cost,
    quartiles,
    refuse_different,
    speed,
    take_turns,
)

SEED = 1234
MEAN_TOKENS = 775  # of a document: what web pages have, in GPT-2's tokens
VOCABULARY = 50_000
MICRO_BATCH = 4
OPEN_SECONDS = 0.1

Digests = dict[str, object]


def run_index(options: Options) -> list[Table]:
    """Index arrays of 10 million documents against one pass over the arrays; opening them; a blend."""
    documents, sequence_length = (20_000, 2048) if options.quick else (10_000_000, 2048)
    with tempfile.TemporaryDirectory() as folder:
        prefix = write_documents(Path(folder), documents, with_tokens=False)
        opened, seconds = open_repeatedly(prefix, options.repeats)
        one_epoch = Part(0, documents, None)
        samples = (opened.num_tokens - 1) // sequence_length
        digests: Digests = {}
        turns = {
            "ours": our_index(prefix, one_epoch, sequence_length, digests),
            "one pass": one_pass(prefix, samples, digests),
        }
        taken = take_turns(turns, options.repeats)
    refuse_different("the order of documents and of samples", digests)
    wanted = OPEN_SECONDS
    open_row = Row("open the dataset", f"{wanted} s", *(s / wanted for s in quartiles(seconds)), at_most=1.0)
    title = f"index: {documents:,} documents, {opened.num_tokens:,} tokens, {samples:,} samples"
    best = ", ".join(f"{name} {min(times):.3f} s" for name, times in taken.items())
    facts = [
        f"Fastest: {best}; opened, every length and pointer checked, in {min(seconds):.3f} s.",
        "One pass: the lengths read, both orders shuffled by numpy's RandomState (which bit-equality with Megatron "
        "prescribes), lengths gathered in that order and summed up, arrays of the result's sizes written.",
        blend_fact(20_000 if options.quick else 10_000_000),
    ]
    return [
        Table(
            title, [cost("ours", taken, "one pass", at_most=1.5, note="times its seconds"), open_row], facts
        )
    ]


def run_samples(options: Options) -> list[Table]:
    """Random samples against a bare loop over a memory map; tokens a second of the loader."""
    documents, length, turn = (400, 256, 64) if options.quick else (130_000, 4096, 4000)
    with tempfile.TemporaryDirectory() as folder:
        prefix = write_documents(Path(folder), documents, with_tokens=True)
        dataset = open_samples(prefix, documents, length)
        chosen = np.random.default_rng(SEED).integers(0, len(dataset), turn).tolist()
        tokens = np.memmap(f"{prefix}.bin", dtype="<u2", mode="r")
        view = np.asarray(
            tokens
        )  # what ours reads from: a slice of np.memmap itself costs a microsecond more
        pieces = [list(piece_bounds(dataset, index)) for index in chosen]
        starts = np.random.default_rng(SEED).integers(0, len(tokens) - length - 1, turn).tolist()
        work = {
            "ours": lambda: ours(dataset, chosen),
            "bare memmap loop": lambda: bare_loop(tokens, pieces, length),
            "bare array loop": lambda: bare_loop(view, pieces, length),
        }
        refuse_different("the tokens read", {name: digest(read()) for name, read in work.items()})
        work |= {"memmap windows": lambda: bare_windows(tokens, starts, length)}
        taken = take_turns({name: clocked(read) for name, read in work.items()}, options.repeats)
        rates = {workers: loader_rate(dataset, workers, turn) for workers in (0, 1, 2)}
    title = f"samples: {turn:,} random samples of {length:,} tokens, documents of {MEAN_TOKENS} on average"
    pieces_each = sum(map(len, pieces)) / len(pieces)
    return [
        Table(
            title,
            [
                speed(
                    "ours", taken, "bare memmap loop", at_least=0.8, note="same bytes, places known before"
                ),
                speed("ours", taken, "bare array loop", note="the same over np.asarray(memmap)"),
                speed("ours", taken, "memmap windows", note="as many tokens in one piece, no documents"),
            ],
            [
                f"{pieces_each:.1f} pieces a sample. Fastest, Mtokens/s: "
                + ", ".join(f"{name} {turn * length / min(times) / 1e6:.1f}" for name, times in taken.items())
                + ". Ours looks the places up and checks every id against the vocabulary.",
                "Loader, Mtokens/s: "
                + ", ".join(f"{workers} workers {rate / 1e6:.1f}" for workers, rate in rates.items())
                + ".",
            ],
        )
    ]


def write_documents(folder: Path, documents: int, with_tokens: bool) -> str:
    """A dataset of so many documents; without tokens its .bin is a hole of the right size. Returns the prefix."""
    random = np.random.default_rng(SEED)
    lengths = np.ceil(random.exponential(MEAN_TOKENS, documents)).astype(np.int32)
    prefix = folder / "documents"
    write_index(
        prefix.with_suffix(".idx"),
        np.dtype("<u2"),
        lambda: [lengths],
        lambda: [np.arange(1, documents + 1)],
    )
    total = int(lengths.sum(dtype=np.int64))
    with prefix.with_suffix(".bin").open("wb") as file:
        if with_tokens:
            file.write(random.integers(0, VOCABULARY, total, dtype=np.uint16).data)
        file.truncate(2 * total)
    return str(prefix)


def open_repeatedly(prefix: str, repeats: int) -> tuple[IndexedDataset, list[float]]:
    """The dataset, and the seconds that it takes to open it with all checks."""
    seconds = []
    for _ in range(1 + repeats):
        started = time.perf_counter()
        dataset = IndexedDataset(prefix)
        seconds.append(time.perf_counter() - started)
    return dataset, seconds[1:]


def our_index(prefix: str, part: Part, sequence_length: int, digests: Digests) -> Callable[[], float]:
    """A turn of what a run does that finds no cached index: hash the lengths, build the three arrays."""

    def turn() -> float:
        source = IndexedDataset(prefix, trusted=True)
        options = SampleOptions(sequence_length)
        started = time.perf_counter()
        entry = build_entry(source, part, options, SEED, IndexCache(None), store=False)
        seconds = time.perf_counter() - started
        arrays = entry.arrays
        digests["ours"] = order_digest(
            arrays["document_index"], arrays["shuffle_index"], arrays["sample_index"]
        )
        return seconds

    return turn


def one_pass(prefix: str, samples: int, digests: Digests) -> Callable[[], float]:
    """A turn of the least that any builder of these arrays does: each array is gone over once."""

    def turn() -> float:
        source = IndexedDataset(prefix, trusted=True)
        started = time.perf_counter()
        random = np.random.RandomState(SEED)
        lengths = np.ascontiguousarray(source.sequence_lengths)
        documents = np.arange(len(lengths), dtype=np.int32)
        random.shuffle(documents)
        ends = np.cumsum(lengths[documents], dtype=np.int64)
        bounds = np.full((samples + 1, 2), ends[-1])
        order = np.arange(samples, dtype=np.uint32)
        random.shuffle(order)
        seconds = time.perf_counter() - started
        digests["one pass"] = order_digest(documents, order, bounds)
        return seconds

    return turn


def order_digest(documents: np.ndarray, order: np.ndarray, bounds: np.ndarray) -> tuple[object, ...]:
    """What two builders of the same index agree in: a sum that knows the order of either shuffle, and all sizes."""
    weighted = (int(np.dot(array, np.arange(len(array), dtype=np.float64))) for array in (documents, order))
    return *weighted, bounds.shape, bounds.dtype.name, documents.dtype.name, order.dtype.name


def blend_fact(samples: int) -> str:
    """Seconds for a blend's arrays."""
    started = time.perf_counter()
    build_blend_index(np.array([0.3, 0.7]), samples)
    return f"A blend of {samples:,} samples from 2 sources: {time.perf_counter() - started:.2f} s."


def open_samples(prefix: str, documents: int, length: int) -> GPTDataset:
    """One epoch of a dataset, ids checked against the vocabulary as in a run."""
    source, options = IndexedDataset(prefix), SampleOptions(length, vocab_size=VOCABULARY)
    entry = build_entry(source, Part(0, documents, None), options, SEED, IndexCache(None), store=False)
    return GPTDataset(source, entry, options, "train")


def piece_bounds(dataset: GPTDataset, index: int) -> Iterator[tuple[int, int]]:
    """(begin, end) in the file's tokens of each piece that a sample is made of, from the arrays alone."""
    arrays, lengths = dataset.entry.arrays, dataset.source.sequence_lengths
    begins = dataset.source.sequence_pointers // 2
    place = int(arrays["shuffle_index"][index])
    (first, offset), (last, end) = arrays["sample_index"][place : place + 2].tolist()
    for position in range(first, last + 1):
        document = int(arrays["document_index"][position])
        start = offset if position == first else 0
        stop = end + 1 if position == last else int(lengths[document])
        yield int(begins[document]) + start, int(begins[document]) + stop


def ours(dataset: GPTDataset, chosen: list[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(tokens, labels) of the samples by way of the dataset, in the microbatches that a loader asks for."""
    for first in range(0, len(chosen), MICRO_BATCH):
        batch = dataset.batch(chosen[first : first + MICRO_BATCH])
        yield from zip(batch["tokens"], batch["labels"])


def bare_loop(
    tokens: np.ndarray, pieces: list[list[tuple[int, int]]], length: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The same samples by someone who knows where each piece lies."""
    for parts in pieces:
        text, filled = np.empty(length + 1, np.int64), 0
        for begin, end in parts:
            text[filled : filled + end - begin] = tokens[begin:end]
            filled += end - begin
        yield text[:-1].copy(), text[1:].copy()


def bare_windows(
    tokens: np.ndarray, starts: list[int], length: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The loop that small trainers have: windows at random places, whatever documents lie there."""
    for start in starts:
        yield (
            tokens[start : start + length].astype(np.int64),
            tokens[start + 1 : start + 1 + length].astype(np.int64),
        )


def clocked(read: Callable[[], Iterator[object]]) -> Callable[[], float]:
    """A turn: all samples of an iterator."""

    def turn() -> float:
        started = time.perf_counter()
        for _ in read():
            pass
        return time.perf_counter() - started

    return turn


def digest(samples: Iterator[tuple[np.ndarray, np.ndarray]]) -> list[int]:
    """Sums that know the order: of tokens and labels of each sample."""
    return [int(np.dot(x, np.arange(len(x))) + 31 * np.dot(y, np.arange(len(y)))) for x, y in samples]


def loader_rate(dataset: GPTDataset, workers: int, samples: int) -> float:
    """Tokens a second that the loader hands out in global batches of 16, after a few to start with."""
    config = Config(
        data=DataConfig(num_workers=workers), training=TrainingConfig(micro_batch_size=MICRO_BATCH)
    )
    loader = Loader(dataset, config, 0, 1, 0)
    loader.next_batch(16)
    started = time.perf_counter()
    for _ in range(samples // 16):
        loader.next_batch(16)
    seconds = time.perf_counter() - started
    loader.close()
    return samples // 16 * 16 * dataset.options.sequence_length / seconds
