"""A run as one HTML page: its loss, learning rate, gradient norm, speed, memory, validation and layout.

    python tools/report.py runs/x            reads runs/x/metrics.jsonl, writes runs/x/report.html
    python tools/report.py a.jsonl b.jsonl --output compare.html

The page holds everything itself (no script, no network) and follows the reader's light or dark theme.
"""

import html
import io
import sys
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lite.arithmetic.costs import model_costs
from megatron_lite.arithmetic.partition import describe, plan_from_config
from megatron_lite.checkpoint import find_in
from megatron_lite.config import Config, ConfigError
from megatron_lite.files.command_line import Parser, make_folder_of, run
from megatron_lite.files.writing import write_aside
from megatron_lite.training.logged import EXPERT_LOAD, LOGGED, values_of_layers
from megatron_lite.training.metrics_file import MetricsFile, Record, read_metrics

MOST_SOURCES = 30
MOST_COLUMNS = 400  # of a picture over time
# Tells lines apart for most colour-blind readers (Okabe and Ito 2008), on white and on black.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
LOGARITHMIC = "Gradient norm"
GREY = "#808080"  # is read on a light page and on a dark one
DRAWN = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "text.parse_math": False,
    "font.size": 9,
    "axes.spines.right": False,
}
DRAWN |= {f"{part}.color": GREY for part in ("xtick", "ytick", "text", "grid")}
DRAWN |= {"axes.edgecolor": GREY, "axes.spines.top": False, "axes.grid": True, "grid.alpha": 0.35}
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))

STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --paper: #ffffff; --line: #d4d4d4; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --paper: #161616; --line: #3a3a3a; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1200px; margin: 2rem auto; padding: 0 1rem; }
.charts { margin-top: 1.5rem; display: grid; gap: 1.2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); }
figure { margin: 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; }
pre { overflow-x: auto; border: 1px solid var(--line); padding: .8rem; }
table { border-collapse: collapse; } td, th { padding: .15rem .9rem .15rem 0; text-align: left; }
"""

Points = dict[int, float]  # iteration -> value


def points(records: Sequence[Record], key: str, factor: float) -> Points:
    """The values of one key, the last of each iteration; those that were not finite are left out."""
    values = {r["iteration"]: r[key] * factor for r in records if r.get(key) is not None}
    return dict(sorted(values.items()))


def chart(heading: str, lines: dict[str, Points], restarts: Sequence[int] = ()) -> str:
    """A figure with a line for each name and a dotted one at each restart; empty when there is nothing to draw."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    lines = {name: values for name, values in lines.items() if values}
    if not lines:
        return ""
    with rc_context(DRAWN):
        figure = Figure(figsize=(6.2, 2.6), layout="constrained")
        axes = figure.subplots()
        for name, values, colour in zip(lines, lines.values(), cycle(COLOURS)):
            style = {"color": colour, "linewidth": 1.2, "marker": "o" if len(values) == 1 else None}
            axes.plot([*values], [*values.values()], label=name, gid="line", **style)
        if heading == LOGARITHMIC and all(
            value > 0 for values in lines.values() for value in values.values()
        ):
            axes.set_yscale("log")
        left, right = axes.get_xlim()
        for iteration in (i for i in restarts if left <= i <= right):
            axes.axvline(iteration, color=GREY, linestyle=":", gid="restart")
        if len(lines) > 1:
            axes.legend(frameon=False)
        return _figure(heading, figure)


def picture_of_layers(heading: str, by_iteration: dict[int, dict[int, float]]) -> str:
    """A figure of a value of each layer over time, the larger the darker; empty when there are no layers.

    Args:
        by_iteration: iteration -> {layer: value}.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    layers = sorted({layer for values in by_iteration.values() for layer in values})
    if not layers:
        return ""
    steps = np.linspace(0, len(by_iteration) - 1, min(len(by_iteration), MOST_COLUMNS)).astype(int)
    shown = np.array([*by_iteration])[steps]
    values = [[by_iteration[step].get(layer, np.nan) for step in shown.tolist()] for layer in layers]
    with rc_context(DRAWN | {"axes.grid": False}):
        figure = Figure(figsize=(6.2, 2.6), layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(values, aspect="auto", cmap="cividis_r", interpolation="nearest", gid="layers")
        every = -(-len(layers) // 8)
        axes.set_yticks(range(0, len(layers), every), [f"layer {layer}" for layer in layers[::every]])
        columns = sorted({0, len(shown) // 2, len(shown) - 1})
        axes.set_xticks(columns, [str(shown[column]) for column in columns])
        figure.colorbar(image)
        return _figure(heading, figure)


def _figure(heading: str, figure: Any) -> str:
    """A matplotlib figure as HTML."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", transparent=True, metadata=NO_METADATA)
    picture = drawn.getvalue()
    return (
        f"<figure><figcaption>{html.escape(heading)}</figcaption>{picture[picture.index('<svg') :]}</figure>"
    )


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
        checkpoint = find_in(str(folder))
    except ConfigError:
        return None
    if checkpoint is None:
        return None
    config = Config.from_dict(checkpoint.config)
    sizes = ", ".join(
        f"{k}: {v}" for k, v in config.to_dict()["parallel"].items() if k.endswith("_size") and v != 1
    )
    table = describe(plan_from_config(config), model_costs(config.model, config.data.seq_length))
    return f"{config.parallel.pipeline_schedule}   {sizes}\n\n{table}"


def page(runs: dict[str, MetricsFile], layout: str | None) -> str:
    """The whole page: of one run, or of several over one another."""
    title = html.escape(", ".join(runs))
    restarts = sorted({iteration for metrics in runs.values() for iteration in metrics.restarts})
    figures = []
    for heading in dict.fromkeys(["Loss", *(row.chart for row in LOGGED if row.chart)]):
        lines = {}
        for run_name, metrics in runs.items():
            named = {row.key: (row.label, row.factor) for row in LOGGED if row.chart == heading}
            if heading == "Loss":
                named |= _validation_sets(metrics.records)
            for key, (label, factor) in named.items():
                line = label if len(runs) == 1 else f"{run_name} {label}"
                lines[line] = points(metrics.records, key, factor)
        figures.append(chart(heading, lines, restarts))
    for run_name, metrics in runs.items():
        found = ((r["iteration"], values_of_layers(r, EXPERT_LOAD)) for r in metrics.records)
        loads = dict(sorted((iteration, values) for iteration, values in found if values))
        name = "" if len(runs) == 1 else f"{run_name} "
        figures.append(
            picture_of_layers(f"{name}Load of the fullest expert of each layer, times mean", loads)
        )
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


def _validation_sets(records: Sequence[Record]) -> dict[str, tuple[str, float]]:
    """{key: (label, factor)} of the losses that were evaluated, by the names of their sets."""
    keys = {
        key for record in records for key in record if key.startswith("lm loss ") and not key.endswith(" ppl")
    }
    return {key: (key.removeprefix("lm loss "), 1) for key in sorted(keys)}


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
