"""Planned bytes against the rehearsal over a grid of layouts, and against what real gloo ranks hold."""

import shlex

import pytest

from megatron_lite.arguments.parse import parse_arguments
from megatron_lite.arithmetic.vocabulary import with_vocabulary
from megatron_lite.distributed.environment import Environment
from megatron_lite.planning.memory import rank_memory
from megatron_lite.rehearsal.dry_run import rehearse_rank
from tests.parity import make_config
from tests.ranks import run_ranks
from tests.rehearsal.test_dry_run import _measure, slow

# Wide enough that tensors, not small change, are what is seen; the rehearsal's tensors are fake and cost nothing.
MODEL = shlex.split("""
    --hidden-size 1024 --num-attention-heads 16 --group-query-attention --num-query-groups 4 --ffn-hidden-size 2816
    --swiglu --normalization LayerNorm --disable-bias-linear --position-embedding-type rope
    --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --seq-length 2048
    --max-position-embeddings 2048 --train-iters 10 --lr 1e-4 --vocab-size 31999 --tokenizer-type NullTokenizer
    --mock-data --bf16 --micro-batch-size 1
""")
PP, V = "--pipeline-model-parallel-size", "--num-virtual-stages-per-pipeline-rank 2"
TP = "--expert-tensor-parallel-size 1 --sequence-parallel --tensor-model-parallel-size"
EP = "--expert-model-parallel-size"
FULL = "--recompute-granularity full --recompute-method"
MIXTURE = "--num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 704 --moe-aux-loss-coeff 0.01"
SHARED = "--moe-shared-expert-intermediate-size 1408"
PATTERN = "--moe-layer-freq ([0]+[1]*{})"


