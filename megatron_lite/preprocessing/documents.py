"""Files of text, in any of their forms, as chunks of whole documents in a fixed order.

What a file is, is told by its content, never by its name alone: JSON lines, plain text (one document a file),
parquet; the first two also inside gzip or zstd. Reading stays at this level of bytes and positions, so that one
process can hand chunks to many; `megatron_lite.preprocessing.records` turns a chunk into checked texts.
"""

import glob
import gzip
import io
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from megatron_lite.config import ConfigError
from megatron_lite.files.foreign_files import foreign_content

# Of decompressed text: small enough to spread over workers, large enough to amortise a hop.
CHUNK_BYTES = 1 << 19
_HEAD_BYTES = 1 << 16
_BOM = b"\xef\xbb\xbf"
_JSON_OBJECT = re.compile(rb'\s*\{\s*["}]')
_JSON_ARRAY = re.compile(rb'\s*\[\s*[\[{"]')
_NOT_DATA = {
    b"PK\x03\x04": "a zip archive",
    b"\xfd7zXZ": "an xz file",
    b"BZh": "a bzip2 file",
    b"ARROW1": "an Arrow file (read it with --dataset FOLDER)",
    b"MMIDIDX": "a Megatron index",
}
# A damaged stream shows itself in one of these, according to where the damage lies.
_DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError)


@dataclass(frozen=True)
class Source:
    """One input file and what its content is.

    kind: jsonl | text | parquet | empty | refused; `problem` says (kind of problem, sentence) why it is refused.
    size: bytes on disk.
    """

    path: str
    kind: str
    compression: str | None
    size: int
    problem: tuple[str, str] | None = None


@dataclass(frozen=True)
class Span:
    """A part of a source: bytes of decompressed text for jsonl (at line starts), rows for parquet, 0 for the rest.

    end None = to the end of the file.
    """

    source: Source
    start: int = 0
    end: int | None = None


@dataclass(frozen=True)
class Chunk:
    """Whole documents that stand together in one file.

    Attributes:
        path: of the file, or the name of the dataset.
        kind: jsonl (data = complete lines), text (data = one document), rows (data = list of tuples, one value a
            key), problem (data = (kind of problem, sentence): nothing readable here).
        offset: position of the first byte or row in the decompressed file.
        end: position after the last.
    """

    path: str
    kind: str
    data: Any
    offset: int
    end: int

    @property
    def size(self) -> int:
        """Bytes of text in it, roughly for rows."""
        if self.kind == "rows":
            return sum(len(value) if isinstance(value, str) else 8 for row in self.data for value in row)
        return len(self.data) if self.kind != "problem" else 0

    @property
    def extent(self) -> "Extent":
        return Extent(self.path, self.kind, self.offset, self.end, self.size)


@dataclass(frozen=True)
class Extent:
    """What a chunk covers, without what is in it."""

    path: str
    kind: str
    offset: int
    end: int
    size: int


def find_files(inputs: Sequence[str]) -> list[Path]:
    """The files that `--input` words name: files, folders (all files below, sorted), glob patterns (sorted).

    Names that begin with a dot or an underscore are left out of folders. Raises ConfigError for a word that
    names nothing.
    """
    found: list[Path] = []
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
        found.extend(sorted(files))
    if len(set(found)) < len(found):
        path, times = Counter(found).most_common(1)[0]
        raise ConfigError(f"--input names '{path}' {times} times, wanted each file once")
    return found


