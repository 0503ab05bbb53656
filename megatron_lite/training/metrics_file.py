"""Read metrics.jsonl, as runs that were killed and resumed leave it. Imports no torch."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_lite.config.declare import ConfigError
from megatron_lite.files.foreign_files import foreign_file

Record = dict[str, Any]
LARGEST = 1e300  # beyond, charts and sums overflow


@dataclass
class MetricsFile:
    """The records of a run, each step once.

    Attributes:
        records: in the file's order; a number that is not finite is None. Of steps that a resumed run repeated the
            later attempt's records are here.
        restarts: {first iteration that a resumed run repeated: iterations of the attempt before from there on}.
        notes: what was left out, one sentence each.
    """

    records: list[Record] = field(default_factory=list)
    restarts: dict[int, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_metrics(path: Path) -> MetricsFile:
    """The records of a metrics file.

    Raises:
        ConfigError: the file cannot be read or holds no training step.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    result, last = MetricsFile(), -1
    torn: list[int] = []
    odd: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        record = _parse(line)
        if record is None:
            torn.append(number)
            continue
        for key, value in record.items():
            finite = _finite(value)
            if finite is None and key != "mfu":  # None where the device's peak is unknown
                odd.append(f"line {number}: {key} is {json.dumps(value)[:40]}")
            record[key] = finite
        last = _take(result, record, last)
    if torn:
        result.notes.append(
            f"{len(torn):,} line{'s' * (len(torn) > 1)} no record, left out (the first is line {torn[0]:,})"
        )
    if odd:
        result.notes.append(
            f"{len(odd):,} value{'s' * (len(odd) > 1)} no finite number, not drawn (the first: {odd[0]})"
        )
    if not any("lm loss" in record for record in result.records):
        what = foreign_file(path) or "".join(f": {note}" for note in result.notes[:1])
        raise ConfigError(f"{path} holds no training step{what}")
    return result


def _take(result: MetricsFile, record: Record, last: int) -> int:
    """Add a record; what an attempt before did from its iteration on is dropped. Returns the last iteration trained."""
    if "lm loss" not in record:
        result.records.append(record)
        return last
    begin = record["iteration"]
    if begin <= last:
        result.records = [r for r in result.records if r["iteration"] < begin]
        result.restarts = {i: n for i, n in result.restarts.items() if i < begin}
        result.restarts[begin] = last - begin + 1
    result.records.append(record)
    return begin


def _parse(line: bytes) -> Record | None:
    """A record; None for a line that is none."""
    try:
        record = json.loads(line)
        iteration = record["iteration"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    whole = isinstance(iteration, int) and not isinstance(iteration, bool)
    return record if whole and 0 <= iteration < 2**53 else None


def _finite(value: Any) -> int | float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if abs(value) < LARGEST and math.isfinite(value) else None
    except OverflowError:
        return None
