"""The laws of docs/architecture.md, enforced on every file."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("megatron_lite", "tools", "data_prep")
FILES = sorted(p for room in ROOMS for p in (ROOT / room).rglob("*.py")) + [ROOT / "pretrain_gpt.py"]
# matplotlib, pyarrow and datasets: slow to import, and each needed by one option or one kind of input only.
# transformers: a peer that tools/benchmark.py runs where it is installed.
OPTIONAL = {
    "wandb",
    "torch.utils.tensorboard",
    "matplotlib",
    "pyarrow",
    "datasets",
    "transformers",
}
PURE = [
    "config",
    "arithmetic",
    "arguments",
    "distributed.environment",
    "files",
    "parallel.miniature",
    "planning",
    "training.loss_scale",
    "rehearsal.run_report",
]
BENCHMARKS = {path.stem for path in (ROOT / "tools/benchmarks").glob("*.py")}
FORBIDDEN_NAMES = {"utils", "helpers", "common", "manager", "misc"}


def module_name(path):
    relative = path.relative_to(ROOT).with_suffix("")
    return ".".join(part for part in relative.parts if part != "__init__")


def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(tree):
    """(module, is it at the top level of the file) of every import, `from a import b` also as a.b."""
    found = []
    top = {id(node) for node in tree.body} | {
        id(inner) for node in tree.body if isinstance(node, ast.If) for inner in node.body
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.append((node.module, id(node) in top))
            found += [(f"{node.module}.{alias.name}", id(node) in top) for alias in node.names]
    return found


def graph():
    """module -> modules of this project that it imports."""
    names = {module_name(path) for path in FILES}
    return {module_name(p): {m for m, _ in imports_of(tree_of(p)) if m in names} for p in FILES}


def reachable(edges, start):
    seen, waiting = set(), [start]
    while waiting:
        for following in edges.get(waiting.pop(), ()):
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return seen


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_file(path):
    text = path.read_text(encoding="utf-8")
    tree = tree_of(path)
    name = module_name(path)
    assert not FORBIDDEN_NAMES & set(name.split(".")), f"{name}: say what it is"
    assert text.count("\n") <= (150 if path.name == "pretrain_gpt.py" else 450), "too long: split it"
    assert ast.get_docstring(tree) or not text.strip(), "a file says what it is for"
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), f"line {node.lineno}: no global"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and path.name != "pretrain_gpt.py":
            length = node.end_lineno - node.lineno + 1
            assert length <= 60, f"line {node.lineno}: {node.name} has {length} lines"
    for module, at_top in imports_of(tree):
        optional = any(module == o or module.startswith(o + ".") for o in OPTIONAL)
        assert at_top or optional, f"{module} is imported inside a function"
    if name.split(".")[0] == "megatron_lite" and name != "megatron_lite.distributed.environment":
        assert "os.environ" not in text and "getenv" not in text, (
            "only distributed/environment.py reads the environment"
        )
    if name.startswith(("megatron_lite.model", "megatron_lite.data")):
        outside = (
            "megatron_lite.distributed",
            "megatron_lite.parallel",
            "torch.distributed",
        )
        hits = [m for m, _ in imports_of(tree) if m.startswith(outside)]
        assert not hits, f"{name} knows no process group, yet imports {hits}"
    if name.startswith("megatron_lite.parallel"):
        hits = [
            m
            for m, _ in imports_of(tree)
            if m.startswith("megatron_lite.model") and m != "megatron_lite.model"
        ]
        assert not hits, f"{name} knows a model by contract, yet imports {hits}"


def test_nothing_in_the_package_imports_the_programs():
    programs = ("pretrain_gpt", "tools", "data_prep", "tests")
    for path in FILES:
        room = path.relative_to(ROOT).parts[0]
        for module, _ in imports_of(tree_of(path)):
            if module.startswith("tools.benchmarks") and path.stem in {"benchmark", *BENCHMARKS}:
                continue  # the suites of tools/benchmark.py: one program in several files
            if module.split(".")[0] in programs:
                raise AssertionError(f"{room}: {path.name} imports {module}")


def test_no_cycles():
    edges = graph()
    for name in edges:
        assert name not in reachable(edges, name), f"{name} imports itself by way of others"


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_import_no_torch(name):
    """A module, or every module of a room."""
    names = {module_name(path): path for path in FILES}
    edges = graph()
    start = f"megatron_lite.{name}"
    inside = {module for module in names if module == start or module.startswith(f"{start}.")}
    assert inside, f"there is no {start}"
    packages = {".".join(start.split(".")[:n]) for n in range(1, start.count(".") + 1)}
    for module in {*inside, *packages}.union(*(reachable(edges, module) for module in inside)):
        roots = {m.split(".")[0] for m, _ in imports_of(tree_of(names[module]))}
        assert not roots & {"torch", "transformers", "datasets"}, (
            f"{start} reaches {module}, which imports {roots}"
        )


def test_rooms_lie_on_floors_without_an_arrow_upwards():
    """Rooms import one another without a circle, on at most 8 floors: the ground floor imports no other room."""

    def room_of(module):
        parts = module.split(".")
        return ".".join(parts[:2]) if parts[0] == "megatron_lite" else parts[0]

    arrows = {}
    for module, imported in graph().items():
        below = {room_of(other) for other in imported} - {room_of(module), "megatron_lite"}
        arrows.setdefault(room_of(module), set()).update(below)
    for room in arrows:
        assert room not in reachable(arrows, room), f"{room} imports itself by way of other rooms"

    def floor(room):
        return 1 + max((floor(other) for other in arrows[room]), default=0)

    assert max(map(floor, arrows)) <= 8, {room: floor(room) for room in arrows}


def test_help_and_errors_answer_before_torch():
    program = (
        "import sys, runpy\n"
        "sys.argv = ['pretrain_gpt.py', *{argv}]\n"
        "try:\n    runpy.run_path('pretrain_gpt.py', run_name='__main__')\n"
        "except SystemExit as leave:\n    print('code', leave.code, 'torch' in sys.modules)\n"
    )
    for argv, expected in ((["--help"], "code 0 False"), (["--no-such-flag"], "code 2 False")):
        code = program.format(argv=argv)
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert done.stdout.splitlines()[-1] == expected, done.stdout[-500:] + done.stderr[-2000:]


def test_no_mutable_module_state():
    """Module-level lists, dicts and sets are constants: named in capitals."""
    for path in FILES:
        for node in tree_of(path).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            value = getattr(node, "value", None)
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(
                value, ast.List | ast.Dict | ast.Set
            ):
                for target in targets:
                    name = getattr(target, "id", "")
                    assert name.isupper() or name == "__all__", f"{path.name}:{node.lineno}: {name}"
