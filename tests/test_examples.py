"""Every launch script of examples/ starts, fits the GPU it names at its last batch size, and stops as it says."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megatron_lite.arguments.parse import parse_arguments
from megatron_lite.arithmetic.vocabulary import with_vocabulary
from megatron_lite.distributed.environment import Environment
from megatron_lite.planning.devices import DEVICES, Cluster
from megatron_lite.planning.memory import rank_memory
from megatron_lite.rehearsal.run_report import describe_run

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
    "slurm_multi_node": (32, 68.45, "pipeline 4 x data 1 (replicas 1 x shards 1) x context 1 x tensor 8"),
    "llama3_8b": (8, 6.98, "pipeline 1 x data 4 (replicas 1 x shards 4) x context 2 x tensor 1"),
    "mixtral_8x7b": (
        64,
        46.44,
        "pipeline 4 x data 16 (replicas 1 x shards 16) x context 1 x tensor 1, experts over 8",
    ),
    "gpt3_175b": (128, 174.6, "pipeline 16 x data 1 (replicas 1 x shards 1) x context 1 x tensor 8"),
}
LAUNCHED = sorted(set(EXPECTED) - {"laptop"})  # the laptop's starts python itself
VOCABULARY = 128_256  # rows of Llama 3's tokenizer, where one has to be opened to know
# torchrun's own options end at the program; it wants to know where nodes meet, and how long a save may take.
TORCHRUN = """#!/usr/bin/env python3
import json, sys
words = sys.argv[1:]
end = words.index("pretrain_gpt.py")
own = dict(zip(words[:end:2], words[1:end:2], strict=True))
nodes, ranks = int(own.pop("--nnodes", 1)), int(own.pop("--nproc-per-node"))
stops = int(own.pop("--shutdown-timeout", 30))
assert int(own.pop("--max-restarts", 0)) >= 0
place = {name: value for name, value in own.items() if value}
if nodes > 1:
    dynamic = {"--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"}
    assert set(place) in (dynamic, {"--node-rank", "--master-addr", "--master-port"}), f"{nodes} nodes meet nowhere"
else:
    assert not place, place
if "--exit-signal-handler" in words:
    assert stops > 60, f"killed {stops} s after SIGTERM"
