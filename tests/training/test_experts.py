"""Whole runs of a mixture of experts: log, trackers, resumes across layouts, generation, a dense model's checkpoint."""

import re
import subprocess
import sys

import pytest

from tests.runs import ROOT, flags, metrics, run_alone, train, training_steps, write_data

EXPERTS = """--num-experts 8 --moe-ffn-hidden-size 16 --moe-router-topk 2 --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.02 --moe-layer-freq ([0]+[1]*3)
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3"""
SPLIT = "--pipeline-model-parallel-size 2"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(folder, data): `whole` six steps in one process; `parts` three on dp 2, and three more on pp 2 x dp 2."""
    folder = tmp_path_factory.mktemp("runs")
    prefix = write_data(folder / "data")
    common = f"{EXPERTS} --train-iters 6 --save-interval 3 --moe-per-layer-logging"
    assert train(1, flags(prefix, common, f"--save {folder}/whole")) == [0]
    parts = f"{common} --save {folder}/parts --load {folder}/parts"
    assert train(2, flags(prefix, parts, "--exit-interval 3")) == [0, 0]
    assert train(4, flags(prefix, parts, SPLIT)) == [0] * 4
    return folder, prefix


def test_a_run_goes_on_in_another_layout(runs):
    """Losses, norms, the routers' losses and loads of the uninterrupted run, biases and all."""
    folder, _ = runs
    whole, parts = (training_steps(folder / name / "metrics.jsonl") for name in ("whole", "parts"))
    assert list(whole) == list(parts) == [1, 2, 3, 4, 5, 6]
    for step, numbers in whole.items():
        assert parts[step] == pytest.approx(numbers, rel=1e-4)
    records = (
        {r["iteration"]: r for r in metrics(folder / name / "metrics.jsonl") if "lm loss" in r}
        for name in ("whole", "parts")
    )
    for one, other in zip(*(kept.values() for kept in records)):
        names = {name for name in one if "load" in name or "z_loss" in name or "starved" in name}
        assert names >= {"seq_load_balancing_loss", "z_loss", "expert-load", "moe/z_loss_layer_3"}
        assert names >= {"starved-experts", "moe/expert-load_layer_3", "moe/starved-experts_layer_1"}
        assert "moe/z_loss_layer_0" not in one  # the dense layer
        assert {n: other[n] for n in names} == pytest.approx({n: one[n] for n in names}, rel=1e-4)
        layers = [one[f"moe/seq_load_balancing_loss_layer_{layer}"] for layer in (1, 2, 3)]
        assert one["seq_load_balancing_loss"] == pytest.approx(sum(layers) / 3, rel=1e-5)
        assert 1 <= one["expert-load"] <= 4


EP = "--expert-tensor-parallel-size 1 --expert-model-parallel-size"
LAYOUTS = {
    "dp 4, ep 4": (4, f"{EP} 4 --async-save"),
    "dp 4, ep 2": (4, f"{EP} 2"),
    "one": (1, ""),
    "tp 2, ep 2": (2, f"{EP} 2 --tensor-model-parallel-size 2 --sequence-parallel"),
    "zbv x dp, ep 2": (4, f"{EP} 2 {SPLIT} --pipeline-schedule zbv"),
    "dp 2, ep 1": (2, ""),
}


def steps_in_parts(prefix, folder, layouts):
    """Six steps, each part from the checkpoint of the one before: (steps, records by iteration)."""
    for part, name in enumerate(layouts, 1):
        world, words = LAYOUTS[name]
        stop = f"--exit-interval {6 // len(layouts)}" if part < len(layouts) else ""
        common = f"{EXPERTS} --train-iters 6 --save {folder} --load {folder} --moe-per-layer-logging"
        assert train(world, flags(prefix, common, words, stop)) == [0] * world
    records = {r["iteration"]: r for r in metrics(folder / "metrics.jsonl") if "lm loss" in r}
    return training_steps(folder / "metrics.jsonl"), records


def test_experts_over_ranks_go_on_in_every_other_layout(runs, tmp_path):
    folder, prefix = runs
    whole = training_steps(folder / "whole" / "metrics.jsonl")
    parts, records = steps_in_parts(prefix, tmp_path, LAYOUTS)
    assert list(parts) == list(whole)
    for step, numbers in whole.items():
        assert parts[step] == pytest.approx(numbers, rel=1e-4)
    wanted = {r["iteration"]: r for r in metrics(folder / "whole" / "metrics.jsonl") if "lm loss" in r}
    for iteration, record in wanted.items():
        loads = {name: value for name, value in record.items() if "expert" in name}
        assert {n: records[iteration][n] for n in loads} == pytest.approx(loads, rel=1e-4)


@pytest.mark.parametrize("layout", ["dp 4, ep 4", "tp 2, ep 2"])
def test_experts_over_ranks_go_on_to_the_bit_in_the_same_layout(runs, tmp_path, layout):
    _, prefix = runs
    assert (
        steps_in_parts(prefix, tmp_path / "parts", [layout] * 3)[0]
        == (steps_in_parts(prefix, tmp_path / "whole", [layout])[0])
    )


def test_the_log_line(runs, tmp_path):
    folder, prefix = runs
    words = f"{EXPERTS} --train-iters 7 --load {folder}/whole --finetune --log-interval 7"
    done = run_alone(flags(prefix, words))
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if "iteration        7/" in line)
    assert re.search(r"\| seq_load_balancing_loss: 1\.\d+E\+00 \| z_loss: \d\.\d+E[+-]\d+ \|", line)
    assert re.search(r"\| expert load \(fullest / mean\): \d\.\d\d \| starved experts: \d+\.\d% \|", line)
    done = run_alone(flags(prefix, f"{words} --moe-per-layer-logging"))
    assert re.search(r"by layer \| 1: \d\.\d\d \d+%, 2: \d\.\d\d \d+%, 3: \d\.\d\d \d+% \|", done.stdout)


def test_generation_from_a_mixture(runs):
    folder, _ = runs
    command = [sys.executable, "tools/generate.py", "--load", f"{folder}/whole", "--prompt", "5 6 7"]
    done = subprocess.run(
        [*command, "--max-new-tokens", "5"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) >= 5


@pytest.mark.parametrize("mixture_first", [True, False])
def test_a_dense_checkpoint_is_no_mixture(runs, tmp_path, mixture_first):
    folder, prefix = runs
    if mixture_first:
        saved, words = f"{folder}/whole", ""
    else:
        saved, words = f"{tmp_path}/dense", EXPERTS
        assert train(1, flags(prefix, f"--train-iters 4 --save {saved}")) == [0]
    done = run_alone(flags(prefix, words, f"--train-iters 6 --load {saved} --finetune"))
    error = done.stderr.strip().splitlines()[-1]
    assert (
        done.returncode == 2
        and "model.num_experts was" in error
        and "the model has to stay the same" in error
    )
