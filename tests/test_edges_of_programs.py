"""What a user of any program meets at its edges: `| head`, numbers that no computation takes, folders to be made."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lite.config import ConfigError
from megatron_lite.files.command_line import make_folder_of, number
from megatron_lite.files.writing import write_aside

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "command",
    [
        ["pretrain_gpt.py", "--help"],
        [
            "pretrain_gpt.py",
            "--check",
            "--num-layers",
            "2",
            "--hidden-size",
            "8",
            "--num-attention-heads",
            "2",
        ],
        ["tools/verify_parity.py", "--help"],
        ["data_prep/merge_datasets.py", "--help"],
    ],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_nobody_reads_on(command, unbuffered):
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        stdout=writes,
        stderr=subprocess.PIPE,
        text=True,
        timeout=100,
    )
    os.close(writes)
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


@pytest.mark.parametrize("text", ["inf", "nan", "-1", "1e999", "word", ""])
def test_numbers_that_are_no_setting(text):
    with pytest.raises(Exception, match=f"is '{text}', wanted a number of at least 0"):
        number(0, float)(text)


def test_a_whole_number_has_64_bits():
    assert number(0)("9223372036854775807") == 2**63 - 1
    with pytest.raises(Exception, match="wanted a whole number"):
        number(0)("9223372036854775808")


def test_the_folder_of_an_output_is_made(tmp_path):
    make_folder_of(tmp_path / "a" / "b" / "x.html", "--output")
    write_aside(tmp_path / "c" / "x.html", "text")
    assert (tmp_path / "a" / "b").is_dir() and (tmp_path / "c" / "x.html").read_text() == "text"
    with pytest.raises(ConfigError, match="its folder cannot be made"):
        make_folder_of(tmp_path / "c" / "x.html" / "x", "--output")
    with pytest.raises(ConfigError, match="is a folder, wanted a file"):
        make_folder_of(tmp_path / "a" / "b", "--output")
