"""Whole runs of pretrain_gpt.py on a tiny model and tiny data, rank by rank in forked processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import pretrain_gpt
from megatron_lite.arguments.parse import parse_arguments
from megatron_lite.distributed.environment import Environment
from tests.pairs import write_documents
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[1]
VOCAB = 61  # NullTokenizer: 61 ids and the end of document
SEQ_LENGTH = 16
MODEL = """
    --num-layers 4 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --max-position-embeddings 16 --swiglu --normalization RMSNorm
    --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights
    --hidden-dropout 0 --attention-dropout 0 --init-method-std 0.1 --make-vocab-size-divisible-by 64
"""
TRAINING = """
    --seq-length 16 --micro-batch-size 1 --global-batch-size 8 --train-iters 12 --lr 0.01 --min-lr 0.001
    --lr-decay-style cosine --lr-warmup-iters 3 --weight-decay 0.1 --log-interval 1 --num-workers 0
    --distributed-timeout-minutes 2 --tokenizer-type NullTokenizer --vocab-size 61 --seed 7 --device cpu
"""


def write_data(folder: Path, documents=60, seed=3) -> str:
    """A tiny indexed dataset with a pattern to learn; returns its prefix."""
    random = np.random.default_rng(seed)
    folder.mkdir(exist_ok=True)
    prefix = str(folder / "tiny_text_document")
    made = []
    for _ in range(documents):
        start, length = random.integers(0, VOCAB), random.integers(20, 60)
        tokens = (start + np.arange(length) * random.integers(1, 4)) % VOCAB
        made.append([*tokens.tolist(), VOCAB])
    return write_documents(prefix, made)


def flags(prefix: str, *more: str, model: str = MODEL, training: str = TRAINING) -> list[str]:
    """The flags of a tiny run; later ones win."""
    words = " ".join([model, training, *more]).split()
    return [*words, "--data-path", prefix, "--split", "90,5,5", "--eval-iters", "0"] if prefix else words


def pretrain_here(argv: list[str]) -> int:
    """pretrain_gpt.py in this process, as one rank (a top-level function for run_ranks)."""
    environment = Environment.read()
    config = parse_arguments(argv, environment)
    return pretrain_gpt.pretrain(config, environment, started=0.0)


def train(world_size: int, argv: list[str], timeout: int = 120) -> list[int]:
    """Run to the end (or stop) on so many ranks; the exit codes."""
    return run_ranks(pretrain_here, world_size, argv, timeout=timeout)


def run_alone(argv: list[str], timeout: int = 120) -> subprocess.CompletedProcess[str]:
    """`python pretrain_gpt.py` as a user would start it, with its output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "pretrain_gpt.py", *argv]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)


def metrics(path: Path | str) -> list[dict]:
    """The records of a metrics file."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def training_steps(path: Path | str) -> dict[int, tuple]:
    """{iteration: (loss, gradient norm, learning rate, consumed samples)}; a later record of a step wins."""
    return {
        r["iteration"]: (r["lm loss"], r["grad-norm"], r["learning-rate"], r["consumed-samples"])
        for r in metrics(path)
        if "lm loss" in r
    }