def identify(path: Path) -> Source:
    """Tell by the first bytes what a file is. Raises ConfigError if it cannot be opened."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            magic = file.read(8)
        compression = (
            "gzip" if magic[:2] == b"\x1f\x8b" else "zstd" if magic[:4] == b"\x28\xb5\x2f\xfd" else None
        )
        source = Source(str(path), "refused", compression, size)
        with open_stream(source) as stream:
            head = stream.read(_HEAD_BYTES)
    except _DAMAGE as error:
        return replace(source, problem=_damaged(source, error))
    except OSError as error:
        raise ConfigError(f"--input '{path}' cannot be read: {error.strerror}") from None
    return _classify(source, path, head)


def _classify(source: Source, path: Path, head: bytes) -> Source:
    if not head:
        return replace(source, kind="empty")
    if head[:4] == b"PAR1" and source.compression is None:
        return replace(source, kind="parquet")
    for magic, name in _NOT_DATA.items():
        if head.startswith(magic):
            return _refused(source, "unknown format", f"is {name}, wanted JSON lines, text or parquet")
    if (
        head[:2] in (b"\xff\xfe", b"\xfe\xff")
        or head[:4] == b"\0\0\xfe\xff"
        or head[:2] in (b"{\0", b"\0{", b"[\0")
    ):
        return _refused(source, "UTF-16", "is UTF-16 or UTF-32 text, wanted UTF-8")
    text = head.removeprefix(_BOM)
    what = foreign_content(text)
    if "pointer" in what:
        return _refused(source, "pointer", f"holds no documents{what}")
    suffixes = {suffix.lower() for suffix in path.suffixes}
    named_json = bool(suffixes & {".json", ".jsonl", ".ndjson"})
    if _JSON_ARRAY.match(text) or (named_json and text.lstrip().startswith(b"[")):
        return _refused(source, "JSON array", "holds one JSON array, wanted JSON lines: one object a line")
    if named_json and what:
        return _refused(source, "unknown format", f"holds no JSON lines{what}")
    if named_json or _JSON_OBJECT.match(text):
        return replace(source, kind="jsonl")
    return replace(source, kind="text")


def _refused(source: Source, kind: str, sentence: str) -> Source:
    return replace(source, kind="refused", problem=(kind, sentence))


def _damaged(source: Source, error: BaseException) -> tuple[str, str]:
    return "damaged file", f"is a damaged {source.compression} file: {error}"


def split_spans(sources: Sequence[Source], num_shards: int, shard_id: int) -> list[Span]:
    """The part of the input that shard `shard_id` of `num_shards` tokenizes.

    The shards, in order, are the whole input in order, so their outputs merge to what one run gives. JSON lines
    that are not compressed are cut at line starts near equal numbers of bytes; any other file goes whole to the
    shard where it begins.
    """
    total = sum(source.size for source in sources)
    low, high = total * shard_id // num_shards, total * (shard_id + 1) // num_shards
    last = shard_id == num_shards - 1
    spans, position = [], 0
    for source in sources:
        begin, finish = position, position + source.size
        position = finish
        if source.kind == "jsonl" and source.compression is None:
            start = line_start(source, low - begin)
            end = source.size if last else line_start(source, high - begin)
            if start < end:
                spans.append(Span(source, start, end))
        elif low <= begin < high or (last and begin >= low):
            spans.append(Span(source))
    return spans


def line_start(source: Source, offset: int) -> int:
    """The first line start at or after `offset`, within [0, size]."""
    if offset <= 0 or offset >= source.size:
        return min(max(offset, 0), source.size)
    with Path(source.path).open("rb") as file:
        file.seek(offset - 1)
        while piece := file.readline(1 << 20):
            if piece.endswith(b"\n"):
                break
        return file.tell()


def resume_spans(spans: Sequence[Span], index: int, position: int) -> list[Span]:
    """What is left of `spans` from `position` in span number `index` on."""
    rest = list(spans[index:])
    if rest:
        rest[0] = replace(rest[0], start=max(position, rest[0].start))
    return rest


def read_chunks(span: Span, keys: Sequence[str], max_document_bytes: int) -> Iterator[Chunk]:
    """The chunks of a span, in order. `keys` are the columns of a parquet file."""
    source = span.source
    if source.problem is not None:
        if span.start == 0:
            yield Chunk(source.path, "problem", source.problem, 0, 1)
    elif source.kind == "jsonl":
        yield from _read_lines(span, max_document_bytes)
    elif source.kind == "text" and span.start == 0:
        yield _read_text(source, max_document_bytes)
    elif source.kind == "parquet":
        yield from _read_parquet(span, keys)


def open_stream(source: Source) -> BinaryIO:
    """The decompressed bytes of a file; only plain files can seek."""
    if source.compression == "gzip":
        return gzip.open(source.path, "rb")
    if source.compression == "zstd":
        return io.BufferedReader(_ZstdReader(Path(source.path).open("rb")), 1 << 17)
    return Path(source.path).open("rb")


class _ZstdReader(io.RawIOBase):
    """Decompressed bytes of a zstd file of one or more frames.

    zstandard's own stream reader takes a file that was cut for one that ends; here that is an EOFError.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._frame, self._ready, self._input = file, None, memoryview(b""), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._input = self._input or self._file.read(1 << 14)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("the compressed data ends early")
                return 0
            self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            self._ready = memoryview(self._frame.decompress(self._input))
            self._input = b""
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


