"""The suites of data and checkpoints: they run, give figures, and refuse work that is not the same."""

import math
import sys

import pytest

from megatron_lite.files.command_line import RunError
from tools.benchmarks import checkpoint, preprocess
from tools.benchmarks.comparison import Options
from tools.benchmarks.ranks import run_ranks

OPTIONS = Options(repeats=1, quick=True)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("suite", [checkpoint, preprocess], ids=lambda suite: suite.__name__)
def test_a_suite_gives_figures_and_leaves_nothing(suite, tmp_path):
    rows = [row for table in suite.run(OPTIONS) for row in table.rows]
    assert rows and all(math.isfinite(row.value) and row.value > 0 for row in rows)
    assert any(row.verdict for row in rows)
    assert not list(tmp_path.iterdir())


def test_other_tokens_from_a_text_are_refused(monkeypatch):
    monkeypatch.setattr(preprocess, "encode", lambda *arguments: (1.0, "5678"))
    with pytest.raises(RunError, match="not the same work: the sha256 of .bin of encode_batch is 5678"):
        preprocess.run(OPTIONS)


def test_a_program_that_fails_says_so_itself(tmp_path):
    command = preprocess.our_command(tmp_path, tmp_path / "absent.jsonl", 1)
    for start in (preprocess.finish, preprocess.peak_memory):
        with pytest.raises(RunError, match="preprocess_data.py failed: error: .* has no tokenizer.json"):
            start(command)


def test_memory_is_of_a_program_and_its_children():
    """A program that holds nothing while its child fills 200 MB."""
    child = "data = bytearray(200_000_000); data[::4096] = data[::4096]; import time; time.sleep(0.5)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert preprocess.peak_memory([sys.executable, "-c", parent]) > 200e6


def _read_half(folder):
    def half(state):
        for name, target in state.targets.items():
            target[: len(target) // 2] = state.tensors[name][: len(target) // 2]

    checkpoint.State.read_plain = half
    return checkpoint.contests(folder, 1 << 20, 1)


def test_a_baseline_that_reads_less_is_refused(tmp_path):
    with pytest.raises(RunError, match="not the same work: what was read"):
        run_ranks(_read_half, 1, str(tmp_path))
