"""Text in any form -> token ids in Megatron's indexed format, PREFIX_KEY_document.bin and .idx.

    python data_prep/preprocess_data.py --input corpus.jsonl --output-prefix corpus --append-eod \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model --workers 8

The input is read once, in order, by this process; workers check, parse and tokenize; this process writes what they
give back, in the order of the input, so the number of workers never shows in the output. What is written grows in
PREFIX.partial and gets its name when it is whole; after an interruption --resume goes on from there.
"""

import math
import os
import signal
import sys
import time
from argparse import SUPPRESS, Namespace
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from itertools import dropwhile
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron_lite.config import ConfigError
from megatron_lite.data.indexed_dataset import best_dtype
from megatron_lite.data.tokenizer import Tokenizer, add_tokenizer_flags, build_tokenizer, tokenizer_config
from megatron_lite.files.command_line import Parser, make_folder_of, number, run
from megatron_lite.preprocessing import text_files
from megatron_lite.preprocessing.encoding import ChunkEncoder, Encoded, EncodingOptions
from megatron_lite.preprocessing.journal import Journal, disk_error
from megatron_lite.preprocessing.records import described, refusal
from megatron_lite.preprocessing.text_files import Chunk
from megatron_lite.preprocessing.workers import map_in_order

MAX_EXAMPLES = 3  # bad documents shown of each kind
SENTENCES = "sentences are not split"
NO_EFFECT = {
    "--partitions": "the output is in the order of the input for any --workers",
    "--keep-sequential-samples": "the order is always kept",
    "--keep-newlines": SENTENCES,
    "--lang": SENTENCES,
    "--dataset-impl": "the indexed format is the only one",
}


@dataclass
class Tally:
    """Where the run stands: what was counted so far, and the position in the input that it stands for."""

    documents: int = 0
    empty: int = 0
    tokens: int = 0  # of all keys
    text_bytes: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    path: str = ""  # of the file that is being read
    position: int = 0  # of the next byte or row in it

    def skipped_words(self) -> str:
        """How many documents were left out, and for what: '3: 2 null, 1 invalid JSON'."""
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.skipped.items()))
        return f"{sum(self.skipped.values()):,}{f': {kinds}' if kinds else ''}"


class Input:
    """What this run reads: the spans of its files, or a part of a dataset of the `datasets` library."""

    def __init__(self, arguments: Namespace) -> None:
        """Find and identify what the flags name. Raises ConfigError for a name without files or without access."""
        files = [text_files.identify(path) for path in text_files.find_files(arguments.input or [])]
        self.files = {file.path: file for file in files}
        self.shard = (arguments.num_shards, arguments.shard_id)
        self.spans = text_files.split_spans(files, *self.shard)
        self.keys = tuple(arguments.json_keys)
        self.max_document_bytes = int(arguments.max_document_megabytes * 1e6)
        self.dataset: tuple[str, str, str | None] | None = None
        self.words = f"--input {' '.join(arguments.input or ())}"  # that named it, for messages
        if arguments.dataset:
            self.dataset = (arguments.dataset, arguments.dataset_split, arguments.dataset_config)
            self.words = f"--dataset {arguments.dataset}"

    def chunks(self, start: Tally) -> Iterator[Chunk]:
        """The chunks from the position of `start` on."""
        if self.dataset is not None:
            yield from text_files.read_dataset(*self.dataset, self.keys, self.shard, start.position)
            return
        rest = list(dropwhile(lambda span: span.file.path != start.path, self.spans)) or self.spans
        for span in rest:
            begin = max(span.start, start.position if span.file.path == start.path else 0)
            yield from text_files.read_chunks(replace(span, start=begin), self.keys, self.max_document_bytes)

    @property
    def total_bytes(self) -> int | None:
        """Bytes of text to come, None where only reading tells."""
        files = [span.file for span in self.spans]
        if self.dataset or any(file.compression or file.kind in ("parquet", "refused") for file in files):
            return None
        return sum((span.file.size if span.end is None else span.end) - span.start for span in self.spans)


def output_names(arguments: Namespace) -> list[str]:
    """Path prefix of each key's dataset."""
    shard = f"_{arguments.shard_id:05d}-of-{arguments.num_shards:05d}" if arguments.num_shards > 1 else ""
    return [f"{arguments.output_prefix}_{key}_document{shard}" for key in arguments.json_keys]


def signature(source: Input, options: EncodingOptions, tokenizer: Tokenizer) -> dict[str, Any]:
    """What has to be the same for a resumed run."""
    files = [[path, item.size, Path(path).stat().st_mtime_ns] for path, item in source.files.items()]
    return {
        "input": files or list(source.dataset or ()),
        "shard": list(source.shard),
        "json keys": list(source.keys),
        "tokenizer": tokenizer.fingerprint,
        "append eod": options.append_eod,
        "longest document": options.max_document_bytes,
        "counts": [item.name for item in fields(Tally)],  # other releases count other things
    }


