"""`pip install` of a clone: the package alone, its data files, and what requirements.txt says."""

import re
import shutil
import subprocess
import sys
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the package as pip puts it there, from a copy: a build leaves files where it runs."""
    copy, target = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("target")
    for name in ("megatron_lite", "tools"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "requirements.txt", "README.md", "pretrain_gpt.py"):
        shutil.copy(ROOT / name, copy)
    flags = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *flags, "--target", str(target), str(copy)]
    subprocess.run(command, check=True, timeout=120)
    return target


def test_the_package_alone_with_its_data_files(installed):
    assert {path.name for path in installed.iterdir() if "dist-info" not in path.name} == {"megatron_lite"}
    wanted = {path.relative_to(ROOT) for path in (ROOT / "megatron_lite").rglob("*") if path.is_file()}
    there = {
        path.relative_to(installed) for path in (installed / "megatron_lite").rglob("*") if path.is_file()
    }
    assert {p for p in there if p.suffix != ".pyc"} == {p for p in wanted if p.suffix != ".pyc"}


def test_requirements_txt_is_what_it_requires(installed):
    (information,) = installed.glob("*.dist-info")
    required = PathDistribution(information).metadata.get_all("Requires-Dist")
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()

    def parts(line):
        name, bounds = re.fullmatch(r"([\w-]+)\s*(.*)", line).groups()
        return name, set(bounds.replace(" ", "").split(","))

    assert sorted(map(parts, required)) == sorted(map(parts, lines))


def test_no_program_changes_the_import_path():
    programs = [
        path for folder in ("tools", "data_prep", "examples") for path in (ROOT / folder).rglob("*.py")
    ]
    assert len(programs) > 10
    assert [path.name for path in programs if "sys.path" in path.read_text(encoding="utf-8")] == []
