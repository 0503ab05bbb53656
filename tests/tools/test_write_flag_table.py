"""docs/megatron_migration.md holds every flag and is what the code says today."""

import csv
import sys
from pathlib import Path

import pytest

from megatron_lite.arguments.megatron_flags import ACCEPTED
from tools import write_flag_table

ROOT = Path(__file__).parents[2]


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["write_flag_table.py", *words])
    return write_flag_table.main()


def test_the_page_is_up_to_date(monkeypatch):
    """If not: python tools/write_flag_table.py"""
    assert run(monkeypatch, "--check") == 0


@pytest.mark.parametrize("change", [("| `--lr` |", "| `--rate` |"), ("## Refused", "## Forbidden")])
def test_an_old_page_is_found_and_renewed(monkeypatch, capsys, tmp_path, change):
    page = tmp_path / "page.md"
    good = write_flag_table.PAGE.read_text(encoding="utf-8")
    page.write_text(good.replace(*change), encoding="utf-8")
    assert page.read_text(encoding="utf-8") != good
    assert run(monkeypatch, "--check", "--page", str(page)) == 1
    assert "is out of date" in capsys.readouterr().err
    assert run(monkeypatch, "--page", str(page)) == 0
    assert page.read_text(encoding="utf-8") == good


def test_every_flag_of_the_frozen_table_is_on_the_page():
    """In the part that its column names; a flag that is refused by its kind stands there as the kind."""
    text = write_flag_table.PAGE.read_text(encoding="utf-8")
    implemented, rest = text.split("## Accepted: ")
    accepted, refused = rest.split("## Refused: ")
    kinds = [word.strip("`*") for word in refused.replace(",", " ").split() if word.endswith("*`")]
    with (ROOT / "tests" / "golden" / "megatron_flags.tsv").open() as table:
        rows = list(csv.DictReader(table, delimiter="\t"))
    assert len(rows) == 248
    for row in rows:
        name, here = row["flag"], row["here"]
        if here == "implement":
            assert f"`{name}`" in implemented, name
        elif here == "accept":
            assert f"`{name}" in (accepted if name in ACCEPTED else text), name
        else:
            assert f"`{name}`" in refused or name.startswith(tuple(kinds)), name


def test_each_row_is_one_line_of_its_table():
    """As many cells as the heading has: no bar or line break from a text breaks a table."""
    width = 0
    for line in write_flag_table.PAGE.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            width = 0
            continue
        cells = line.replace("\\|", "").count("|")
        width = width or cells
        assert cells == width, line
