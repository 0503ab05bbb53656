"""From the command to the end of the first step: pretrain_gpt.py against a bare program."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from megatron_lite.data.build import build_datasets
from megatron_lite.data.loader import Loader
from megatron_lite.data.tokenizer import build_tokenizer
from megatron_lite.files.command_line import RunError
from tools.benchmarks.baseline_model import QUICK
from tools.benchmarks.comparison import Options, Table, cost, fastest, refuse_unlike, take_turns
from tools.benchmarks.ours import run_config, run_flags
from tools.benchmarks.scripts import bare_model

ROOT = Path(__file__).resolve().parents[2]
THREADS = 2
SIZES = QUICK  # what is asked is what comes before the step
MORE = f"--mock-data --train-iters 1 --global-batch-size {SIZES.micro_batch} --log-interval 1"
OURS = [sys.executable, "pretrain_gpt.py", *run_flags(SIZES), *MORE.split()]
BARE = [sys.executable, "-m", "tools.benchmarks.baseline_model", json.dumps(asdict(SIZES))]
LOSS = re.compile(r"iteration +1/ +1 .*lm loss: (\S+)|^loss (\S+)")


def run(options: Options) -> list[Table]:
    """From the command to the end of the first step, against importing torch, building a bare model and one step."""
    losses: dict[str, float] = {}

    def our_turn() -> float:
        seconds, losses["ours"] = first_step(OURS)
        return seconds

    seconds = take_turns({"bare": lambda: first_step(BARE)[0], "ours": our_turn}, options.repeats)
    losses["bare"] = loss_from_our_start()
    refuse_unlike("the first step's loss", losses)
    row = cost("ours", seconds, "bare", at_most=1.3, note="time: below 1 is faster")
    facts = [f"Fastest start, s: {fastest(seconds)}. {SIZES}, {THREADS} threads."]
    return [Table("startup: from the command to the end of the first step", [row], facts)]


def first_step(command: Sequence[str]) -> tuple[float, float]:
    """(seconds from a program's start to the line of its first step, its loss). Raises RunError without it."""
    environment = os.environ | {"OMP_NUM_THREADS": str(THREADS)}
    started, found, last = time.perf_counter(), None, ""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **streams) as process:
        for last in process.stdout:
            if found is None and (match := LOSS.search(last)):
                found = time.perf_counter() - started, float(match[1] or match[2])
    if found is None:
        raise RunError(f"{' '.join(command[:3])} made no step: {last[-500:]}")
    return found


def loss_from_our_start() -> float:
    """The bare program's loss from our first weights and our first batch; outside of what is timed."""
    config = run_config(SIZES, MORE)
    datasets = build_datasets(config, build_tokenizer(config.data, SIZES.vocabulary - 1))
    loader = Loader(datasets.train, config, 0, 1, 0)
    batch = loader.next_batch(SIZES.micro_batch)
    loader.close()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/start.pt"
        torch.save({"weights": bare_model(SIZES).state_dict(), "batch": batch}, path)
        return first_step([*BARE, path])[1]
