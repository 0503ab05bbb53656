"""A pipeline's timetable as a picture, SVG or PNG. Imports no torch, and matplotlib only to draw.

Every rank is a row, time runs to the right. Hue says the kind of action, a lighter shade a later chunk of the rank, the
number the microbatch; what is left is idle.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megatron_lite.arithmetic.pipeline_schedule import Event, Timeline
from megatron_lite.files.writing import write_aside

# Tells kinds apart for most colour-blind readers (Okabe and Ito 2008).
KINDS = {
    "F": ("forward", "#0072b2"),
    "B": ("backward", "#d55e00"),
    "I": ("backward, input gradient", "#e69f00"),
    "W": ("weight gradient", "#009e73"),
    "R": ("gradient reduction", "#cc79a7"),
}
IDLE = "#e9e9e9"
CELL, ROW, NARROWEST, WIDEST = 0.2, 0.26, 5.2, 20.0  # inches: a forward, a rank, the rows' width
TEXT, NUMBER_SIZES = 8, (7.5, 6.5, 5.5)  # points


@dataclass(frozen=True)
class Panel:
    """One timetable; in_flight[rank]: most activations at once, in microbatches of a rank's layers, if given."""

    title: str
    timeline: Timeline
    in_flight: tuple[float, ...] = ()
    note: str = ""


def draw(panels: Sequence[Panel], pipeline_size: int, unit: str, scale: float = 1.0) -> Any:
    """A matplotlib Figure of all panels under one another, on the same time scale.

    Args:
        unit: the words under the time axis, e.g. 'ms'.
        scale: what the timelines' times are multiplied with to be in `unit`.
    """
    from matplotlib.figure import Figure

    longest = max(panel.timeline.seconds for panel in panels)
    forwards = [e.end - e.start for rank in panels[0].timeline.events for e in rank if e.action.kind == "F"]
    width = min(WIDEST, max(NARROWEST, CELL * longest / median(forwards)))
    ranks = [len(panel.timeline.events) for panel in panels]
    figure = Figure((width + 1.8, ROW * sum(ranks) + 0.8 * len(panels) + 0.4), layout="constrained")
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=ranks)[:, 0]
    for axes, panel in zip(rows, panels, strict=True):
        _draw_panel(axes, panel, pipeline_size, scale, points=72 * width / longest)
    rows[-1].set_xlim(0, longest * scale)
    rows[-1].set_xlabel(unit, fontsize=TEXT, loc="right")
    _draw_legend(figure, panels, pipeline_size)
    return figure


def _draw_panel(axes: Any, panel: Panel, pipeline_size: int, scale: float, points: float) -> None:
    """points: of the page, for a second."""
    timeline, ranks = panel.timeline, len(panel.timeline.events)
    axes.set_title(panel.title + (f"\n{panel.note}" if panel.note else ""), loc="left", fontsize=TEXT + 1)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.tick_params(labelsize=TEXT, length=0)
    axes.spines[:].set_visible(False)
    axes.barh(range(ranks), timeline.seconds * scale, 0.84, color=IDLE)
    beside = {"transform": axes.get_yaxis_transform(), "fontsize": TEXT, "va": "center"}
    axes.text(1.01, -0.9, "idle" + (", in flight" if panel.in_flight else ""), **beside)
    size_of = _number_sizes(timeline, points)
    for rank, events in enumerate(timeline.events):
        spans = [((e.start - timeline.start) * scale, (e.end - e.start) * scale) for e in events]
        colours = [shade(e.action.kind, e.action.stage // pipeline_size) for e in events]
        axes.broken_barh(spans, (rank - 0.42, 0.84), facecolors=colours, edgecolors="white", linewidths=0.3)
        held = f", {panel.in_flight[rank]:g}" if panel.in_flight else ""
        axes.text(1.01, rank, f"{timeline.bubble(rank):.0%}{held}", **beside)
        for event, (start, length), colour in zip(events, spans, colours, strict=True):
            if size := size_of(event):
                style = {"color": ink_on(colour), "fontsize": size, "ha": "center", "va": "center_baseline"}
                axes.text(start + length / 2, rank, str(event.action.microbatch), **style)


def _number_sizes(timeline: Timeline, points: float) -> Any:
    """Event -> the size in which its microbatch's number fits, 0 where none does.

    Numbers of one length decide for all: none for the long ones only would look as if they meant something.
    """
    digits = len(str(max(event.action.microbatch for rank in timeline.events for event in rank)))

    def size_of(event: Event) -> float:
        room = (event.end - event.start) * points
        fitting = (size for size in NUMBER_SIZES if room >= 0.62 * size * digits + 2)
        return next(fitting, 0) if event.action.microbatch >= 0 else 0

    return size_of


def _draw_legend(figure: Any, panels: Sequence[Panel], pipeline_size: int) -> None:
    """A swatch for each kind that is there, with one part a chunk, and idle."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    there = {event.action[:2] for panel in panels for rank in panel.timeline.events for event in rank}
    chunks = 1 + max(stage for stage, _ in there) // pipeline_size
    names = {name: kind for kind, (name, _) in KINDS.items() if any(kind == one for _, one in there)}
    swatches = [tuple(Patch(color=shade(kind, chunk)) for chunk in range(chunks)) for kind in names.values()]
    labels = [*names, "idle" + (f"; shades, dark to light: chunks 0 to {chunks - 1}" if chunks > 1 else "")]
    figure.legend(
        [*swatches, (Patch(color=IDLE),)],
        labels,
        loc="outside lower left",
        ncols=3,
        fontsize=TEXT,
        frameon=False,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )


def shade(kind: str, chunk: int) -> str:
    """A kind's colour, the lighter the later the chunk (from the fourth on the same)."""
    part = (0.0, 0.34, 0.54, 0.68)[min(chunk, 3)] if kind != "R" else 0.0
    parts = bytes.fromhex(KINDS[kind][1].removeprefix("#"))
    return "#" + "".join(f"{round(value + (255 - value) * part):02x}" for value in parts)


def ink_on(colour: str) -> str:
    """Black or white, whichever is read better on `colour` (relative luminance, WCAG 2, its curve as a power)."""
    red, green, blue = ((value / 255) ** 2.2 for value in bytes.fromhex(colour.removeprefix("#")))
    return "#000000" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 else "#ffffff"


def write_picture(path: Path, figure: Any) -> None:
    """Write aside and rename, as the name's ending says; the same figure gives the same bytes."""
    import matplotlib

    written = io.BytesIO()
    style = {"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"], "svg.hashsalt": "timetable"}
    with matplotlib.rc_context(style):
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(written, format=path.suffix.removeprefix("."), dpi=200, metadata=metadata)
    write_aside(path, written.getvalue())
