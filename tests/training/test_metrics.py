"""The log line, the records, and trackers that fail."""

import json
import re
import sys
from dataclasses import replace

import pytest
import torch

from megatron_lite.config import CheckpointConfig, LoggingConfig, TrainingConfig
from megatron_lite.distributed.environment import Environment
from megatron_lite.training.metrics import Metrics, StepResult, memory_record, peak_memory
from megatron_lite.training.state import TrainState
from megatron_lite.training.trackers import JsonLines, Tracker, build_tracker
from tests.parity import make_config

# The pattern that scripts use to read Megatron-LM's logs.
MEGATRON_LINE = re.compile(
    r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] iteration +(\d+)/ +(\d+) \| consumed samples: +(\d+) \| "
    r"elapsed time per iteration \(ms\): ([\d.]+) \| throughput per GPU \(TFLOP/s/GPU\): ([\d.e+-]+) \| .*"
    r"learning rate: ([\d.E+-]+) \| global batch size: +(\d+) \| lm loss: ([\d.E+-]+) \| loss scale: ([\d.]+) \| "
    r"grad norm: ([\d.]+) \| number of skipped iterations: +(\d+) \| number of nan iterations: +(\d+) \|"
)


class Kept:
    name = "kept"

    def __init__(self):
        self.records = []

    def track(self, record, step):
        self.records.append((step, record))

    def close(self):
        pass


def config_with(**logging):
    config = make_config()
    return replace(config, logging=LoggingConfig(log_interval=2, log_throughput=True, **logging))


def steps(metrics, *losses, **more):
    state = TrainState()
    for loss in losses:
        state.iteration += 1
        state.consumed_samples += 4
        metrics.step(StepResult(loss, 1.5, 0.01, 4, 64, seconds=0.5, **more), state)
    return state


def test_line_has_megatrons_fields_and_means_over_the_interval(capsys):
    kept = Kept()
    metrics = Metrics(config_with(), torch.device("cpu"), 2, 6, Tracker([kept], speaks=True))
    steps(metrics, 3.0, 2.0, 1.5, 0.5)
    lines = capsys.readouterr().out.splitlines()
    first, second = (MEGATRON_LINE.fullmatch(line) for line in lines)
    assert first.groups()[:4] == ("2", "6", "8", "500.0")
    assert float(first[8]) == 2.5
    assert float(second[8]) == 1.0
    assert "tokens/s: 128 |" in lines[0]
    assert "ETA: 0:00:02 |" in lines[0]
    assert [(step, record["lm loss"]) for step, record in kept.records] == [
        (1, 3.0),
        (2, 2.0),
        (3, 1.5),
        (4, 0.5),
    ]


def test_the_last_step_is_told_even_within_an_interval(capsys):
    metrics = Metrics(config_with(), torch.device("cpu"), 1, 3, Tracker([], speaks=True))
    steps(metrics, 3.0, 2.0, 1.0)
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_steps_that_are_not_finite_do_not_enter_the_mean(capsys):
    metrics = Metrics(config_with(), torch.device("cpu"), 1, 2, Tracker([], speaks=True))
    state = TrainState(iteration=1)
    metrics.step(StepResult(float("nan"), float("nan"), 0.01, 4, 64, 0.5, nonfinite=True), state)
    state.iteration = 2
    metrics.step(StepResult(2.0, 1.0, 0.01, 4, 64, 0.5), state)
    assert "lm loss: 2.000000E+00" in capsys.readouterr().out


def test_spikes_are_reported_with_their_samples(capsys):
    config = replace(config_with(), training=TrainingConfig(check_for_spiky_loss=True, micro_batch_size=1))
    metrics = Metrics(config, torch.device("cpu"), 1, 9, Tracker([], speaks=True))
    steps(metrics, 1.0, 50.0)
    out = capsys.readouterr().out
    assert "warning: loss 50 at iteration 2 is more than ten times" in out
    assert "samples 4 to 7" in out


