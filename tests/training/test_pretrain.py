"""What a run does besides its numbers: evaluation, skipped steps, signals, errors, exit codes."""

import contextlib
import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_lite.checkpoint import checkpointer
from megatron_lite.config import ConfigError
from megatron_lite.files.command_line import RunError
from megatron_lite.training.run import Run
from tests.checkpoint.folders import is_intact
from tests.ranks import RankError, run_ranks
from tests.runs import ROOT, flags, metrics, pretrain_here, run_alone, train, training_steps, write_data
from tests.training.test_trackers import wandb_records

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


def torchrun(world, argv, timeout=150, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*TORCHRUN, str(world), "pretrain_gpt.py", *argv]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, **options
    )


def test_validation_is_the_same_in_every_layout_and_disturbs_nothing(prefix, tmp_path):
    evaluating = "--eval-iters 2 --eval-interval 4 --split 60,30,10 --hidden-dropout 0.02"
    losses = {}
    for world, layout in ((1, ""), (2, ""), (4, "--pipeline-model-parallel-size 2")):
        path = tmp_path / f"{world}.jsonl"
        train(world, [*flags(prefix, layout, f"--metrics-file {path}"), *evaluating.split()])
        losses[world] = [
            r[key] for r in metrics(path) for key in ("lm loss validation", "lm loss test") if key in r
        ]
        assert len(losses[world]) == 4  # at 4, 8 and 12, which is the end; the test set
    for world in (2, 4):
        # Dropout differs between layouts, so the trained weights do: the first validation comes after four steps.
        assert losses[world] == pytest.approx(losses[1], rel=0.05)
    quiet = tmp_path / "quiet.jsonl"
    train(1, [*flags(prefix, f"--metrics-file {quiet}"), *evaluating.split(), "--eval-interval", "1000"])
    assert training_steps(quiet) == training_steps(tmp_path / "1.jsonl")


