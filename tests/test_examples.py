"""Every launch script of examples/ passes --check, with the number of processes that it would start."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(
    path for path in (ROOT / "examples").glob("*.sh") if "pretrain_gpt.py" in path.read_text(encoding="utf-8")
)
# name -> (processes, billions of parameters, axes). Parameters by hand, L (h (q + 2 kv) + q h + m h ffn), and what the
# flags alone tell of the vocabulary: 50,257 tokens for GPT-2's, none for a tokenizer that has to be opened.
EXPECTED = {
    "laptop": (1, 0.004353, "pipeline 1 x data 1 (replicas 1 x shards 1) x context 1 x tensor 1"),
    "one_gpu": (1, 0.08495, "pipeline 1 x data 1 (replicas 1 x shards 1) x context 1 x tensor 1"),
    "eight_gpus_fsdp": (8, 1.214, "pipeline 1 x data 8 (replicas 1 x shards 8) x context 1 x tensor 1"),
    "eight_gpus_pipeline": (8, 6.477, "pipeline 4 x data 2 (replicas 1 x shards 2) x context 1 x tensor 1"),
    "eight_gpus_3d": (8, 6.98, "pipeline 2 x data 2 (replicas 1 x shards 2) x context 1 x tensor 2"),
    "slurm_multi_node": (32, 68.45, "pipeline 4 x data 8 (replicas 1 x shards 8) x context 1 x tensor 1"),
    "llama3_8b": (8, 6.98, "pipeline 1 x data 4 (replicas 1 x shards 4) x context 2 x tensor 1"),
    "gpt3_175b": (128, 174.6, "pipeline 16 x data 1 (replicas 1 x shards 1) x context 1 x tensor 8"),
}
# torchrun: its own options end at the program; their product is the number of processes.
TORCHRUN = """#!/usr/bin/env bash
nodes=1
while [[ "$1" != *.py ]]; do
    case "$1" in
        --nproc-per-node) ranks="$2" ;;
        --nnodes) nodes="$2" ;;
        --max-restarts | --rdzv-*) ;;
        *) echo "torchrun has no option $1" >&2; exit 9 ;;
    esac
    shift 2
done
exec python "$@" --check --world-size $((ranks * nodes))
"""
COMMANDS = {
    "torchrun": TORCHRUN,
    "srun": '#!/usr/bin/env bash\nexec "$@"\n',
    "scontrol": "#!/bin/sh\necho node0\n",
}
SLURM = {"SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "node[0-3]", "SLURM_JOB_ID": "7"}
PLACES = ("DATA", "TOKENIZER", "VOCAB_FILE", "MERGE_FILE")


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """A folder that stands first on PATH: what launches processes only says how many."""
    folder = tmp_path_factory.mktemp("commands")
    for name, text in COMMANDS.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def start(script, commands, tmp_path, *words, places=PLACES):
    variables = {name: str(tmp_path / name.lower()) for name in places} | {"SAVE": str(tmp_path / "save")}
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", *PLACES)
    }
    environment |= {**SLURM, "PATH": f"{commands}:{os.environ['PATH']}", **variables}
    return subprocess.run(
        ["bash", str(script), *words],
        cwd=tmp_path,
        env={**environment, "SLURM_SUBMIT_DIR": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_no_script_is_left_out():
    assert {path.stem for path in SCRIPTS} - {"quickstart"} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_passes_check(name, commands, tmp_path):
    world_size, billions, axes = EXPECTED[name]
    words = ["--check"] if name == "laptop" else []  # it starts python itself
    done = start(ROOT / "examples" / f"{name}.sh", commands, tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert f"Layout of {world_size} processes" in done.stdout and axes in done.stdout
    parameters = int(re.search(r"parameters +([\d,]+) =", done.stdout)[1].replace(",", ""))
    assert parameters / 1e9 == pytest.approx(billions, rel=0.01)
    # Nothing is there on this machine, and nothing is made by asking.
    assert f"{tmp_path}/data.idx" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", EXPECTED)
def test_more_flags_come_last_and_win(name, commands, tmp_path):
    words = ["--check"] if name == "laptop" else []
    done = start(
        ROOT / "examples" / f"{name}.sh", commands, tmp_path, *words, "--lr", "0.5", "--min-lr", "0.5"
    )
    assert done.returncode == 0, done.stderr
    assert " 5.000e-01 |" in done.stdout


@pytest.mark.parametrize("name", sorted(set(EXPECTED) - {"laptop"}))
def test_says_what_it_needs(name, commands, tmp_path):
    done = start(ROOT / "examples" / f"{name}.sh", commands, tmp_path, places=())
    assert done.returncode != 0 and "DATA: set DATA to the prefix of your .bin/.idx files" in done.stderr
