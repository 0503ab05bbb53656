"""Every layout gives the numbers of one process: losses of three steps, gradient norms, every gradient, evaluation."""

import pytest

from tests.parity import assert_equals_one_process, make_batches, make_config, train_in_layout
from tests.ranks import run_ranks

LAYOUTS = [(1, 1, 1, 4), (1, 1, 4, 2), (2, 1, 1, 4), (2, 1, 2, 4), (2, 2, 2, 4), (4, 1, 1, 8), (4, 2, 1, 8)]
TIED = {"untie_embeddings_and_output_weights": False}

SCHEDULES = {
    "gpipe": {"pp": 2, "dp": 2, "schedule": "gpipe"},
    "1f1b, fewer microbatches than stages": {"pp": 4, "microbatches": 2},
    "interleaved 4 chunks": {"pp": 2, "chunks": 4},
    "zero bubble": {"pp": 2, "chunks": 2, "dp": 2, "schedule": "interleaved-zero-bubble"},
    "zero bubble, pp 4": {"pp": 4, "chunks": 2, "microbatches": 8, "schedule": "interleaved-zero-bubble"},
    "zero bubble, recompute": {
        "pp": 2,
        "chunks": 2,
        "dp": 2,
        "schedule": "interleaved-zero-bubble",
        "recompute_granularity": "full",
    },
    "zbv": {"pp": 4, "chunks": 2, "microbatches": 8, "schedule": "zbv"},
    "zbv, recompute": {"pp": 2, "chunks": 2, "schedule": "zbv", "recompute_granularity": "full"},
    "dualpipev": {"pp": 4, "chunks": 2, "microbatches": 8, "schedule": "dualpipev"},
    "dualpipev, dp, recompute": {
        "pp": 2,
        "chunks": 2,
        "dp": 2,
        "schedule": "dualpipev",
        "recompute_granularity": "full",
    },
    "tied": {"pp": 2, "dp": 2, "model": TIED},
    "tied, pp 4": {"pp": 4, "microbatches": 8, "model": TIED},
    "tied in one chunk": {"dp": 2, "model": TIED},
    "tied, one process": {"model": TIED},
    "tied, one process, two chunks": {"chunks": 2, "model": TIED},
    "tied, one process, recompute": {"model": TIED, "recompute_granularity": "full"},
    "tied, pp 2": {"pp": 2, "model": TIED},
    "tied, two chunks of one rank": {"chunks": 2, "dp": 2, "model": TIED},
    "tied, both ends of a V": {"pp": 2, "chunks": 2, "dp": 2, "schedule": "zbv", "model": TIED},
}


GPT2 = TIED | {
    "normalization": "LayerNorm",
    "swiglu": False,
    "disable_bias_linear": False,
    "qk_layernorm": True,
    "position_embedding_type": "learned_absolute",
}
SP = {"sequence_parallel": True}
FULL = {"recompute_granularity": "full"}

TENSOR = {
    "tp": {"tp": 2},
    "tp x dp": {"tp": 2, "dp": 2},
    "tp + sp": {"tp": 2} | SP,
    # One step: a change of the weights by 1e-7 moves this model's second norm by 1e-4 in one process, too.
    "tp 4 + sp": {"tp": 4, "model": {"num_query_groups": 4}, "steps": 1} | SP,
    "tp + sp x dp": {"tp": 2, "dp": 2} | SP,
    "tp + sp x pp, recompute": {"tp": 2, "pp": 2} | SP | FULL,
    "tp x pp x chunks, selective": {"tp": 2, "pp": 2, "chunks": 2, "recompute_granularity": "selective"},
    "tp + sp x pp, gpt2": {"tp": 2, "pp": 2, "model": GPT2} | SP,
    "tp x dp, gpt2": {"tp": 2, "dp": 2, "model": GPT2},
    "tp + sp x zbv, chunked loss": {
        "tp": 2,
        "pp": 2,
        "chunks": 2,
        "schedule": "zbv",
        "model": {"apply_layernorm_1p": True, "cross_entropy_loss_fusion": True},
    }
    | SP,
    "tp + sp x zero bubble, recompute": {
        "tp": 2,
        "pp": 2,
        "chunks": 2,
        "schedule": "interleaved-zero-bubble",
    }
    | SP
    | FULL,
    "3-D: tp + sp x pp x dp": {"tp": 2, "pp": 2, "dp": 2, "chunks": 2, "model": TIED} | SP | FULL,
}

