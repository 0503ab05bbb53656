"""Which checkpoint is taken: pointers that lie, folders that are not whole, names made by hand."""

import shutil

import pytest

from megatron_lite.checkpoint.folder import (
    check_folders,
    clear_leftovers,
    expired,
    find_checkpoint,
    find_in,
    refuse_to_replace,
)
from megatron_lite.checkpoint.storage import Storage
from megatron_lite.config import CheckpointConfig, ConfigError
from tests.checkpoint.folders import make_checkpoint, point

BAD_POINTERS = {
    "empty": b"",
    "blank": b"  \n",
    "garbage": bytes(range(128, 160)) + b"\x00\n",
    "words": b"release",
    "negative": b"-5",
    "huge": b"9" * 40,
    "longer than any number": b"1" * 5000,
    "traversal": b"../../etc/passwd",
    "absolute": b"/etc/passwd",
    "float": b"10.0",
    "nowhere": b"77",
    "two": b"5 10",
}


@pytest.mark.parametrize("pointer", BAD_POINTERS.values(), ids=BAD_POINTERS.keys())
def test_a_bad_pointer_means_the_newest_complete_one(tmp_path, pointer):
    make_checkpoint(tmp_path, 5)
    make_checkpoint(tmp_path, 10)
    point(tmp_path, pointer)
    found = find_in(str(tmp_path))
    assert (found.iteration, found.path) == (10, str(tmp_path / "iter_0000010"))
    assert len(found.notes) == 1 and "taking the newest complete checkpoint, iter_0000010" in found.notes[0]
    assert found.notes[0].isprintable()


def test_without_a_pointer_steps_are_numbers_not_words(tmp_path):
    for step in (9, 10, 100):
        make_checkpoint(tmp_path, step)
    found = find_in(str(tmp_path))
    assert found.iteration == 100
    assert "is missing: taking the newest" in found.notes[0]


def test_a_good_pointer_is_followed_without_a_word(tmp_path):
    for step in (9, 10):
        make_checkpoint(tmp_path, step)
    point(tmp_path, "10\n")
    assert find_in(str(tmp_path)).notes == ()


def test_a_manifest_of_version_1_counts_one_of_the_future_does_not(tmp_path):
    make_checkpoint(tmp_path, 9, version=1)
    assert find_in(str(tmp_path)).iteration == 9
    manifest = make_checkpoint(tmp_path, 10) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 2', '"version": 3'))
    found = find_in(str(tmp_path))
    assert found.iteration == 9
    assert any("of version 3, wanted 1 to 2" in note for note in found.notes), found.notes
    (tmp_path / "iter_0000009" / "config.json").write_bytes(b"[]")
    with pytest.raises(ConfigError, match="config.json has sha256"):
        find_in(str(tmp_path))


def test_an_older_pointer_is_followed_and_the_newer_one_named(tmp_path):
    for step in (5, 10):
        make_checkpoint(tmp_path, step)
    point(tmp_path, 5)
    found = find_in(str(tmp_path))
    assert found.iteration == 5
    assert "iter_0000010 is left alone (--ckpt-step 10 takes it)" in found.notes[0]


def _lose_a_file(folder):
    (folder / "__0_0.distcp").unlink()


def _empty_a_file(folder):
    (folder / "__0_0.distcp").write_bytes(b"")


def _half_a_file(folder):
    (folder / "__0_0.distcp").write_bytes(b"PK\x03\x04half")


def _no_manifest(folder):
    (folder / "manifest.json").unlink()


def _empty_manifest(folder):
    (folder / "manifest.json").write_bytes(b"")


def _list_as_manifest(folder):
    (folder / "manifest.json").write_text("[1, 2]")


def _manifest_of_elsewhere(folder):
    text = (folder / "manifest.json").read_text().replace("__0_0.distcp", "../../__0_0.distcp")
    (folder / "manifest.json").write_text(text)


def _changed_config(folder):
    (folder / "config.json").write_text("[]")


def _changed_metadata(folder):
    (folder / ".metadata").write_bytes(b"METADATA")


def _nothing(folder):
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / ".keep").write_bytes(b"")