def test_json_lines_are_valid_json(tmp_path):
    sink = JsonLines(str(tmp_path / "a" / "m.jsonl"))
    sink.track({"lm loss": float("nan"), "iteration": 1}, 1)
    sink.close()
    line = (tmp_path / "a" / "m.jsonl").read_text()
    assert json.loads(line, parse_constant=lambda c: pytest.fail(f"{c} is no JSON"))["lm loss"] is None


class Failing:
    name = "the failing one"

    def track(self, record, step):
        raise OSError("down")

    def close(self):
        raise OSError("down")


def test_a_tracker_that_fails_is_left_out(capsys):
    kept = Kept()
    tracker = Tracker([Failing(), kept], speaks=True)
    tracker.track({"a": 1}, 1)
    tracker.track({"a": 2}, 2)
    tracker.close()
    assert len(kept.records) == 2
    assert capsys.readouterr().out.count("the failing one failed") == 1


def test_wandb_missing_or_broken_never_stops_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)  # import wandb raises ImportError
    config = replace(config_with(wandb_project="p"), checkpoint=CheckpointConfig(save=str(tmp_path / "save")))
    tracker = build_tracker(config, Environment(), None)
    tracker.track({"iteration": 1, "lm loss": 2.0}, 1)
    tracker.close()
    assert "wandb cannot be used" in capsys.readouterr().out
    assert (tmp_path / "save" / "metrics.jsonl").read_text().count("\n") == 1


def test_other_ranks_are_silent(tmp_path, capsys):
    config = config_with(metrics_file=str(tmp_path / "m.jsonl"))
    tracker = build_tracker(config, Environment(rank=1, world_size=2), None)
    tracker.say("hello")
    tracker.track({"a": 1}, 1)
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "m.jsonl").exists()


def test_tensorboard_gets_megatrons_names(tmp_path):
    config = config_with(tensorboard_dir=str(tmp_path / "tb"))
    tracker = build_tracker(config, Environment(), None)
    metrics = Metrics(config, torch.device("cpu"), 1, 4, tracker)
    steps(metrics, 3.0, 2.0)
    tracker.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [point.value for point in events.Scalars("lm loss")] == [3.0, 2.0]
    assert {"grad-norm", "learning-rate", "batch-size"} <= set(events.Tags()["scalars"])
    assert "memory-bytes" not in events.Tags()["scalars"]


def test_a_terminal_shows_where_the_run_is(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    metrics = Metrics(config_with(), torch.device("cpu"), 1, 4, Tracker([], speaks=True))
    steps(metrics, 3.0)
    assert capsys.readouterr().out == "\r\x1b[2Kiteration 1/4 (25%), loss 3.0000, 128 tokens/s, ETA 0:00:02"
    steps(metrics, 3.0, 2.0)
    assert "\r\x1b[2K[" in capsys.readouterr().out, "a line of the log takes its place"


def test_peak_memory_of_a_gpu_starts_anew_and_shows_what_is_reserved(monkeypatch, capsys):
    peaks = {"max_memory_allocated": 70 * 2**30, "max_memory_reserved": 75 * 2**30}
    resets, full = [], torch.full
    for name, size in peaks.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, size=size: size)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    monkeypatch.setattr(torch, "full", lambda shape, value, device: full(shape, value))
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda tensor, op: tensor.add_(2**30)
    )  # another rank's
    record = memory_record(peak_memory(torch.device("cuda", 0)).tolist())
    assert record == {"memory-bytes": 71 * 2**30, "memory-reserved-bytes": 76 * 2**30}
    assert resets == [torch.device("cuda", 0)]
    kept = Kept()
    steps(
        Metrics(config_with(), torch.device("cpu"), 1, 2, Tracker([kept], speaks=True)),
        3.0,
        2.0,
        extras=record,
    )
    assert "| peak memory (GiB): 71.00, 76.00 reserved |" in capsys.readouterr().out
    assert kept.records[-1][1]["memory-reserved-bytes"] == 76 * 2**30
