"""Trackers whose package blocks, fails or loses its server: training is never held, the job always ends."""

import contextlib
import os
import struct
import subprocess
import sys
import threading
import types
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_lite.config import LoggingConfig
from megatron_lite.distributed.environment import Environment
from megatron_lite.training import background, trackers
from megatron_lite.training.trackers import JsonLines, build_tracker
from tests.parity import make_config

ROOT = Path(__file__).parents[2]


def config_with(**logging):
    return replace(make_config(), logging=LoggingConfig(**logging))


def fake_wandb(monkeypatch, **blocking):
    """A wandb whose methods named in `blocking` run those functions; returns what was logged and defined."""
    log, defined, codes = [], [], blocking.pop("codes", [])
    run = types.SimpleNamespace(
        id="x",
        step=blocking.pop("step", 0),
        define_metric=lambda *a, **k: defined.append((a, k)),
        log=lambda record, step: (blocking.get("log", lambda: None)(), log.append((step, record)))[1],
        finish=lambda exit_code: (codes.append(exit_code), blocking.get("finish", lambda: None)()),
    )
    module = types.ModuleType("wandb")
    module.Settings = lambda **_: None
    module.setup = lambda: types.SimpleNamespace(
        settings=types.SimpleNamespace(mode="online", api_key="k", base_url="http://127.0.0.1:9")
    )
    module.init = lambda **options: (blocking.get("init", lambda: None)(), run)[1]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return log, defined