print(json.dumps({"world": nodes * ranks, "flags": words[end + 1 :], "place": place}))
"""
COMMANDS = {
    "torchrun": TORCHRUN,
    "srun": '#!/usr/bin/env bash\nexec "$@"\n',
    "scontrol": "#!/bin/sh\nprintf 'node0\\nnode1\\n'\n",
}
SLURM = {"SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "node[0-3]", "SLURM_JOB_ID": "7"}
PLACES = ("DATA", "TOKENIZER", "VOCAB_FILE", "MERGE_FILE")
OTHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "NUM_NODES", *PLACES)


def write_commands(folder, commands):
    for name, text in commands.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def write_torch(folder, text):
    """A torch whose torchrun has the options in text: what a script does must not depend on the one installed."""
    (folder / "torch/distributed").mkdir(parents=True)
    (folder / "torch/__init__.py").touch()
    (folder / "torch/distributed/run.py").write_text(text)


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """A folder that stands first on PATH: what launches processes only says how."""
    folder = tmp_path_factory.mktemp("commands")
    write_torch(folder, '"--shutdown-timeout"')
    return write_commands(folder, COMMANDS)


def environment(commands, folder, places=PLACES, **variables):
    kept = {name: value for name, value in os.environ.items() if name not in OTHERS}
    given = {name: str(folder / name.lower()) for name in places} | {"SAVE": str(folder / "save")}
    path = f"{commands}:{os.environ['PATH']}"
    return {
        **kept,
        **given,
        **SLURM,
        "PATH": path,
        "PYTHONPATH": str(commands),
        "SLURM_SUBMIT_DIR": str(ROOT),
        **variables,
    }


def start(name, commands, folder, *words, **options):
    return subprocess.run(
        ["bash", str(ROOT / "examples" / f"{name}.sh"), *words],
        cwd=folder,
        env=environment(commands, folder, **options),
        capture_output=True,
        text=True,
        timeout=60,
    )


def launched(name, commands, folder, *words, **options):
    """(config, what the fake torchrun was told) of a script."""
    done = start(name, commands, folder, *words, **options)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    config = parse_arguments(["--check", "--world-size", str(told["world"]), *told["flags"]], Environment())
    return config, told


def test_no_script_is_left_out():
    assert {path.stem for path in SCRIPTS} - {"quickstart"} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_passes_check(name, commands, tmp_path):
    world_size, billions, axes = EXPECTED[name]
    if name == "laptop":
        report = start(name, commands, tmp_path, "--check").stdout
    else:
        report = describe_run(launched(name, commands, tmp_path)[0])
    assert f"Layout of {world_size} processes" in report and axes in report
    parameters = int(re.search(r"parameters +([\d,]+) (?:=|\()", report)[1].replace(",", ""))
    assert parameters / 1e9 == pytest.approx(billions, rel=0.01)
    # Nothing is there on this machine, and nothing is made by asking.
    assert f"{tmp_path}/data.idx" in report
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words, experts",
    [([], None), (["--quick"], None), (["--experts"], 4), (["--quick", "--experts"], 4)],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_quickstart_passes_check_twice(words, experts, commands, tmp_path):
    """What it trains with before the stop and after it; its other programs are not run, and each is there."""
    python = {"python": '#!/bin/sh\necho "unigram loss"\n'}
    done = start(
        "quickstart",
        write_commands(tmp_path, COMMANDS | python),
        tmp_path,
        *words,
        VIRTUAL_ENV=str(tmp_path),
        RUN=str(tmp_path / "run"),
        PYTHONPATH=str(commands),
    )
    assert done.returncode == 0, done.stderr
    programs = set(re.findall(r"^\+ python (\S+)", done.stdout, re.MULTILINE))
    assert len(programs) >= 4 and all((ROOT / program).exists() for program in programs - {"-m"})
    runs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    half, whole = (
        parse_arguments(["--check", "--world-size", str(run["world"]), *run["flags"]], Environment())
        for run in runs
    )
    assert half.training.exit_interval * 2 == whole.training.train_iters and not whole.training.exit_interval
    for config in (half, whole):
        assert config.model.num_experts == experts
        assert "pipeline 2 x data 2 (replicas 1 x shards 2)" in describe_run(config)
        assert config.parallel.expert_model_parallel_size == (2 if experts else 1)


def test_quickstart_refuses_other_words(commands, tmp_path):
    done = start("quickstart", commands, tmp_path, "--expert", VIRTUAL_ENV=str(tmp_path))
    assert done.returncode == 2 and "'--expert' is no flag of quickstart.sh" in done.stderr


@pytest.mark.parametrize("name", LAUNCHED)
def test_fits_the_gpu_it_names_at_its_last_batch_size(name, commands, tmp_path):
    """Every pipeline rank, all microbatches of the last batch: a batch that ramps up must not end a run hours later."""
    config, _ = launched(name, commands, tmp_path)
    rows = 50_257 if config.data.vocab_file else VOCABULARY
    planned = re.search(
        r"Planned for(?: [\w ]+ x)?[\s#]*([ABH]\d00) \d+GB", (ROOT / f"examples/{name}.sh").read_text()
    )
    limit = Cluster(DEVICES[planned[1].lower()], config.parallel.world_size, 8).memory_limit
    ranks = rank_memory(with_vocabulary(config, rows))
    assert len(ranks) == config.parallel.pipeline_model_parallel_size
    assert max(rank.total for rank in ranks) < limit


@pytest.mark.parametrize("name", EXPECTED)
def test_more_flags_come_last_and_win(name, commands, tmp_path):
    if name == "laptop":
        assert (
            " 5.000e-01 |"
            in start(name, commands, tmp_path, "--check", "--lr", "0.5", "--min-lr", "0.5").stdout
        )
    else:
        assert launched(name, commands, tmp_path, "--lr", "0.5")[0].optimizer.lr == 0.5


@pytest.mark.parametrize("name", LAUNCHED)
def test_says_what_it_needs(name, commands, tmp_path):
    done = start(name, commands, tmp_path, places=())
    assert done.returncode != 0 and "DATA: set DATA to the prefix of your .bin/.idx files" in done.stderr


def test_where_several_nodes_meet(commands, tmp_path):
    def place(name, **variables):
        return launched(name, commands, tmp_path, **variables)[1]["place"]

    alone = {"SLURM_JOB_NODELIST": "", "SLURM_JOB_ID": ""}
    by_slurm = {"--rdzv-backend": "c10d", "--rdzv-endpoint": "node0:20007", "--rdzv-id": "7"}
    assert place("slurm_multi_node") == place("gpt3_175b") == by_slurm
    assert place("llama3_8b", NUM_NODES="2", MASTER_ADDR="a", MASTER_PORT="5")["--rdzv-endpoint"] == "a:5"
    assert place("llama3_8b", NUM_NODES="2", MASTER_ADDR="a", **alone)["--rdzv-endpoint"] == "a:29500"
    numbered = place("gpt3_175b", MASTER_ADDR="a", NODE_RANK="3", MASTER_PORT="6000")
    assert numbered == {"--node-rank": "3", "--master-addr": "a", "--master-port": "6000"}
    nowhere = start("gpt3_175b", commands, tmp_path, **alone)
    assert (
        nowhere.returncode != 0 and "set MASTER_ADDR to the name of the first of 16 nodes" in nowhere.stderr
    )


def test_a_torchrun_without_a_shutdown_timeout_is_not_given_one(tmp_path):
    """torch 2.11's kills after 30 s: the script says so, and what to do."""
    write_torch(tmp_path / "older", "# no such option")
    shown = write_commands(tmp_path, COMMANDS | {"torchrun": '#!/bin/sh\necho "$@"\n'})
    done = start("one_gpu", shown, tmp_path, PYTHONPATH=str(tmp_path / "older"))
    assert done.returncode == 0 and "shutdown" not in done.stdout
    assert "30 s after SIGTERM" in done.stderr and "--exit-duration-in-mins" in done.stderr


