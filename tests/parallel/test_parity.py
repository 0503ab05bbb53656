"""Every layout gives the numbers of one process: losses of three steps, gradient norms, every gradient, evaluation."""

import pytest

from tests.parity import assert_equal_outcomes, make_batches, make_config, train_bare, train_in_layout
from tests.ranks import run_ranks

LAYOUTS = [(1, 1, 1, 4), (1, 1, 4, 2), (2, 1, 1, 4), (2, 1, 2, 4), (2, 2, 2, 4), (4, 1, 1, 8), (4, 2, 1, 8)]
TIED = {"untie_embeddings_and_output_weights": False}

SCHEDULES = {
    "gpipe": {"pp": 2, "dp": 2, "schedule": "gpipe"},
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
    "cp x dualpipev": {"cp": 2, "pp": 2, "chunks": 2, "schedule": "dualpipev"},
}
DOCUMENTS = {
    "dp": {"dp": 2},
    "pp": {"pp": 2, "chunks": 2},
    "tp + sp": {"tp": 2} | SP,
    "cp": {"cp": 2, "pp": 2},
    "cp, window": {"cp": 2, "model": {"window_size": (3, 0)}},
}


def check(config, steps=3, tolerance=1e-5, documents=False):
    batches = make_batches(config.training.global_batch_size, steps, documents)
    outcomes = run_ranks(train_in_layout, config.parallel.world_size, config, batches, init=True)
    assert_equal_outcomes(outcomes, train_bare(config, batches), tolerance)


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize(("pp", "chunks", "dp", "microbatches"), LAYOUTS)
def test_layout_equals_one_process(pp, chunks, dp, microbatches, recompute):
    check(make_config(pp, chunks, dp, microbatches, recompute_granularity=recompute))


@pytest.mark.parametrize("row", SCHEDULES)
def test_schedule_equals_one_process(row):
    check(make_config(**SCHEDULES[row]))


@pytest.mark.parametrize("row", TENSOR)
def test_tensor_parallel_equals_one_process(row):
    row = {"steps": 2} | TENSOR[row]
    check(make_config(**{k: v for k, v in row.items() if k != "steps"}), row["steps"])


@pytest.mark.parametrize("row", CONTEXT)
def test_context_parallel_equals_one_process(row):
    check(make_config(**CONTEXT[row]), steps=1)


@pytest.mark.parametrize("row", DOCUMENTS)
def test_documents_in_a_sample(row):
    check(make_config(**DOCUMENTS[row]), steps=1, documents=True)
