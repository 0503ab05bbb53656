"""What a run does besides computing: data, log, checkpoint checks, signals, counters."""

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_lite.config import Config
from megatron_lite.data.build import Datasets, build_datasets
from megatron_lite.data.indexed_dataset import write_pair
from megatron_lite.data.loader import Loader
from megatron_lite.data.samples import Samples
from megatron_lite.data.tokenizer import build_tokenizer
from megatron_lite.distributed.environment import Environment
from megatron_lite.distributed.mesh import build_mesh
from megatron_lite.distributed.process_group import process_group
from megatron_lite.parallel.pipeline import Batch
from megatron_lite.training.loop import Trainer
from megatron_lite.training.run import Run, build_run
from tools.benchmarks.baseline_model import QUICK, Sizes
from tools.benchmarks.comparison import (
    Options,
    Row,
    Table,
    quartiles,
    refuse_unlike,
    speed,
    take_turns,
    torch_threads,
)
from tools.benchmarks.our_run import run_config
from tools.benchmarks.our_step import build_prepared

THREADS = 2
STEPS_A_TURN = 5
LOG_INTERVALS = (1, 10)
MOST = 0.02


def run(options: Options) -> list[Table]:
    """All that a run does besides computing, as a share of its step: data, log, checkpoint checks, signals."""
    with torch_threads(1 if options.quick else THREADS), tempfile.TemporaryDirectory() as folder:
        return [measure(QUICK if options.quick else Sizes(), Path(folder), options)]


class ClockedTrainer(Trainer):
    """A Trainer that notes how long it computes, and when each iteration ends."""

    def __init__(self, run: Run, datasets: Datasets) -> None:
        super().__init__(run, datasets, run.checkpointer(), Environment())
        self.loader = run.loader(datasets.train, 0)
        self.computing = 0.0
        self.loss = 0.0
        self.shares: list[float] = []
        self._last: float | None = None
        self.on_step = (self._note,)
        compute, update = run._forward_backward, run._update_weights
        run._forward_backward = lambda *args: self._clocked(compute, *args)
        run._update_weights = lambda *args: self._clocked(update, *args)

    def _clocked(self, part: Callable[..., Any], *args: Any) -> Any:
        started = time.perf_counter()
        result = part(*args)
        self.computing += time.perf_counter() - started
        if result is not None:
            self.loss, _ = result
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


def measure(sizes: Sizes, folder: Path, options: Options) -> Table:
    """The table: each interval's share, and the whole run against steps whose batches lie ready."""
    prefix = write_data(sizes, folder)
    turns = options.repeats + 1
    configs = {f"log-interval {n}": config_of(sizes, prefix, folder, n) for n in LOG_INTERVALS}
    first = next(iter(configs.values()))
    datasets = build_datasets(first, build_tokenizer(first.data, sizes.vocabulary - 1))
    with process_group(first, Environment()) as (device, _):
        whole = {
            name: ClockedTrainer(build_run(config, build_mesh(config, device), time.monotonic()), datasets)
            for name, config in configs.items()
        }
        bare, losses = build_prepared(first, batches_of(first, datasets.train, turns * STEPS_A_TURN)), {}

        def computing_only() -> float:
            started = time.perf_counter()
            for _ in range(STEPS_A_TURN):
                losses["step alone"] = bare.step().loss
            return time.perf_counter() - started

        contestants = {"step alone": computing_only} | {name: one.turn for name, one in whole.items()}
        seconds = take_turns(contestants, options.repeats)
        for name, one in whole.items():
            losses[name] = one.loss
            one.loader.close()
    refuse_unlike(f"the loss after {turns * STEPS_A_TURN} steps", losses)
    rows = [
        Row(f"all else: share, {name}", "the iteration", *quartiles(one.shares), at_most=MOST)
        for name, one in whole.items()
    ]
    for name in whole:
        row = speed(name, seconds, "step alone", at_least=1 - MOST)
        rows.append(replace(row, name=f"whole run: speed, {name}"))
    step = statistics.median(seconds["step alone"]) / STEPS_A_TURN
    return Table(
        "overhead: data, log, checks and signals beside the computing of a step",
        rows,
        [
            f"{sizes}, {torch.get_num_threads()} threads, a step of {1000 * step:.1f} ms (median).",
            "Data from an indexed dataset with the default workers; metrics file, console line, a stop decision over "
            "all ranks each step; no save falls into it. The computing is forward, backward, norm, clip, AdamW.",
        ],
    )


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
    tokens = random.integers(0, sizes.vocabulary - 1, lengths.sum()).astype(np.uint16)
    tokens[np.cumsum(lengths) - 1] = sizes.vocabulary - 1
    write_pair(prefix, tokens.dtype, [tokens.data], lambda: [lengths], lambda: [np.arange(1, 301)])
    return prefix


def batches_of(config: Config, dataset: Samples, count: int) -> list[Batch]:
    """The first batches that a run reads."""
    loader = Loader(dataset, config, 0, 1, 0)
    batches = [loader.next_batch(config.training.global_batch_size) for _ in range(count)]
    loader.close()
    return batches
