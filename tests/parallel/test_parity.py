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


def check(config, steps=3, tolerance=1e-5):
    batches = make_batches(config.training.global_batch_size, steps)
    outcomes = run_ranks(train_in_layout, config.parallel.world_size, config, batches, init=True)
    assert_equal_outcomes(outcomes, train_bare(config, batches), tolerance)


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize(("pp", "chunks", "dp", "microbatches"), LAYOUTS)
def test_layout_equals_one_process(pp, chunks, dp, microbatches, recompute):
    check(make_config(pp, chunks, dp, microbatches, recompute_granularity=recompute))


@pytest.mark.parametrize("row", SCHEDULES)
def test_schedule_equals_one_process(row):
    check(make_config(**SCHEDULES[row]))
