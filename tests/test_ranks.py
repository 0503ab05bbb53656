"""The test helper itself: results come back in order, a failing or hanging rank is an error in time."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, run_ranks


def _sum_of_ranks():
    value = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(value)
    return os.environ["RANK"], value.item()


def _one_rank_raises():
    if os.environ["RANK"] == "1":
        raise ValueError("planted")
    time.sleep(60)


def _hangs():
    time.sleep(60)


def test_results_in_rank_order():
    assert run_ranks(_sum_of_ranks, 3, init=True, timeout=60) == [("0", 3.0), ("1", 3.0), ("2", 3.0)]


def test_first_error_is_shown_and_others_stopped():
    start = time.monotonic()
    with pytest.raises(RankError, match="planted"):
        run_ranks(_one_rank_raises, 2, timeout=50)
    assert time.monotonic() - start < 40


def test_time_limit():
    with pytest.raises(RankError, match="time limit"):
        run_ranks(_hangs, 1, timeout=3)
