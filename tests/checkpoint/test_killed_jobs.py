"""pretrain_gpt.py killed again and again, in its saves above all; it ends with the weights of a run left alone."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from megatron_lite.checkpoint import find_in
from megatron_lite.checkpoint.reading import CheckpointReader
from tests.checkpoint.folders import is_intact
from tests.ranks import RankError, run_ranks
from tests.runs import flags, pretrain_here, train, write_data

RANKS, LAYOUT = 2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"  # so that a random state that is lost shows


def _pretrain_until_killed(argv, save, seed):
    """One of the ranks goes by SIGKILL: at a random moment of a random save, or at any moment at all."""
    generator = random.Random(seed)
    victim, saves, delay = generator.randrange(RANKS), generator.randrange(1, 4), generator.uniform(0, 0.04)
    anywhere = generator.random() < 0.2

    def watch():
        if anywhere:
            time.sleep(50 * delay)
        else:
            seen = set()
            while len(seen) < saves:
                seen |= {path.name for path in Path(save).glob("iter_*.tmp")}
                time.sleep(0.001)
            time.sleep(delay)
        os.kill(os.getpid(), signal.SIGKILL)

    if int(os.environ["RANK"]) == victim:
        threading.Thread(target=watch, daemon=True).start()
    return pretrain_here(argv)


def kill_and_compare(prefix, folder, kills, steps, *more, timeout=120):
    """Returns how many of the kills left a half-written folder. timeout: seconds of one run to its end."""
    common = flags(prefix, LAYOUT, DROPOUT, f"--train-iters {steps} --save-interval 1 --keep-last 2", *more)
    straight, killed = folder / "straight", folder / "killed"
    train(RANKS, [*common, "--save", str(straight)], timeout)
    argv, in_a_save, died = [*common, "--save", str(killed), "--load", str(killed)], 0, 0
    for seed in range(kills):
        try:
            run_ranks(_pretrain_until_killed, RANKS, argv, str(killed), seed)
        except RankError:  # the victim's death, or its peer's complaint about it
            died += 1
        found = find_in(str(killed)) if killed.exists() else None
        if found is not None:
            assert is_intact(found.path)
            in_a_save += any(killed.glob("iter_*.tmp"))
    train(RANKS, argv, timeout)
    assert died >= kills // 2, "the run was over before the kills: give it more steps"
    with CheckpointReader(str(straight)) as expected, CheckpointReader(str(killed)) as found:
        assert found.train_state == expected.train_state
        assert found.names().keys() == expected.names().keys()
        for name in expected.names():
            assert torch.equal(found.read(name), expected.read(name)), name
    return in_a_save


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


def test_a_job_killed_three_times(prefix, tmp_path):
    kill_and_compare(prefix, tmp_path, 3, 20)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["", "--async-save"])
def test_a_job_killed_thirty_times(prefix, tmp_path, how):
    in_a_save = kill_and_compare(prefix, tmp_path, 30, 120, how, timeout=900)
    assert in_a_save >= 10, f"only {in_a_save} of 30 kills left a half-written folder"