CONTEXT = {
    "cp": {"cp": 2},
    "cp 4, window": {"cp": 4, "model": {"window_size": (6, 0)}},
    "cp x dp, recompute": {"cp": 2, "dp": 2} | FULL,
    "cp x pp x chunks, learned positions": {"cp": 2, "pp": 2, "chunks": 2, "model": GPT2},
    "cp x tp + sp": {"cp": 2, "tp": 2, "recompute_granularity": "selective"} | SP,
    "cp x dp x pp, norms over all heads": {
        "cp": 2,
        "dp": 2,
        "pp": 2,
        "model": {"qk_layernorm": True, "qk_layernorm_across_heads": True},
    },
    "cp x dualpipev": {"cp": 2, "pp": 2, "chunks": 2, "schedule": "dualpipev"},
}
DOCUMENTS = {
    "dp": {"dp": 2},
    "pp": {"pp": 2, "chunks": 2},
    "tp + sp": {"tp": 2} | SP,
    "cp": {"cp": 2, "pp": 2},
    "cp, window": {"cp": 2, "model": {"window_size": (3, 0)}},
}


EACH = {"reduce_gradients": "each-microbatch", "reshard_after_forward": "always"}
NO_SHARD = {"data_parallel_sharding_strategy": "no_shard"}
UNIFORM = FULL | {"recompute_method": "uniform"}
ALL_OPERATORS = {
    "recompute_granularity": "selective",
    "recompute_modules": ("core_attn", "layernorm", "mlp"),
}
FSDP = {
    "hsdp": {"dp": 4, "microbatches": 2, "num_distributed_optimizer_instances": 2},
    "hsdp x pp, tied": {"pp": 2, "dp": 2, "num_distributed_optimizer_instances": 2, "model": TIED},
    "hsdp x tp + sp": {"tp": 2, "dp": 2, "num_distributed_optimizer_instances": 2} | SP,
    "hsdp x cp": {"cp": 2, "dp": 2, "num_distributed_optimizer_instances": 2},
    "no_shard": {"dp": 2} | NO_SHARD,
    "no_shard x cp x pp": {"dp": 1, "cp": 2, "pp": 2} | NO_SHARD,
    "optim x pp": {"dp": 2, "pp": 2, "data_parallel_sharding_strategy": "optim"},
    "optim_grads": {"dp": 2, "data_parallel_sharding_strategy": "optim_grads"},
    "reshard never": {"dp": 2, "reshard_after_forward": "never"},
    "reshard keep-last": {
        "dp": 2,
        "pp": 2,
        "reshard_after_forward": "keep-last",
        "reshard_keep_last_blocks": 2,
    },
    "cpu offload, tied": {"dp": 2, "pp": 2, "fsdp_cpu_offload": True, "model": TIED},
    "prefetch 2": {"dp": 2, "fsdp_prefetch_depth": 2},
    "each microbatch, 1f1b": {"dp": 2, "pp": 2} | EACH,
    "each microbatch, hsdp x gpipe, tied, two passes": {
        "pp": 2,
        "dp": 2,
        "microbatches": 8,
        "max_microbatches_per_step": 4,
        "schedule": "gpipe",
        "num_distributed_optimizer_instances": 2,
        "model": TIED,
    }
    | EACH,
    "each microbatch, interleaved, tied, recompute": {"dp": 2, "pp": 2, "chunks": 2, "model": TIED}
    | EACH
    | FULL,
    "each microbatch, weights kept, interleaved": {
        "dp": 2,
        "pp": 2,
        "chunks": 2,
        "reduce_gradients": "each-microbatch",
    },
    "each microbatch, cpu offload, tp": {"dp": 2, "pp": 2, "tp": 2, "fsdp_cpu_offload": True} | EACH,
    "weights freed, gradients whole": {"dp": 2, "pp": 2} | EACH | {"reduce_gradients": "last-microbatch"},
    "several passes, tied": {
        "dp": 2,
        "pp": 2,
        "microbatches": 8,
        "max_microbatches_per_step": 2,
        "model": TIED,
    },
    "vocabulary rows uneven over dp 3 x tp 2": {"dp": 3, "tp": 2, "microbatches": 2},
    "recompute units of 3": {"dp": 2, "recompute_num_layers": 3} | UNIFORM,
    "recompute units of 2 x zero bubble": {
        "pp": 2,
        "chunks": 2,
        "schedule": "interleaved-zero-bubble",
        "recompute_num_layers": 2,
    }
    | UNIFORM,
    "recompute block": {"dp": 2, "pp": 2, "recompute_method": "block", "recompute_num_layers": 1} | FULL,
    "recompute all operators": {"dp": 2, "pp": 2} | ALL_OPERATORS,
    "recompute all operators x tp + sp": {"tp": 2, "pp": 2} | SP | ALL_OPERATORS,
}
PRECISION = {
    "bf16 x pp x dp": {"pp": 2, "dp": 2, "precision": "bf16"},
    "bf16 x zbv": {"pp": 2, "chunks": 2, "schedule": "zbv", "precision": "bf16"},
    "bf16 x tp + sp": {"tp": 2, "precision": "bf16"} | SP,
    "bf16 x cp, recompute": {"cp": 2, "precision": "bf16"} | FULL,
    "fp16 x pp x dp": {"pp": 2, "dp": 2, "precision": "fp16"},
    "fp16 x tp + sp": {"tp": 2, "precision": "fp16"} | SP,
}
COMPILED = {
    "dp, recompute": {"dp": 2, "compile": True, "model": {"num_layers": 2}} | FULL,
    "tp + sp": {"tp": 2, "compile": True, "model": {"num_layers": 2}} | SP,
}


