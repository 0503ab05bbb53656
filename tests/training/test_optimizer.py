"""An optimizer is one row: with nothing else it plans, trains, saves and resumes in another layout."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from megatron_lite.config.optimizers import ADAM_STATE, FULL, OPTIMIZERS, OptimizerRow
from tests.ranks import free_port
from tests.runs import ROOT, flags, training_steps, write_data

ADAGRAD = """
OPTIMIZERS["adagrad"] = OptimizerRow(
    "torch.optim:Adagrad",
    {"eps": "adam_eps", "initial_accumulator_value": 0.5},
    {"step": SCALAR, "sum": FULL},
    initial={"sum": 0.5},
)
"""


def run(tree, words, ranks=1):
    launch = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        "--master-port",
        str(free_port()),
    ]
    command = [sys.executable, *(launch if ranks > 1 else []), "pretrain_gpt.py", *words]
    done = subprocess.run(
        command,
        cwd=tree,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_new_one_works_everywhere(tmp_path):
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "megatron_lite", tree / "megatron_lite")
    shutil.copy(ROOT / "pretrain_gpt.py", tree)
    with (tree / "megatron_lite" / "config" / "optimizers.py").open("a") as file:
        file.write(ADAGRAD)
    base = flags(write_data(tmp_path / "data"), "--optimizer adagrad --device cpu")
    straight, resumed = tmp_path / "straight.jsonl", tmp_path / "resumed.jsonl"
    run(tree, [*base, "--metrics-file", str(straight)])
    place = [
        "--save",
        str(tmp_path / "ckpt"),
        "--load",
        str(tmp_path / "ckpt"),
        "--metrics-file",
        str(resumed),
    ]
    run(tree, [*base, *place, "--exit-interval", "6"])
    run(tree, [*base, *place], ranks=2)
    once, twice = training_steps(straight), training_steps(resumed)
    assert sorted(once) == sorted(twice) == list(range(1, 13))
    for iteration, (loss, *_) in once.items():
        assert twice[iteration][0] == pytest.approx(loss, rel=1e-5)
    rehearsed = run(tree, [*base, "--dry-run", "--world-size", "2"])
    assert "optimizer state (adagrad)" in rehearsed
    sizes = dict(re.findall(r"(parameters|optimizer state) \(.*\) +([\d.]+)\n", rehearsed))
    assert float(sizes["optimizer state"]) == pytest.approx(float(sizes["parameters"]), rel=0.1)


def test_bytes_by_row():
    assert {name: row.bytes_of(100, 60) for name, row in OPTIMIZERS.items()} == {
        "adam": 800,
        "sgd": 400,
        "muon": 8 * 40 + 4 * 60,
    }
    assert OptimizerRow("x:y", state=ADAM_STATE | {"third": FULL}).bytes_of(10, 5) == 120
