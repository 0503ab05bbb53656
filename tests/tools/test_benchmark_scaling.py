"""The suite of growths: figures for everything, nothing grows worse than it must, and what would is told."""

import pytest

from tools.benchmarks import scaling
from tools.benchmarks.comparison import Options, render


def test_everything_is_counted_and_nothing_grows_worse_than_it_must():
    tables = scaling.run(Options(repeats=1, quick=True))
    assert len(tables) == 6
    timed = ("flags", "mesh", "split", "chunks", "planning", "reading", "index built")
    for table in tables:
        for row in table.rows:
            assert row.value > 0
            assert row.verdict == "ok" or row.name.startswith(timed), render(
                table
            )  # seconds: for a quiet machine


@pytest.mark.parametrize(("power", "verdict"), [(1, "ok"), (2, "MISSED")])
def test_what_grows_with_the_square_of_the_ranks_is_told(power, verdict):
    growths = {"groups": scaling.Growth(1, "")}
    found = scaling.table("pairs", "ranks", (4, 8), lambda size: {"groups": float(size**power)}, growths, 1)
    assert [row.verdict for row in found.rows] == [verdict]
    assert "| 8 | " in found.facts[-1]


def test_a_save_of_many_ranks_is_planned_as_it_would_be():
    """Two ranks, one layer: each of nine weights and their averages in two pieces."""
    costs = scaling.metadata_costs(2, 1)
    assert costs["entries"] == 2 * 9 * 3
    assert costs[".metadata"] > 54 * 50
