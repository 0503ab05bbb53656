"""The drawn timetable, by hand for a small one."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lite.config import ConfigError
from tools.show_schedule import describe_schedule

ROOT = Path(__file__).resolve().parents[2]


def test_1f1b_by_hand():
    lines = describe_schedule("1f1b", 2, 2, 1).splitlines()
    assert lines[1:3] == ["rank 0  a0 a1 .. .. A0 A0 .. A1 A1", "rank 1  .. a0 A0 A0 a1 A1 A1 .. .."]
    assert lines[3].startswith("idle 33.3%;") and lines[3].endswith("2, 1")


def test_split_backwards_and_chunks_have_their_signs():
    text = describe_schedule("zbv", 2, 4, 2)
    assert all(sign in text for sign in ("a0", "b0", "A3", "B3", "w3"))


def test_what_cannot_run_is_refused():
    with pytest.raises(ConfigError, match="--pipeline-schedule 1f1b"):
        describe_schedule("1f1b", 4, 2, 1)


def test_the_command():
    flags = """
        --check --world-size 4 --num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64
        --micro-batch-size 1 --global-batch-size 8 --train-iters 5 --lr 1e-3 --tokenizer-type NullTokenizer
        --vocab-size 61 --mock-data --pipeline-model-parallel-size 4 --pipeline-schedule gpipe
    """
    command = [sys.executable, "tools/show_schedule.py", *flags.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "gpipe: 4 ranks x 1 chunks, 8 microbatches" in done.stdout
    assert "idle 27.3%" in done.stdout