@pytest.mark.parametrize(
    "damage",
    [
        _lose_a_file,
        _empty_a_file,
        _half_a_file,
        _no_manifest,
        _empty_manifest,
        _list_as_manifest,
        _manifest_of_elsewhere,
        _changed_config,
        _changed_metadata,
        _nothing,
    ],
)
def test_a_newest_checkpoint_that_is_not_whole_falls_back(tmp_path, damage):
    make_checkpoint(tmp_path, 5)
    damage(make_checkpoint(tmp_path, 10))
    point(tmp_path, 10)
    found = find_in(str(tmp_path))
    assert found.iteration == 5
    assert any("iter_0000010 does not count: " in note for note in found.notes)
    assert "says 10: taking the newest complete checkpoint, iter_0000005" in found.notes[-1]
    with pytest.raises(
        ConfigError, match=r"--ckpt-step 10: .* has no complete checkpoint of it \(.+\); there are: (10, )?5"
    ):
        find_in(str(tmp_path), 10)


@pytest.mark.parametrize("damage", [_nothing, _no_manifest, _empty_a_file])
def test_checkpoints_that_are_all_broken_are_no_fresh_start(tmp_path, damage):
    damage(make_checkpoint(tmp_path, 10))
    with pytest.raises(
        ConfigError, match="no complete checkpoint .*iter_0000010: .* remove these to start afresh"
    ):
        find_in(str(tmp_path))


def test_a_pointer_without_any_folder_is_no_fresh_start(tmp_path):
    point(tmp_path, BAD_POINTERS["garbage"])
    with pytest.raises(
        ConfigError, match="no complete checkpoint .*latest_checkpointed_iteration.txt is there"
    ):
        find_in(str(tmp_path))


def test_an_empty_folder_and_one_with_other_things_start_afresh(tmp_path):
    assert find_in(str(tmp_path)) is None
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "iter_0000010.tmp").mkdir()  # a first save that was killed
    assert find_in(str(tmp_path)) is None


def test_a_renamed_folder_does_not_count_and_is_named(tmp_path):
    make_checkpoint(tmp_path, 5)
    make_checkpoint(tmp_path, 10, "iter_0000020")
    make_checkpoint(tmp_path, 15, "iter_15")
    make_checkpoint(tmp_path, 25, "iter_0000025_backup")
    make_checkpoint(tmp_path, 30, "old")
    point(tmp_path, 20)
    found = find_in(str(tmp_path))
    assert found.iteration == 5
    notes = "\n".join(found.notes)
    assert "iter_0000020 does not count: it holds iteration 10: it was renamed" in notes
    assert "iter_15 does not count: it holds iteration 15" in notes
    assert "iter_0000025_backup does not count: it holds iteration 25" in notes
    assert find_in(str(tmp_path / "old")).iteration == 30, (
        "a folder named directly is taken whatever its name"
    )


def test_a_named_folder_and_step(tmp_path):
    folder = make_checkpoint(tmp_path, 10)
    assert find_in(str(folder)).path == str(folder)
    assert find_in(f"{folder}/", 10).iteration == 10
    with pytest.raises(ConfigError, match="--ckpt-step 5: --load .* holds iteration 10"):
        find_in(str(folder), 5)
    _empty_a_file(folder)
    with pytest.raises(ConfigError, match="not a complete checkpoint: __0_0.distcp has 0 bytes, wanted 700"):
        find_in(str(folder))
    with pytest.raises(ConfigError, match="--ckpt-step 3: .*there are: 10"):
        find_in(str(tmp_path), 3)


