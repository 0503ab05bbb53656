"""Small files that somebody else wrote: nothing in them stops a run with a traceback or counts unseen."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

import pretrain_gpt
from megatron_lite.checkpoint import find_in
from megatron_lite.checkpoint.folder import clear_leftovers
from megatron_lite.checkpoint.reading import CheckpointReader
from megatron_lite.checkpoint.storage import Storage
from megatron_lite.checkpoint.writing import write_checkpoint
from megatron_lite.config import Config, ConfigError
from megatron_lite.training.state import TrainState
from tests.checkpoint.folders import make_checkpoint
from tests.ranks import run_ranks
from tests.runs import flags, pretrain_here, training_steps, write_data


def _with_file(name):
    def edit(stored):
        stored["files"][name] = dict(stored["files"]["config.json"])

    return edit


MANIFESTS = {
    "nested without end": (lambda text: "[" * 100_000, "nests too deep"),
    "an endless size": (lambda text: text.replace('"size": ', '"size": 1e999, "x": ', 1), "cannot be read"),
    "a name that cannot be written": (_with_file("a\ud800"), "outside the folder"),
    "a name of lines": (_with_file("a\nerror: all is lost"), "outside the folder"),
    "no name": (_with_file(""), "outside the folder"),
    "a name far up": (_with_file("tokenizer/../../x"), "outside the folder"),
    "an absolute name": (_with_file("/etc/passwd"), "outside the folder"),
    "tensors unlisted": (lambda stored: stored["files"].pop("__0_0.distcp"), "does not list __0_0.distcp"),
}


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_manifest_that_lies_does_not_count(tmp_path, kind):
    make_checkpoint(tmp_path, 5)
    path = make_checkpoint(tmp_path, 10) / "manifest.json"
    change, reason = MANIFESTS[kind]
    stored = json.loads(path.read_text())
    changed = change(path.read_text()) if "text" in change.__code__.co_varnames else change(stored)
    path.write_text(changed if isinstance(changed, str) else json.dumps(stored))
    found = find_in(str(tmp_path))
    assert found.iteration == 5
    assert any(reason in note and note.isprintable() for note in found.notes), found.notes


@pytest.mark.parametrize("content", [[1], None, {}, {"iteration": 5}, {"iteration": "10"}, "[" * 100_000])
def test_a_train_state_of_another_step_or_kind_is_refused(tmp_path, content):
    folder = write_checkpoint(str(tmp_path), 10, [("a", torch.ones(2))], {}, {})
    reader = CheckpointReader(folder)
    assert reader.train_state == {"iteration": 10}
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "iter_0000010" / "train_state.json").write_text(text)
    with pytest.raises(ConfigError, match=r"train_state.json cannot be read: (it|its) "):
        reader.train_state  # noqa: B018


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("iteration", "3"),
        ("iteration", -1),
        ("consumed_samples", 8.5),
        ("skipped_iterations", True),
        ("flops", float("nan")),
        ("tokens_of_source", [1]),
        ("loss_scale", "x"),
        ("data_fingerprint", 3),
    ],
)
def test_counts_that_are_none_are_refused(field, value):
    good = TrainState(iteration=3, loss_scale={"scale": 1.0}, tokens_of_source={"a": 1}).to_dict()
    assert TrainState.from_dict(good | {"of_another_version": 1}).to_dict() == good
    with pytest.raises(ConfigError, match=f"the checkpoint's {field} is"):
        TrainState.from_dict(good | {field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", "four"),
        ("num_layers", -4),
        ("num_layers", True),
        ("num_layers", {"a": [1]}),
        ("norm_epsilon", float("nan")),
        ("normalization", "FooNorm"),
        ("swiglu", "yes"),
        ("window_size", ["a", 0]),
    ],
)
def test_a_stored_flag_that_no_flag_can_be_is_refused(field, value):
    with pytest.raises(ConfigError, match=rf"model\.{field} is .*, wanted "):
        Config.from_dict({"model": {field: value}})


def test_leftovers_that_cannot_be_removed_stop_no_save(tmp_path, monkeypatch):
    (tmp_path / "iter_0000003.tmp").write_text("a file where a folder would be")
    clear_leftovers(Storage(str(tmp_path)))
    assert not list(tmp_path.iterdir())
    (tmp_path / "iter_0000004.tmp").mkdir()
    monkeypatch.setattr(Storage, "remove_folder", lambda self, path: Path("/nowhere").rmdir())
    write_checkpoint(str(tmp_path), 10, [("a", torch.ones(2))], {}, {})
    assert find_in(str(tmp_path)).iteration == 10


def _signalled_while_it_starts(argv):
    build = pretrain_gpt.build_tokenizer

    def build_later(*arguments):
        os.kill(os.getpid(), signal.SIGUSR1)
        return build(*arguments)

    pretrain_gpt.build_tokenizer = build_later
    return pretrain_here(argv)


def test_a_signal_during_the_start_is_kept_until_the_first_step(tmp_path):
    save = tmp_path / "run"
    argv = flags(write_data(tmp_path / "data"), f"--save {save} --exit-signal-handler")
    assert run_ranks(_signalled_while_it_starts, 1, argv) == [0]
    assert find_in(str(save)).iteration == 1
    assert list(training_steps(save / "metrics.jsonl")) == [1]
