"""pretrain_gpt.py as a process: how fast it answers, and which rank says what is wrong."""

import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_lite.config import ConfigError
from megatron_lite.distributed.environment import Environment

ROOT = Path(__file__).parents[1]


def run(*words, **variables):
    return subprocess.run(
        [sys.executable, "pretrain_gpt.py", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", **{k: str(v) for k, v in variables.items()}},
    )


@pytest.mark.parametrize("words", [["--help"], ["--nope"], ["--num-layers", "4"]])
def test_answers_within_half_a_second(words):
    """Processor time, since the machine may be busy; the quickest of three."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run(*words)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.5


def test_an_error_is_one_line_on_rank_0_and_code_2():
    done = run("--nope", RANK=0, WORLD_SIZE=2)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: unknown flag: --nope") and done.stderr.count("\n") == 1


def test_an_error_is_silent_on_the_other_ranks():
    """They also wait: torchrun shows the first rank that fails, which has to be rank 0."""
    started = time.monotonic()
    done = run("--nope", RANK=1, WORLD_SIZE=2)
    assert done.returncode == 2 and done.stdout == done.stderr == ""
    assert time.monotonic() - started >= 5


def test_a_bad_environment_is_one_line():
    with pytest.raises(ConfigError, match="WORLD_SIZE is 'many', wanted a whole number"):
        Environment.read({"WORLD_SIZE": "many"})