def leave():
    raise SystemExit(3)


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_a_package_that_blocks_holds_nobody(where, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(background, "QUEUE_LIMIT", 3)
    monkeypatch.setattr(trackers, "CLOSE_TIMEOUT_S", 0.2)
    free, blocked = threading.Event(), threading.Event()
    fake_wandb(monkeypatch, **{where: lambda: (blocked.set(), free.wait(60))})
    tracker = build_tracker(config_with(wandb_project="p", wandb_save_dir=str(tmp_path)), Environment(), None)
    assert tracker.wandb_run_id
    if where != "finish":
        tracker.track({"lm loss": 1.0}, 1)
        assert blocked.wait(30)
        for step in range(2, 8):
            tracker.track({"lm loss": 1.0}, step)
    tracker.close()
    out = capsys.readouterr().out
    free.set()
    assert "did not finish within" in out
    if where == "finish":
        assert "0 of 0 records were dropped" in out
    else:
        first = 5 if where == "log" else 4  # one record is on its way, three wait
        assert f"from iteration {first} on records are dropped" in out
        assert "7 of 7 records were dropped" in out


def test_what_a_package_that_fails_midway_did_not_take_is_counted(monkeypatch, capsys, tmp_path):
    tries, failed = [], threading.Event()

    def log():
        tries.append(1)
        if len(tries) == 3:
            failed.set()
            raise OSError("the server is gone")

    fake_wandb(monkeypatch, log=log)
    tracker = build_tracker(config_with(wandb_project="p", wandb_save_dir=str(tmp_path)), Environment(), None)
    for step in range(1, 4):
        tracker.track({"lm loss": 1.0}, step)
    assert failed.wait(30)
    tracker.track({"lm loss": 1.0}, 4)
    tracker.close()
    out = capsys.readouterr().out
    assert "wandb failed and is left out from here on: the server is gone" in out
    assert "warning: wandb failed: 2 of 4 records were dropped" in out


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_a_package_that_ends_the_program_is_left_out(where, monkeypatch, capsys, tmp_path):
    fake_wandb(monkeypatch, **{where: leave})
    tracker = build_tracker(config_with(wandb_project="p", wandb_save_dir=str(tmp_path)), Environment(), None)
    tracker.track({"lm loss": 1.0}, 1)
    tracker.close()
    out = capsys.readouterr().out
    assert out.count("warning: wandb") == 1 and "3" in out


def test_points_after_a_resume_from_an_older_step_come_after_those_that_are_there(monkeypatch, tmp_path):
    log, defined = fake_wandb(monkeypatch, step=10)  # the server has steps 0 to 9
    config = config_with(wandb_project="p", wandb_save_dir=str(tmp_path))
    tracker = build_tracker(config, Environment(), "old")
    for step in (5, 6, 6):
        tracker.track({"lm loss": 1.0}, step)
    tracker.close()
    assert [(step, record["iteration"]) for step, record in log] == [(10, 5), (11, 6), (11, 6)]
    assert (("*",), {"step_metric": "iteration"}) in defined


@pytest.mark.parametrize("failing", [False, True])
def test_a_run_that_fails_is_finished_as_failed(failing, monkeypatch, tmp_path):
    codes = []
    fake_wandb(monkeypatch, codes=codes)
    path = tmp_path / "m.jsonl"
    logs = {"wandb_project": "p", "wandb_save_dir": str(tmp_path), "metrics_file": str(path)}
    tracker = build_tracker(config_with(**logs), Environment(), None)
    sink = tracker._sinks[0]
    with pytest.raises(ZeroDivisionError) if failing else contextlib.nullcontext(), tracker:
        tracker.track({"lm loss": 1.0}, 1)
        assert 1 / (not failing)
    assert codes == [int(failing)] and sink._file.closed


HUNG = """
import os, signal, sys, time
from pathlib import Path
from megatron_lite.distributed.environment import Environment
from megatron_lite.training import trackers
from tests.training.test_trackers import config_with
trackers.CLOSE_TIMEOUT_S = 1.0
tracker = trackers.build_tracker(config_with(wandb_project="p", wandb_save_dir=sys.argv[1]), Environment(), None)
tracker.track({"lm loss": 1.0}, 1)
def service():
    for comm in Path("/proc").glob("[0-9]*/comm"):
        try:
            parent = f"PPid:\\t{os.getpid()}\\n"
            if comm.read_text().startswith("wandb") and parent in (comm.parent / "status").read_text():
                return int(comm.parent.name)
        except OSError:
            pass
deadline = time.monotonic() + 60
while tracker._sinks[0]._kept < 1 and time.monotonic() < deadline:
    time.sleep(0.05)
os.kill(service(), signal.SIGSTOP)
tracker.track({"lm loss": 1.0}, 2)
tracker.close()
import wandb
netrc = Path(os.environ["NETRC"])
host = wandb.setup().settings.base_url.split("//")[1]
netrc.write_text(f"machine {host}\\nlogin user\\npassword {'a' * 40}\\n")
print("login found:", trackers._wandb_has_login(wandb), flush=True)
os._exit(0)
"""


@pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="processes are found in /proc")
def test_a_job_ends_though_wandbs_service_hangs_and_netrc_is_a_login(tmp_path):
    """The service inherits our output: were it left alive, whoever reads that would never see its end."""
    pytest.importorskip("wandb")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    done = subprocess.run(
        [sys.executable, "-c", HUNG, str(tmp_path)],
        cwd=ROOT,
        env=environment | {"NETRC": str(tmp_path / "netrc")},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert "warning: wandb goes offline" in done.stdout and "login found: True" in done.stdout
    assert "wandb did not finish within" in done.stdout


def test_a_torn_line_of_a_killed_run_stays_alone(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"iteration": 1}\n{"iteration": 2, "lm')
    sink = JsonLines(str(path))
    sink.track({"iteration": 3}, 3)
    sink.close()
    assert path.read_text().splitlines()[1:2] == ['{"iteration": 2, "lm']
    assert path.read_text().count("\n") == 3


def wandb_records(path, kind):
    """The records of one kind in a run's .wandb file (leveldb's log format around protobuf)."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, part = struct.unpack_from("<IHB", data, at)
        whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
        if part in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record.FromString(whole)
            whole = b""
            if record.WhichOneof("record_type") == kind:
                yield getattr(record, kind)