def _read_lines(span: Span, limit: int) -> Iterator[Chunk]:
    source, offset = span.source, span.start
    try:
        with open_stream(source) as stream:
            _skip(stream, source, offset)
            while data := stream.read(min(CHUNK_BYTES, (span.end or 1 << 62) - offset)):
                cut = data.rfind(b"\n") + 1
                line = data[cut:] + (stream.readline(limit) if cut < len(data) else b"")
                if len(line) <= min(limit, CHUNK_BYTES):
                    yield Chunk(source.path, "jsonl", data[:cut] + line, offset, offset + cut + len(line))
                    offset += cut + len(line)
                    continue
                if cut:
                    yield Chunk(source.path, "jsonl", data[:cut], offset, offset + cut)
                    offset, cut = offset + cut, 0
                size = len(line)
                if size <= limit:
                    held, line = [line], b""  # handed over: a generator that waits must not hold a long line
                    yield Chunk(source.path, "jsonl", held.pop(), offset, offset + size)
                    offset += size
                    continue
                while not line.endswith(b"\n") and (line := stream.readline(1 << 20)):
                    size += len(line)
                yield Chunk(source.path, "problem", too_long(size, limit), offset + cut, offset + cut + size)
                offset += cut + size
    except _DAMAGE as error:
        yield Chunk(source.path, "problem", _damaged(source, error), offset, offset + 1)


def _skip(stream: BinaryIO, source: Source, offset: int) -> None:
    if source.compression is None:
        stream.seek(offset)
        return
    while offset > 0 and (piece := stream.read(min(offset, 1 << 20))):
        offset -= len(piece)


def too_long(size: int, limit: int) -> tuple[str, str]:
    """(kind of problem, sentence) for a document of `size` bytes."""
    return "too long", (
        f"has {size:,} bytes, wanted at most {limit:,} in one document (--max-document-megabytes); "
        "the memory needed grows with the longest document"
    )


def _read_text(source: Source, limit: int) -> Chunk:
    try:
        with open_stream(source) as stream:
            data = stream.read(limit + 1)
            size = len(data)
            while piece := (stream.read(1 << 20) if size > limit else b""):
                size += len(piece)
    except _DAMAGE as error:
        return Chunk(source.path, "problem", _damaged(source, error), 0, 1)
    if size > limit:
        return Chunk(source.path, "problem", too_long(size, limit), 0, 1)
    return Chunk(source.path, "text", data.removeprefix(_BOM), 0, 1)


def _read_parquet(span: Span, keys: Sequence[str]) -> Iterator[Chunk]:
    import pyarrow  # optional: only parquet files need it
    import pyarrow.parquet

    path, row = span.source.path, span.start
    try:
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as file:
            missing = [key for key in keys if key not in file.schema_arrow.names]
            if missing:
                names = ", ".join(file.schema_arrow.names)
                sentence = f"has no column '{missing[0]}', wanted one of its columns: {names}"
                yield Chunk(path, "problem", ("missing key", sentence), 0, 1)
                return
            skip = row
            for batch in file.iter_batches(batch_size=256, columns=list(keys)):
                if skip >= len(batch):
                    skip -= len(batch)
                    continue
                columns = [batch.column(batch.schema.get_field_index(key))[skip:].to_pylist() for key in keys]
                skip = 0
                for chunk in _rows(path, list(zip(*columns)), row):
                    yield chunk
                    row = chunk.end
    except (pyarrow.ArrowInvalid, UnicodeDecodeError, OSError) as error:
        yield Chunk(path, "problem", ("damaged file", f"is a damaged parquet file: {error}"), row, row + 1)


def _rows(path: str, rows: list[tuple], first: int) -> Iterator[Chunk]:
    """Rows as chunks of about CHUNK_BYTES: a batch of long documents is more than one worker should hold."""
    start = size = 0
    for index, row in enumerate(rows):
        size += sum(len(value) for value in row if isinstance(value, str))
        if size >= CHUNK_BYTES or index == len(rows) - 1:
            yield Chunk(path, "rows", rows[start : index + 1], first + start, first + index + 1)
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
        raise ConfigError(
            f"--dataset '{name}' cannot be loaded (--dataset-split {split}): {first_line}"
        ) from None
    missing = [key for key in keys if key not in loaded.column_names]
    if missing:
        raise ConfigError(
            f"--json-keys names '{missing[0]}', wanted a column of --dataset '{name}': {', '.join(loaded.column_names)}"
        )
    number, mine = shard
    begin, finish = len(loaded) * mine // number, len(loaded) * (mine + 1) // number
    for row in range(max(begin, start), finish, 256):
        columns = loaded[row : min(row + 256, finish)]
        yield from _rows(name, list(zip(*(columns[key] for key in keys))), row)
