"""The defaults of freeing and reducing: by the bytes of a rank's layers, and never where the backward is split."""

import pytest

from megatron_lite.arguments.parse import parse_arguments
from megatron_lite.arithmetic.sharding import keeps_whole, reduces_each_microbatch, reshards
from megatron_lite.config import ConfigError
from megatron_lite.distributed.environment import Environment

LLAMA_70B = """--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --swiglu
    --group-query-attention --num-query-groups 8 --disable-bias-linear --normalization RMSNorm --bf16
    --position-embedding-type rope --seq-length 8192 --micro-batch-size 1 --global-batch-size 1024 --train-iters 10
    --lr 1e-4 --vocab-size 128000 --tokenizer-type NullTokenizer --mock-data --check"""


def config_of(words, world=64):
    return parse_arguments(f"{LLAMA_70B} --world-size {world} {words}".split(), Environment())


@pytest.mark.parametrize(
    ("words", "frees", "each"),
    [
        ("", True, True),
        ("--pipeline-model-parallel-size 4", True, True),
        # 1.1 billion parameters a rank: 2.0 GiB of weights and 4.1 of gradients
        ("--pipeline-model-parallel-size 8 --tensor-model-parallel-size 8", False, False),
        ("--pipeline-model-parallel-size 4 --pipeline-schedule zbv", False, False),
        ("--pipeline-model-parallel-size 4 --data-parallel-sharding-strategy optim_grads", False, True),
        ("--pipeline-model-parallel-size 4 --data-parallel-sharding-strategy optim", False, False),
        ("--pipeline-model-parallel-size 4 --reshard-after-forward never", False, True),
        ("--pipeline-model-parallel-size 4 --reduce-gradients last-microbatch", True, False),
        ("--reshard-after-forward never", False, False),
    ],
)
def test_what_is_freed_and_when_it_is_reduced(words, frees, each):
    config = config_of(words)
    assert (reshards(config), reduces_each_microbatch(config)) == (frees, each)


def test_the_limit_is_of_a_ranks_layers():
    assert not keeps_whole(config_of("--pipeline-model-parallel-size 8"))
    assert keeps_whole(config_of("--pipeline-model-parallel-size 8 --tensor-model-parallel-size 4"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "--pipeline-model-parallel-size 4 --pipeline-schedule zbv",
            "--pipeline-schedule zbv, .* saves nothing",
        ),
        ("--data-parallel-sharding-strategy no_shard", "has no shards to reduce to"),
    ],
)
def test_each_microbatch_where_it_cannot_be(words, says):
    with pytest.raises(ConfigError, match=says):
        config_of(f"{words} --reduce-gradients each-microbatch")