def test_what_the_flags_ask_for(tmp_path):
    save, absent, weights = str(tmp_path / "run"), str(tmp_path / "absent"), tmp_path / "weights"
    make_checkpoint(weights, 40)
    assert find_checkpoint(CheckpointConfig()) is None
    assert find_checkpoint(CheckpointConfig(save=save, load=save)) is None, (
        "the first start of a run that restarts"
    )
    assert find_checkpoint(CheckpointConfig(save=save, load=save + "/")) is None, "the same folder"
    for asked in ({"load": absent}, {"load": absent, "save": save}, {"load": f"{save}/iter_0000010"}):
        with pytest.raises(ConfigError, match="there is no such folder"):
            find_checkpoint(CheckpointConfig(**asked))
    with pytest.raises(ConfigError, match="no such folder, which --finetune starts from"):
        find_checkpoint(CheckpointConfig(save=save, load=save, finetune=True))
    with pytest.raises(ConfigError, match="--exit-on-missing-checkpoint"):
        find_checkpoint(CheckpointConfig(save=save, load=save, exit_on_missing_checkpoint=True))
    with pytest.raises(ConfigError, match="--ckpt-step 7"):
        find_checkpoint(CheckpointConfig(save=save, load=save, ckpt_step=7))
    found = find_checkpoint(CheckpointConfig(load=absent, pretrained_checkpoint=str(weights)))
    assert (found.iteration, found.pretrained) == (40, True)
    with pytest.raises(ConfigError, match="--pretrained-checkpoint .*: there is no checkpoint"):
        find_checkpoint(CheckpointConfig(pretrained_checkpoint=absent))
    make_checkpoint(tmp_path / "run", 50)
    found = find_checkpoint(CheckpointConfig(load=save, pretrained_checkpoint=str(weights)))
    assert (found.iteration, found.pretrained) == (50, False), "what the run itself has saved comes first"


def test_a_rejected_checkpoint_counts_as_broken(tmp_path):
    make_checkpoint(tmp_path, 5)
    newest = make_checkpoint(tmp_path, 10)
    found = find_in(str(tmp_path), rejected={str(newest): "its hash is wrong"})
    assert found.iteration == 5
    assert "iter_0000010 does not count: its hash is wrong" in found.notes[0]


@pytest.mark.parametrize(
    "steps, saved, keep_last, retain, gone",
    [
        ([5, 10, 15, 20], 20, None, None, []),
        ([5, 10, 15, 20], 20, 2, None, [5, 10]),
        ([5, 10, 15, 20], 20, 1, None, [5, 10, 15]),
        ([5, 10, 15, 20], 20, None, 10, [5, 15]),
        ([5, 10, 15, 20, 25], 25, None, 10, [5, 15]),
        ([5, 10, 15, 20, 25], 25, 2, 15, [5, 10]),
        (
            [5, 10, 100, 200],
            10,
            2,
            None,
            [],
        ),  # rolled back to 5: the old future is neither counted nor deleted
        ([9, 10, 100], 100, 2, None, [9]),
    ],
)
def test_retention_goes_by_step(tmp_path, steps, saved, keep_last, retain, gone):
    for step in reversed(steps):
        make_checkpoint(tmp_path, step)
    names = expired(Storage(str(tmp_path)), saved, keep_last, retain)
    assert sorted(names) == [f"iter_{step:07d}" for step in gone]


def test_only_whole_checkpoints_count_as_newer_ones(tmp_path):
    for step in (5, 10, 15, 20):
        make_checkpoint(tmp_path, step)
    _empty_a_file(tmp_path / "iter_0000015")
    _no_manifest(tmp_path / "iter_0000005")
    assert expired(Storage(str(tmp_path)), 20, 2, None) == [], "20 and 10 are the two whole ones"
    assert expired(Storage(str(tmp_path)), 20, 1, None) == ["iter_0000015", "iter_0000010"]


def test_leftovers_of_killed_runs_go_and_nothing_else(tmp_path):
    make_checkpoint(tmp_path, 5)
    make_checkpoint(tmp_path, 5, "iter_0000005.replaced")
    (tmp_path / "iter_0000010.tmp").mkdir()
    make_checkpoint(tmp_path, 15, "iter_0000015.replaced")  # killed between two renames: the only step 15
    assert find_in(str(tmp_path)).path.endswith("iter_0000015.replaced")
    for other in ("mine.tmp", "iter_0000020", "tensorboard"):
        (tmp_path / other).mkdir()
    clear_leftovers(Storage(str(tmp_path)))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["iter_0000005", "iter_0000015", "iter_0000020", "mine.tmp", "tensorboard"]


