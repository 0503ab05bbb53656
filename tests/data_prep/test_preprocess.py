"""Preprocessing against a plain loop over the lines: json, the tokenizer's own library, struct."""

import fcntl
import gzip
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import sentencepiece

from data_prep import merge_datasets, preprocess_data
from megatron_lite.config import ConfigError
from megatron_lite.files.command_line import RunError
from megatron_lite.preprocessing import journal, text_files
from megatron_lite.preprocessing.workers import map_in_order
from tests.local_tokenizers import TEXT, write_byte_level, write_sentencepiece

ROOT = Path(__file__).parents[2]
HOSTILE = ROOT / "tests" / "hostile" / "jsonl"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_sentencepiece(tmp_path_factory.mktemp("tokenizer") / "t.model"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """About 3 MB in seven chunks; documents of very different length, some without text."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    with path.open("w") as file:
        for n in range(3000):
            text = " ".join(TEXT[(n + k) % len(TEXT)] for k in range(n * 7 % 25))
            file.write(json.dumps({"text": f"{n} {text}" if n % 11 else "", "title": f"title {n}"}) + "\n")
    return path


def flags(model, *more):
    return ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model, *map(str, more)]


def run(*argv, workers=0):
    words = list(map(str, argv))
    preprocess_data.main(words if "--workers" in words else [*words, "--workers", str(workers)])


def read_pair(prefix):
    """(tokens of each document, dtype) read by struct and numpy alone."""
    raw = Path(f"{prefix}.idx").read_bytes()
    magic, version, code, sequences, boundaries = struct.unpack_from("<9sQBQQ", raw)
    assert (magic, version) == (b"MMIDIDX\0\0", 1)
    dtype = {4: np.int32, 8: np.uint16}[code]
    lengths = np.frombuffer(raw, "<i4", sequences, 34)
    pointers = np.frombuffer(raw, "<i8", sequences, 34 + 4 * sequences)
    ends = np.frombuffer(raw, "<i8", boundaries, 34 + 12 * sequences)
    assert len(raw) == 34 + 12 * sequences + 8 * boundaries and ends[0] == 0
    tokens = np.fromfile(f"{prefix}.bin", dtype)
    assert len(tokens) == lengths.sum() and (lengths > 0).all()
    size = np.dtype(dtype).itemsize
    found = []
    for first, stop in zip(ends, ends[1:]):
        starts = [pointers[s] // size for s in range(first, stop)]
        found.append([int(t) for s, n in zip(starts, lengths[first:stop]) for t in tokens[s : s + n]])
    return found, dtype


def expected(lines, model, key="text", eod=True):
    bare = sentencepiece.SentencePieceProcessor(model_file=model)
    made = [bare.encode(json.loads(line)[key]) for line in lines]
    return [ids + [bare.eos_id()] if ids and eod else ids for ids in made]


def bytes_of(prefix):
    return [Path(f"{prefix}.{ending}").read_bytes() for ending in ("bin", "idx", "json")]


def test_equal_to_a_plain_loop_for_any_number_of_workers(tmp_path, model, corpus, capsys):
    run("--input", corpus, "--output-prefix", tmp_path / "w0", "--append-eod", *flags(model))
    found, dtype = read_pair(tmp_path / "w0_text_document")
    assert found == expected(corpus.read_text().splitlines(), model) and dtype == np.uint16
    assert sum(not ids for ids in found) == 273
    text = capsys.readouterr().out
    assert "documents   3,000, 273 of them without text" in text
    assert f"tokens      {sum(map(len, found)):,}," in text
    for workers in (1, 3):
        name = f"w{workers}"
        argv = ["--input", corpus, "--output-prefix", tmp_path / name, "--append-eod", *flags(model)]
        run(*argv, workers=workers)
        assert bytes_of(tmp_path / f"{name}_text_document") == bytes_of(tmp_path / "w0_text_document")
    assert sorted({path.suffix for path in tmp_path.iterdir()}) == [".bin", ".idx", ".json"]


def test_keys_eod_and_forms_of_input(tmp_path, model, corpus):
    lines = corpus.read_text().splitlines()[:200]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.gz").write_bytes(gzip.compress("\n".join(lines[:90]).encode()))
    (tmp_path / "in" / "b").write_text("\n".join(lines[90:]))
    run(
        "--input",
        tmp_path / "in",
        "--output-prefix",
        tmp_path / "o",
        "--json-keys",
        "title",
        "text",
        *flags(model),
    )
    for key in ("text", "title"):
        assert read_pair(tmp_path / f"o_{key}_document")[0] == expected(lines, model, key, eod=False)
    rows = [json.loads(line) for line in lines]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    for shard in range(3):
        words = ["--num-shards", 3, "--shard-id", shard, "--json-keys", "text", *flags(model)]
        run("--dataset", tmp_path / "saved", "--output-prefix", tmp_path / "shards" / "d", *words)
    merge_datasets.main(["--input", str(tmp_path / "shards"), "--output-prefix", str(tmp_path / "merged")])
    assert bytes_of(tmp_path / "merged")[:2] == bytes_of(tmp_path / "o_text_document")[:2]


def test_byte_level_tokenizer_and_special_words(tmp_path):
    folder = write_byte_level(tmp_path / "hf")
    words = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder, "--append-eod"]
    run("--input", HOSTILE / "16_special_tokens.jsonl", "--output-prefix", tmp_path / "o", *words, workers=1)
    found, _ = read_pair(tmp_path / "o_text_document")
    assert [ids.count(0) for ids in found] == [1, 1, 1] and all(ids[-1] == 0 for ids in found)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(65_534, np.uint16), (65_535, np.uint16), (65_536, np.int32), (200_000, np.int32)],
)
def test_dtype_by_vocabulary(tmp_path, vocab_size, dtype):
    """A NullTokenizer's true size is one more than --vocab-size: its eod comes on top."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": f"0 7 {vocab_size - 1}"}))
    words = ["--tokenizer-type", "NullTokenizer", "--vocab-size", vocab_size, "--append-eod"]
    run("--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "o", *words)
    assert read_pair(tmp_path / "o_text_document") == ([[0, 7, vocab_size - 1, vocab_size]], dtype)


HOSTILE_FILES = {  # good documents, (line, kind) of the bad ones
    "01_bom": (2, []),
    "02_crlf": (3, []),
    "03_blank_lines": (2, []),
    "05_lone_surrogate": (2, [(2, "lone surrogate"), (4, "lone surrogate")]),
    "06_missing_key": (2, [(2, "missing key")]),
    "08_nonstring_text": (2, [(n, "not a string") for n in (2, 3, 4, 5)]),
    "10_one_huge_line": (1, []),
    "11_truncated_last": (2, [(3, "invalid JSON")]),
    "13_empty": (0, []),
    "16_special_tokens": (3, []),
    "17_unicode_separators": (3, []),
    "21_empty_first_doc": (5, []),
    "22_short_corpus": (3, []),
}


def test_all_hostile_files_are_known():
    assert sorted(HOSTILE_FILES) == sorted(path.stem for path in HOSTILE.iterdir())


@pytest.mark.parametrize("name", HOSTILE_FILES)
def test_hostile_files(tmp_path, model, capsys, name):
    path = HOSTILE / f"{name}.jsonl"
    good, bad = HOSTILE_FILES[name]
    argv = ["--input", path, "--output-prefix", tmp_path / "o", "--append-eod", *flags(model)]
    if bad or not good:
        with pytest.raises(ConfigError) as caught:
            run(*argv)
        assert f"{path}{f':{bad[0][0]}: ' if bad else ' holds no document'}" in str(caught.value)
        assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    if not good:
        return
    run(*argv, "--skip-bad-documents")
    assert len(read_pair(tmp_path / "o_text_document")[0]) == good
    text = capsys.readouterr().out
    assert f"skipped     {len(bad)}" in text
    for line, kind in bad[:3]:
        assert f"{path}:{line}: " in text and f" {kind}" in text


def test_only_empty_documents(tmp_path, model):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n' * 3)
    with pytest.raises(ConfigError, match="holds 3 documents, all without text, wanted text"):
        run("--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "o", *flags(model))
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


REFUSALS = [
    (["--split-sentences"], "--split-sentences is not supported"),
    (["--shard-id", "2", "--num-shards", "2"], "--shard-id is 2, wanted less than --num-shards 2"),
    (["--json-keys", "text", "text"], "wanted different keys"),
    (["--dataset", "x"], "either --input or --dataset"),
    (["--workers", "-1"], "--workers: is '-1', wanted a whole number of at least 0"),
    (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
    (["--vocab-size", "50"], "--vocab-size is 50, but the tokenizer"),
    (["--json-keys", "body"], "22_short_corpus.jsonl:1: has no key 'body', wanted it beside its keys (text)"),
]


@pytest.mark.parametrize(("words", "sentence"), REFUSALS)
def test_refusals(tmp_path, model, words, sentence):
    base = ["--input", HOSTILE / "22_short_corpus.jsonl", "--output-prefix", tmp_path / "o", *flags(model)]
    with pytest.raises(ConfigError) as caught:
        run(*base, *words)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def start(*argv, **options):
    command = [sys.executable, "data_prep/preprocess_data.py", *map(str, argv)]
    # A shell's background job, as tests may be run, hands "ignore SIGINT" down to its children.
    with_signals = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **(with_signals | options),
    )


def children(pid):
    """Command lines of the living children of a process that are workers."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        command = Path(f"/proc/{child}/cmdline").read_bytes()
        if b"spawn_main" in command:
            found[int(child)] = command
    return found


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


@pytest.fixture
def long_corpus(tmp_path, corpus):
    path = tmp_path / "long.jsonl"
    path.write_bytes(corpus.read_bytes() * 4)
    return path


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, "worker"])
def test_interrupted_runs_leave_no_process_and_no_result_and_resume(
    tmp_path, model, corpus, long_corpus, how
):
    argv = ["--input", long_corpus, "--output-prefix", tmp_path / "o", "--append-eod", *flags(model)]
    argv += ["--workers", 2]
    process = start(*argv, "--commit-interval", 0)
    state = tmp_path / "o.partial" / "state.json"
    wait_for(lambda: state.exists() and json.loads(state.read_text())["state"]["documents"] > 1500)
    workers = children(process.pid)
    assert len(workers) == 2
    if how == "worker":
        os.kill(next(iter(workers)), signal.SIGKILL)
    else:
        process.send_signal(how)
    _, errors = process.communicate(timeout=90)
    wait_for(lambda: not any(map(alive, workers)), 60)
    assert (
        process.returncode == {"worker": 1, signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[how]
    )
    if how == "worker":
        last = errors.strip().splitlines()[-1]
        assert "was killed by signal 9 (SIGKILL)" in last and "--resume goes on" in last
    assert not list(tmp_path.glob("o_text_document*"))
    run(*argv, "--resume", "--skip-bad-documents")
    wanted = expected(corpus.read_text().splitlines(), model)
    assert read_pair(tmp_path / "o_text_document")[0] == wanted * 4
    assert not (tmp_path / "o.partial").exists()


def test_resume_wants_the_same_input_and_one_writer(tmp_path, model, corpus):
    argv = ["--output-prefix", tmp_path / "o", "--append-eod", *flags(model), "--commit-interval", 0]
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(corpus.read_bytes() + b'{"text": null}\n')
    with pytest.raises(ConfigError, match=r"bad.jsonl:3001: has null .* --resume goes on"):
        run("--input", bad, *argv)
    with pytest.raises(ConfigError, match="--resume: .* was made with another input"):
        run("--input", corpus, *argv, "--resume")
    with pytest.raises(ConfigError, match="--resume: .* was made with another append eod"):
        run("--input", bad, *[word for word in argv if word != "--append-eod"], "--resume")
    path = tmp_path / "o.partial" / "state.json"
    kept = json.loads(path.read_text())
    path.write_text(json.dumps(kept | {"signature": kept["signature"] | {"counts": ["documents", "lines"]}}))
    with pytest.raises(ConfigError, match=r"--resume: .* was made with another counts .*lines"):
        run("--input", bad, *argv, "--resume")
    path.write_text(json.dumps({name: value for name, value in kept.items() if name != "sizes"}))
    with pytest.raises(ConfigError, match="state.json' has no 'sizes'; remove the folder"):
        run("--input", bad, *argv, "--resume")
    path.write_text(json.dumps(kept))
    run("--input", bad, *argv, "--resume", "--skip-bad-documents")
    assert read_pair(tmp_path / "o_text_document")[0] == expected(corpus.read_text().splitlines(), model)
    (tmp_path / "o.partial").mkdir()
    with (tmp_path / "o.partial" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process is writing"):
            run("--input", bad, *argv)


def write_form(folder, form, texts):
    """Input with a bad document at its end, in one of its forms; returns the flag and the path."""
    lines = [json.dumps({"text": text}) for text in texts] + ['{"text": null}']
    data = ("\n".join(lines) + "\n").encode()
    if form in ("gzip", "zstd"):
        packed = gzip.compress(data) if form == "gzip" else pyarrow.compress(data, "zstd", asbytes=True)
        (folder / "a").write_bytes(packed)
    elif form == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": [*texts, None]}), folder / "a")
    elif form == "dataset":
        datasets.Dataset.from_dict({"text": [*texts, None]}).save_to_disk(folder)
        return "--dataset", folder
    elif form == "texts":
        for number, text in enumerate(texts):
            (folder / f"{number:03d}.txt").write_text(text)
        (folder / "last.txt").write_bytes(b"bad \xff")
    else:
        half = len(lines) // 2
        (folder / "a").write_text("\n".join(lines[:half]))
        (folder / "b").write_text("\n".join(lines[half:]))
    return "--input", folder


@pytest.mark.parametrize("form", ["two files", "gzip", "zstd", "parquet", "dataset", "texts"])
def test_every_form_of_input_is_resumed_in_the_middle(tmp_path, monkeypatch, model, form):
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 1000)
    texts = [f"{n} " + "some words " * (n % 30) for n in range(300)]
    (tmp_path / "in").mkdir()
    argv = [*write_form(tmp_path / "in", form, texts), "--output-prefix", tmp_path / "o", *flags(model)]
    argv += ["--commit-interval", 0]
    with pytest.raises(ConfigError, match="--resume goes on"):
        run(*argv)
    state = json.loads((tmp_path / "o.partial" / "state.json").read_text())["state"]
    assert 250 < state["documents"] <= 300
    encoded = []
    monkeypatch.setattr(preprocess_data, "take", lambda *args: (encoded.append(args[1]), take(*args)))
    run(*argv, "--resume", "--skip-bad-documents")
    assert len(encoded) <= 3, "what was done is not done again"
    lines = [json.dumps({"text": text}) for text in texts]
    assert read_pair(tmp_path / "o_text_document")[0] == expected(lines, model, eod=False)


take = preprocess_data.take


@pytest.mark.parametrize("failing", [0, 1])
def test_an_interruption_while_the_results_get_their_names(tmp_path, monkeypatch, model, corpus, failing):
    argv = ["--input", corpus, "--json-keys", "text", "title", *flags(model)]
    run(*argv, "--output-prefix", tmp_path / "whole")
    calls = []

    def full(path, *rest):
        calls.append(path)
        if len(calls) == failing + 1:
            raise OSError(28, "No space left on device", str(path))
        write_index(path, *rest)

    write_index = journal.write_index
    monkeypatch.setattr(journal, "write_index", full)
    with pytest.raises(RunError, match="no space left on the disk; what was done is kept"):
        run(*argv, "--output-prefix", tmp_path / "o")
    assert len(list(tmp_path.glob("o_*.idx"))) == failing == len(list(tmp_path.glob("o_*.bin")))
    run(*argv, "--output-prefix", tmp_path / "o", "--resume")
    for key in ("text", "title"):
        assert bytes_of(tmp_path / f"o_{key}_document") == bytes_of(tmp_path / f"whole_{key}_document")


def test_full_disk_is_one_sentence(tmp_path, model, corpus):
    """A limit on the size of files stands for the full disk: the write fails the same way."""
    argv = ["--input", corpus, "--output-prefix", tmp_path / "o", *flags(model), "--workers", 0]
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (100_000, 100_000))
    process = start(*argv, "--log-interval", 100_000, preexec_fn=limit)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and len(errors.strip().splitlines()) == 1, errors
    assert "cannot be written: File too large" in errors and list(tmp_path.iterdir()) == []


def test_exit_codes(tmp_path, model):
    for words, code in [
        (["--help"], 0),
        (["--input", tmp_path / "no", "--output-prefix", "o", *flags(model)], 2),
    ]:
        process = start(*words)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == code and len(errors.splitlines()) == (code == 2), errors


def slow_square(number):
    if number < 0:
        raise ValueError(f"{number} is negative")
    time.sleep(0.02 * (number % 5 == 0))
    return number * number


def build_square():
    return slow_square


def test_workers_keep_the_order_bound_the_memory_and_pass_errors_on():
    taken = []

    def items():
        for number in range(60):
            taken.append(number)
            yield number

    results = map_in_order(build_square, items(), 2, lambda number: 1 << 25)
    for index, (number, square) in enumerate(results):
        assert (number, square) == (index, index * index)
        assert len(taken) - index <= 5, "at most 128 MB are on the way"
    assert index == 59
    for workers in (0, 2):
        kept = map_in_order(
            build_square, range(9), workers, lambda number: 1, keep=lambda number: f"item {number}"
        )
        assert list(kept) == [(f"item {number}", number * number) for number in range(9)]
    with pytest.raises(ValueError, match="-1 is negative"):
        list(map_in_order(build_square, [1, 2, -1, 3], 2, lambda number: 1))


def exit_at_three(number):
    return os._exit(7) if number == 3 else number


def build_exit():
    return exit_at_three


def test_a_worker_that_ends_is_an_error():
    with pytest.raises(RunError, match="worker process .* ended with 7"):
        list(map_in_order(build_exit, range(10), 2, lambda number: 1))