def small(row):
    """Half the layers: DTensor's dispatch costs more than the model."""
    return row | {"model": {"num_layers": 4} | row.get("model", {})}


def check(config, steps=3, documents=False):
    batches = make_batches(config.training.global_batch_size, steps, documents)
    outcomes = run_ranks(train_in_layout, config.parallel.world_size, config, batches, init=True)
    assert_equals_one_process(outcomes, config, batches)


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize(("pp", "chunks", "dp", "microbatches"), LAYOUTS)
def test_layout_equals_one_process(pp, chunks, dp, microbatches, recompute):
    check(make_config(pp, chunks, dp, microbatches, recompute_granularity=recompute))


@pytest.mark.parametrize("row", SCHEDULES)
def test_schedule_equals_one_process(row):
    check(make_config(**SCHEDULES[row]))


@pytest.mark.parametrize("row", TENSOR)
def test_tensor_parallel_equals_one_process(row):
    row = {"steps": 2} | small(TENSOR[row])
    check(make_config(**{k: v for k, v in row.items() if k != "steps"}), row["steps"])


@pytest.mark.parametrize("row", CONTEXT)
def test_context_parallel_equals_one_process(row):
    check(make_config(**small(CONTEXT[row])), steps=1)


@pytest.mark.parametrize("row", DOCUMENTS)
def test_documents_in_a_sample(row):
    check(make_config(**DOCUMENTS[row]), steps=1, documents=True)


@pytest.mark.parametrize("row", FSDP)
def test_fsdp_and_recompute_equal_one_process(row):
    row = FSDP[row]
    check(make_config(**(small(row) if "tp" in row else row)), steps=1)


@pytest.mark.parametrize("row", PRECISION)
def test_half_precision_equals_one_process_in_half_precision(row):
    row = {"model": {"init_method_std": 0.05}} | PRECISION[row]
    check(make_config(**row), steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("row", COMPILED)
def test_compiled_blocks_equal_one_process(row):
    check(make_config(**COMPILED[row]), steps=1)
