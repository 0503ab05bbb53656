"""What `bash tests/run.sh --quick` runs: tests/quick.txt names every room and program, and tests that there are."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import Share

ROOT = Path(__file__).parents[1]
LINES = [
    line.split(maxsplit=1)
    for line in (ROOT / "tests/quick.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]


def rooms_and_programs():
    rooms = {f"megatron_lite/{path.parent.name}" for path in ROOT.glob("megatron_lite/*/__init__.py")}
    programs = {path for folder in ("tools", "data_prep") for path in (ROOT / folder).glob("*.py")}
    return rooms | {str(path.relative_to(ROOT)) for path in programs} | {"pretrain_gpt.py"}


def source_of(path):
    """Text of a test file and of the files of tests/ that it imports."""
    text = path.read_text(encoding="utf-8")
    named = {
        name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module.startswith("tests.")
        for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    }
    files = [
        ROOT / (name.replace(".", "/") + ".py") for name in sorted(named)
    ]  # what is no file is a name in one
    return "\n".join([text, *(file.read_text(encoding="utf-8") for file in files if file.is_file())])


def test_every_room_and_program_is_named():
    assert {name for name, _ in LINES} == rooms_and_programs()


@pytest.mark.parametrize(("name", "test"), LINES, ids=lambda word: word)
def test_a_named_test_touches_what_it_is_named_for(name, test):
    file, *function = test.split("::")
    source = source_of(ROOT / file)
    module, stem = name.removesuffix(".py").replace("/", "."), Path(name).stem
    mentions = (
        rf"\b({re.escape(module)}|{re.escape(name)}|from {module.partition('.')[0]} import .*\b{stem})\b"
    )
    assert re.search(mentions, source), f"{file} does not touch {name}"
    if function:
        defined = {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
        assert function[0].partition("[")[0] in defined


def test_processes_that_share_the_tests_run_each_of_them_once(tmp_path):
    """Each module whole in one process, also where its tests do not stand together."""
    items = [SimpleNamespace(nodeid=f"tests/{module}.py::{n}") for n, module in enumerate("aabbbcadddeb")]
    parts, done = [Share(tmp_path).mine(items) for _ in range(3)], [[], [], []]
    for _ in items:
        for part, mine in zip(parts, done):
            mine += [item.nodeid for item in (next(part, None),) if item is not None]
    assert sorted(sum(done, [])) == sorted(item.nodeid for item in items)
    modules = [{name.partition("::")[0] for name in mine} for mine in done]
    assert sum(map(len, modules)) == len(set().union(*modules)) == 5 and all(modules)


def test_parameters_named_are_there(request):
    """pytest itself refuses an unknown name in a quick run; this says so in a run of everything."""
    if request.config.args != ["tests"]:
        pytest.skip("only a run of everything has collected everything")
    collected = {item.nodeid for item in request.session.items}
    assert [test for _, test in LINES if "[" in test and test not in collected] == []