def about(tokenizer: Tokenizer, options: EncodingOptions) -> list[dict[str, Any]]:
    """What NAME.json says of each dataset: which tokenizer made it."""
    facts = {
        "tokenizer": tokenizer.name,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "append_eod": options.append_eod,
        "dtype": options.dtype,
    }
    return [dict(facts, key=key) for key in options.keys]


def take(tally: Tally, chunk: Chunk, encoded: Encoded, source: Input, skip_bad: bool) -> None:
    """Count a chunk. Raises ConfigError at the first bad document unless such are skipped."""
    for bad in encoded.bad:
        shown = tally.skipped.get(bad.kind, 0)
        if not skip_bad:
            raise refusal(chunk, bad, source.files)
        if shown < MAX_EXAMPLES:
            tally.examples.append(described(chunk, bad, source.files))
        tally.skipped[bad.kind] = shown + 1
    if encoded.lengths:
        tally.documents += len(encoded.lengths[0])
        tally.empty += int(np.all([lengths == 0 for lengths in encoded.lengths], axis=0).sum())
    tally.tokens += sum(map(len, encoded.tokens))
    tally.text_bytes += encoded.text_bytes
    tally.path, tally.position = chunk.path, chunk.end


def tokenize(
    source: Input, options: EncodingOptions, journal: Journal, tally: Tally, arguments: Namespace
) -> None:
    """Read, encode and append everything from where `tally` stands, committing every few seconds.

    Progress is a bar on a terminal; in a log a line every ten seconds, or after every --log-interval documents.
    """
    before, started = tally.tokens, time.monotonic()
    last_commit, next_line = started, arguments.log_interval or math.inf
    results = map_in_order(
        partial(ChunkEncoder, options),
        source.chunks(tally),
        arguments.workers,
        size=lambda chunk: chunk.size,
        keep=lambda chunk: replace(chunk, data=None),
    )
    bar = tqdm(
        total=source.total_bytes,
        unit="B",
        unit_scale=True,
        mininterval=0.2 if sys.stderr.isatty() else 10,
        disable=arguments.log_interval is not None,
        dynamic_ncols=True,
        desc="tokenizing",
        delay=1,  # a wrong input is reported without a bar before it
    )
    with bar, closing(results):  # which ends the workers, whatever happened
        for chunk, encoded in results:
            take(tally, chunk, encoded, source, arguments.skip_bad_documents)
            for key, (tokens, lengths) in enumerate(zip(encoded.tokens, encoded.lengths)):
                journal.append(key, tokens, lengths)
            del encoded  # not to be held while the next document is read
            now, new = time.monotonic(), tally.tokens - before
            rate = f"{new / max(1e-9, now - started):,.0f} tokens/s"
            bar.set_postfix_str(f"{tally.documents:,} documents, {rate}", refresh=False)
            bar.update(chunk.size)
            if tally.documents >= next_line:
                print(f"{tally.documents:,} documents, {new:,} tokens, {rate}", file=sys.stderr, flush=True)
                next_line = tally.documents + arguments.log_interval
            if now - last_commit >= arguments.commit_interval:
                journal.commit(asdict(tally))
                last_commit = time.monotonic()
    if arguments.num_shards == 1 and tally.documents == tally.empty:
        what = f"{tally.documents:,} documents, all without text" if tally.documents else "no document"
        if tally.skipped:
            what += f" (bad ones were left out, {tally.skipped_words()}; first {tally.examples[0]})"
        raise ConfigError(f"{source.words} holds {what}, wanted text to tokenize")
    journal.commit(asdict(tally), complete=True)


def preprocess(arguments: Namespace) -> None:
    """The whole run. Raises ConfigError and RunError; what was written aside stays only if --resume can use it."""
    tokenizer_flags = tokenizer_config(arguments)
    tokenizer = build_tokenizer(tokenizer_flags, arguments.vocab_size)
    source = Input(arguments)
    options = EncodingOptions(
        tokenizer=tokenizer_flags,
        vocab_size=arguments.vocab_size,
        keys=source.keys,
        append_eod=arguments.append_eod,
        dtype=np.dtype(best_dtype(tokenizer.vocab_size)).name,
        max_document_bytes=source.max_document_bytes,
    )
    names = output_names(arguments)
    make_folder_of(Path(names[0]), "--output-prefix")
    shard = f".{arguments.shard_id:05d}" if arguments.num_shards > 1 else ""
    prefix, facts = f"{arguments.output_prefix}{shard}", signature(source, options, tokenizer)
    journal = Journal(prefix, names, options.dtype, facts, arguments.resume)
    tally = Tally(**(journal.state or {}))
    if journal.state:
        print(f"going on after {tally.documents:,} documents, {tally.tokens:,} tokens", file=sys.stderr)
    started, before = time.monotonic(), tally.tokens
    try:
        if not journal.complete:
            tokenize(source, options, journal, tally, arguments)
        journal.publish(about(tokenizer, options))
    except BaseException as error:
        if isinstance(error, OSError):
            error = disk_error(error, str(journal.folder))
        if journal.state is None:
            journal.remove()
        else:
            journal.release()
            if isinstance(error, ConfigError | RuntimeError | KeyboardInterrupt):
                hint = f"what was done is kept in '{journal.folder}': --resume goes on"
                error = type(error)(f"{error}; {hint}".removeprefix("; "))
        raise error from None
    seconds = time.monotonic() - started
    print(f"tokenizer   {tokenizer.name}, {tokenizer.vocab_size:,} tokens, eod {tokenizer.eod}")
    summarise(tally, options)
    rate = (tally.tokens - before) / max(seconds, 1e-9)
    print(f"time        {seconds:,.1f} s, {rate:,.0f} tokens/s with {arguments.workers} workers")
    for name in names:
        size = Path(f"{name}.bin").stat().st_size
        print(f"written     {name}.bin ({size:,} bytes, {options.dtype}) and .idx")


