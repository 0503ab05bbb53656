"""Timers over ranks, the progress file, replicas that differ, changed data."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_lite.config import CheckpointConfig, ConfigError, LoggingConfig
from megatron_lite.distributed.environment import Environment
from megatron_lite.training.consistency import check_replicas
from megatron_lite.training.gradients import local_part
from megatron_lite.training.resume import check_same_data
from megatron_lite.training.state import TrainState
from megatron_lite.training.timers import Timers
from megatron_lite.training.trackers import ProgressLog
from tests.parity import make_config, set_up
from tests.ranks import run_ranks


def report_of(level, option):
    timers = Timers(LoggingConfig(timing_log_level=level, timing_log_option=option), torch.device("cpu"))
    timers._seconds = {name: 2.0 * (dist.get_rank() + 1) for name in timers._seconds}
    return timers.report(num_steps=2)


@pytest.mark.parametrize(
    ("option", "shown"),
    [("minmax", r"\(1000.00, 2000.00\)"), ("max", "2000.00"), ("all", "0: 1000.00 1: 2000.00")],
)
def test_timers_over_ranks(option, shown):
    lines, records = run_ranks(report_of, 2, 1, option, init=True)[1]
    assert re.search(r"forward-backward \.+: " + shown, lines)
    assert records["forward-backward-time"] == pytest.approx(2.0)
    assert "optimizer-clip" not in lines  # level 2


def test_level_0_keeps_nothing():
    timers = Timers(LoggingConfig(), torch.device("cpu"))
    with timers("forward-backward"):
        pass
    assert timers.report(1) == ("", {})


def damaged_replicas(config, damage):
    run = set_up(config)
    chunks, mesh = run.chunks, run.mesh
    check_replicas(chunks, mesh, 5)
    if damage and dist.get_rank() == 1:
        with torch.no_grad():
            local_part(next(chunks[0].parameters())).view(-1)[3] += 1e-6
    try:
        check_replicas(chunks, mesh, 6)
    except RuntimeError as error:
        return str(error)
    return None


def test_replicas_that_differ_in_one_bit_are_found():
    config = make_config(dp=2, data_parallel_sharding_strategy="no_shard")
    assert run_ranks(damaged_replicas, 2, config, False, init=True) == [None, None]
    for message in run_ranks(damaged_replicas, 2, config, True, init=True):
        assert "after iteration 6 the weights of replicas [1] differ" in message


def test_progress_file(tmp_path):
    config = replace(
        make_config(),
        checkpoint=CheckpointConfig(save=str(tmp_path)),
        logging=LoggingConfig(log_progress=True),
    )
    progress = ProgressLog(config, Environment(world_size=4, slurm_job_id="77"))
    progress.started(TrainState(iteration=3))
    progress.saved(TrainState(iteration=6, consumed_tokens=2_000_000_000))
    first, second = (tmp_path / "progress.txt").read_text().splitlines()
    assert "Job ID: 77\t# GPUs: 4\tStarting job\tIteration: 3" in first
    assert "Saved checkpoint\tIteration: 6" in second
    assert "Tokens (in billions): 2" in second
    ProgressLog(config, Environment(rank=1, world_size=4)).started(TrainState())
    assert len((tmp_path / "progress.txt").read_text().splitlines()) == 2


def test_changed_samples_are_refused():
    config = make_config()
    state = TrainState(iteration=4, data_fingerprint="a")
    check_same_data(config, state, "a")
    with pytest.raises(ConfigError, match="--allow-data-change"):
        check_same_data(config, replace(state), "b")
    allowed = replace(config, data=replace(config.data, allow_data_change=True))
    check_same_data(allowed, state, "b")
    assert state.data_fingerprint == "b"
    check_same_data(config, TrainState(), "c")


def test_progress_of_a_run_that_cannot_write_goes_on(tmp_path, capsys):
    blocked = tmp_path / "file"
    Path(blocked).write_text("")
    config = replace(
        make_config(),
        checkpoint=CheckpointConfig(save=str(blocked)),
        logging=LoggingConfig(log_progress=True),
    )
    ProgressLog(config, Environment()).started(TrainState())
    assert "--log-progress stops" in capsys.readouterr().out
