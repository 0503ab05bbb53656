"""A pipeline's timetable as a picture: SVG that follows the reader's light or dark theme, or PNG. Imports no torch.

Every rank is a row, time runs to the right. Hue says the kind of action, a lighter shade a later chunk of the rank, the
number the microbatch; what is left is idle.
"""

import html
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from megatron_lite.arithmetic.pipeline_schedule import Timeline

# Tells kinds apart for most colour-blind readers (Okabe and Ito 2008), on white and on black.
KINDS = {
    "F": ("forward", "#0072b2"),
    "B": ("backward", "#d55e00"),
    "I": ("backward, input gradient", "#e69f00"),
    "W": ("weight gradient", "#009e73"),
    "R": ("gradient reduction", "#cc79a7"),
}
# name -> (light theme, dark theme)
THEME = {
    "ink": ("#1c1c1c", "#e8e8e8"),
    "quiet": ("#5c5c5c", "#a8a8a8"),
    "paper": ("#ffffff", "#161616"),
    "idle": ("#e9e9e9", "#303030"),
    "line": ("#b8b8b8", "#5a5a5a"),
}
LEFT, ROW, CELL, EDGE = 58, 24, 20, 12
TITLE, AXIS, LEGEND, GAP = 42, 24, 20, 16
NARROWEST, WIDEST, WIDER = 520, 1120, 2000  # the last one where forwards would be slivers
COLUMNS = 112  # idle and in flight, to the right of the rows


@dataclass(frozen=True)
class Panel:
    """One timetable; in_flight[rank]: most activations at once, in microbatches of a rank's layers, if told."""

    title: str
    timeline: Timeline
    in_flight: tuple[float, ...] = ()
    note: str = ""


@dataclass
class Scene:
    """What is drawn, in pixels from the top left: boxes (x, y, width, height) by colour, texts by style."""

    width: float
    height: float = 0.0
    boxes: dict[str, list[tuple[float, float, float, float]]] = field(default_factory=dict)
    texts: list[tuple[float, float, str, str, str, int]] = field(default_factory=list)

    def box(self, colour: str, x: float, y: float, width: float, height: float) -> None:
        """colour: a name of THEME or #rrggbb."""
        self.boxes.setdefault(colour, []).append((x, y, width, height))

    def text(
        self, x: float, y: float, words: str, colour: str = "ink", anchor: str = "start", size: int = 12
    ) -> None:
        """anchor: start, middle or end of the words is at x; y is their base line."""
        self.texts.append((x, y, words, colour, anchor, size))


def draw(panels: Sequence[Panel], pipeline_size: int, unit: str, scale: float = 1.0) -> Scene:
    """All panels under one another, on the same time scale.

    Args:
        unit: the words under the time axis, e.g. 'ms'.
        scale: what the timelines' times are multiplied with to be in `unit`.
    """
    longest = max(panel.timeline.seconds for panel in panels)
    forwards = [
        event.end - event.start
        for rank in panels[0].timeline.events
        for event in rank
        if event.action.kind == "F"
    ]
    cells = longest / max(median(forwards), longest / 1000)
    across = max(min(WIDEST, max(NARROWEST, 20 * cells)), min(WIDER, 6.2 * cells))
    pixels = across / longest
    scene = Scene(LEFT + across + COLUMNS + EDGE)
    for panel in panels:
        _draw_panel(scene, panel, pipeline_size, pixels)
        _draw_axis(scene, longest * scale, pixels / scale, unit if panel is panels[-1] else "")
        scene.height += GAP
    _draw_legend(scene, panels, pipeline_size)
    return scene


def _draw_panel(scene: Scene, panel: Panel, pipeline_size: int, pixels: float) -> None:
    timeline, top = panel.timeline, scene.height
    right = scene.width - EDGE
    # Numbers of one length decide for all: none for the long ones only would look as if they meant something.
    digits = len(str(max(event.action.microbatch for rank in timeline.events for event in rank)))
    scene.text(EDGE, top + 20, panel.title, size=14)
    scene.text(LEFT, top + TITLE - 6, panel.note, "quiet")
    scene.text(right - 62, top + TITLE - 5, "idle", "quiet", "end", 11)
    scene.text(right, top + TITLE - 5, "in flight" if panel.in_flight else "", "quiet", "end", 11)
    for rank, events in enumerate(timeline.events):
        y = top + TITLE + rank * ROW
        scene.text(LEFT - 8, y + 14, f"rank {rank}", "quiet", "end")
        scene.box("idle", LEFT, y, timeline.seconds * pixels, CELL)
        scene.text(right - 62, y + 14, f"{timeline.bubble(rank):.0%}", "ink", "end")
        if panel.in_flight:
            scene.text(right, y + 14, f"{panel.in_flight[rank]:g}", "ink", "end")
        for event in events:
            x, width = LEFT + (event.start - timeline.start) * pixels, (event.end - event.start) * pixels
            colour = shade(event.action.kind, event.action.stage // pipeline_size)
            scene.box(colour, x, y, width - min(0.8, 0.15 * width), CELL)  # a gap tells neighbours apart
            number = str(event.action.microbatch)
            size = next((s for s in (11, 9, 8) if width >= 0.62 * s * digits + 2.4), None)
            if size and event.action.microbatch >= 0:
                scene.text(x + width / 2, y + 14, number, ink_on(colour), "middle", size)
    scene.height = top + TITLE + len(timeline.events) * ROW


def _draw_axis(scene: Scene, longest: float, pixels: float, unit: str) -> None:
    y = scene.height
    step = _round_step(longest / 8)
    for number in range(math.floor(longest / step + 1e-9) + 1):
        x = LEFT + number * step * pixels
        scene.box("line", x, y, 1, 4)
        scene.text(x, y + 15, f"{number * step:,.6g}", "quiet", "middle", 11)
    if unit:
        scene.text(scene.width - EDGE, y + 15, unit, "quiet", "end", 11)
    scene.height += AXIS


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))


