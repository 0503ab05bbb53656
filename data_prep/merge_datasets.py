"""Several tokenized datasets -> one, equal to the bit to preprocessing their texts in one go.

    python data_prep/merge_datasets.py --input shards/ --output-prefix corpus_text_document

The order is that of the words after --input; a folder or a glob pattern gives its datasets sorted by name. Bytes are
copied, nothing is decoded, and memory does not grow with the data.
"""

import glob
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron_lite.config import ConfigError
from megatron_lite.data.indexed_dataset import IndexedDataset, write_pair
from megatron_lite.files.command_line import Parser, make_folder_of, run
from megatron_lite.files.reading import read_object
from megatron_lite.preprocessing.journal import disk_error

COPY_BYTES = 1 << 24
PIECE = 1 << 20  # entries of an index handled at a time
SAME_TOKENIZER = ("tokenizer_fingerprint", "eod", "append_eod")


def find_prefixes(words: Sequence[str]) -> list[str]:
    """The path prefixes that --input's words name. Raises ConfigError for a word without a pair behind it."""
    prefixes: list[str] = []
    for word in words:
        names = [word]
        if Path(word).is_dir():
            names = list(map(str, Path(word).glob("*.idx")))
        elif any(sign in word for sign in "*?["):
            names = glob.glob(word, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        if not names:
            raise ConfigError(f"--input '{word}' names no dataset, wanted PREFIX, a folder or a pattern")
        prefixes += sorted(set(map(_prefix, names)))
    prefix, times = Counter(prefixes).most_common(1)[0]
    if times > 1:
        raise ConfigError(f"--input names '{prefix}' {times} times, wanted each dataset once")
    return prefixes


def _prefix(word: str) -> str:
    return word.removesuffix(".bin").removesuffix(".idx").removesuffix(".json")


def read_about(prefix: str) -> dict[str, Any] | None:
    """What PREFIX.json says of the tokenizer; None for a dataset that another program made."""
    path = Path(f"{prefix}.json")
    return read_object(path, f"'{path}' (wanted what preprocess_data.py wrote)") if path.exists() else None


def check_same(datasets: Sequence[IndexedDataset], about: Sequence[dict[str, Any] | None]) -> None:
    """Raise ConfigError unless all have one dtype and, where that is known, one tokenizer and use of eod."""
    for dataset in datasets[1:]:
        if dataset.dtype != datasets[0].dtype:
            raise ConfigError(
                f"{dataset.idx_path}: dtype is {dataset.dtype.name}, wanted {datasets[0].dtype.name} "
                f"as in {datasets[0].idx_path}"
            )
    known = [(dataset.path_prefix, facts) for dataset, facts in zip(datasets, about) if facts is not None]
    for prefix, facts in known[1:]:
        first_prefix, first = known[0]
        for name in SAME_TOKENIZER:
            if facts.get(name) != first.get(name):
                raise ConfigError(
                    f"{prefix}.json: {name.replace('_', ' ')} is {facts.get(name)} ({facts.get('tokenizer')}), "
                    f"wanted {first.get(name)} ({first.get('tokenizer')}) as in {first_prefix}.json"
                )


def copied(datasets: Sequence[IndexedDataset]) -> Iterator[bytes]:
    """The tokens of all datasets, as bytes."""
    total = sum(dataset.bin_size for dataset in datasets)
    with tqdm(total=total, unit="B", unit_scale=True, desc="merging") as bar:
        for dataset in datasets:
            with Path(dataset.bin_path).open("rb") as file:
                while piece := file.read(COPY_BYTES):
                    yield piece
                    bar.update(len(piece))


def lengths(datasets: Sequence[IndexedDataset]) -> Iterator[np.ndarray]:
    """The tokens of each sequence."""
    for dataset in datasets:
        for first in range(0, len(dataset), PIECE):
            yield dataset.sequence_lengths[first : first + PIECE]


def boundaries(datasets: Sequence[IndexedDataset]) -> Iterator[np.ndarray]:
    """The number of sequences up to the end of each document."""
    before = 0
    for dataset in datasets:
        for first in range(1, dataset.num_documents + 1, PIECE):
            yield dataset.document_indices[first : first + PIECE] + before
        before += len(dataset)


def main(argv: Sequence[str]) -> None:
    """Parse `argv`, check that the datasets fit together, merge them."""
    parser = Parser("Merge tokenized datasets.")
    parser.add_argument("--input", nargs="+", required=True, help="prefixes, folders or glob patterns")
    parser.add_argument("--output-prefix", required=True, help="path of the result without .bin or .idx")
    arguments = parser.parse_args(argv)
    output = _prefix(arguments.output_prefix)
    prefixes = find_prefixes(arguments.input)
    if Path(output).resolve() in [Path(prefix).resolve() for prefix in prefixes]:
        raise ConfigError(f"--output-prefix '{output}' is one of the inputs, wanted another name")
    make_folder_of(Path(output), "--output-prefix")
    started = time.perf_counter()
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    about = [read_about(prefix) for prefix in prefixes]
    check_same(datasets, about)
    unknown = [prefix for prefix, facts in zip(prefixes, about) if facts is None]
    if unknown and len(prefixes) > 1:
        print(f"note: no .json beside {unknown[0]}, so its tokenizer cannot be compared", file=sys.stderr)
    try:
        write_pair(
            output,
            datasets[0].dtype,
            copied(datasets),
            partial(lengths, datasets),
            partial(boundaries, datasets),
            None if unknown else about[0],
        )
    except OSError as error:
        raise disk_error(error, output) from None
    for dataset in datasets:
        print(
            f"{dataset.num_documents:>15,} documents {dataset.num_tokens:>17,} tokens  {dataset.path_prefix}"
        )
    documents, tokens = (sum(getattr(d, name) for d in datasets) for name in ("num_documents", "num_tokens"))
    seconds = time.perf_counter() - started
    print(f"{documents:>15,} documents {tokens:>17,} tokens  {output}.bin and .idx, in {seconds:.1f} s")


if __name__ == "__main__":
    run(main)
