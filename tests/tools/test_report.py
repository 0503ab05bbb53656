"""The HTML page of a run: every number from the metrics file, nothing from elsewhere."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron_lite.config import ConfigError
from megatron_lite.training.metrics_file import MetricsFile, read_metrics
from tools.report import chart, page, summary

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
    """Killed after 6, resumed from 3 and from 4, an old checkpoint evaluated: each step once, of the last attempt."""
    validation = {"iteration": 4, "lm loss validation": 9.0}
    first = [record(i, 9.0) for i in (1, 2, 3, 4)] + [validation, record(5, 9.0), record(6, 9.0)]
    second = [record(4, 8.0), {"iteration": 4, "lm loss validation": 8.0}, record(5, 8.0), record(6, 8.0)]
    third = [record(i, 7.0, **{"consumed-tokens": 1}) for i in (5, 6, 7)]
    late = {"iteration": 2, "lm loss test": 5.0}
    run = read_metrics(write(tmp_path / "m.jsonl", [*first, *second, *third, late]))
    losses = [(r["iteration"], r["lm loss"]) for r in run.records if "lm loss" in r]
    assert losses == [(1, 9), (2, 9), (3, 9), (4, 8), (5, 7), (6, 7), (7, 7)]
    assert [r["lm loss validation"] for r in run.records if "lm loss validation" in r] == [8.0]
    assert run.restarts == {4: 3, 5: 2}
    text = page({"run": run}, None)
    figure = next(part for part in text.split("<figure>") if "Loss" in part)
    assert figure.count('id="restart"') == 2
    assert ("restarted", "from iteration 5 on, 2 done again (drawn once)") in summary(run)


ODD = [
    '{"iteration": 3, "lm',
    '{"iter{"iteration": 3, "lm loss": 1.0}',
    "\x00\x00\x00",
    "[" * 100_000,
    '{"iteration": "4", "lm loss": 1.0}',
    '{"iteration": 1e400, "lm loss": 1.0}',
    '{"iteration": true, "lm loss": 1.0}',
    "7",
]
VALUES = ["NaN", "-Infinity", "null", '"text"', "1e400", "1" + "0" * 400, "1e308", "[1]", "true", "5e-324"]


def test_torn_lines_and_values_that_are_no_numbers_are_left_out_and_told(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b"\xff\xfe\n" + "\n".join([json.dumps(record(1)), *ODD, json.dumps(record(2))]).encode())
    run = read_metrics(path)
    assert [r["iteration"] for r in run.records] == [1, 2]
    assert run.notes == ["9 lines no record, left out (the first is line 1)"]
    assert ("left out", run.notes[0]) in summary(run)

    lines = [json.dumps(record(1))]
    for number, value in enumerate(VALUES, 2):
        lines.append(
            json.dumps(record(number, loss="HERE", **{"grad-norm": "HERE"})).replace('"HERE"', value)
        )
        lines.append('{"iteration": %d, "lm loss validation": %s}' % (number, value))  # noqa: UP031
    path.write_text("\n".join(lines))
    run = read_metrics(path)
    assert run.notes == ["27 values no finite number, not drawn (the first: line 2: lm loss is NaN)"]
    text = page({"run": run}, None)
    assert "nan" not in text and "inf" not in text.replace("info", "")
    assert ("validation loss", "not finite to 0.0000, best 0.0000") in summary(run)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "it is empty"),
        ("<html>\n", "HTML or XML page"),
        ("garbage\n", "1 line no record"),
        ('{"iteration": 1}', ""),
    ],
)
def test_a_file_without_steps_is_an_error(content, words, tmp_path):
    (tmp_path / "m.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=f"holds no training step.*{words}"):
        read_metrics(tmp_path / "m.jsonl")


def test_sources_are_told_with_their_share():
    records = [record(1), record(2), {"iteration": 2, "consumed-tokens/a": 96, "consumed-tokens/<b>": 32}]
    assert summary(MetricsFile(records))[-2:] == [
        ("read of a", "96 tokens, 75.0%"),
        ("read of <b>", "32 tokens, 25.0%"),
    ]
    assert "read of &lt;b&gt;" in page({"run": MetricsFile(records)}, None)


def points_of(text):
    """How many points each line has."""
    lines = re.findall(r'<g id="line">.*? d="([^"]*)"', text, re.DOTALL)
    return [len(re.findall("[ML]", line)) for line in lines]


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
    text = page({"a <run>": MetricsFile(records)}, "layout")
    checker = Checked()
    checker.feed(text)
    assert checker.open == []
    assert "a &lt;run&gt;" in text
    assert points_of(text)[0] == 50  # the step without a finite loss has no point
    assert "validation books" in text
    assert "10.0000 to not finite" in text


def test_a_pipeline_s_idle_share_is_drawn_where_there_is_one():
    records = [record(i, **{"pipeline-idle-share": 0.25, "pipeline-idle-share-max": 0.5}) for i in (1, 2)]
    text = page({"run": MetricsFile(records)}, None)
    figure = next(part for part in text.split("<figure>") if "Pipeline idle" in part)
    assert len(points_of(figure)) == 2
    assert "Pipeline idle" not in page({"run": MetricsFile([record(1), record(2)])}, None)


def test_a_mixture_s_loads_are_drawn_by_layer_over_time():
    records = [
        {"iteration": n, "lm loss": 1.0, "expert-load": 2.0}
        | {f"moe/expert-load_layer_{layer}": 1.0 + layer for layer in (1, 10, 2)}
        for n in range(1, 6)
    ]
    records.insert(3, {"iteration": 2, "lm loss validation": 1.0})
    drawn = page({"run": MetricsFile(records)}, None)
    assert "Load of the fullest expert of each layer" in drawn and "Experts without a token" not in drawn
    assert drawn.index("layer 1<") < drawn.index("layer 2<") < drawn.index("layer 10<")
    dense = [{"iteration": 1, "lm loss": 1.0}]
    assert "expert" not in page({"run": MetricsFile(dense)}, None)


def test_a_long_run_is_thinned_and_keeps_its_spike():
    values = dict.fromkeys(range(100_000), 1.0) | {70_001: 50.0}
    figure = chart("Loss", {"training": values})
    assert points_of(figure)[0] < 1000
    drawn = re.search(r'<g id="line">.*? d="([^"]*)"', figure, re.DOTALL)[1]
    heights = [float(number) for number in re.findall(r"[ML] \S+ (\S+)", drawn)]
    assert max(heights) - min(heights) > 100


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
