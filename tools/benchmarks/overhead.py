"""What a run does besides computing: data, log, checkpoint checks, signals, counters."""

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_lite.config import Config
from megatron_lite.data.build import Datasets, build_datasets
from megatron_lite.data.indexed_dataset import write_pair
from megatron_lite.data.tokenizer import build_tokenizer
from megatron_lite.distributed.environment import Environment
from megatron_lite.distributed.mesh import build_mesh
from megatron_lite.parallel.pipeline import Batch
from megatron_lite.training.loop import Trainer
from megatron_lite.training.run import Run, build_run
from megatron_lite.training.signals import StopConditions
from tools.benchmarks.baseline_model import QUICK, Sizes
from tools.benchmarks.comparison import Options, Row, Table, refuse_unlike, row_of, speed, take_turns
from tools.benchmarks.ours import PreparedRun, run_config
from tools.benchmarks.ranks import run_ranks

STEPS_A_TURN = 5
LOG_INTERVALS = (1, 10)
MOST = 0.02


def run(options: Options) -> list[Table]:
    """All that a run does besides computing, as a share of its step: data, log, checkpoint checks, signals."""
    sizes, threads = (QUICK, 1) if options.quick else (Sizes(), 2)
    with tempfile.TemporaryDirectory() as folder:
        rows, step = run_ranks(measure, 1, sizes, Path(folder), options.repeats, threads=threads)[0]
    facts = [
        f"{sizes}, {threads} threads, a step of {1000 * step:.1f} ms (median).",
        "Data from an indexed dataset with the default workers; metrics file, console line, a stop decision over all "
        "ranks each step; no save falls into it. The computing is forward, backward, norm, clip, AdamW.",
    ]
    return [Table("overhead: data, log, checks and signals beside the computing of a step", rows, facts)]


class ClockedTrainer(Trainer):
    """A Trainer that notes how long it computes, and when each iteration ends."""

    def __init__(self, run: Run, datasets: Datasets) -> None:
        super().__init__(run, datasets, run.checkpointer(), Environment())
        self.loader = run.loader(datasets.train, 0)
        self.computing = self.loss = 0.0
        self.shares: list[float] = []
        self._last: float | None = None
        self.on_step = (self._note,)
        run._forward_backward = partial(self._clocked, run._forward_backward)
        run._update_weights = partial(self._clocked, run._update_weights)

    def _clocked(self, part: Callable[..., Any], *args: Any) -> Any:
        started = time.perf_counter()
        result = part(*args)
        self.computing += time.perf_counter() - started
        self.loss = result[0] if result else self.loss
        return result

    def _note(self, iteration: int) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self.shares.append(1 - self.computing / (now - self._last))
        self._last, self.computing = now, 0.0

    def turn(self) -> float:
        """STEPS_A_TURN whole iterations, as --exit-interval ends them; seconds."""
        started, self._last = time.perf_counter(), None
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # noqa: PTH123
            self.steps()
        return time.perf_counter() - started


def measure(sizes: Sizes, folder: Path, repeats: int) -> tuple[list[Row], float]:
    """(each interval's share, and the whole run against steps whose batches lie ready; seconds of a step)."""
    prefix, device = write_data(sizes, folder), torch.device("cpu")
    configs = {f"log-interval {n}": config_of(sizes, prefix, folder, n) for n in LOG_INTERVALS}
    first = next(iter(configs.values()))
    datasets = build_datasets(first, build_tokenizer(first.data, sizes.vocabulary - 1))
    whole = {
        name: ClockedTrainer(
            build_run(config, build_mesh(config, device), StopConditions(config.training, device)), datasets
        )
        for name, config in configs.items()
    }
    steps, losses = (repeats + 1) * STEPS_A_TURN, {}
    alone = PreparedRun(first, batches_of(next(iter(whole.values())).run, datasets, steps))

    def computing_only() -> float:
        started = time.perf_counter()
        for _ in range(STEPS_A_TURN):
            losses["step alone"] = alone.step().loss
        return time.perf_counter() - started

    seconds = take_turns({"step alone": computing_only} | {n: one.turn for n, one in whole.items()}, repeats)
    rows = []
    for name, one in whole.items():
        losses[name] = one.loss
        one.loader.close()
        rows.append(row_of(f"all else: share, {name}", "the iteration", one.shares, at_most=MOST))
        row = speed(name, seconds, "step alone", at_least=1 - MOST)
        rows.append(replace(row, name=f"whole run: speed, {name}"))
    refuse_unlike(f"the loss after {steps} steps", losses)
    return rows, statistics.median(seconds["step alone"]) / STEPS_A_TURN


def config_of(sizes: Sizes, prefix: str, folder: Path, log_interval: int) -> Config:
    """A run with everything usual on."""
    return run_config(
        sizes,
        f"--global-batch-size {sizes.micro_batch} --train-iters 1000 --data-path {prefix} --split 100,0,0",
        f"--log-interval {log_interval} --metrics-file {folder}/{log_interval}.jsonl --log-throughput",
        f"--exit-interval {STEPS_A_TURN} --exit-duration-in-mins 100000 --data-cache-path {folder}/cache",
        data="",
    )


def write_data(sizes: Sizes, folder: Path) -> str:
    """An indexed dataset of random documents; its prefix."""
    random, prefix = np.random.default_rng(1), str(folder / "random_text_document")
    lengths = random.integers(20, 4 * sizes.seq_length, 300)
    tokens = random.integers(0, sizes.vocabulary, lengths.sum(), dtype=np.uint16)
    write_pair(prefix, tokens.dtype, [tokens.data], lambda: [lengths], lambda: [np.arange(1, 301)])
    return prefix


def batches_of(run: Run, datasets: Datasets, count: int) -> list[Batch]:
    """The first batches that a run reads."""
    loader = run.loader(datasets.train, 0)
    batches = [loader.next_batch(run.config.training.global_batch_size) for _ in range(count)]
    loader.close()
    return batches
