"""The HTML page of a run: every number from the metrics file, nothing from elsewhere."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron_lite.config import ConfigError
from tools.report import MOST_POINTS, page, read_metrics, summary, thinned, ticks

ROOT = Path(__file__).parents[2]


def record(iteration, loss=1.0, **more):
    return {
        "iteration": iteration,
        "lm loss": loss,
        "consumed-samples": 4 * iteration,
        "consumed-tokens": 64 * iteration,
        "skipped-iterations": 0,
        "nan-iterations": 0,
        "learning-rate": 0.1,
        **more,
    }


def write(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def test_steps_done_again_after_a_resume_replace_the_first(tmp_path):
    path = write(tmp_path / "m.jsonl", [record(1), record(2), record(3, 9.0), record(3, 5.0), record(4)])
    assert [(r["iteration"], r["lm loss"]) for r in read_metrics(path)] == [(1, 1), (2, 1), (3, 5), (4, 1)]


def test_a_line_cut_off_by_a_kill_is_left_out_and_garbage_is_an_error(tmp_path):
    path = write(tmp_path / "m.jsonl", [record(1)])
    path.write_text(path.read_text() + '{"iteration": 2, "lm')
    assert len(read_metrics(path)) == 1
    path.write_text("garbage\n" + json.dumps(record(1)) + "\n")
    with pytest.raises(ConfigError, match=r"m.jsonl:1 is no record"):
        read_metrics(path)
    path.write_text("")
    with pytest.raises(ConfigError, match="holds no training step"):
        read_metrics(path)


def test_sources_are_told_with_their_share():
    records = [record(1), record(2), {"iteration": 2, "consumed-tokens/a": 96, "consumed-tokens/<b>": 32}]
    assert summary(records)[-2:] == [("read of a", "96 tokens, 75.0%"), ("read of <b>", "32 tokens, 25.0%")]
    assert "read of &lt;b&gt;" in page({"run": records}, None)


class Checked(HTMLParser):
    """Every tag is closed in order; no address of anything outside."""

    VOID = {"meta", "!doctype"}

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        assert not {"src", "href"} & {name for name, _ in attrs}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_is_whole_and_draws_every_point():
    records = [record(i, loss=10.0 / i) for i in range(1, 51)]
    records.insert(10, {"iteration": 10, "lm loss validation": 1.25, "lm loss validation books": 2.0})
    records.append(record(51, loss=None))
    text = page({"a <run>": records}, "layout")
    checker = Checked()
    checker.feed(text)
    assert checker.open == []
    assert "a &lt;run&gt;" in text
    lines = re.findall(r'<polyline points="([^"]*)"', text)
    assert len(lines[0].split()) == 50  # the step without a finite loss has no point
    assert "validation books" in text
    assert "10.0000 to not finite" in text


def test_a_pipeline_s_idle_share_is_drawn_where_there_is_one():
    records = [record(i, **{"pipeline-idle-share": 0.25, "pipeline-idle-share-max": 0.5}) for i in (1, 2)]
    text = page({"run": records}, None)
    figure = next(part for part in text.split("<figure>") if "Pipeline idle" in part)
    assert figure.count("<polyline") == 2
    assert "Pipeline idle" not in page({"run": [record(1), record(2)]}, None)


def test_thinning_keeps_extremes():
    points = [(float(i), 1.0) for i in range(100_000)]
    points[70_001] = (70_001.0, 50.0)
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS + 2
    assert (70_001.0, 50.0) in kept


@pytest.mark.parametrize(("low", "high"), [(0, 1), (5.2, 8.5), (-3e-5, 4e-3), (15.2, 16.8), (0, 2.4e6)])
def test_ticks_are_few_round_and_inside(low, high):
    values = ticks(low, high)
    assert 3 <= len(values) <= 7
    assert all(low <= value <= high for value in values)


def test_command(tmp_path):
    write(tmp_path / "metrics.jsonl", [record(1, 2.0), record(2, 1.0)])
    done = subprocess.run(
        [sys.executable, "tools/report.py", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    wrong = subprocess.run(
        [sys.executable, "tools/report.py", str(tmp_path / "no")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: ")
