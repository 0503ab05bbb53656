"""What all suites share: contestants that take turns, medians of paired ratios, a table, a refusal of unlike work."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_lite.files.command_line import RunError


@dataclass(frozen=True)
class Options:
    """What every suite is handed."""

    repeats: int = 7  # turns that each contestant gets
    quick: bool = False  # the smallest form that still runs everything, for a test; its figures mean nothing
    peers: bool = False  # also run other code bases that happen to be installed


@dataclass(frozen=True)
class Row:
    """One measured ratio: value (median), low and high (quartiles), and what was wanted of it."""

    name: str
    baseline: str
    value: float
    low: float
    high: float
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        """'ok', 'MISSED', or '' where nothing was wanted."""
        if self.at_least is self.at_most is None:
            return ""
        least, most = self.at_least or 0, math.inf if self.at_most is None else self.at_most
        return "ok" if least <= self.value <= most else "MISSED"


@dataclass(frozen=True)
class Table:
    """A titled list of ratios, and lines of plain facts below it (sizes, seconds, versions)."""

    title: str
    rows: Sequence[Row]
    facts: Sequence[str] = field(default=())


Seconds = dict[str, list[float]]  # contestant -> seconds of its turns


def take_turns(contestants: Mapping[str, Callable[[], float]], repeats: int, warm_up: int = 1) -> Seconds:
    """Seconds of each contestant's turns. A round lets each run once, every other round backwards, so that a machine
    that slows down, or a neighbour that leaves warm caches, favours none. The first `warm_up` rounds do not count.

    contestants: name -> does one turn and returns the seconds that count.
    """
    seconds: Seconds = {name: [] for name in contestants}
    for turn in range(warm_up + repeats):
        for name in contestants if turn % 2 == 0 else reversed(contestants):
            seconds[name].append(contestants[name]())
    return {name: times[warm_up:] for name, times in seconds.items()}


def row_of(name: str, baseline: str, ratios: Sequence[float], *wanted: float | None, **more: Any) -> Row:
    """A row of the median and the quartiles; wanted: at_least, at_most, as Row has them."""
    several = ratios if len(ratios) > 1 else [*ratios, *ratios]
    low, middle, high = statistics.quantiles(several, n=4, method="inclusive")
    return Row(name, baseline, middle, low, high, *wanted, **more)


def speed(name: str, seconds: Seconds, baseline: str, at_least: float | None = None, note: str = "") -> Row:
    """How fast `name` is as a share of `baseline` (above 1: faster), by the rounds' own ratios."""
    ratios = [theirs / ours for ours, theirs in zip(seconds[name], seconds[baseline], strict=True)]
    return row_of(name, baseline, ratios, at_least, note=note)


def cost(name: str, seconds: Seconds, baseline: str, at_most: float | None = None, note: str = "") -> Row:
    """How long `name` takes as a multiple of `baseline` (above 1: longer), by the rounds' own ratios."""
    ratios = [ours / theirs for ours, theirs in zip(seconds[name], seconds[baseline], strict=True)]
    return row_of(name, baseline, ratios, None, at_most, note=note)


def fastest(seconds: Seconds, per_second: float = 1.0) -> str:
    """Each contestant's fastest turn, times a factor (1000: milliseconds)."""
    return ", ".join(f"{name} {per_second * min(times):.4g}" for name, times in seconds.items())


def refuse_unlike(what: str, values: Mapping[str, object], tolerance: float = 1e-4) -> None:
    """Raise RunError unless all values agree, numbers to a relative `tolerance`: the same work was done."""
    (first, wanted), *others = values.items()
    for name, value in others:
        same = value == wanted
        if isinstance(value, float) and isinstance(wanted, float):
            same = math.isclose(value, wanted, rel_tol=tolerance)
        if not same:
            seen, expected = (str(text)[:60] for text in (value, wanted))
            raise RunError(f"not the same work: {what} of {name} is {seen}, of {first} {expected}")


def render(table: Table) -> str:
    """The table as Markdown."""
    lines = [f"### {table.title}", ""]
    if table.rows:
        lines += ["| what | against | ratio | quartiles | wanted | | note |", "|---|---|---|---|---|---|---|"]
    for row in table.rows:
        bounds = [f">= {row.at_least:.5g}"] if row.at_least is not None else []
        bounds += [f"<= {row.at_most:.5g}"] if row.at_most is not None else []
        lines.append(
            f"| {row.name} | {row.baseline} | {row.value:.3f} | {row.low:.3f} to {row.high:.3f} "
            f"| {' and '.join(bounds)} | {row.verdict} | {row.note} |"
        )
    return "\n".join([*lines, "", *table.facts]).rstrip()