STEP = """#!/usr/bin/env bash
trap 'sleep 0.3; echo saved >> "$LOG"; exit 1' TERM
echo $$ > "$LOG.pid"
[[ -z "${DONE:-}" ]] || exit 0
for _ in {1..300}; do sleep 0.1; done
"""
JOB = {
    "srun": STEP,
    "scancel": '#!/usr/bin/env bash\necho "scancel $*" >> "$LOG"; kill -TERM "$(cat "$LOG.pid")"\n',
    "scontrol": '#!/bin/sh\n[ "$1" = show ] && echo node0 || echo "scontrol $*" >> "$LOG"\n',
    "squeue": '#!/bin/sh\necho "${STATE:-RUNNING}"\n',
}


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({}, ["scancel --signal=TERM 7", "saved", "scontrol requeue 7"]),
        ({"STATE": "COMPLETING"}, ["scancel --signal=TERM 7", "saved"]),
        ({"DONE": "1"}, []),
    ],
    ids=["signalled", "cancelled", "done"],
)
def test_a_job_goes_back_into_the_queue_when_a_signal_stopped_it(tmp_path, variables, expected):
    log = tmp_path / "log"
    log.touch()
    env = environment(write_commands(tmp_path, JOB), tmp_path, LOG=str(log), **variables)
    job = subprocess.Popen(["bash", str(ROOT / "examples/slurm_multi_node.sh")], env=env)
    deadline = time.monotonic() + 30
    while not Path(f"{log}.pid").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if "DONE" not in variables:
        job.send_signal(signal.SIGTERM)
    assert job.wait(30) == (0 if "DONE" in variables else 1)
    assert log.read_text().splitlines() == expected
