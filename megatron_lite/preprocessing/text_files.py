"""Files of text, in any of their forms, as chunks of whole documents in a fixed order.

What a file is depends on its content, never on its name alone: JSON lines, plain text (one document a file),
parquet; the first two also inside gzip or zstd. Reading stays at this level of bytes and positions, so that one
process can hand chunks to many; `megatron_lite.preprocessing.records` turns a chunk into checked texts.
"""

import glob
import io
import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from megatron_lite.config.declare import ConfigError
from megatron_lite.files.foreign_files import foreign_content

# Of decompressed text: small enough to spread over workers, large enough to amortise a hop.
CHUNK_BYTES = 1 << 19
_HEAD_BYTES = 1 << 16
_BOM = b"\xef\xbb\xbf"
_JSON_OBJECT = re.compile(rb'\s*\{\s*["}]')
_JSON_ARRAY = re.compile(rb'\s*\[\s*[\[{"]')
_UTF_16_OR_32 = (b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff", b"{\0", b"\0{", b"[\0")

Problem = tuple[str, str]  # kind of problem, sentence


@dataclass(frozen=True)
class TextFile:
    """One input file and what its content is.

    kind: jsonl | text | parquet | empty | refused; `problem` says why it is refused.
    size: bytes on disk.
    """

    path: str
    kind: str
    compression: str | None
    size: int
    problem: Problem | None = None


@dataclass(frozen=True)
class Span:
    """A part of a file: bytes of decompressed text for jsonl (at line starts), rows for parquet, 0 for the rest.

    end None = to the end of the file.
    """

    file: TextFile
    start: int = 0
    end: int | None = None


@dataclass(frozen=True)
class Chunk:
    """Whole documents that stand together in one file.

    Attributes:
        path: of the file, or the name of the dataset.
        kind: jsonl (data = complete lines), text (data = one document), rows (data = list of tuples, one value a
            key), problem (data = Problem: nothing readable here).
        offset: position of the first byte or row in the decompressed file.
        end: position after the last.
        size: bytes of text in it, roughly for rows.
    """

    path: str
    kind: str
    data: Any
    offset: int
    end: int
    size: int = 0


def find_files(inputs: Sequence[str]) -> list[Path]:
    """The files that `--input` words name: files, folders (all files below, sorted), glob patterns (sorted).

    Names that begin with a dot or an underscore are left out of folders. Raises ConfigError for a word that
    names nothing.
    """
    paths: list[Path] = []
    for word in inputs:
        path = Path(word)
        if path.is_dir():
            below = [item for item in path.rglob("*") if item.is_file()]
            files = [item for item in below if not any(p[0] in "._" for p in item.relative_to(path).parts)]
        elif path.exists():
            files = [path]
        else:
            # Path.glob takes no absolute pattern, and matches hidden names.
            names = glob.glob(word, recursive=True)  # noqa: PTH207
            files = [Path(name) for name in names if Path(name).is_file()]
        if not files:
            what = "is a folder without files" if path.is_dir() else "names no file"
            raise ConfigError(f"--input '{word}' {what}, wanted a file, a folder or a glob pattern")
        paths.extend(sorted(files))
    path, times = Counter(paths).most_common(1)[0] if paths else ("", 0)
    if times > 1:
        raise ConfigError(f"--input names '{path}' {times} times, wanted each file once")
    return paths


def identify(path: Path) -> TextFile:
    """Tell by the first bytes what a file is. Raises ConfigError if it cannot be opened."""
    try:
        with path.open("rb") as stream:
            magic = stream.read(8)
        size = path.stat().st_size
    except OSError as error:
        raise ConfigError(f"--input '{path}' cannot be read: {error.strerror}") from None
    compression = "gzip" if magic[:2] == b"\x1f\x8b" else "zstd" if magic[:4] == b"\x28\xb5\x2f\xfd" else None
    file = TextFile(str(path), "refused", compression, size)
    try:
        with open_stream(file) as stream:
            head = stream.read(_HEAD_BYTES)
    except OSError as error:
        return replace(file, problem=_damaged(file, error))
    if problem := _problem(file, head):
        return replace(file, problem=problem)
    if head[:4] == b"PAR1" and compression is None:
        return replace(file, kind="parquet")
    json_lines = _is_named_json(file) or _JSON_OBJECT.match(head.removeprefix(_BOM))
    return replace(file, kind="jsonl" if head and json_lines else "text" if head else "empty")


def _is_named_json(file: TextFile) -> bool:
    return bool({suffix.lower() for suffix in Path(file.path).suffixes} & {".json", ".jsonl", ".ndjson"})


def _problem(file: TextFile, head: bytes) -> Problem | None:
    """Why a file that begins with `head` holds no documents."""
    if head.startswith(_UTF_16_OR_32):
        return "UTF-16", "is UTF-16 or UTF-32 text, wanted UTF-8"
    text, named_json = head.removeprefix(_BOM), _is_named_json(file)
    if _JSON_ARRAY.match(text) or (named_json and text.lstrip().startswith(b"[")):
        return "JSON array", "holds one JSON array, wanted JSON lines: one object a line"
    what = foreign_content(text) if head else ""
    if what and (named_json or " page" not in what):  # a page can be a text
        return "unknown format", f"holds no JSON lines, text or parquet{what}"
    return None


def _damaged(file: TextFile, error: BaseException) -> Problem:
    return "damaged file", f"is a damaged {file.compression or file.kind} file: {error}"


def split_spans(files: Sequence[TextFile], num_shards: int, shard_id: int) -> list[Span]:
    """The part of the input that shard `shard_id` of `num_shards` tokenizes.

    The shards, in order, are the whole input in order, so their outputs merge to what one run gives. JSON lines
    that are not compressed are cut at line starts near equal numbers of bytes; any other file goes whole to the
    shard where it begins.
    """
    total = sum(file.size for file in files)
    low, high = total * shard_id // num_shards, total * (shard_id + 1) // num_shards
    last = shard_id == num_shards - 1
    spans, position = [], 0
    for file in files:
        begin, finish = position, position + file.size
        position = finish
        if file.kind == "jsonl" and file.compression is None:
            start = line_start(file, low - begin)
            end = file.size if last else line_start(file, high - begin)
            if start < end:
                spans.append(Span(file, start, end))
        elif low <= begin < high or (last and begin >= low):
            spans.append(Span(file))
    return spans


def line_start(file: TextFile, offset: int) -> int:
    """The first line start at or after `offset`, within [0, size]."""
    if offset <= 0 or offset >= file.size:
        return min(max(offset, 0), file.size)
    with Path(file.path).open("rb") as stream:
        stream.seek(offset - 1)
        while piece := stream.readline(1 << 20):
            if piece.endswith(b"\n"):
                break
        return stream.tell()


def read_chunks(span: Span, keys: Sequence[str], max_document_bytes: int) -> Iterator[Chunk]:
    """The chunks of a span, in order. `keys` are the columns of a parquet file."""
    file = span.file
    if file.problem is not None:
        if span.start == 0:
            yield Chunk(file.path, "problem", file.problem, 0, 1)
    elif file.kind == "jsonl":
        yield from _read_lines(span, max_document_bytes)
    elif file.kind == "text" and span.start == 0:
        yield _read_text(file, max_document_bytes)
    elif file.kind == "parquet":
        yield from _read_parquet(span, keys)


def open_stream(file: TextFile) -> BinaryIO:
    """The decompressed bytes of a file; only plain files can seek. Raises OSError for a damaged one."""
    if file.compression is None:
        return Path(file.path).open("rb")
    import pyarrow  # optional: only parquet and compressed files need it

    return io.BufferedReader(pyarrow.input_stream(file.path, file.compression), 1 << 17)


def pieces(stream: BinaryIO, size: int) -> Iterator[bytes]:
    """The next `size` bytes, piece by piece."""
    while size > 0 and (piece := stream.read(min(size, 1 << 20))):
        yield piece
        size -= len(piece)


def _read_lines(span: Span, limit: int) -> Iterator[Chunk]:
    path, offset = span.file.path, span.start

    def chunk(kind: str, data: Any, size: int) -> Chunk:
        nonlocal offset
        offset += size
        return Chunk(path, kind, data, offset - size, offset, size if kind == "jsonl" else 0)

    try:
        with open_stream(span.file) as stream:
            if span.file.compression is None:
                stream.seek(offset)
            else:
                deque(pieces(stream, offset), 0)
            while data := stream.read(min(CHUNK_BYTES, (span.end or 1 << 62) - offset)):
                cut = data.rfind(b"\n") + 1
                line = data[cut:] + (stream.readline(limit) if cut < len(data) else b"")
                size = len(line)
                if size <= min(limit, CHUNK_BYTES):
                    yield chunk("jsonl", data[:cut] + line, cut + size)
                    continue
                if cut:
                    yield chunk("jsonl", data[:cut], cut)
                if size <= limit:
                    held, line = [line], b""  # handed over: a generator that waits must not hold a long line
                    yield chunk("jsonl", held.pop(), size)
                    continue
                while not line.endswith(b"\n") and (line := stream.readline(1 << 20)):
                    size += len(line)
                yield chunk("problem", too_long(size, limit), size)
    except OSError as error:
        yield chunk("problem", _damaged(span.file, error), 1)


def too_long(size: int, limit: int) -> Problem:
    """The problem with a document of `size` bytes."""
    return "too long", (
        f"has {size:,} bytes, wanted at most {limit:,} in one document (--max-document-megabytes); "
        "the memory needed grows with the longest document"
    )


def _read_text(file: TextFile, limit: int) -> Chunk:
    try:
        with open_stream(file) as stream:
            data = stream.read(limit + 1)
            size = len(data)
            if size > limit:
                size += sum(map(len, pieces(stream, 1 << 62)))
    except OSError as error:
        return Chunk(file.path, "problem", _damaged(file, error), 0, 1)
    if size > limit:
        return Chunk(file.path, "problem", too_long(size, limit), 0, 1)
    return Chunk(file.path, "text", data.removeprefix(_BOM), 0, 1, size)


def _read_parquet(span: Span, keys: Sequence[str]) -> Iterator[Chunk]:
    import pyarrow  # optional, see open_stream
    import pyarrow.parquet

    path, row = span.file.path, span.start
    try:
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as file:
            names = file.schema_arrow.names
            if missing := [key for key in keys if key not in names]:
                sentence = f"has no column '{missing[0]}', wanted one of its columns: {', '.join(names)}"
                yield Chunk(path, "problem", ("missing key", sentence), 0, 1)
                return
            skip = row
            for batch in file.iter_batches(batch_size=256, columns=list(keys)):
                columns = [batch.column(batch.schema.get_field_index(key))[skip:].to_pylist() for key in keys]
                skip = max(0, skip - len(batch))
                for chunk in _rows(path, columns, row):
                    yield chunk
                    row = chunk.end
    except (pyarrow.ArrowInvalid, UnicodeDecodeError, OSError) as error:
        yield Chunk(path, "problem", _damaged(span.file, error), row, row + 1)


def _rows(path: str, columns: Sequence[Sequence], first: int) -> Iterator[Chunk]:
    """Rows as chunks of about CHUNK_BYTES: a batch of long documents is more than one worker should hold."""
    rows = list(zip(*columns))
    start = size = 0
    for index, row in enumerate(rows):
        size += sum(len(value) if isinstance(value, str) else 8 for value in row)
        if size >= CHUNK_BYTES or index == len(rows) - 1:
            yield Chunk(path, "rows", rows[start : index + 1], first + start, first + index + 1, size)
            start, size = index + 1, 0


def read_dataset(
    name: str,
    split: str,
    config_name: str | None,
    keys: Sequence[str],
    shard: tuple[int, int],
    start: int = 0,
) -> Iterator[Chunk]:
    """The rows of a dataset of the `datasets` library: a folder made by save_to_disk, or what load_dataset takes.

    Args:
        shard: (number of shards, my shard): contiguous rows, so the shards in order are the whole.
        start: first row that is still to be read.

    Raises:
        ConfigError: the library cannot load it, or it lacks a key.
    """
    import datasets  # optional: only --dataset needs it, and it takes a second to import

    try:
        if (Path(name) / "dataset_info.json").exists() or (Path(name) / "dataset_dict.json").exists():
            loaded = datasets.load_from_disk(name)
            loaded = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            loaded = datasets.load_dataset(name, config_name, split=split)
    except Exception as error:  # the library raises many kinds for what it lacks: a name, a split, a file
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"--dataset '{name}' cannot be loaded (split {split}): {first_line}") from None
    if missing := [key for key in keys if key not in loaded.column_names]:
        raise ConfigError(
            f"--json-keys names '{missing[0]}', wanted a column of --dataset '{name}': {', '.join(loaded.column_names)}"
        )
    number, mine = shard
    begin, finish = len(loaded) * mine // number, len(loaded) * (mine + 1) // number
    for row in range(max(begin, start), finish, 256):
        columns = loaded[row : min(row + 256, finish)]
        yield from _rows(name, [columns[key] for key in keys], row)
