"""An optimizer is one row: with nothing else it plans, trains, saves and resumes in another layout."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from megatron_lite.config import OptimizerConfig
from megatron_lite.config.optimizers import ADAM_STATE, FULL, OPTIMIZERS, SCALAR, OptimizerRow
from megatron_lite.model.gpt import GPTChunk
from megatron_lite.training.named_tensors import named_state
from megatron_lite.training.optimizer import build_optimizer, parameter_groups
from tests.parity import MODEL
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


def run(tree, words, ranks=1, program="pretrain_gpt.py"):
    launch = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        "--master-port",
        str(free_port()),
    ]
    command = [sys.executable, *(launch if ranks > 1 else []), program, *words]
    done = subprocess.run(
        command,
        cwd=tree,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_new_one_works_everywhere(tmp_path):
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "megatron_lite", tree / "megatron_lite")
    shutil.copytree(ROOT / "tools", tree / "tools")
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
    assert "learning rate" in run(tree, [*base, "--check", "--world-size", "2"]).lower()
    memory = {}
    for name in ("adagrad", "adam"):  # a later flag wins
        plan = ["--num-gpus", "2", "--gpu", "h100", "--json", *base, "--optimizer", name]
        memory[name] = json.loads(run(tree, plan, program="tools/plan.py"))["plans"][0]["memory_bytes"][0]
    assert memory["adagrad"]["optimizer state"] == pytest.approx(memory["adam"]["optimizer state"] / 2)
    rehearsed = run(tree, [*base, "--dry-run", "--world-size", "2"])
    assert "optimizer state (adagrad)" in rehearsed
    sizes = dict(re.findall(r"(parameters|optimizer state) \(.*\) +([\d.]+)\n", rehearsed))
    assert float(sizes["optimizer state"]) == pytest.approx(float(sizes["parameters"]), rel=0.1)


EXPERTS = {
    "num_layers": 1,
    "num_experts": 4,
    "moe_ffn_hidden_size": 16,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
SHARED = EXPERTS | {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True}
BIASED = EXPERTS | {"disable_bias_linear": False, "swiglu": False}


@pytest.mark.parametrize("model", [SHARED, BIASED], ids=["shared expert", "biases"])
def test_groups_of_a_mixture(model):
    """Every matrix decays and no bias does, though one of experts is [E, F]; a router's rows are no matrix for Muon."""
    chunk = GPTChunk(replace(MODEL, **model), [0])
    names = {parameter: name for name, parameter in chunk.named_global_parameters()}
    groups = parameter_groups([chunk], OptimizerConfig(optimizer="muon", lr=1e-3))
    decaying, orthogonal = (
        {names[p] for group in groups if group[key] for p in group["params"]}
        for key in ("decays", "orthogonal")
    )
    assert decaying == {n for n in names.values() if n.endswith(".weight") and "norm" not in n}
    scores = {"layers.0.mlp.router.weight", "layers.0.mlp.shared_expert_gate.weight"}
    assert orthogonal == {n for n in decaying if n.startswith("layers.")} - scores
    assert "layers.0.mlp.experts.up_proj.weight" in orthogonal


def test_bytes_by_row():
    assert {name: row.bytes_of(100, 60) for name, row in OPTIMIZERS.items()} == {
        "adam": 800,
        "sgd": 400,
        "muon": 8 * 40 + 4 * 60,
    }
    assert OptimizerRow("x:y", state=ADAM_STATE | {"third": FULL}).bytes_of(10, 5) == 120


@pytest.mark.parametrize(
    ("kept", "text"),
    [({"sum": 1.0}, "'step'"), ({"sum": 1.0, "step": 3}, "'int'"), ({"sum": 1.0, "more": 1.0}, "'more'")],
)
def test_state_that_the_row_does_not_name_is_an_error_not_a_loss(kept, text):
    """A checkpoint without it would resume with another state."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([{"params": [parameter], "orthogonal": False}])
    optimizer.row = OptimizerRow("torch.optim:SGD", state={"step": SCALAR, "sum": FULL})
    assert [name for name, _ in named_state([("a", parameter)], optimizer)] == [
        "optimizer.step.a",
        "optimizer.sum.a",
    ]
    optimizer.state[parameter] = {k: torch.ones(2) if isinstance(v, float) else v for k, v in kept.items()}
    with pytest.raises(ValueError, match=text):
        list(named_state([("a", parameter)], optimizer))


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_rows_name_the_state_that_their_optimizers_keep(name):
    """So do the values that it starts from: what is made before the first step is what the step would make."""
    chunk = GPTChunk(replace(MODEL, num_layers=1), range(1))
    optimizer = build_optimizer([chunk], OptimizerConfig(optimizer=name, lr=0.1))
    for made_first in (True, False):
        optimizer.state.clear()
        if made_first:
            dict(named_state(chunk.named_global_parameters(), optimizer))
        for parameter in chunk.parameters():
            torch.nn.init.ones_(parameter)
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
        found = dict(named_state(chunk.named_global_parameters(), optimizer))
        weights = [p.detach().clone() for p in chunk.parameters()]
        if made_first:
            first = found, weights
    assert first[0].keys() == found.keys()
    assert all(torch.equal(first[0][key], value) for key, value in found.items())
    assert all(map(torch.equal, first[1], weights))
