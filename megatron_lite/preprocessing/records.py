"""A chunk of an input file -> checked texts; every document that is not clean text is named, none is repaired."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_lite.config.declare import ConfigError
from megatron_lite.data.unicode_text import check_unicode, utf8_size
from megatron_lite.preprocessing.text_files import Chunk, TextFile, open_stream, pieces, too_long

_BOM = b"\xef\xbb\xbf"
_LONG_LINE = 1 << 20  # bytes; not copied without need


class BadDocument(Exception):
    """A document that is left out or stops the run.

    Attributes:
        kind: one of a few words, for counting: "invalid JSON", "null", "lone surrogate" ...
        sentence: what is wrong, to follow the place.
        line: lines (or rows) after the chunk's first.
    """

    def __init__(self, kind: str, sentence: str, line: int = 0) -> None:
        super().__init__(kind, sentence, line)
        self.kind, self.sentence, self.line = kind, sentence, line


class _Pairs(list):
    """A JSON object as its pairs: a dict would drop a duplicate key without a word."""


# json.loads with a hook makes a decoder at each call, which costs as much as reading a short line.
_DECODER = json.JSONDecoder(object_pairs_hook=_Pairs)


@dataclass
class Records:
    """The documents of a chunk: one tuple of texts each, in the order of the keys; and what was not taken."""

    texts: list[tuple[str, ...]] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)  # of each document, counted from the chunk's first
    bad: list[BadDocument] = field(default_factory=list)


def parse(chunk: Chunk, keys: Sequence[str], max_document_bytes: int | None = None) -> Records:
    """Check the documents of `chunk`. Blank lines are no documents; empty texts are documents of no text."""
    records = Records()
    if chunk.kind == "problem":
        records.bad.append(BadDocument(*chunk.data))
        return records
    # Only \n ends a line: U+2028, U+0085 and \x1c, where str.splitlines cuts, may stand inside a JSON string.
    rows = (
        _lines(chunk.data) if chunk.kind == "jsonl" else [chunk.data] if chunk.kind == "text" else chunk.data
    )
    for line, row in enumerate(rows):
        try:
            values = _values(chunk.kind, row, keys)
            if values is None:
                continue
            _check(values, keys, max_document_bytes)
            records.texts.append(tuple(values))
            records.lines.append(line)
        except BadDocument as bad:
            bad.line = line
            records.bad.append(bad.with_traceback(None))
    return records


def _lines(data: bytes) -> list[bytes]:
    """Cut at \\n. What may be one long line is not copied: the end of the last line stays on it, to be stripped."""
    first = data.find(b"\n") + 1
    return [data] if data and first in (0, len(data)) else data.split(b"\n")


def _values(kind: str, row: Any, keys: Sequence[str]) -> Sequence[Any] | None:
    if kind == "rows":
        return row
    if kind == "text":
        return [_decode(row)] * len(keys)
    line = row.removeprefix(_BOM)
    # The decoder passes over blanks by itself; off a short line they go for the sake of its messages.
    line = line.strip() if len(line) < _LONG_LINE else line
    return _from_json(line, keys) if line and not line.isspace() else None


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadDocument(
            "invalid UTF-8", f"byte {error.start + 1:,} is 0x{data[error.start]:02x}, wanted UTF-8 text"
        ) from None


def _from_json(line: bytes, keys: Sequence[str]) -> list[Any]:
    text = _decode(line)
    try:
        pairs = _DECODER.decode(text)
    except RecursionError:
        raise BadDocument("invalid JSON", "is nested too deeply to be read, wanted a JSON object") from None
    except ValueError as error:
        message = str(error)
        if isinstance(error, json.JSONDecodeError):
            message = f"{error.msg.removesuffix(' at')} at column {error.colno:,}"
        raise BadDocument("invalid JSON", f"is not valid JSON ({message}), wanted a JSON object") from None
    if not isinstance(pairs, _Pairs):
        raise BadDocument("not an object", f"is a JSON {_json_type(pairs)}, wanted a JSON object")
    values = []
    for key in keys:
        named = [value for name, value in pairs if name == key]
        if not named:
            names = ", ".join(sorted({name for name, _ in pairs})[:8]) or "none"
            raise BadDocument("missing key", f"has no key '{key}', wanted it beside its keys ({names})")
        if len(named) > 1:
            raise BadDocument("duplicate key", f"has {len(named)} keys '{key}', wanted one")
        values.append(named[0])
    return values


def _check(values: Sequence[Any], keys: Sequence[str], limit: int | None) -> None:
    for key, value in zip(keys, values):
        if value is None:
            raise BadDocument("null", f"has null for key '{key}', wanted a string")
        if not isinstance(value, str):
            raise BadDocument("not a string", f"has a {_json_type(value)} for key '{key}', wanted a string")
        try:
            check_unicode(value)
        except ConfigError as error:
            raise BadDocument("lone surrogate", f"key '{key}': {error}") from None
        # A character is at most four bytes: most texts need no counting.
        if limit is not None and 4 * len(value) > limit and (size := utf8_size(value)) > limit:
            raise BadDocument(*too_long(size, limit))


def _json_type(value: Any) -> str:
    names = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string"}
    return names.get(type(value), "object" if isinstance(value, _Pairs | dict) else "list")


def described(chunk: Chunk, bad: BadDocument, files: dict[str, TextFile]) -> str:
    """'file:line (or file:row, file): what is wrong'.

    The lines before the chunk are counted here, only when a message needs them: it may be of a shard or a resumed
    run that starts in mid-file.
    """
    where, file = chunk.path, files.get(chunk.path)
    if chunk.kind == "rows":
        where += f":row {chunk.offset + bad.line + 1:,}"
    elif file is not None and file.kind == "jsonl":
        with open_stream(file) as stream:
            lines_before = sum(piece.count(b"\n") for piece in pieces(stream, chunk.offset))
        where += f":{lines_before + bad.line + 1}"
    return f"{where}: {bad.sentence}"


def refusal(chunk: Chunk, bad: BadDocument, files: dict[str, TextFile]) -> ConfigError:
    """The error that ends a run at a bad document."""
    return ConfigError(f"{described(chunk, bad, files)}; --skip-bad-documents leaves such documents out")