def summarise(tally: Tally, options: EncodingOptions) -> None:
    """Print what the documents gave."""
    empty = f", {tally.empty:,} of them without text" if tally.empty else ""
    print(f"documents   {tally.documents:,}{empty}")
    if not options.append_eod:
        print("            not ended by eod: --append-eod was not given")
    ratio = f", {tally.text_bytes / tally.tokens:.2f} bytes of text each" if tally.tokens else ""
    print(f"tokens      {tally.tokens:,}{ratio}")
    print(f"skipped     {tally.skipped_words()}")
    for example in tally.examples:
        print(f"            {example}")


def main(argv: Sequence[str]) -> None:
    """Parse `argv`, check what argparse cannot, run."""
    arguments = build_parser().parse_args(argv)
    keys = arguments.json_keys
    if arguments.split_sentences:
        raise ConfigError("--split-sentences is not supported: GPT samples run over sentences")
    if bool(arguments.input) == bool(arguments.dataset):
        raise ConfigError("either --input or --dataset is wanted, and not both")
    if len(set(keys)) < len(keys) or any("/" in key for key in keys):
        raise ConfigError(f"--json-keys is {' '.join(keys)}, wanted different keys without '/'")
    if arguments.shard_id >= arguments.num_shards:
        raise ConfigError(
            f"--shard-id is {arguments.shard_id}, wanted less than --num-shards {arguments.num_shards}"
        )
    for flag, reason in NO_EFFECT.items():
        if flag.removeprefix("--").replace("-", "_") in arguments:
            print(f"note: {flag} has no effect: {reason}", file=sys.stderr)
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        preprocess(arguments)
    finally:
        signal.signal(signal.SIGTERM, previous)


def build_parser() -> Parser:
    """The flags of this script: Megatron's, and those for what it cannot do."""
    parser = Parser("Tokenize text into Megatron's indexed format.")
    flag = parser.add_argument_group("input").add_argument
    flag("--input", nargs="+", help="files, folders, glob patterns: JSON lines, text, parquet; .gz, .zst")
    flag("--json-keys", nargs="+", default=["text"], help="keys or columns; one dataset each")
    flag("--dataset", help="instead of --input: name or folder for the `datasets` library")
    flag("--dataset-split", default="train", help="split of --dataset (default: train)")
    flag("--dataset-config", help="configuration name of --dataset")
    flag("--skip-bad-documents", action="store_true", help="leave them out and count them by kind")
    megabytes = {"type": number(0.001, float, 2000), "default": 64.0}
    flag("--max-document-megabytes", **megabytes, help="longer ones are bad documents (default: 64)")
    flag("--num-shards", type=number(1), default=1, help="jobs that the input is cut into (default: 1)")
    flag("--shard-id", type=number(0), default=0, help="number of this job, from 0 (default: 0)")
    add_tokenizer_flags(parser)
    flag = parser.add_argument_group("output").add_argument
    flag("--output-prefix", required=True, help="PREFIX of PREFIX_KEY_document.bin and .idx")
    flag("--append-eod", action="store_true", help="end each document with the tokenizer's eod")
    flag("--resume", action="store_true", help="go on with PREFIX.partial if there is one")
    seconds = {"type": number(0, float), "default": 20.0}
    flag("--commit-interval", **seconds, help="seconds between points to resume from (default: 20)")
    flag = parser.add_argument_group("run").add_argument
    cores = len(os.sched_getaffinity(0))
    flag("--workers", type=number(0), default=cores, help="processes (default: one a core); 0 = none")
    flag("--log-interval", type=number(1), help="documents between lines of log instead of a bar")
    flag = parser.add_argument_group("Megatron's, without effect here").add_argument
    flag("--split-sentences", action="store_true", help="refused: for BERT-style samples")
    for name in NO_EFFECT:
        flag(name, nargs="?", default=SUPPRESS, help="no effect")
    return parser


if __name__ == "__main__":
    run(main)
