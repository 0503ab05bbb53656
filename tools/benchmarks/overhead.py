"""What a run does besides computing: data, log, checkpoint checks, signals, counters."""

import contextlib
import os
import statistics
import tempfile
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_lite.arithmetic.mesh_sizes import mesh_sizes
from megatron_lite.checkpoint.checkpointer import Checkpointer
from megatron_lite.config import Config
from megatron_lite.data.build import build_datasets, sample_counts
from megatron_lite.data.indexed_dataset import write_pair
from megatron_lite.data.loader import Loader
from megatron_lite.data.samples import Samples
from megatron_lite.data.tokenizer import build_tokenizer
from megatron_lite.distributed.environment import Environment
from megatron_lite.distributed.process_group import process_group
from megatron_lite.parallel.pipeline import Batch
from megatron_lite.training.evaluate import Evaluator
from megatron_lite.training.loop import Trainer
from megatron_lite.training.metrics import Metrics
from megatron_lite.training.signals import StopWatch
from megatron_lite.training.trackers import ProgressLog, build_tracker
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
from tools.benchmarks.our_step import build_trainer

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

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.computing = 0.0
        self.loss = 0.0
        self.shares: list[float] = []
        self._last: float | None = None
        self.on_step = (self._note,)

    def _forward_backward(self, batch: Batch, microbatches: int) -> tuple[float, float]:
        started = time.perf_counter()
        self.loss, norm = super()._forward_backward(batch, microbatches)
        self.computing += time.perf_counter() - started
        return self.loss, norm

    def _update_weights(self, norm: float) -> None:
        started = time.perf_counter()
        super()._update_weights(norm)
        self.computing += time.perf_counter() - started

    def _note(self, iteration: int) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self.shares.append(1 - self.computing / (now - self._last))
        self._last, self.computing = now, 0.0

    def turn(self) -> float:
        """STEPS_A_TURN whole iterations, as --exit-interval ends them; seconds."""
        started, self._last = time.perf_counter(), None
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # noqa: PTH123
            self.run()
        return time.perf_counter() - started


def measure(sizes: Sizes, folder: Path, options: Options) -> Table:
    """The table: each interval's share, and the whole run against steps whose batches lie ready."""
    prefix = write_data(sizes, folder)
    turns = options.repeats + 1
    configs = {f"log-interval {n}": config_of(sizes, prefix, folder, n) for n in LOG_INTERVALS}
    first = next(iter(configs.values()))
    dataset = build_datasets(
        first, build_tokenizer(first.data, sizes.vocabulary - 1), sample_counts(first)
    ).train
    with process_group(first, Environment()) as (device, _):
        whole = {name: whole_trainer(config, dataset, device) for name, config in configs.items()}
        bare, losses = build_trainer(first, batches_of(first, dataset, turns * STEPS_A_TURN)), {}

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


def whole_trainer(config: Config, dataset: Samples, device: torch.device) -> ClockedTrainer:
    """The Trainer with all that pretrain_gpt.py gives it."""
    plain, environment = build_trainer(config, []), Environment()
    parts = {item.name: getattr(plain, item.name) for item in fields(plain) if item.init}
    loader, stop = Loader(dataset, config, 0, 1, 0, device), StopWatch(config.training, device)
    tracker = build_tracker(config, environment, None)
    parts |= {
        "loader": loader,
        "stop": stop,
        "validation": Evaluator(config, plain.pipeline, plain.mesh, {}, lambda *_: loader, stop.asked),
        "checkpointer": Checkpointer(
            config, plain.mesh.host_group, mesh_sizes(config), plain.mesh.coordinates
        ),
        "metrics": Metrics(config, device, 1, plain.batches.total_iterations, tracker, plain.timers),
        "progress": ProgressLog(config, environment),
    }
    return ClockedTrainer(**parts)
