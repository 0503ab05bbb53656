"""What the pages say is there: links, files, flags; the README's count of lines; no page grows without a reason."""

import re
import subprocess
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from megatron_lite.config import Config
from megatron_lite.config.declare import flag_name

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BASES = (ROOT, ROOT / "megatron_lite", ROOT / "tests")
MOST_WORDS = 13_500  # of docs/*.md together: half of what they once had, and room for what is new
# Flags of others: torchrun, pip, pytest, Slurm, nccl-tests, lm-eval.
OTHERS = re.compile(
    "--(nproc-per-node|max-restarts|shutdown-timeout|ntasks-per-node|batch|signal|model_args|model|tasks|include_path|"
    "batch_size|torch|quick|random-examples)"
)


def anchor(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def anchors(page):
    return {
        anchor(line.lstrip("#"))
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.startswith("#")
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        if link.startswith(("http:", "https:")):
            continue
        path, _, name = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not name or name in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_are_there(page):
    """A word in backticks with a folder and an ending, or a room with its slash."""
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"\b(?:python |bash |pytest -m slow )?((?:\w+/)+\w+\.(?:py|sh|md|txt|tsv))\b", text)
    missing = {name for name in named if not any((base / name).exists() for base in BASES)}
    made = {name for name in missing if name.startswith(("tasks/", "runs/", "SAVE/"))}
    assert missing == made
    for room in re.findall(r"`(\w+)/`", text):
        assert any((base / room).is_dir() for base in BASES) or room in ("index_cache", "tokenizer"), room


def flags_there():
    """A field of the configuration, or written out in a program: `--name`, or "its_name" that becomes one."""
    groups = (group.type for group in fields(Config) if is_dataclass(group.type))
    names = {flag_name(item.name) for group in groups for item in fields(group)}
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.tsv", "*.sh"], cwd=ROOT, capture_output=True, text=True
    )
    sources = [ROOT / name for name in listed.stdout.split() if not name.startswith("tests/")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources if path.exists())
    return (
        names
        | set(re.findall(r"--[a-z][\w-]*", text))
        | {flag_name(w) for w in re.findall(r'"(\w+_\w+)"', text)}
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_named_are_there(page):
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text(encoding="utf-8")))
    assert {flag for flag in named - flags_there() if not OTHERS.fullmatch(flag)} == set()


def test_pages_stay_short():
    assert (
        sum(len(page.read_text(encoding="utf-8").split()) for page in (ROOT / "docs").glob("*.md"))
        <= MOST_WORDS
    )


def test_the_readme_counts_the_core_truly():
    """Lines to within a tenth, and hours at the speed it names."""
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    core, rooms = text[text.index("The core, ") :], ("model", "parallel", "training", "distributed")
    assert all(f"`{room}`" in core.partition(" has ")[0] for room in rooms)
    lines, speed, hours = (
        float(re.search(pattern, core)[1].replace(",", ""))
        for pattern in (r"has ([\d,]+) lines", r"At (\d+) lines a minute", r"that is (\d+) hours")
    )
    files = [path for room in rooms for path in (ROOT / "megatron_lite" / room).rglob("*.py")]
    counted = sum(path.read_text(encoding="utf-8").count("\n") for path in [*files, ROOT / "pretrain_gpt.py"])
    assert lines == pytest.approx(counted, rel=0.1)
    assert hours == pytest.approx(counted / speed / 60, rel=0.1)
