"""Our side of a comparison: the baseline's sizes as flags, the program's own step, fed by hand."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle

import torch
import torch.distributed as dist

from megatron_lite.arguments.parse import parse_arguments
from megatron_lite.arithmetic.vocabulary import with_vocabulary
from megatron_lite.config import Config
from megatron_lite.distributed.environment import Environment
from megatron_lite.distributed.mesh import build_mesh
from megatron_lite.parallel.pipeline import Batch
from megatron_lite.training.metrics import StepResult
from megatron_lite.training.run import Run, build_run
from tools.benchmarks.baseline_model import (
    BETAS,
    CLIP,
    EPSILON,
    LEARNING_RATE,
    NORM_EPSILON,
    ROTARY_BASE,
    WEIGHT_DECAY,
    Sizes,
)
from tools.benchmarks.scripts import Job, Step


def run_flags(sizes: Sizes) -> list[str]:
    """The model, optimizer and loop of the baseline in the words of pretrain_gpt.py, but for data, batch and layout.

    One id less than the vocabulary: NullTokenizer adds its end of document.
    """
    mixture = f"--num-experts {sizes.experts} --moe-router-topk {sizes.chosen}" if sizes.experts else ""
    return f"""
        {mixture} --num-layers {sizes.layers} --hidden-size {sizes.hidden} --num-attention-heads {sizes.heads}
        --ffn-hidden-size {sizes.ffn} --seq-length {sizes.seq_length} --max-position-embeddings {sizes.seq_length}
        --vocab-size {sizes.vocabulary - 1} --make-vocab-size-divisible-by 1 --tokenizer-type NullTokenizer
        --micro-batch-size {sizes.micro_batch} --swiglu --normalization RMSNorm --norm-epsilon {NORM_EPSILON}
        --position-embedding-type rope --rotary-base {ROTARY_BASE:.0f} --disable-bias-linear
        --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
        --lr {LEARNING_RATE} --lr-decay-style constant --weight-decay {WEIGHT_DECAY} --clip-grad {CLIP}
        --adam-beta1 {BETAS[0]} --adam-beta2 {BETAS[1]} --adam-eps {EPSILON} --cpu --eval-iters 0
    """.split()


def run_config(sizes: Sizes, *more: str, world_size: int = 1, data: str = "--mock-data") -> Config:
    """The Config of these flags and `more` (layout, batch), with the vocabulary known.

    more, data: flags as text, one or several to a string.
    """
    words = " ".join([data, "--train-iters 1000000", *more]).split()
    config = parse_arguments([*run_flags(sizes), *words], Environment(world_size=world_size))
    return with_vocabulary(config, sizes.vocabulary)


@dataclass
class PreparedRun:
    """A run whose batches lie ready: tokens and labels [M*B, S] of this data-parallel rank, taken round and round."""

    run: Run
    batches: Sequence[Batch]
    _following: cycle = field(init=False)

    def __post_init__(self) -> None:
        self._following = cycle(self.batches)

    def next_batch(self, global_batch_size: int) -> Batch:
        """The next batch, as the Loader gives it."""
        return next(self._following)

    def step(self) -> StepResult:
        """The program's whole step, but for reading data."""
        return self.run.step(self)


def build_prepared(
    config: Config,
    batches: Sequence[Batch],
    device: torch.device = torch.device("cpu"),  # noqa: B008  a constant
) -> PreparedRun:
    """The run that pretrain_gpt.py would train, over batches on the device."""
    return PreparedRun(build_run(config, build_mesh(config, device)), batches)


def our_step(job: Job, flags: str = "") -> Step:
    """The program's own step, in the layout that the flags ask for."""
    batch = f"--global-batch-size {job.global_batch}"
    prepared = build_prepared(
        run_config(job.sizes, batch, flags, world_size=dist.get_world_size()), job.batches
    )
    return lambda: prepared.step().loss
