"""Input files of any form: told by content, read in chunks of whole documents, every bad one named."""

import gzip
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from megatron_lite.config import ConfigError
from megatron_lite.data.unicode_text import check_unicode, utf8_size
from megatron_lite.preprocessing import text_files
from megatron_lite.preprocessing.records import BadDocument, described, parse
from megatron_lite.preprocessing.text_files import Span, find_files, identify, read_chunks, split_spans

LIMIT = 1 << 20


def zstd(data):
    return pyarrow.compress(data, codec="zstd", asbytes=True)


def lines_of(texts):
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def read(path, keys=("text",), limit=LIMIT):
    """(texts, kinds of bad documents) of a file."""
    texts, bad = [], []
    for chunk in read_chunks(Span(identify(path)), keys, limit):
        records = parse(chunk, keys, limit)
        texts += [values[0] for values in records.texts]
        bad += [item.kind for item in records.bad]
    return texts, bad


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a", "a.jsonl.gz", "a.zst", "a.parquet"])
@pytest.mark.parametrize("packing", [None, "gzip", "gzip twice", "zstd", "zstd twice"])
def test_content_decides_not_the_name(tmp_path, name, packing):
    texts = ["alpha", "βeta " * 100, "ga\u2028mma"]
    halves = lines_of(texts[:1]), lines_of(texts[1:])
    whole = b"".join(halves)
    data = {
        None: lambda: whole,
        "gzip": lambda: gzip.compress(whole),
        "gzip twice": lambda: b"".join(map(gzip.compress, halves)),
        "zstd": lambda: zstd(whole),
        "zstd twice": lambda: b"".join(map(zstd, halves)),
    }[packing]()
    (tmp_path / name).write_bytes(data)
    source = identify(tmp_path / name)
    assert (source.kind, source.compression) == ("jsonl", packing and packing.split(" ")[0])
    assert read(tmp_path / name) == (texts, [])


def test_text_and_parquet(tmp_path):
    (tmp_path / "one.txt").write_text("one\ndocument\n")
    (tmp_path / "two.md.gz").write_bytes(gzip.compress("\ufeffzwei äöü".encode()))
    rows = ["a", None, "", "long " * 300_000, "b"] * 60
    pyarrow.parquet.write_table(pyarrow.table({"id": range(300), "text": rows}), tmp_path / "no_suffix")
    assert read(tmp_path / "one.txt") == (["one\ndocument\n"], [])
    assert read(tmp_path / "two.md.gz") == (["zwei äöü"], [])
    texts, bad = read(tmp_path / "no_suffix", limit=1 << 21)
    assert texts == [text for text in rows if text is not None] and bad == ["null"] * 60
    chunks = list(read_chunks(Span(identify(tmp_path / "no_suffix"), start=150), ("text",), LIMIT))
    assert [row[0] for chunk in chunks for row in chunk.data] == rows[150:]
    assert max(len(chunk.data) for chunk in chunks) < 20, "long rows make small chunks"
    assert read(tmp_path / "no_suffix", keys=("body",)) == ([], ["missing key"])


BAD_FILES = {
    "UTF-16": '{"text": "a"}\n'.encode("utf-16"),
    "UTF-16 without mark": '{"text": "a"}\n'.encode("utf-16-le"),
    "JSON array": b' [{"text": "a"},\n {"text": "b"}]',
    "damaged gzip": gzip.compress(lines_of(["a" * 5000]))[:-9],
    "damaged gzip inside": gzip.compress(np.random.default_rng(1).bytes(1 << 18))[: 1 << 17],
    "damaged zstd": zstd(lines_of(["a" * 5000]))[:-5],
    "zip": b"PK\x03\x04 and more",
    "arrow": b"ARROW1\0\0 and more",
    "damaged parquet": b"PAR1 and no end",
    "invalid UTF-8": b"plain \xff text",
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_is_no_text_is_one_named_problem(tmp_path, name):
    (tmp_path / "file").write_bytes(BAD_FILES[name])
    texts, bad = read(tmp_path / "file")
    kinds = ("UTF-16", "JSON array", "damaged file", "unknown format", "invalid UTF-8")
    assert len(bad) == 1 and bad[0] in kinds and not [text for text in texts if "\ufffd" in text]
    assert bad[0].split(" ")[0] in name or bad[0] == "unknown format"


LINES = {
    b'{"text": "a"}': "a",
    b'\xef\xbb\xbf{"text": "a"}\r': "a",
    b'  {"text": "a", "n": NaN}\t': "a",
    b'{"text": "one\xe2\x80\xa8still one \\u0000 \\u001c"}': "one\u2028still one \0 \x1c",
    b'{"text": "whole \\ud83d\\ude00 pair"}': "whole 😀 pair",
    b'{"text": "None"}': "None",
    b'{"text": ""}': "",
    b'{"text": null}': ["null"],
    b'{"text": 12}': ["not a string"],
    b'{"text": ["a"]}': ["not a string"],
    b'{"text": {"body": "x"}}': ["not a string"],
    b'{"text": "half \\ud83d"}': ["lone surrogate"],
    b'{"text": "bad \xff"}': ["invalid UTF-8"],
    b'{"body": "a"}': ["missing key"],
    b'{"text": "a", "text": "b"}': ["duplicate key"],
    b'{"text": "cut': ["invalid JSON"],
    b'{"text": "a"} {"text": "b"}': ["invalid JSON"],
    b"{'text': 'a'}": ["invalid JSON"],
    b'"a"': ["not an object"],
    b"[1]": ["not an object"],
    b"null": ["not an object"],
    b"[" * 100_000: ["invalid JSON"],
    b'{"text": 1' + b"0" * 5000 + b"}": ["invalid JSON"],
}


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:30])
def test_each_kind_of_line(tmp_path, line):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "before"}\n\n' + line + b"\n \t\n" + b'{"text": "after"}')
    texts, bad = read(tmp_path / "a.jsonl")
    expected = LINES[line]
    middle = [] if isinstance(expected, list) else [expected]
    assert texts == ["before", *middle, "after"]
    assert bad == (expected if isinstance(expected, list) else [])