def _draw_legend(scene: Scene, panels: Sequence[Panel], pipeline_size: int) -> None:
    """A swatch a kind that is there, with one part a chunk, and idle; in as many lines as it takes."""
    there = {event.action[:2] for panel in panels for rank in panel.timeline.events for event in rank}
    chunks = 1 + max(stage for stage, _ in there) // pipeline_size
    entries = [
        ([shade(kind, chunk) for chunk in range(1 if kind == "R" else chunks)], name)
        for kind, (name, _) in KINDS.items()
        if any(kind == one for _, one in there)
    ]
    entries.append((["idle"], "idle"))
    x, y = LEFT, scene.height
    for colours, name in entries:
        needed = 14 * len(colours) + 8 + 6.6 * len(name) + 20
        if x > LEFT and x + needed > scene.width:
            x, y = LEFT, y + LEGEND
        for colour in colours:
            scene.box(colour, x, y, 14, 12)
            x += 14
        scene.text(x + 6, y + 10, name)
        x += needed - 14 * len(colours)
    if chunks > 1:
        words = f"shades, dark to light: the rank's chunks 0 to {chunks - 1}"
        if x + 6.2 * len(words) > scene.width:
            x, y = LEFT, y + LEGEND
        scene.text(x, y + 10, words, "quiet")
    scene.height = y + LEGEND + EDGE / 2


def shade(kind: str, chunk: int) -> str:
    """A kind's colour, the lighter the later the chunk (from the fourth on the same)."""
    part = (0.0, 0.34, 0.54, 0.68)[min(chunk, 3)] if kind != "R" else 0.0
    colour = KINDS[kind][1]
    return "#" + "".join(
        f"{round(value + (255 - value) * part):02x}" for value in bytes.fromhex(colour.removeprefix("#"))
    )


def ink_on(colour: str) -> str:
    """Black or white, whichever is read better on `colour` (relative luminance, WCAG 2)."""
    parts = [value / 255 for value in bytes.fromhex(colour.removeprefix("#"))]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if luminance > 0.179 else "#ffffff"


def to_svg(scene: Scene) -> str:
    """The scene as a file that needs nothing else; it follows the reader's theme."""
    names = {name: f"c{index}" for index, name in enumerate(dict.fromkeys([*THEME, *_colours(scene)]))}
    light = " ".join(f".{names[name]} {{ fill: {pair[0]}; }}" for name, pair in THEME.items())
    dark = " ".join(f".{names[name]} {{ fill: {pair[1]}; }}" for name, pair in THEME.items())
    fixed = " ".join(f".{names[name]} {{ fill: {name}; }}" for name in names if name not in THEME)
    width, height = math.ceil(scene.width), math.ceil(scene.height)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif">',
        f"<style>{light} {fixed} @media (prefers-color-scheme: dark) {{ {dark} }}</style>",
        f'<rect class="{names["paper"]}" width="{width}" height="{height}"/>',
    ]
    for colour, boxes in scene.boxes.items():
        outline = "".join(f"M{x:.1f} {y:.1f}h{w:.1f}v{h:g}h{-w:.1f}z" for x, y, w, h in boxes)
        parts.append(f'<path class="{names[colour]}" d="{outline}"/>')
    for (colour, anchor, size), texts in _by_style(scene).items():
        weight = ' font-weight="600"' if size == 14 else ""
        parts.append(f'<g class="{names[colour]}" text-anchor="{anchor}" font-size="{size}"{weight}>')
        parts += [f'<text x="{x:.1f}" y="{y:.1f}">{html.escape(words)}</text>' for x, y, words in texts]
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _colours(scene: Scene) -> Iterable[str]:
    return [*scene.boxes, *(text[3] for text in scene.texts)]


def _by_style(scene: Scene) -> dict[tuple[str, str, int], list[tuple[float, float, str]]]:
    groups: dict[tuple[str, str, int], list[tuple[float, float, str]]] = {}
    for x, y, words, colour, anchor, size in scene.texts:
        if words:
            groups.setdefault((colour, anchor, size), []).append((x, y, words))
    return groups


def to_png(scene: Scene, dots: float = 2.0) -> bytes:
    """The scene in the light theme, with `dots` dots a pixel. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(scene.width / 100, scene.height / 100), dpi=100 * dots, facecolor=THEME["paper"][0]
    )
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, scene.width)
    axes.set_ylim(scene.height, 0)
    axes.axis("off")
    for colour, boxes in scene.boxes.items():
        corners = [[(x, y), (x + w, y), (x + w, y + h), (x, y + h)] for x, y, w, h in boxes]
        fill = THEME[colour][0] if colour in THEME else colour
        axes.add_collection(PolyCollection(corners, facecolors=fill, edgecolors="none"))
    for x, y, words, colour, anchor, size in scene.texts:
        axes.text(
            x,
            y,
            words,
            color=THEME[colour][0] if colour in THEME else colour,
            fontsize=0.72 * size * 0.95,
            horizontalalignment={"start": "left", "middle": "center", "end": "right"}[anchor],
            verticalalignment="baseline",
            fontweight="bold" if size == 14 else "normal",
        )
    FigureCanvasAgg(figure)
    written = io.BytesIO()
    figure.savefig(written, format="png", facecolor=figure.get_facecolor())
    return written.getvalue()
