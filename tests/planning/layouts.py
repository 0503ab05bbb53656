"""A small Llama-like model and a way to put it in a layout, for the planner's tests."""

import shlex

from megatron_lite.planning.devices import DEVICES, Cluster
from megatron_lite.planning.search import Layout
from tools.plan import read_model

SMALL = shlex.split("""
    --num-layers 16 --hidden-size 2048 --num-attention-heads 16 --group-query-attention --num-query-groups 8
    --ffn-hidden-size 5632 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
    --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --seq-length 4096
    --global-batch-size 256 --train-iters 10 --lr 1e-4 --tokenizer-type NullTokenizer --vocab-size 31999 --mock-data
    --bf16
""")
# The same with 16 experts of which a token takes 4, in all layers but the first, and a shared one.
EXPERTS = shlex.split("""
    --num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 2816
    --moe-layer-freq ([0]+[1]*15) --moe-router-score-function sigmoid --moe-aux-loss-coeff 1e-4
""")


def layout(**values):
    """A layout of one process's degrees, but for the given fields."""
    plain = {
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "num_virtual_stages_per_pipeline_rank": 1,
        "pipeline_schedule": "1f1b",
        "micro_batch_size": 1,
    }
    return Layout(**plain | values)


def config(num_gpus=8, extra=(), **values):
    """The small model in a layout on so many GPUs."""
    return layout(**values).applied_to(read_model([*SMALL, *extra]), num_gpus)


def cluster(num_gpus=8, device="h100"):
    return Cluster(DEVICES[device], num_gpus, min(8, num_gpus))
