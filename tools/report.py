"""A run as one HTML page: its loss, learning rate, gradient norm, speed, memory, validation and layout.

    python tools/report.py runs/x            reads runs/x/metrics.jsonl, writes runs/x/report.html
    python tools/report.py a.jsonl b.jsonl --output compare.html

The page holds everything itself (no script from elsewhere, no network); it follows the reader's light or dark theme.
"""

import html
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.arithmetic.costs import model_costs
from megatron_lite.arithmetic.partition import describe, plan_from_config
from megatron_lite.checkpoint import find_in
from megatron_lite.config import Config, ConfigError
from megatron_lite.files.command_line import Parser, make_folder_of, run
from megatron_lite.files.writing import write_aside
from megatron_lite.training.metrics_file import MetricsFile, Record, read_metrics

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 560, 240, 64, 28, 12, 12
MOST_POINTS = 600
MOST_SOURCES = 30
# Tells lines apart for most colour-blind readers (Okabe and Ito 2008), on white and on black.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")

# Heading -> (keys of a record and how each is called, factor, logarithmic).
CHARTS: dict[str, tuple[dict[str, str], float, bool]] = {
    "Loss": ({"lm loss": "training", "lm loss validation": "validation", "lm loss test": "test"}, 1.0, False),
    "Learning rate": ({"learning-rate": "learning rate"}, 1.0, False),
    "Gradient norm": ({"grad-norm": "gradient norm"}, 1.0, True),
    "Tokens per second": ({"tokens-per-second": "tokens/s"}, 1.0, False),
    "Milliseconds per step": ({"iteration-time": "step", "data-wait-time": "waiting for data"}, 1e3, False),
    "TFLOP/s per device": ({"throughput": "TFLOP/s"}, 1.0, False),
    "Pipeline idle, % of its time": (
        {"pipeline-idle-share": "mean over ranks", "pipeline-idle-share-max": "most"},
        100.0,
        False,
    ),
    "Peak memory, GiB": (
        {"memory-bytes": "allocated (CPU: resident)", "memory-reserved-bytes": "reserved"},
        2.0**-30,
        False,
    ),
    "Batch, samples": ({"batch-size": "global batch"}, 1.0, False),
}

STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --paper: #ffffff; --line: #d4d4d4; --quiet: #666666; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --paper: #161616; --line: #3a3a3a; --quiet: #a0a0a0; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1200px; margin: 2rem auto; padding: 0 1rem; }
.charts { margin-top: 1.5rem; display: grid; gap: 1.2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); }
figure { margin: 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; }
svg text { fill: var(--quiet); font-size: 12px; } svg .grid { stroke: var(--line); }
svg .restart { stroke: var(--quiet); stroke-dasharray: 3 3; }
pre { overflow-x: auto; border: 1px solid var(--line); padding: .8rem; }
table { border-collapse: collapse; } td, th { padding: .15rem .9rem .15rem 0; text-align: left; }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 .8em; }
"""


@dataclass(frozen=True)
class Series:
    """One line of a chart: points (iteration, value) in order."""

    name: str
    points: tuple[tuple[float, float], ...]


def series(records: Iterable[Record], key: str, name: str, factor: float) -> Series:
    """The values of one key, the last of each iteration; those that were not finite are left out."""
    values = {r["iteration"]: r[key] * factor for r in records if r.get(key) is not None}
    return Series(name, tuple(thinned(sorted(values.items()))))


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most about MOST_POINTS points: of each run of neighbours the lowest and the highest, so no spike is lost."""
    size = math.ceil(len(points) / (MOST_POINTS // 2))
    if size <= 2:
        return list(points)
    kept = []
    for start in range(0, len(points), size):
        group = points[start : start + size]
        kept += sorted({min(group, key=lambda p: p[1]), max(group, key=lambda p: p[1])})
    return kept


def chart(title: str, lines: Sequence[Series], logarithmic: bool, restarts: Sequence[int] = ()) -> str:
    """A figure with axes, grid, a key and a dashed line at each restart; empty when there is nothing to draw."""
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    logarithmic = logarithmic and all(value > 0 for line in lines for _, value in line.points)
    scale = math.log10 if logarithmic else float
    xs = [x for line in lines for x, _ in line.points]
    ys = [scale(y) for line in lines for _, y in line.points]
    left, right = min(xs), max(max(xs), min(xs) + 1)
    low, high = min(ys), max(ys)
    margin = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
    low = max(0.0, low - margin) if low >= 0 and not logarithmic else low - margin
    high = high + margin

    def place(x: float, y: float) -> str:
        across = LEFT + (x - left) / (right - left) * (WIDTH - LEFT - RIGHT)
        down = HEIGHT - BOTTOM - (scale(y) - low) / (high - low) * (HEIGHT - BOTTOM - TOP)
        return f"{across:.1f},{down:.1f}"

    parts = [_grid(low, high, left, right, logarithmic)]
    for iteration in restarts:
        if left <= iteration <= right:
            x = LEFT + (iteration - left) / (right - left) * (WIDTH - LEFT - RIGHT)
            parts.append(
                f'<line class="restart" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}">'
                f"<title>restarted: from iteration {iteration:,} on again</title></line>"
            )
    keys = []
    for colour, line in zip(COLOURS * len(lines), lines):
        if len(line.points) == 1:
            x, y = place(*line.points[0]).split(",")
            parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>')
        path = " ".join(place(*point) for point in line.points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        if len(lines) > 1:
            keys.append(f'<span class="key" style="background:{colour}"></span>{html.escape(line.name)}')
    label = html.escape(title)
    return (
        f"<figure><figcaption>{label}{''.join(keys)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg></figure>'
    )


def _grid(low: float, high: float, left: float, right: float, logarithmic: bool) -> str:
    parts = []
    for value in ticks(low, high):
        down = HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - BOTTOM - TOP)
        shown = f"{10**value:.3g}" if logarithmic else f"{value:,.6g}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down:.1f}" y2="{down:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{down + 4:.1f}" text-anchor="end">{shown}</text>')
    for step, anchor in ((0, "start"), (2, "middle"), (4, "end")):
        across = LEFT + (WIDTH - LEFT - RIGHT) * step / 4
        shown = f"{round(left + (right - left) * step / 4):,}"
        parts.append(f'<text x="{across:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{shown}</text>')
    return "".join(parts)


def ticks(low: float, high: float) -> list[float]:
    """Three to seven round values between low and high."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [round(number * step, 12) for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def summary(metrics: MetricsFile) -> list[tuple[str, str]]:
    """What the table at the top says."""
    steps = [record for record in metrics.records if "lm loss" in record]
    first, last = steps[0], steps[-1]
    rows = [
        ("steps", f"{first['iteration']:,} to {last['iteration']:,}"),
        ("samples, tokens", f"{_count(last, 'consumed-samples')}, {_count(last, 'consumed-tokens')}"),
        ("training loss", f"{_shown(first['lm loss'])} to {_shown(last['lm loss'])}"),
    ]
    for name in ("validation", "test"):
        values = [r[f"lm loss {name}"] for r in metrics.records if f"lm loss {name}" in r]
        if values:
            best = min((value for value in values if value is not None), default=None)
            text = f"{_shown(values[0])} to {_shown(values[-1])}, best {_shown(best)}"
            rows.append((f"{name} loss", text))
    rows.append(
        ("skipped, not finite", f"{_count(last, 'skipped-iterations')}, {_count(last, 'nan-iterations')}")
    )
    mfu = [record["mfu"] for record in steps if record.get("mfu") is not None]
    rows.append(("MFU", f"{100 * sorted(mfu)[len(mfu) // 2]:.1f}% (median)" if mfu else "not available"))
    for iteration, repeated in sorted(metrics.restarts.items()):
        rows.append(("restarted", f"from iteration {iteration:,} on, {repeated:,} done again (drawn once)"))
    rows += [("left out", note) for note in metrics.notes]
    return rows + _sources(metrics.records)


def _sources(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Tokens read of each source, as last counted: those most read first."""
    counted: dict[str, int] = {}
    for record in records:
        prefix = "consumed-tokens/"
        counted |= {key.removeprefix(prefix): n for key, n in record.items() if key.startswith(prefix) and n}
    total = max(1, sum(counted.values()))
    ranked = sorted(counted.items(), key=lambda item: -item[1])
    return [(f"read of {name}", f"{n:,} tokens, {n / total:.1%}") for name, n in ranked[:MOST_SOURCES]]


def _count(record: Record, key: str) -> str:
    value = record.get(key)
    return "unknown" if value is None else f"{value:,}"


def _shown(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def layout_of(folder: Path) -> str | None:
    """The stage table of the run that saved here; None when no checkpoint lies there."""
    try:
        found = find_in(str(folder))
    except ConfigError:
        return None
    if found is None:
        return None
    config = Config.from_dict(found.config)
    sizes = ", ".join(
        f"{k}: {v}" for k, v in config.to_dict()["parallel"].items() if k.endswith("_size") and v != 1
    )
    table = describe(plan_from_config(config), model_costs(config.model, config.data.seq_length))
    return f"{config.parallel.pipeline_schedule}   {sizes}\n\n{table}"


def page(runs: dict[str, MetricsFile], layout: str | None) -> str:
    """The whole page: of one run, or of several over one another."""
    title = html.escape(", ".join(runs))
    figures = []
    for heading, (keys, factor, logarithmic) in CHARTS.items():
        lines = [
            series(metrics.records, key, name if len(runs) == 1 else f"{run_name} {name}", factor)
            for run_name, metrics in runs.items()
            for key, name in (keys | _named_sets(heading, metrics.records)).items()
        ]
        restarts = sorted({iteration for metrics in runs.values() for iteration in metrics.restarts})
        figures.append(chart(heading, lines, logarithmic, restarts))
    tables = []
    for name, metrics in runs.items():
        rows = "".join(
            f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in summary(metrics)
        )
        tables.append((f"<h2>{html.escape(name)}</h2>" if len(runs) > 1 else "") + f"<table>{rows}</table>")
    picture = f"<h2>Layout</h2><pre>{html.escape(layout)}</pre>" if layout else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
        f'<h1>{title}</h1>{"".join(tables)}<div class="charts">{"".join(figures)}</div>{picture}</body></html>\n'
    )


def _named_sets(heading: str, records: Sequence[Record]) -> dict[str, str]:
    """Validation sets that have a name of their own."""
    if heading != "Loss":
        return {}
    known = set(CHARTS["Loss"][0])
    names = {
        key for record in records for key in record if key.startswith("lm loss ") and not key.endswith(" ppl")
    }
    return {key: key.removeprefix("lm loss ") for key in sorted(names - known)}


def main(argv: Sequence[str]) -> None:
    """Parse argv, write the page."""
    parser = Parser("Make one HTML page of a run, or of several to compare.")
    parser.add_argument("runs", nargs="+", type=Path, help="folders with metrics.jsonl, or such files")
    parser.add_argument("--output", type=Path, help="default: report.html beside the first run's metrics")
    arguments = parser.parse_args(argv)
    files = [path / "metrics.jsonl" if path.is_dir() else path for path in arguments.runs]
    names = [str(path) for path in arguments.runs]
    output = arguments.output or files[0].parent / "report.html"
    make_folder_of(output, "--output")
    runs = {name: read_metrics(file) for name, file in zip(names, files)}
    for name, read in runs.items():
        for note in read.notes:
            print(f"note: {name}: {note}", file=sys.stderr)
    layout = layout_of(files[0].parent) if len(files) == 1 else None
    write_aside(output, page(runs, layout))
    print(f"written: {output}")


if __name__ == "__main__":
    run(main)
