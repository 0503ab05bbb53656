"""Write the tables of docs/megatron_migration.md from the code, so that the page can't go stale.

python tools/write_flag_table.py            write the page anew
python tools/write_flag_table.py --check    only compare; exit code 1 when the page is out of date
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import Field, fields
from pathlib import Path

from megatron_lite.arguments.megatron_flags import (
    ACCEPTED,
    REFUSED,
    REFUSED_KINDS,
    RENAMED,
    SETS,
    SETS_UNLESS_GIVEN,
    Accepted,
)
from megatron_lite.config import CONCERNS
from megatron_lite.config.declare import flag_of
from megatron_lite.files.command_line import guarded

PAGE = Path(__file__).resolve().parent.parent / "docs" / "megatron_migration.md"
BEGIN = "<!-- The rest is written by tools/write_flag_table.py: change the code, not these tables. -->\n"
_OURS = "ours: "


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write")
    arguments = parser.parse_args()
    old = arguments.page.read_text(encoding="utf-8")
    new = renewed(old)
    if arguments.check:
        if old != new:
            print(f"{arguments.page} is out of date: run python tools/write_flag_table.py", file=sys.stderr)
        return int(old != new)
    arguments.page.write_text(new, encoding="utf-8")
    return 0


def renewed(page: str) -> str:
    """The page with its tables written anew; what stands before them stays."""
    assert page.count(BEGIN) == 1, f"the page has the line {BEGIN.strip()!r} once"
    return page[: page.index(BEGIN)] + BEGIN + "\n" + tables()


def tables() -> str:
    """Every flag that the program knows, in Markdown."""
    parts = [
        "## Implemented: Megatron's name, meaning and default\n",
        *(_concern(concern, ours=False) for concern in CONCERNS.values()),
        "## Ours: what Megatron has no flag for\n",
        _table(("flag", "default", "what it is"), _rows(CONCERNS.values(), ours=True)),
        "## Old spellings\n",
        _table(("in a script", "is read as"), _old_spellings()),
        "## Accepted: read, without effect, with a line at start that says why\n",
        _table(("why", "flags"), _accepted()),
        "## Refused: one sentence, exit code 2\n",
        _table(("what the sentence says", "flags"), _refused()),
    ]
    return "\n".join(part for part in parts if part)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _concern(concern: type, ours: bool) -> str:
    rows = _rows((concern,), ours)
    title = concern.__doc__.strip().rstrip(".")
    return f"### {title}\n\n" + _table(("flag", "default", "what it is"), rows) if rows else ""


def _rows(concerns: Iterable[type], ours: bool) -> list[tuple[str, str, str]]:
    found = []
    for concern in concerns:
        for item in fields(concern):
            text = item.metadata["help"]
            if item.metadata.get("no_effect") or text.startswith(_OURS) is not ours:
                continue
            names = (flag_of(item), *item.metadata.get("aliases", ()))
            choices = item.metadata.get("choices", ())
            text = text.removeprefix(_OURS) + (f": {', '.join(choices)}" if choices else "")
            found.append((_code(names), _default(item), _plain(text)))
    return found


def _default(item: Field) -> str:
    value = item.default
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return "off"
    words = value if isinstance(value, tuple) else (value,)
    return " ".join(f"{word:.10g}" if isinstance(word, float) else str(word) for word in words)


def _old_spellings() -> list[tuple[str, str]]:
    rows = [(_code((name,)), _code((" ".join(words),))) for name, words in RENAMED.items()]
    for table, condition in ((SETS, ""), (SETS_UNLESS_GIVEN, ", where that is not given")):
        for name, values in table.items():
            words = " ".join(f"--{field.replace('_', '-')} {value}" for field, value in values.items())
            rows.append((_code((name,)), _code((words,)) + condition))
    return sorted(rows)


def _accepted() -> list[tuple[str, str]]:
    by_reason = defaultdict(list)
    for name, accepted in ACCEPTED.items():
        by_reason[accepted.reason].append(_with_values(name, accepted))
    for concern in CONCERNS.values():
        for item in fields(concern):
            if item.metadata.get("no_effect"):
                by_reason[item.metadata["no_effect"]].append(flag_of(item))
    return [(_plain(reason), _code(names)) for reason, names in by_reason.items()]


def _with_values(name: str, accepted: Accepted) -> str:
    return name if accepted.values is None else f"{name} {'|'.join(accepted.values)}"


def _refused() -> list[tuple[str, str]]:
    by_reason = defaultdict(list)
    for name, reason in REFUSED.items():
        by_reason[reason].append(name)
    for prefix, reason in REFUSED_KINDS:
        by_reason[reason].append(prefix + "*")
    return [(_plain(reason), _code(names)) for reason, names in by_reason.items()]


def _plain(text: str) -> str:
    """Text that Markdown leaves alone."""
    return text.replace("*", "\\*")


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    sys.exit(guarded(main))
