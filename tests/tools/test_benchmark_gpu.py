"""The suite for a GPU starts, measures and compares; here in its smallest form, on the CPU."""

import json
import subprocess
import sys

from tests.runs import ROOT
from tools.benchmarks import gpu
from tools.benchmarks.gpu import Measured, speeds


def test_it_starts(tmp_path):
    command = [sys.executable, "tools/benchmark.py", "--suite", "gpu", "--quick", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr
    suites = json.loads((tmp_path / "results.json").read_text())["suites"]
    right, steps = suites["gpu"]
    assert [row["verdict"] for row in right["rows"]] == ["ok"] * 4
    assert len(steps["rows"]) == len(gpu.QUICK_ORDER) - 1
    assert all(row["value"] > 0 for row in steps["rows"])


def test_variants_are_held_against_bf16():
    measured = {
        ("1B", "bf16"): Measured([2.0, 2.0, 4.0], 5.0, 100, 10.0, 2**31),
        ("1B", "compile"): Measured([1.0, 1.0, 1.0], 5.0, 100, 20.0, 2**30),
        ("3B", "bf16"): "out of memory: as told",
    }
    table = speeds(measured, [("125M", "bf16")], peak=None)
    (row,) = table.rows
    assert (row.name, row.value, row.low, row.high) == ("1B, compile", 2.0, 2.0, 3.0)
    assert "1B, bf16: 50 tokens/s, 10 TFLOP/s, MFU not available, 2.0 GiB." in table.facts
    assert "3B, bf16: out of memory: as told." in table.facts
    assert "Left out for want of time: 125M bf16." in table.facts
    (mfu,) = (row for row in speeds(measured, [], peak=1e14).rows if row.name == "1B, MFU")
    assert (mfu.value, mfu.verdict) == (0.2, "MISSED")
