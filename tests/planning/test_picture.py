"""Pictures of timetables: every action once, at its place and in proportion, in a file that stands alone."""

import re
import struct
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest

from megatron_lite.arithmetic.pipeline_schedule import schedule_timeline
from megatron_lite.planning.picture import (
    COLUMNS,
    EDGE,
    LEFT,
    THEME,
    Panel,
    draw,
    ink_on,
    shade,
    to_png,
    to_svg,
)

CASES = [
    (name, size, microbatches, chunks)
    for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("interleaved-zero-bubble", 4))
    for size, microbatches in ((2, 4), (4, 8), (8, 32))
] + [(name, size, 2 * size, 2) for name in ("zbv", "dualpipev") for size in (2, 8)]


def scene_of(name, size, microbatches, chunks):
    timeline = schedule_timeline(name, size, microbatches, chunks)
    return timeline, draw([Panel("a <title>", timeline, (1.5,) * size)], size, "units")


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_every_action_has_its_place_its_length_and_its_colour(case):
    _, size, _, _ = case
    timeline, scene = scene_of(*case)
    pixels = (scene.width - LEFT - COLUMNS - EDGE) / timeline.seconds
    drawn = Counter(
        (colour, round(x, 3), y)
        for colour, boxes in scene.boxes.items()
        for x, y, _, height in boxes
        if height == 20
    )
    for rank, events in enumerate(timeline.events):
        for event in events:
            colour = shade(event.action.kind, event.action.stage // size)
            drawn[colour, round(LEFT + event.start * pixels, 3), 42 + 24 * rank] -= 1
    for rank in range(size):
        drawn["idle", LEFT, 42 + 24 * rank] -= 1
    assert not any(drawn.values())
    busy = sum(
        w for colour, boxes in scene.boxes.items() if colour not in THEME for _, _, w, h in boxes if h == 20
    )
    actions = sum(len(rank) for rank in timeline.events)
    whole = sum(timeline.busy(rank) for rank in range(size)) * pixels
    assert whole - 0.81 * actions <= busy < whole


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_nothing_leaves_the_page_and_numbers_stay_in_their_cells(case):
    _, scene = scene_of(*case)
    cells = [
        (x, y, w) for c, boxes in scene.boxes.items() if c not in THEME for x, y, w, h in boxes if h == 20
    ]
    for boxes in scene.boxes.values():
        for x, y, width, height in boxes:
            assert x >= 0 and y >= 0 and x + width <= scene.width and y + height <= scene.height
    middles = {(round(x + w / 2), y): w for x, y, w in cells}
    for x, y, words, _, anchor, size in scene.texts:
        assert 0 <= x <= scene.width and 0 <= y <= scene.height
        if anchor == "middle" and (round(x), y - 14) in middles:
            assert 0.6 * size * len(words) <= middles[round(x), y - 14]


def test_small_pictures_number_every_microbatch():
    timeline, scene = scene_of("1f1b", 4, 8, 1)
    numbers = [words for _, y, words, _, anchor, _ in scene.texts if anchor == "middle" and y < 42 + 4 * 24]
    assert Counter(numbers) == {str(m): 8 for m in range(8)}


def test_svg_stands_alone_and_knows_both_themes():
    _, scene = scene_of("zbv", 4, 8, 2)
    text = to_svg(scene)
    root = ElementTree.fromstring(text)
    assert "a <title>" in [element.text for element in root.iter()]
    assert not re.search(r"href|src=|url\(|<script", text)
    assert text.count("prefers-color-scheme: dark") == 1
    classes = {name for element in root.iter() for name in element.get("class", "").split()}
    assert classes <= set(re.findall(r"\.(c\d+) \{", text))
    assert all(f"fill: {colour};" in text for pair in THEME.values() for colour in pair)


def test_numbers_are_read_on_every_shade():
    """WCAG's contrast of the number and its cell is 4.5 or more."""
    for kind in "FBIWR":
        for chunk in range(5):
            colour = shade(kind, chunk)
            assert contrast(colour, ink_on(colour)) >= 4.5, (kind, chunk)
    for theme in (0, 1):
        for name in ("ink", "quiet"):
            assert contrast(THEME[name][theme], THEME["paper"][theme]) >= 4.5


def contrast(one, other):
    def luminance(colour):
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_chunks_have_shades_of_their_own():
    for kind in "FBIW":
        assert len({shade(kind, chunk) for chunk in range(4)}) == 4


def test_png_has_the_scene_s_size():
    _, scene = scene_of("1f1b", 2, 4, 1)
    data = to_png(scene, dots=1.0)
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert abs(width - scene.width) <= 1 and abs(height - scene.height) <= 1


def test_panels_share_one_time_scale():
    short, long = (schedule_timeline("1f1b", 2, m, 1) for m in (2, 6))
    scene = draw([Panel("short", short), Panel("long", long)], 2, "units", scale=1000.0)
    widths = sorted({w for _, _, w, h in scene.boxes["idle"] if h == 20})
    assert widths[0] / widths[1] == pytest.approx(short.seconds / long.seconds)
    assert "20,000" in [words for _, _, words, *_ in scene.texts]


PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"


@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv", "dualpipev"]
)
def test_the_pictures_of_the_docs_are_those_of_today(name):
    """`tools/show_schedule.py` draws them again: see docs/parallelism.md."""
    chunks = 1 if name in ("gpipe", "1f1b") else 2
    timeline = schedule_timeline(name, 4, 8, chunks)
    text = (PICTURES / f"{name}.svg").read_text()
    root = ElementTree.fromstring(text)
    words = [element.text for element in root.iter() if element.text]
    assert f"{name}: 4 ranks x {chunks} chunks, 8 microbatches, idle {timeline.bubble_fraction:.1%}" in words
    cells = sum(element.get("d").count("v20h") for element in root.iter() if element.get("d"))
    assert cells == sum(len(rank) for rank in timeline.events) + 4