@pytest.mark.parametrize(
    "names, says",
    [
        (["config.json", "model.safetensors"], "a Hugging Face model"),
        (["iter_0000010.pt"], "files of --ckpt-convert-format torch"),
        (["notes.txt", "events"], "events, notes.txt"),
        (["iter_0000010.tmp"], "iter_0000010.tmp"),
    ],
)
def test_a_folder_of_other_things_is_no_start_from_random_weights(tmp_path, names, says):
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=f"--load {tmp_path} holds no checkpoint but {says}"):
        find_checkpoint(CheckpointConfig(load=str(tmp_path)))
    (tmp_path / "link").symlink_to(tmp_path)
    for save in (tmp_path, f"{tmp_path}/", tmp_path / "link"):  # a run's own folder holds its logs at first
        assert find_checkpoint(CheckpointConfig(load=str(tmp_path), save=str(save))) is None


def test_the_parent_of_checkpoints_names_them(tmp_path):
    make_checkpoint(tmp_path / "run", 5)
    point(tmp_path / "run", 5)
    with pytest.raises(ConfigError, match="folders that hold checkpoints: run"):
        find_checkpoint(CheckpointConfig(load=str(tmp_path)))


def test_a_run_does_not_write_over_another_ones_checkpoints(tmp_path):
    mine, other = tmp_path / "mine", tmp_path / "other"
    make_checkpoint(mine, 5), make_checkpoint(other, 9)
    fresh = CheckpointConfig(save=str(mine))
    going_on = CheckpointConfig(save=str(mine), load=str(mine), ckpt_step=5)
    elsewhere = CheckpointConfig(save=str(mine), load=str(other))
    for config in (fresh, elsewhere):
        with pytest.raises(ConfigError, match="newest of iteration 5.*--overwrite-checkpoints"):
            refuse_to_replace(config, find_checkpoint(config), weights_only=False)
        with pytest.raises(ConfigError, match="newest of iteration 5"):
            check_folders(config)
    refuse_to_replace(going_on, find_checkpoint(going_on), weights_only=False)
    check_folders(going_on)
    check_folders(CheckpointConfig(save=f"file://{mine}", load=str(mine)))
    check_folders(CheckpointConfig(save=str(mine), load=str(tmp_path / "on the cluster")))
    refuse_to_replace(CheckpointConfig(save=str(mine), overwrite_checkpoints=True), None, weights_only=False)
    refuse_to_replace(CheckpointConfig(save=str(tmp_path / "new")), None, weights_only=False)
    refuse_to_replace(CheckpointConfig(), None, weights_only=False)


@pytest.mark.parametrize("name", ["iter_0000005/.metadata", "iter_0000005/mp_rank_00/model_optim_rng.pt"])
def test_a_run_does_not_write_over_another_programs_checkpoints(tmp_path, name):
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="of another run .iter_0000005.*: another --save leaves them"):
        check_folders(CheckpointConfig(save=str(tmp_path)))


def test_a_checkpoint_is_no_folder_to_save_in(tmp_path):
    make_checkpoint(tmp_path, 5)
    with pytest.raises(ConfigError, match="iter_0000005 is a checkpoint itself"):
        check_folders(CheckpointConfig(save=str(tmp_path / "iter_0000005"), overwrite_checkpoints=True))


def test_finetuning_does_not_write_over_what_it_starts_from(tmp_path):
    """It counts from 0 again, in the same folder too; an imported model, iteration 0, is replaced by no save."""
    config = CheckpointConfig(save=str(tmp_path), load=str(tmp_path), finetune=True)
    make_checkpoint(tmp_path, 0)
    check_folders(config)
    make_checkpoint(tmp_path, 5)
    with pytest.raises(ConfigError, match="only the weights from .the newest of iteration 5.*--finetune"):
        check_folders(config)
    check_folders(CheckpointConfig(save=str(tmp_path / "new"), load=str(tmp_path), finetune=True))


def test_what_is_no_folder_of_checkpoints_is_named(tmp_path):
    (tmp_path / "iter_0000010.pt").touch()
    with pytest.raises(ConfigError, match="no such folder, it is a file: torch.load reads"):
        find_checkpoint(CheckpointConfig(load=str(tmp_path / "iter_0000010.pt")))
    (tmp_path / "config.json").touch(), (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="there is no checkpoint but a Hugging Face"):
        find_checkpoint(CheckpointConfig(pretrained_checkpoint=str(tmp_path)))
    for name in (".DS_Store", "lost+found"):  # an empty folder, all the same
        (tmp_path / "new" / name).mkdir(parents=True)
    assert find_checkpoint(CheckpointConfig(load=str(tmp_path / "new"))) is None