def test_too_long_documents(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines_of(["a", "b" * 2000, "ä" * 400, "c" * 2_000_000, "d"]))
    texts, bad = read(tmp_path / "a.jsonl", limit=1000)
    assert texts == ["a", "ä" * 400, "d"] and bad == ["too long"] * 2
    (tmp_path / "b.txt").write_text("x" * 3000)
    assert read(tmp_path / "b.txt", limit=1000) == ([], ["too long"])


@pytest.mark.parametrize("packing", [lambda data: data, gzip.compress, zstd])
def test_chunks_hold_whole_lines_and_can_be_entered_anywhere(tmp_path, monkeypatch, packing):
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 300)
    texts = [f"{n} " + "x" * (n * 37 % 700) for n in range(80)]
    data = lines_of(texts)
    (tmp_path / "a.jsonl").write_bytes(packing(data))
    source = identify(tmp_path / "a.jsonl")
    chunks = list(read_chunks(Span(source), ("text",), LIMIT))
    assert b"".join(chunk.data for chunk in chunks) == data and len(chunks) > 20
    assert all(data[chunk.offset : chunk.end] == chunk.data and chunk.data[-1:] == b"\n" for chunk in chunks)
    for chunk in chunks[::7]:
        rest = list(read_chunks(Span(source, start=chunk.offset), ("text",), LIMIT))
        assert b"".join(item.data for item in rest) == data[chunk.offset :]
        line = data[: chunk.offset].count(b"\n")
        by_path = {source.path: source}
        assert (
            described(chunk, BadDocument("kind", "is bad", 2), by_path) == f"{source.path}:{line + 3}: is bad"
        )


@pytest.mark.parametrize("num_shards", [1, 2, 3, 7, 50])
def test_shards_in_order_are_the_whole(tmp_path, num_shards):
    (tmp_path / "a.jsonl").write_bytes(lines_of([f"a{n}" * (n % 5 + 1) for n in range(20)]))
    (tmp_path / "b.jsonl").write_bytes(gzip.compress(lines_of(["b1", "b2"])))
    (tmp_path / "c.txt").write_text("c")
    (tmp_path / "d.jsonl").write_bytes(lines_of(["d1", "d2" * 200]).removesuffix(b"\n"))
    (tmp_path / "e.jsonl").write_bytes(b"")
    sources = [identify(path) for path in find_files([str(tmp_path)])]

    def texts(spans):
        chunks = [chunk for span in spans for chunk in read_chunks(span, ("text",), LIMIT)]
        return [values[0] for chunk in chunks for values in parse(chunk, ("text",)).texts]

    whole = texts([Span(source) for source in sources])
    parts = [texts(split_spans(sources, num_shards, shard)) for shard in range(num_shards)]
    assert [text for part in parts for text in part] == whole and len(whole) == 25


def test_find_files(tmp_path, monkeypatch):
    for name in ("b.jsonl", "a.jsonl", "sub/c.txt", ".hidden", "_SUCCESS", "sub/.x/d.txt", "odd[1].txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    names = [path.relative_to(tmp_path).as_posix() for path in find_files([str(tmp_path)])]
    assert names == ["a.jsonl", "b.jsonl", "odd[1].txt", "sub/c.txt"]
    assert [p.name for p in find_files([str(tmp_path / "*.jsonl"), str(tmp_path / "odd[1].txt")])] == [
        "a.jsonl",
        "b.jsonl",
        "odd[1].txt",
    ]
    monkeypatch.chdir(tmp_path)
    assert [str(path) for path in find_files(["**/*.txt"])] == ["odd[1].txt", "sub/c.txt"]
    for words, sentence in [
        (["nowhere.jsonl"], "'nowhere.jsonl' names no file"),
        (["*.parquet"], "names no file"),
        (["a.jsonl", "*.jsonl"], "2 times"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            find_files(words)


@pytest.mark.parametrize("end", [b"\n", b" \t\r\n", b""])
def test_a_long_line_is_read_as_a_short_one_is(tmp_path, end):
    """Longer than what is read, cut and stripped at a time; none of its neighbours is lost."""
    long = "é\n" * 700_000
    mark = b"\xef\xbb\xbf" + json.dumps({"text": long}, ensure_ascii=False).encode()
    lines = [
        lines_of(["before"]),
        mark + b"\r\n",
        b" " * 1_500_000 + b"\n",
        b'{"text": "' + b"x" * 1_500_000,
        end,
    ]
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines[:3]) + lines_of(["after"]) + b"".join(lines[3:]))
    texts, bad = read(tmp_path / "a.jsonl", limit=1 << 24)
    assert texts == ["before", long, "after"] and bad == ["invalid JSON"]
    covered = list(read_chunks(Span(identify(tmp_path / "a.jsonl")), ("text",), 1 << 24))
    assert covered[0].offset == 0 and covered[-1].end == (tmp_path / "a.jsonl").stat().st_size
    assert all(before.end == after.offset for before, after in zip(covered, covered[1:]))
    assert sum(chunk.size for chunk in covered) == covered[-1].end


def test_unicode_is_checked_and_measured_piece_by_piece():
    text = "é" * 1_100_000 + "😀"
    assert utf8_size(text) == len(text.encode())
    check_unicode(text)
    with pytest.raises(ConfigError, match="surrogate .*d800 at character 1,100,001"):
        check_unicode(text + "\ud800")
