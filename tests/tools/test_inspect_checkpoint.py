"""tools/inspect_checkpoint.py says what is there, finds damage, and shows what differs."""

import sys
from pathlib import Path

import pytest
import torch

from megatron_lite.checkpoint.writing import write_checkpoint
from megatron_lite.files.command_line import guarded
from tools import inspect_checkpoint


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*argv):
        monkeypatch.setattr(sys, "argv", ["inspect_checkpoint.py", *map(str, argv)])
        try:
            code = guarded(inspect_checkpoint.main)
        except SystemExit as leave:
            code = leave.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def make(save, step, value, seed=1):
    tensors = {
        "embedding.word_embeddings.weight": torch.full((6, 4), value),
        "optimizer.exp_avg.embedding.word_embeddings.weight": torch.zeros(6, 4),
        "final_norm.weight": torch.ones(4, dtype=torch.bfloat16),
    }
    config = {
        "model": {"num_layers": 2, "hidden_size": 4, "num_attention_heads": 1},
        "training": {"seed": seed},
    }
    return write_checkpoint(str(save), step, tensors.items(), config, {"consumed_samples": 4000 * step})


def test_it_describes(tmp_path, run):
    make(tmp_path, 5, 1.0)
    code, out, _ = run(tmp_path, "--tensors", "--config", "--verify")
    assert code == 0
    for words in (
        f"folder     {tmp_path}/iter_0000005",
        "iteration 5, consumed_samples 20,000",
        "model      2 layers, hidden 4, 1 heads",
        "weights    2 tensors, 28 elements, 104 bytes",
        "optimizer  1 tensors, 24 elements, 96 bytes",
        "training.seed = 1",
        "verified   4 of 4 files",
    ):
        assert words in out
    assert any(line.split()[:3] == ["final_norm.weight", "4", "bfloat16"] for line in out.splitlines())


def test_it_finds_damage(tmp_path, run):
    path = Path(make(tmp_path, 5, 1.0), "__0_0.distcp")
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    code, out, _ = run(tmp_path, "--verify")
    assert code == 1
    assert "damaged    __0_0.distcp has xxh3_128" in out and "verified   3 of 4" in out


def test_it_shows_differences(tmp_path, run):
    one, two = make(tmp_path, 5, 1.0), make(tmp_path, 10, 3.0, seed=2)
    assert run(one, "--diff", one) == (0, f"- {one}\n+ {one}\nno difference\n", "")
    code, out, _ = run(one, "--diff", two)
    assert code == 1
    assert out.splitlines()[2:] == [
        "training.seed: 1 -> 2",
        "consumed_samples: 20000 -> 40000",
        "iteration: 5 -> 10",
        "embedding.word_embeddings.weight: 24 of 24 elements differ, relative change 2.00e+00",
    ]


def test_nothing_to_look_at(tmp_path, run):
    code, out, error = run(tmp_path / "absent")
    assert (code, out) == (2, "") and error.startswith("error: ") and error.count("\n") == 1