def compared(layers, world, flags, rank):
    """(planned, rehearsed) peak bytes of one pipeline rank."""
    words = ["--check", "--world-size", str(world), "--num-layers", str(layers), *MODEL, *shlex.split(flags)]
    config = parse_arguments(words, Environment())
    size = config.parallel.pipeline_model_parallel_size
    rank %= size
    [planned] = rank_memory(with_vocabulary(config, 32000), [rank])
    total = planned.total
    if (
        config.parallel.fsdp_cpu_offload
    ):  # without a GPU the rehearsal counts the host's memory together with the rest
        total += planned.host - planned.parts.get("gradient shards", 0.0) - planned.host / 4
    return total, rehearse_rank(config, rank * (world // size)).peak


@pytest.mark.parametrize(
    ("world", "flags", "rank"),
    [
        (4, f"{PP} 2 --pipeline-schedule zbv {V} --global-batch-size 8", 1),
        (8, f"{TP} 4 {FULL} uniform --global-batch-size 4", 0),
        (4, f"{PP} 4 --global-batch-size 4", -1),
        (8, f"{MIXTURE} {SHARED} {PATTERN.format(3)} --global-batch-size 24", 0),
        (8, f"{MIXTURE} {PP} 2 {EP} 4 --imbalance 1.5 --global-batch-size 16", 0),
    ],
)
def test_agrees_with_the_rehearsal(world, flags, rank):
    """Within 10%."""
    planned, rehearsed = compared(4, world, flags, rank)
    assert planned == pytest.approx(rehearsed, rel=0.1)


# GPUs, flags: both ends of each pipeline.
GRID = [
    (8, "--global-batch-size 8"),
    (8, "--global-batch-size 24"),
    (8, "--global-batch-size 64 --micro-batch-size 4"),
    (8, f"--global-batch-size 8 {FULL} uniform"),
    (8, "--global-batch-size 8 --reshard-after-forward never"),
    (8, "--global-batch-size 24 --num-distributed-optimizer-instances 2"),
    (8, "--global-batch-size 24 --data-parallel-sharding-strategy no_shard"),
    (8, "--global-batch-size 24 --cross-entropy-loss-fusion"),
    (8, f"--global-batch-size 24 {FULL} uniform --recompute-num-layers 4"),
    (8, f"--global-batch-size 24 {FULL} block --recompute-num-layers 4"),
    (8, "--global-batch-size 24 --recompute-granularity selective --recompute-modules core_attn mlp"),
    (8, "--global-batch-size 24 --optimizer muon"),
    (8, "--global-batch-size 24 --fsdp-cpu-offload"),
    (8, "--global-batch-size 24 --grad-reduce-in-bf16"),
    (8, "--global-batch-size 24 --hidden-dropout 0.1"),
    (8, "--global-batch-size 24 --qk-layernorm"),
    (4, f"{TP} 4 --global-batch-size 3"),
    (4, "--tensor-model-parallel-size 4 --global-batch-size 3"),
    (32, f"{TP} 4 {FULL} uniform --global-batch-size 24"),
    (16, f"{TP} 2 {PP} 2 --micro-batch-size 2 --global-batch-size 32"),
    (8, "--context-parallel-size 4 --global-batch-size 8"),
    (8, f"--context-parallel-size 2 {PP} 2 --reshard-after-forward never --global-batch-size 12"),
    (16, f"{PP} 4 --global-batch-size 32"),
    (16, f"{PP} 4 {V} --global-batch-size 32"),
    (16, f"{PP} 4 {FULL} uniform --global-batch-size 32"),
    (16, f"{PP} 4 --recompute-granularity selective --global-batch-size 32"),
    (16, f"{PP} 4 --pipeline-schedule gpipe --num-distributed-optimizer-instances 2 --global-batch-size 32"),
    (16, f"{PP} 2 --pipeline-schedule zbv {V} {TP} 2 --global-batch-size 16"),
    (8, f"{PP} 2 --pipeline-schedule zbv {V} --recompute-granularity selective --global-batch-size 16"),
    (8, f"{PP} 2 --pipeline-schedule zbv {V} --cross-entropy-loss-fusion --global-batch-size 16"),
    (16, f"{PP} 4 --pipeline-schedule zbv {V} --global-batch-size 32"),
    (8, f"{PP} 2 --pipeline-schedule dualpipev {V} --global-batch-size 16"),
    (8, f"{PP} 2 --pipeline-schedule dualpipev {V} --global-batch-size 24"),
    (8, f"{PP} 2 --pipeline-schedule interleaved-zero-bubble {V} --global-batch-size 16"),
    (16, f"{PP} 4 --pipeline-schedule interleaved-zero-bubble {V} --global-batch-size 32"),
]
SELECTIVE = "--recompute-granularity selective --recompute-modules"
GRID += [
    (world, f"{MIXTURE} {flags}")
    for world, flags in (
        (8, "--global-batch-size 8"),
        (8, "--global-batch-size 64 --micro-batch-size 4"),
        (8, f"--global-batch-size 24 {SHARED} --moe-shared-expert-gate {PATTERN.format(7)}"),
        (8, f"--global-batch-size 24 {FULL} uniform --recompute-num-layers 4"),
        (8, f"--global-batch-size 24 {FULL} block --recompute-num-layers 4 {PATTERN.format(7)}"),
        (8, f"--global-batch-size 24 {SELECTIVE} moe"),
        (8, f"--global-batch-size 24 {SELECTIVE} core_attn shared_experts mlp {PATTERN.format(7)}"),
        (8, "--global-batch-size 24 --optimizer muon"),
        (8, "--global-batch-size 24 --fsdp-cpu-offload"),
        (8, "--global-batch-size 24 --moe-router-dtype fp32 --moe-z-loss-coeff 1e-3"),
        (8, "--global-batch-size 24 --data-parallel-sharding-strategy no_shard"),
        (8, "--global-batch-size 24 --num-distributed-optimizer-instances 2"),
        (8, "--global-batch-size 24 --num-experts 64 --moe-router-topk 8 --moe-ffn-hidden-size 256"),
        (8, "--global-batch-size 24 --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 2816"),
        (8, "--context-parallel-size 4 --global-batch-size 8"),
        (16, f"{PP} 4 --global-batch-size 32 {SHARED} {PATTERN.format(7)}"),
        (16, f"{PP} 4 {V} --global-batch-size 32"),
        (16, f"{PP} 4 {FULL} uniform --global-batch-size 32"),
        (16, f"{PP} 4 {SELECTIVE} moe --global-batch-size 32"),
        (8, f"{PP} 2 --pipeline-schedule zbv {V} --global-batch-size 16 {SHARED}"),
        (8, f"{PP} 2 --pipeline-schedule dualpipev {V} --global-batch-size 16"),
        (8, f"{PP} 2 --pipeline-schedule interleaved-zero-bubble {V} --global-batch-size 16"),
        (4, f"{PP} 2 {FULL} uniform --global-batch-size 8"),
        (4, f"{TP} 4 --global-batch-size 3"),
        (32, f"{TP} 4 {FULL} uniform --global-batch-size 24"),
        (16, f"{TP} 2 {PP} 2 --micro-batch-size 2 --global-batch-size 32 {SHARED}"),
        (16, f"{TP} 2 {PP} 2 --pipeline-schedule zbv {V} --global-batch-size 16 {PATTERN.format(7)}"),
        (8, f"{EP} 8 --global-batch-size 24"),
        (8, f"{EP} 8 --global-batch-size 24 --imbalance 1.5"),
        (8, f"{EP} 4 --global-batch-size 24 {SHARED}"),
        (8, f"{EP} 2 --global-batch-size 8 {PATTERN.format(7)}"),
        (8, f"{EP} 8 --global-batch-size 24 {FULL} uniform"),
        (8, f"{EP} 8 --global-batch-size 24 {SELECTIVE} moe"),
        (8, f"{EP} 8 --global-batch-size 24 --optimizer muon"),
        (8, f"{EP} 4 --global-batch-size 24 --fsdp-cpu-offload"),
        (8, f"{EP} 4 --global-batch-size 24 --num-distributed-optimizer-instances 2"),
        (8, f"{EP} 4 --global-batch-size 8 --context-parallel-size 4"),
        (32, f"{EP} 16 --global-batch-size 24 {TP} 4 {FULL} uniform"),
        (16, f"{EP} 4 --global-batch-size 16 {PP} 2"),
        (16, f"{EP} 8 --global-batch-size 16 {PP} 2 {TP} 2"),
        (8, f"{EP} 4 --global-batch-size 16 {PP} 2 --pipeline-schedule zbv {V}"),
        (8, f"{EP} 4 --global-batch-size 16 {PP} 2 --pipeline-schedule dualpipev {V}"),
        (8, f"{EP} 4 --global-batch-size 16 {PP} 2 --pipeline-schedule interleaved-zero-bubble {V}"),
    )
]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "flags"), GRID)
def test_agrees_with_the_rehearsal_over_a_grid(world, flags):
    """Within 10%, on the first and the last pipeline rank."""
    for rank in (0, -1) if PP in flags else (0,):
        planned, rehearsed = compared(8, world, flags, rank)
        print(
            f"{world} GPUs {flags}, rank {rank}: {planned / rehearsed - 1:+.1%} of {rehearsed / 2**20:,.0f} MiB"
        )
        assert planned == pytest.approx(rehearsed, rel=0.1)


