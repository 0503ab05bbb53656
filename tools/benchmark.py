"""How fast the parts are, as ratios against named baselines measured in the same run.

    python tools/benchmark.py --suite step                 tables in Markdown
    python tools/benchmark.py --suite step fsdp --json     the same for programs
    python tools/benchmark.py --list

Contestants take turns, ratios are medians over the rounds, and contestants that did not do the same work (another
loss after the same steps, other bytes) end the run with an error instead of a figure. --quick runs everything in the
smallest size: it shows that a suite starts, not how fast anything is.
"""

import importlib
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import date
from functools import partial
from pathlib import Path

import torch

from megatron_lite.files.command_line import Parser, make_folder_of, number, run
from megatron_lite.files.writing import write_aside
from tools.benchmarks.comparison import Options, Table, render

# Name -> module of tools.benchmarks and function; the first line of its docstring is what --list shows. A suite is
# imported when it is run: one of them needs more than another.
SUITES = {
    "step": "steps:step",
    "experts": "steps:experts",
    "expert-parallel": "steps:expert_parallel",
    "startup": "startup:run",
    "overhead": "overhead:run",
    "fsdp": "steps:fsdp",
    "pipeline": "steps:pipeline",
    "schedules": "schedules:run",
    "memory": "steps:memory",
    "gpu": "gpu:run",
    "preprocess": "preprocess:run",
    "checkpoint": "checkpoint:run",
}


def suite_of(name: str) -> Callable[[Options], list[Table]]:
    """The function that runs a suite."""
    module, function = SUITES[name].split(":")
    return getattr(importlib.import_module(f"tools.benchmarks.{module}"), function)


def machine() -> str:
    """One line: date, torch, Python, processor, cores or GPU."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    versions = f"{date.today()}, torch {torch.__version__}, Python {platform.python_version()}"
    return f"{versions}, {device}, {torch.get_num_threads()} threads"


def main(argv: Sequence[str]) -> None:
    """Parse, run the suites one after the other, print each table as it comes."""
    parser = Parser(__doc__.splitlines()[0], prog="benchmark.py")
    flag = parser.add_argument
    flag("--suite", nargs="+", choices=list(SUITES), default=list(SUITES), metavar="NAME")
    flag("--list", action="store_true", help="print the suites and leave")
    flag("--repeats", type=number(1), default=Options.repeats, help="turns of each contestant")
    flag("--quick", action="store_true", help="smallest sizes; the figures mean nothing")
    flag("--peers", action="store_true", help="also other code bases that are installed")
    flag("--output", type=Path, metavar="DIR", help="folder for results.json")
    flag("--json", action="store_true", help="print one JSON object instead of tables")
    own = parser.parse_args(argv)
    if own.list:
        print("\n".join(f"{name:12} {suite_of(name).__doc__.splitlines()[0]}" for name in SUITES))
        return
    if own.output is not None:
        make_folder_of(own.output / "results.json", "--output")
    options = Options(1 if own.quick else own.repeats, own.quick, own.peers)
    results, show = {}, (lambda text: None) if own.json else partial(print, flush=True)
    show(machine())
    for name in own.suite:
        tables = suite_of(name)(options)
        show("\n" + "\n\n".join(map(render, tables)))
        rows = [[asdict(row) | {"verdict": row.verdict} for row in table.rows] for table in tables]
        results[name] = [asdict(table) | {"rows": each} for table, each in zip(tables, rows)]
    content = json.dumps({"machine": machine(), "suites": results}, indent=1)
    if own.json:
        print(content)
    if own.output is not None:
        write_aside(own.output / "results.json", content + "\n")


if __name__ == "__main__":
    run(main)
