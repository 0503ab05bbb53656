"""Every layout gives the numbers of one process: losses of three steps, gradient norms, every gradient."""

import pytest

from tests.parity import assert_equal_outcomes, make_batches, make_config, train_bare, train_in_layout
from tests.ranks import run_ranks

LAYOUTS = [(1, 1, 1, 4), (1, 1, 4, 2), (2, 1, 1, 4), (2, 1, 2, 4), (2, 2, 2, 4), (4, 1, 1, 8), (4, 2, 1, 8)]


def check(config, steps=3, tolerance=1e-5):
    batches = make_batches(config.training.global_batch_size, steps)
    outcomes = run_ranks(train_in_layout, config.parallel.world_size, config, batches, init=True)
    assert_equal_outcomes(outcomes, train_bare(config, batches), tolerance)


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize(("pp", "chunks", "dp", "microbatches"), LAYOUTS)
def test_layout_equals_one_process(pp, chunks, dp, microbatches, recompute):
    check(make_config(pp, chunks, dp, microbatches, recompute_granularity=recompute))
