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

from megatron_lite.data.build import build_datasets, sample_counts
from megatron_lite.data.loader import Loader
from megatron_lite.data.tokenizer import build_tokenizer
from megatron_lite.files.command_line import RunError
from tools.benchmarks.baseline_model import QUICK, BareModel, Sizes
from tools.benchmarks.comparison import Options, Row, Table, quartiles, refuse_unlike, take_turns
from tools.benchmarks.our_run import load_initial_weights, run_config, run_flags

ROOT = Path(__file__).resolve().parents[2]
THREADS = 2
TIMEOUT_S = 300.0
FIRST_STEP = re.compile(r"iteration +1/ +1 .*lm loss: (\S+)")
BARE_STEP = re.compile(r"^loss (\S+)")


def run(options: Options) -> list[Table]:
    """From the command to the end of the first step, against importing torch, building a bare model and one step."""
    sizes = QUICK  # what is asked is what comes before the step
    more = f"--mock-data --train-iters 1 --global-batch-size {sizes.micro_batch} --log-interval 1"
    ours = [sys.executable, "pretrain_gpt.py", *run_flags(sizes), *more.split()]
    bare = [sys.executable, "-m", "tools.benchmarks.bare_start", json.dumps(asdict(sizes))]
    losses: dict[str, float] = {}

    def our_turn() -> float:
        seconds, losses["ours"] = first_step(ours, FIRST_STEP)
        return seconds

    seconds = take_turns({"bare": lambda: first_step(bare, BARE_STEP)[0], "ours": our_turn}, options.repeats)
    losses["bare"] = loss_from_our_start(bare, sizes, more)
    refuse_unlike("the first step's loss", losses)
    ratios = [mine / theirs for mine, theirs in zip(seconds["ours"], seconds["bare"], strict=True)]
    fastest = ", ".join(f"{name} {min(times):.2f}" for name, times in seconds.items())
    return [
        Table(
            "startup: from the command to the end of the first step",
            [Row("ours: time", "bare", *quartiles(ratios), at_most=1.3)],
            [
                f"Fastest start, s: {fastest}. {sizes}, {THREADS} threads.",
                "A ratio of times: below 1 is faster.",
            ],
        )
    ]


def first_step(command: Sequence[str], line: re.Pattern[str]) -> tuple[float, float]:
    """(seconds from the start of the program to the line of its first step, the loss in it).

    Raises:
        RunError: the program ended, or TIMEOUT_S passed, without that line.
    """
    environment = os.environ | {"OMP_NUM_THREADS": str(THREADS)}
    started = time.perf_counter()
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        for text in process.stdout:
            if found := line.search(text):
                seconds = time.perf_counter() - started
                process.stdout.read()
                process.wait(TIMEOUT_S)
                return seconds, float(found[1])
        errors.seek(0)
        raise RunError(f"{' '.join(command[:3])} made no step: {errors.read()[-500:]}")


def loss_from_our_start(bare: Sequence[str], sizes: Sizes, more: str) -> float:
    """The bare program's loss from our first weights and our first batch; outside of what is timed."""
    config = run_config(sizes, more)
    tokenizer = build_tokenizer(config.data, sizes.vocabulary - 1)
    datasets = build_datasets(config, tokenizer, sample_counts(config))
    loader = Loader(datasets.train, config, 0, 1, 0)
    model = BareModel(sizes)
    load_initial_weights(model, config)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/start.pt"
        torch.save({"weights": model.state_dict(), "batch": loader.next_batch(sizes.micro_batch)}, path)
        loader.close()
        return first_step([*bare, path], BARE_STEP)[1]
