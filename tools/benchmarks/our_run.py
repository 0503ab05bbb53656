"""Our side of the comparisons with baseline_model.py: sizes as flags and a Config, the first weights."""

import torch
from torch import nn

from megatron_lite.arguments.parse import parse_arguments
from megatron_lite.arithmetic.vocabulary import with_vocabulary
from megatron_lite.config import Config
from megatron_lite.distributed.environment import Environment
from megatron_lite.model.initialization import initial_rows
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


def run_flags(sizes: Sizes) -> list[str]:
    """The model, optimizer and loop of the baseline in the words of pretrain_gpt.py, but for data, batch and layout.

    One id less than the vocabulary: NullTokenizer adds its end of document.
    """
    return f"""
        --num-layers {sizes.layers} --hidden-size {sizes.hidden} --num-attention-heads {sizes.heads}
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
    words = " ".join([data, "--train-iters 100", *more]).split()
    config = parse_arguments([*run_flags(sizes), *words], Environment(world_size=world_size))
    return with_vocabulary(config, sizes.vocabulary)


@torch.no_grad()
def load_initial_weights(model: nn.Module, config: Config) -> None:
    """Give each parameter of an unsharded bare model the value that our run of this config starts from, by name."""
    for name, parameter in model.named_parameters():
        rows = torch.arange(parameter.shape[0])
        parameter.copy_(initial_rows(name, tuple(parameter.shape), rows, config.model, config.training.seed))
