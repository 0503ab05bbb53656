"""The laws of docs/architecture.md, enforced on every file."""

import ast
import functools
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


ENTRY = ROOT / "pretrain_gpt.py"
# What training/run.py puts together, so that nobody writes a second wiring: module -> what is called there only.
# tools/benchmarks/ measures parts by themselves.
WIRED = {
    "megatron_lite.parallel.parallelize": "build_chunks",
    "megatron_lite.parallel.pipeline": "Pipeline",
    "megatron_lite.training.optimizer": "build_optimizer",
    "megatron_lite.training.evaluate": "Evaluator",
    "megatron_lite.checkpoint.checkpointer": "Checkpointer",
    "megatron_lite.data.loader": "Loader",
}
# Who in the package talks to other ranks; everybody else calls these, so that a step's messages can be counted here.
COLLECTIVES = {
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "barrier"),
    *("batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend"),
    *("monitored_barrier", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send"),
    *("all_to_all_single", "all_gather_single", "reduce_scatter_single", "scatter_object_list"),
}
TALKERS = (
    "megatron_lite.distributed.",
    "megatron_lite.parallel.",
    "megatron_lite.training.gradients",
    "megatron_lite.training.metrics",
    "megatron_lite.training.signals",
)
TORCH_PRIVATE = "megatron_lite.distributed.torch_private"


def module_name(path):
    relative = path.relative_to(ROOT).with_suffix("")
    return ".".join(part for part in relative.parts if part != "__init__")


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports_of(path):
    """(module, is it at the top level of the file) of every import, `from a import b` also as a.b."""
    found, tree = [], tree_of(path)
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


@functools.cache
def graph():
    """module -> modules of this project that it imports."""
    names = {module_name(path) for path in FILES}
    return {module_name(p): {m for m, _ in imports_of(p) if m in names} for p in FILES}


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
    assert text.count("\n") <= (110 if path == ENTRY else 450), "too long: split it"
    assert ast.get_docstring(tree) or not text.strip(), "a file says what it is for"
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), f"line {node.lineno}: no global"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= 60, f"line {node.lineno}: {node.name} has {length} lines"
    for module, at_top in imports_of(path):
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
        hits = [m for m, _ in imports_of(path) if m.startswith(outside)]
        assert not hits, f"{name} knows no process group, yet imports {hits}"
    if name.startswith("megatron_lite.parallel"):
        hits = [
            m
            for m, _ in imports_of(path)
            if m.startswith("megatron_lite.model") and m != "megatron_lite.model"
        ]
        assert not hits, f"{name} knows a model by contract, yet imports {hits}"


def test_nothing_in_the_package_imports_the_programs():
    programs = ("pretrain_gpt", "tools", "data_prep", "tests")
    for path in FILES:
        room = path.relative_to(ROOT).parts[0]
        for module, _ in imports_of(path):
            if module.startswith("tools.benchmarks") and path.stem in {"benchmark", *BENCHMARKS}:
                continue  # the suites of tools/benchmark.py: one program in several files
            if module.split(".")[0] in programs:
                raise AssertionError(f"{room}: {path.name} imports {module}")


def test_the_entry_tells_a_story_of_few_names():
    imported = [node for node in ast.walk(tree_of(ENTRY)) if isinstance(node, ast.ImportFrom)]
    names = {
        alias.name for node in imported if node.module.startswith("megatron_lite") for alias in node.names
    }
    assert len(names) <= 18, sorted(names)


def test_no_chain_of_imports_is_longer_than_9():
    """A reader who follows every import of a module down to the ground opens at most 9 files one after the other."""
    edges = graph()

    @functools.cache
    def chain(name):
        return [name, *max((chain(other) for other in edges[name]), key=len, default=[])]

    longest = max(map(chain, edges), key=len)
    assert len(longest) <= 9, " imports ".join(longest)


def calls_of(path):
    """(name, line) of every call, of `a.b.name(...)` too."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            yield getattr(node.func, "attr", getattr(node.func, "id", None)), node.lineno


def test_only_run_wires_rooms_together():
    second_wirings, defined = [], set()
    for path in FILES:
        name = module_name(path)
        body = {node.name for node in tree_of(path).body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        defined |= {name for module, callee in WIRED.items() if module == name and callee in body}
        if name == "megatron_lite.training.run" or name.startswith("tools.benchmarks."):
            continue
        known = {callee for module, callee in WIRED.items() if f"{module}.{callee}" in dict(imports_of(path))}
        second_wirings += [(name, *call) for call in calls_of(path) if call[0] in known]
        for module in (
            dict(imports_of(path)).keys() & WIRED.keys()
        ):  # by way of the module: pipeline.Pipeline(...)
            second_wirings += [(name, *call) for call in calls_of(path) if call[0] == WIRED[module]]
    assert not second_wirings, "call megatron_lite.training.run.build_run"
    assert defined == WIRED.keys(), "WIRED names what is not there"


def test_collectives_are_issued_where_they_are_expected():
    for path in FILES:
        name = module_name(path)
        if name.split(".")[0] in ("megatron_lite", "pretrain_gpt") and not name.startswith(TALKERS):
            used = {node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)}
            hits = [node.attr for node in used if ast.unparse(node.value) in ("dist", "torch.distributed")]
            hits += [m.removeprefix("torch.distributed.") for m, _ in imports_of(path)]
            assert not COLLECTIVES.intersection(hits), f"{name}: {COLLECTIVES.intersection(hits)}"


def is_private(name):
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def test_private_names_of_torch_have_one_place():
    """So that a new torch is read against one file; each name there says why, and which test watches it."""
    for path in FILES:
        hits = [m for m, _ in imports_of(path) if m.split(".")[0] == "torch" and is_private(m)]
        if module_name(path) == TORCH_PRIVATE:
            assert hits
        elif not module_name(path).startswith("tools.benchmarks."):
            assert not hits, f"{module_name(path)} imports {hits}"


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
        roots = {m.split(".")[0] for m, _ in imports_of(names[module])}
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