# LayerNorm: for RMSNorm torch's CPU code keeps copies that the GPU's kernel does not.
SMALL = {
    "hidden_size": 64,
    "ffn_hidden_size": 192,
    "kv_channels": 16,
    "num_layers": 4,
    "normalization": "LayerNorm",
}
EXPERTS = {"experts": {"num_experts": 8, "moe_ffn_hidden_size": 96, "moe_layer_freq": (0, 1, 1, 1)}}


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 2, "chunks": 2, "schedule": "zbv"},
        {},
        EXPERTS,
        slow(EXPERTS | {"dp": 2, "pp": 2}),
        slow({"microbatches": 1}),
        slow({"pp": 2}),
        slow({"pp": 2, "microbatches": 8, "max_microbatches_per_step": 4}),
        slow({"pp": 2, "dp": 2, "microbatches": 8, "max_microbatches_per_step": 4}),
        slow({"dp": 2, "data_parallel_sharding_strategy": "no_shard", "micro_batch_size": 1}),
        slow({"dp": 2, "microbatches": 1, "micro_batch_size": 1}),
        slow({"tp": 2, "pp": 2, "micro_batch_size": 1}),
        slow({"dp": 2}),
        slow({"tp": 2, "sequence_parallel": True, "dp": 2}),
        slow({"pp": 2, "dp": 2, "chunks": 2}),
        slow({"pp": 2, "microbatches": 8, "precision": "bf16"}),
        slow({"pp": 2, "schedule": "gpipe"}),
        slow(
            {
                "dp": 2,
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }
        ),
    ],
    ids=str,
)
def test_agrees_with_what_a_real_run_holds(layout):
    """Within 10% of the bytes measured on gloo ranks: states, and the peak of a step."""
    layout = dict(layout)
    model = SMALL | layout.pop("experts", {})
    config = make_config(**{"micro_batch_size": 8} | layout, model=model)
    real = run_ranks(_measure, config.parallel.world_size, config, layout.get("microbatches", 4), init=True)
    planned = rank_memory(config)
    size = config.parallel.pipeline_model_parallel_size
    for rank in range(size):
        parameters, _, states, peak = real[rank * config.parallel.world_size // size]
        assert planned[rank].parts["parameters"] == pytest.approx(parameters, rel=0.01)
        assert planned[rank].parts["optimizer state"] == pytest.approx(states, rel=0.02)
        print(f"{layout} {planned[rank].total / peak - 1:+.1%}")
        assert planned[rank].total == pytest.approx(peak, rel=0.1)