def test_exact_validation_across_layouts(prefix, tmp_path):
    evaluating = "--eval-iters 2 --eval-interval 4 --split 60,30,10"
    results = []
    for world, layout in (
        (1, ""),
        (4, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    ):
        path = tmp_path / f"{world}.jsonl"
        train(world, [*flags(prefix, layout, f"--metrics-file {path}"), *evaluating.split()])
        results.append([r["lm loss validation"] for r in metrics(path) if "lm loss validation" in r])
    assert results[0] == pytest.approx(results[1], rel=1e-5)


def test_a_step_that_is_not_finite_is_skipped_and_the_run_gives_up_in_time(prefix, tmp_path, monkeypatch):
    argv = flags(
        prefix, f"--metrics-file {tmp_path}/m.jsonl --init-method-std 1e30 --max-consecutive-nonfinite 3"
    )
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb = f"--wandb-project test --wandb-save-dir {tmp_path}".split()
    done = run_alone([*argv, *wandb, "--save", str(tmp_path / "ckpt")])
    assert done.returncode == 1
    (ended,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert [record.exit_code for record in wandb_records(ended, "exit")] == [1]
    assert "3 steps in a row" in done.stderr
    assert "iteration 2 skipped" in done.stdout
    assert "its samples are 8 to 15" in done.stdout
    assert (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text().strip() == "3"


def test_fp16_finds_its_loss_scale_from_the_default(prefix, tmp_path):
    train(1, flags(prefix, f"--fp16 --train-iters 40 --metrics-file {tmp_path}/m.jsonl"))
    records = [r for r in metrics(tmp_path / "m.jsonl") if "lm loss" in r]
    assert records[0]["loss-scale"] == 2.0**32 > records[-1]["loss-scale"] >= 1
    assert records[-1]["skipped-iterations"] > 10  # more than --max-consecutive-nonfinite's default
    assert records[-1]["nan-iterations"] == 0
    assert records[-1]["lm loss"] < records[0]["lm loss"]


def test_a_state_that_is_not_finite_is_not_saved_and_costs_no_good_checkpoint(prefix, tmp_path):
    save = f"--save {tmp_path}/ckpt --load {tmp_path}/ckpt --save-interval 2 --keep-last 1 --no-load-optim"
    train(1, flags(prefix, save, "--exit-interval 2"))
    wild = (
        "--lr 1e38 --min-lr 1e38 --lr-decay-style constant --weight-decay 100 --override-opt_param-scheduler"
    )
    done = run_alone(flags(prefix, save, wild))
    assert done.returncode == 1
    assert (
        "layers.0.attention.k_proj.weight" in done.stderr and "hold values that are not finite" in done.stderr
    )
    assert (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
    assert is_intact(tmp_path / "ckpt" / "iter_0000002")
    assert [p.name for p in (tmp_path / "ckpt").glob("iter_*")] == ["iter_0000002"]


def save_without_room(argv, failures):
    """A run whose first saves find the disk full, so many on each rank; its exit code, or the sentence it ends with."""
    write, left = checkpointer.save_shards, [failures]

    def save_shards(*arguments):
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*arguments)

    checkpointer.save_shards = save_shards
    try:
        return pretrain_here(argv)
    except RunError as error:
        return str(error)


@pytest.mark.parametrize(("world", "async_save"), [(1, ""), (2, "--async-save")])
def test_a_last_save_that_fails_is_tried_again_and_else_ends_the_run_with_an_error(
    prefix, tmp_path, world, async_save
):
    argv = flags(prefix, f"--save {tmp_path}/ckpt --save-interval 2 --train-iters 4", async_save)
    kept = tmp_path / "ckpt" / "latest_checkpointed_iteration.txt"
    lost = run_ranks(save_without_room, world, argv, 100)
    wanted = (
        f"the run is at its end, but iteration 4 is not saved in {tmp_path}/ckpt; the last good checkpoint"
    )
    assert [text.startswith(wanted) for text in lost] == [True] * world, lost
    assert not kept.exists()
    assert run_ranks(save_without_room, world, argv, 2) == [0] * world
    assert kept.read_text().strip() == "4" and is_intact(tmp_path / "ckpt" / "iter_0000004")


def stop_while_saving(argv):
    """A run that a wrong token ends on one rank while the save of an earlier step is written; what it raised."""
    write, step = checkpointer.save_shards, Run.step

    def save_shards(*arguments):
        time.sleep(2)
        return write(*arguments)

    def fails_at_three(self, loader):
        if self.state.iteration == 2 and os.environ["RANK"] == "0":
            raise ConfigError("token id 99")
        return step(self, loader)

    checkpointer.save_shards, Run.step = save_shards, fails_at_three
    try:
        return pretrain_here(argv)
    except (ConfigError, RuntimeError) as error:
        if os.environ["RANK"] == "0":
            os._exit(
                0 if str(error) == "token id 99" else 1
            )  # as the program does; the others hang or lose it
        return None


def test_an_error_of_its_own_does_not_cost_the_run_the_save_that_is_being_written(prefix, tmp_path):
    with contextlib.suppress(RankError):
        run_ranks(
            stop_while_saving, 2, flags(prefix, f"--save {tmp_path}/ckpt --save-interval 2 --async-save")
        )
    assert is_intact(tmp_path / "ckpt" / "iter_0000002")


def test_iterations_to_skip(prefix, tmp_path):
    train(1, flags(prefix, f"--metrics-file {tmp_path}/m.jsonl --iterations-to-skip 1 2"))
    records = [r for r in metrics(tmp_path / "m.jsonl") if "lm loss" in r]
    assert [r["iteration"] for r in records if r["lm loss"] is None] == [2, 3]
    assert records[-1]["skipped-iterations"] == 2
    assert records[-1]["nan-iterations"] == 0
    assert records[-1]["consumed-samples"] == 12 * 8


def test_a_wrong_flag_is_one_sentence_once_and_code_2(prefix):
    done = run_alone(flags(prefix, "--num-attention-heads 5"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    several = torchrun(3, flags(prefix, "--pipeline-model-parallel-size 2"))
    assert several.returncode != 0
    assert several.stderr.count("error: ") == 1, several.stderr
    assert "3" in next(line for line in several.stderr.splitlines() if line.startswith("error: "))


def test_the_error_of_the_rank_that_failed_is_shown(prefix, tmp_path):
    """A file that vanishes between the check and the use, on all ranks: a traceback or sentence, and no hang."""
    broken = write_data(tmp_path)
    content = Path(broken + ".bin").read_bytes()
    Path(broken + ".bin").write_bytes(content[:-8])
    done = torchrun(2, flags(broken), timeout=100)
    assert done.returncode != 0
    assert ".bin" in done.stderr
    assert "wanted" in done.stderr


def test_wandb_offline_goes_on_with_the_same_run(prefix, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-login"))
    common = f"--save {tmp_path}/ckpt --load {tmp_path}/ckpt --wandb-project test --wandb-save-dir {tmp_path}"
    for part in ("--exit-interval 3 --train-iters 4 --save-interval 1", "--train-iters 4 --ckpt-step 1"):
        done = run_alone(flags(prefix, common, part))
        assert done.returncode == 0, done.stderr
        assert "wandb cannot be used" not in done.stdout
        assert "warning: wandb goes offline" in done.stdout
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1, "one run id"
    steps = []
    for file in files:
        records = [{i.nested_key[0]: i.value_json for i in r.item} for r in wandb_records(file, "history")]
        steps.append([int(record["iteration"]) for record in records])
        assert all(record["_step"] == record["iteration"] for record in records)
        assert [m.step_metric for m in wandb_records(file, "metric") if m.glob_name == "*"] == ["iteration"]
    assert steps == [[1, 2, 3], [2, 3, 4]]
