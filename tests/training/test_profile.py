"""--profile: where its trace begins and ends, and what is said when there is none."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_lite.arguments.input_checks import check_logging
from megatron_lite.config import ConfigError, LoggingConfig
from megatron_lite.training import profile
from tests.parity import make_config


@pytest.mark.parametrize(
    ("resumed_at", "last", "said"),
    [
        (0, 6, "trace of steps 2 to 4 in"),
        (3, 6, "trace of steps 3 to 4 in"),
        (0, 3, "trace of steps 2 to 3 in"),
        (
            4,
            6,
            "warning: --profile traced nothing: the run, now at iteration 6, began at or after the end of",
        ),
        (0, 2, "trace of steps 2 to 2 in"),
        (0, 1, "warning: --profile traced nothing: the run, now at iteration 1, ended before"),
    ],
)
def test_the_window(resumed_at, last, said, monkeypatch, capsys, tmp_path):
    calls = []
    profiler = SimpleNamespace(
        start=lambda: calls.append("start"),
        stop=lambda: calls.append("stop"),
        export_chrome_trace=calls.append,
    )
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: profiler)
    monkeypatch.setattr(profile.dist, "get_rank", lambda: 0)
    logging = LoggingConfig(
        profile=True, profile_step_start=2, profile_step_end=4, tensorboard_dir=str(tmp_path / "a" / "b")
    )
    config = replace(make_config(), logging=logging)
    with profile.profiled(config, SimpleNamespace(device=torch.device("cpu")), resumed_at) as on_step:
        for iteration in range(resumed_at + 1, last + 1):
            on_step(iteration)
    out = capsys.readouterr().out
    assert out.startswith(said) and out.count("\n") == 1
    assert len(calls) == (0 if "warning" in said else 3)


def test_a_folder_that_cannot_be_made_is_refused_before_the_run(tmp_path):
    (tmp_path / "file").touch()
    logging = LoggingConfig(profile=True, tensorboard_dir=str(tmp_path / "file" / "x"))
    with pytest.raises(ConfigError, match=r"--profile writes to .*, but .*file is not a folder"):
        check_logging(replace(make_config(), logging=logging))
