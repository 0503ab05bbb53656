"""Megatron's flags that are no field here, read from megatron_flags.tsv beside this file.

A row's `here` says what becomes of the flag:
    rename   `text` is put in its place; a value after it follows the last word.
    default  the same, where the command line says nothing else.
    accept   read without effect, for the reason in `text`. `value` is empty for a switch, else `any`, the words that
             may follow (`a|b`), `+` one or more, `*` any number.
    dense    accepted by a dense model, which does not read it; with --num-experts refused for the reason in `text`.
    refuse   for the reason in `text`. A name that ends in * stands for all that begin like it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lite.config.declare import ConfigError


class Row(NamedTuple):
    """One flag of the table."""

    flag: str
    here: str
    value: str
    text: str

    @property
    def choices(self) -> list[str]:
        """The values that may follow; empty for any."""
        return [] if self.value in ("", "any", "+", "*") else self.value.split("|")


ROWS = tuple(
    Row(*line.split("\t"))
    for line in Path(__file__).with_name("megatron_flags.tsv").read_text(encoding="utf-8").splitlines()[1:]
)
ACCEPTED: dict[str, Row] = {row.flag: row for row in ROWS if row.here in ("accept", "dense")}
RENAMED: dict[str, list[str]] = {row.flag: row.text.split() for row in ROWS if row.here == "rename"}
DEFAULTS: dict[str, list[str]] = {row.flag: row.text.split() for row in ROWS if row.here == "default"}
REFUSED: dict[str, str] = {row.flag: row.text for row in ROWS if row.here == "refuse"}


def why_refused(name: str) -> str | None:
    """Why a flag is refused and what to use instead; None for a flag that is not known to be refused."""
    kinds = (text for flag, text in REFUSED.items() if flag[-1] == "*" and name.startswith(flag[:-1]))
    return REFUSED.get(name) or next(kinds, None)


def accepted_notes(given: Mapping[str, Any], tensor_size: int, dense: bool) -> list[str]:
    """Why each accepted flag of {flag: its value} has no effect. Raises ConfigError for a value that would."""
    notes = []
    for flag, value in given.items():
        row = ACCEPTED[flag]
        if row.choices and value not in row.choices:
            raise ConfigError(f"{flag} {value} has no counterpart, only {', '.join(row.choices)}: {row.text}")
        if flag == "--tensor-parallel-num-weight-shards" and value != str(tensor_size):
            raise ConfigError(f"{flag} {value} has to be --tensor-model-parallel-size {tensor_size}")
        reason = "the model is dense" if dense and row.here == "dense" else row.text
        notes.append(f"{flag} has no effect: {reason}")
    return notes


def has_effect_with_experts(given: Mapping[str, Any]) -> frozenset[str]:
    """Of accepted flags {flag: its value} those that a dense model does not read, but a mixture of experts would."""
    unread = {flag: value for flag, value in given.items() if ACCEPTED[flag].here == "dense"}
    if str(unread.get("--moe-expert-capacity-factor", "")).startswith("-"):  # negative: no capacity
        unread.pop("--moe-expert-capacity-factor")
    return frozenset(unread)
