"""A reconstruction of how Megatron-LM's tools/preprocess_data.py works, as a baseline; written from its structure.

    python tools/benchmarks/megatron_preprocess.py INPUT PREFIX TOKENIZER_FOLDER WORKERS

A pool of processes takes lines 32 at a time (imap); each line is parsed and goes alone through transformers' tokenizer,
first to the texts of tokens, then to ids, as Megatron-core's wrapper does; lists of ids travel back pickled, and the
first process turns each document into an array and writes it. Prints the seconds from the start of the pool to the
finished index: imports and the building of a first tokenizer are not counted.
"""

import json
import multiprocessing
import sys
import time
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

DOCUMENTS_A_TASK = 32


class Encoder:
    """What each process of the pool holds; Megatron keeps the tokenizer on the class, too."""

    tokenizer = None

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def start(self) -> None:
        """Once in each process."""
        Encoder.tokenizer = AutoTokenizer.from_pretrained(self.folder)

    def encode(self, line: str) -> tuple[list[int], list[int], int]:
        """(ids, lengths of its sequences, size) of one document."""
        text = json.loads(line)["text"]
        ids = Encoder.tokenizer.convert_tokens_to_ids(Encoder.tokenizer.tokenize(text))
        if ids:
            ids.append(Encoder.tokenizer.eos_token_id)
        return ids, [len(ids)] if ids else [], len(line)


def write(path: str, prefix: str, folder: str, workers: int) -> float:
    """Tokenize a file of JSON lines; returns the seconds."""
    vocabulary = len(AutoTokenizer.from_pretrained(folder))
    dtype = np.uint16 if vocabulary < 65500 else np.int32
    started = time.perf_counter()
    encoder = Encoder(folder)
    lengths: list[int] = []
    boundaries = [0]
    with (
        Path(path).open(encoding="utf-8") as lines,
        Path(f"{prefix}.bin").open("wb") as output,
        multiprocessing.Pool(workers, initializer=encoder.start) as pool,
    ):
        for ids, sequences, _ in pool.imap(encoder.encode, lines, DOCUMENTS_A_TASK):
            output.write(np.array(ids, dtype=dtype).tobytes(order="C"))
            lengths.extend(sequences)
            boundaries.append(len(lengths))
    sizes = np.array(lengths, np.int32)
    pointers = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)[:-1] * np.dtype(dtype).itemsize))
    with Path(f"{prefix}.idx").open("wb") as index:
        for array in (sizes, pointers.astype(np.int64), np.array(boundaries, np.int64)):
            index.write(array.tobytes(order="C"))
    return time.perf_counter() - started


if __name__ == "__main__":
    print(write(*sys.argv[1:4], int(sys.argv[4])))
