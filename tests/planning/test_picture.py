"""Pictures of timetables: every action once, at its place and in proportion, in a file that stands alone."""

import re
import struct
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest
from matplotlib.colors import to_hex

from megatron_lite.arithmetic.pipeline_schedule import schedule_timeline
from megatron_lite.planning.picture import IDLE, KINDS, Panel, draw, ink_on, shade, write_picture

CASES = [
    ("gpipe", 2, 4, 1),
    ("1f1b", 4, 8, 1),
    ("interleaved-1f1b", 8, 32, 2),
    ("interleaved-zero-bubble", 4, 8, 4),
    ("zbv", 2, 4, 2),
    ("dualpipev", 8, 16, 2),
]


def figure_of(name, size, microbatches, chunks, scale=1.0):
    timeline = schedule_timeline(name, size, microbatches, chunks)
    return timeline, draw([Panel("a <title>", timeline, (1.5,) * size, "a note")], size, "units", scale)


def cells_of(axes):
    """(colour, start, width, rank) of every drawn action."""
    for collection in axes.collections:
        for path, colour in zip(collection.get_paths(), collection.get_facecolors(), strict=True):
            (left, bottom), (right, top) = path.vertices.min(axis=0), path.vertices.max(axis=0)
            yield to_hex(colour), round(left, 6), round(right - left, 6), round((bottom + top) / 2)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_every_action_has_its_place_its_length_and_its_colour(case):
    timeline, figure = figure_of(*case, scale=10.0)
    wanted = Counter(
        (
            shade(event.action.kind, event.action.stage // case[1]),
            round(10 * event.start, 6),
            round(10 * (event.end - event.start), 6),
            rank,
        )
        for rank, events in enumerate(timeline.events)
        for event in events
    )
    (axes,) = figure.axes
    assert Counter(cells_of(axes)) == wanted
    idle = [patch for patch in axes.patches if to_hex(patch.get_facecolor()) == IDLE]
    assert [patch.get_width() for patch in idle] == pytest.approx([10 * timeline.seconds] * case[1])


def drawn_boxes(figure):
    figure.draw_without_rendering()
    (axes,) = figure.axes
    return axes, [(text, text.get_window_extent()) for text in axes.texts]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_nothing_leaves_the_page_and_numbers_stay_in_their_cells(case):
    _, figure = figure_of(*case)
    axes, boxes = drawn_boxes(figure)
    page = figure.bbox
    widths = {(round(start + width / 2, 5), rank): width for _, start, width, rank in cells_of(axes)}
    pixels = axes.get_window_extent().width / axes.get_xlim()[1]
    for text, box in boxes:
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1
        if (text.get_ha(), text.get_text().isdigit()) == ("center", True):
            x, rank = text.get_position()
            assert box.width <= widths[round(x, 5), rank] * pixels


def test_small_pictures_number_every_microbatch():
    _, figure = figure_of("1f1b", 4, 8, 1)
    numbers = [text.get_text() for text in figure.axes[0].texts if text.get_ha() == "center"]
    assert Counter(numbers) == {str(m): 8 for m in range(8)}


def test_ranks_tell_their_idle_share_and_what_they_hold():
    timeline, figure = figure_of("1f1b", 4, 8, 1)
    words = [text.get_text() for text in figure.axes[0].texts]
    assert [f"{timeline.bubble(rank):.0%}, 1.5" for rank in range(4)] == [w for w in words if "%" in w]


def test_svg_stands_alone_and_is_the_same_every_time(tmp_path):
    for name in ("one", "two"):
        write_picture(tmp_path / f"{name}.svg", figure_of("zbv", 4, 8, 2)[1])
    text = (tmp_path / "one.svg").read_text()
    words = [element.text for element in ElementTree.fromstring(text).iter()]
    assert {"a <title>", "a note", "rank 3", "units", "weight gradient"} <= set(words)
    assert not re.search(r'href="[^#]|src=|<script', text)
    assert text == (tmp_path / "two.svg").read_text()


def test_numbers_are_read_on_every_shade():
    """WCAG's contrast of the number and its cell is 4.5 or more."""
    for kind in KINDS:
        for chunk in range(5):
            colour = shade(kind, chunk)
            assert contrast(colour, ink_on(colour)) >= 4.5, (kind, chunk)


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


def test_png_has_the_figure_s_proportions(tmp_path):
    _, figure = figure_of("1f1b", 2, 4, 1)
    write_picture(tmp_path / "p.png", figure)
    data = (tmp_path / "p.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert width / height == pytest.approx(figure.get_figwidth() / figure.get_figheight(), rel=0.01)


def test_panels_share_one_time_scale():
    short, long = (schedule_timeline("1f1b", 2, m, 1) for m in (2, 6))
    figure = draw([Panel("short", short), Panel("long", long)], 2, "units", scale=1000.0)
    above, below = figure.axes
    assert above.get_xlim() == below.get_xlim() == (0, 1000 * long.seconds)
    assert max(start + width for _, start, width, _ in cells_of(above)) == pytest.approx(1000 * short.seconds)


PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"


@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv", "dualpipev"]
)
def test_the_pictures_of_the_docs_are_those_of_today(name):
    """`tools/show_schedule.py` draws them again: see docs/parallelism.md."""
    chunks = 1 if name in ("gpipe", "1f1b") else 2
    timeline = schedule_timeline(name, 4, 8, chunks)
    text = (PICTURES / f"{name}.svg").read_text()
    words = Counter(element.text for element in ElementTree.fromstring(text).iter())
    title = f"{name}: 4 ranks x {chunks} chunks, 8 microbatches, idle {timeline.bubble_fraction:.1%}"
    assert words[title] == 1
    shades = Counter(shade(e.action.kind, e.action.stage // 4) for events in timeline.events for e in events)
    assert all(text.count(f"fill: {colour}; stroke: #ffffff") == count for colour, count in shades.items())
