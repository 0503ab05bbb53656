"""Suites on ranks: every one in its smallest form, figures and equal losses; what fails or hangs there ends the run."""

import time
from functools import partial

import pytest
import torch.distributed as dist

from megatron_lite.arithmetic.pipeline_schedule import schedule_timeline
from megatron_lite.files.command_line import RunError
from megatron_lite.planning.trace import trace_of
from tests.parity import make_config
from tools.benchmarks import schedules, scripts, steps
from tools.benchmarks.baseline_model import QUICK
from tools.benchmarks.comparison import Options
from tools.benchmarks.ours import our_step
from tools.benchmarks.ranks import run_ranks
from tools.benchmarks.steps import Contest, Entry

SMALLEST = Options(repeats=1, quick=True)


def _fail_or_hang(fails):
    if dist.get_rank() == 1:
        if fails:
            raise ValueError("no such thing")
        time.sleep(60)
    dist.barrier()  # the peer waits


def test_a_rank_that_fails_is_the_error():
    with pytest.raises(RunError, match="rank 1 raised:(.|\n)*ValueError: no such thing"):
        run_ranks(_fail_or_hang, 2, True)


def test_ranks_that_hang_end_by_the_time_limit():
    started = time.monotonic()
    with pytest.raises(RunError, match="not all of 2 ranks finished within the time limit"):
        run_ranks(_fail_or_hang, 2, False, timeout=3)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("suite", [steps.fsdp, steps.pipeline], ids=lambda suite: suite.__name__)
def test_steps_of_both_sides_do_the_same_work(suite):
    (table,) = suite(SMALLEST)  # it refuses losses that differ
    assert all(row.value > 0 for row in table.rows)
    assert {row.at_least for row in table.rows if row.name.startswith("ours")} == {0.95}


def test_unlike_work_is_refused():
    faster = {"script": Entry(scripts.sharded), "ours": Entry(partial(our_step, flags="--lr 2e-3"))}
    with pytest.raises(RunError, match="not the same work: the last loss of ours"):
        steps.race_table(Contest("", QUICK, faster), Options(repeats=3))


def test_memory_counts_and_ours_holds_no_more():
    one, two, stages = steps.memory(SMALLEST)
    verdicts = {row.name: row.verdict for table in (one, two, stages) for row in table.rows}
    assert "MISSED" not in verdicts.values()
    assert sum(verdict == "ok" for verdict in verdicts.values()) == 5
    ratios = {row.name: row.value for row in one.rows}
    assert ratios["ours, recompute core_attn, layernorm, mlp"] < 0.7
    assert ratios["ours, loss in chunks"] < 0.97  # the logits of 1,024 tokens, not of 2,048


def test_every_schedule_is_run_and_predicted():
    (table,) = schedules.run(SMALLEST)
    assert [row.name for row in table.rows] == list(schedules.SCHEDULES)
    # A real step cannot be faster than its actions allow.
    assert all(0 < row.value < 1.1 for row in table.rows)


def test_idle_share_of_known_spans():
    """Two ranks, two stages, one microbatch: F 1 s and 2 s, B 2 s and 4 s, one after the other: 9 s, half idle."""
    first = [("F", 0, 0, 0.0, 1.0), ("B", 0, 0, 7.0, 9.0)]
    second = [("F", 1, 0, 1.0, 3.0), ("B", 1, 0, 3.0, 7.0)]
    config = make_config(pp=2, schedule="gpipe", microbatches=1)
    row = schedules.row_of_trace("gpipe", trace_of(config, "cpu", [[(0, first)], [(0, second)]]))
    assert (row.value, row.note) == (1.0, "idle 50.0 %, simulator 50.0 %")
    assert schedule_timeline("gpipe", 2, 1, 1).bubble_fraction == 0.5
