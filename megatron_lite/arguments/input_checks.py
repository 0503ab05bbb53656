"""Checks of where things come from and go to: data, tokenizer, checkpoints, logs; and whether the files are there."""

import os
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from megatron_lite.config import Config, ConfigError, refuse_together
from megatron_lite.config.declare import flag_name
from megatron_lite.data.blends import plan_data


def check_not_empty(config: Config) -> None:
    """A script's unset variable (--load "$DIR") must not quietly mean: no checkpoint, no data."""
    for concern in (config.checkpoint, config.data):
        for item in fields(concern):
            if getattr(concern, item.name) == "":
                flag = flag_name(item.name)
                raise ConfigError(f"{flag} is empty: give it a value or leave it out")


def check_data_source(config: Config) -> None:
    data = config.data
    per_split = _given_paths(config)
    sources = [
        "--data-path" if data.data_path is not None else None,
        "--data-args-path" if data.data_args_path else None,
        "--per-split-data-args-path" if data.per_split_data_args_path else None,
        "--mock-data" if data.mock_data else None,
        per_split or None,
    ]
    refuse_together(*sources, because="training has one source of data")
    if not any(sources) and not config.command.planning:
        raise ConfigError("--data-path is needed (or --train-data-path and its kin, or --mock-data)")
    by_split = per_split or data.per_split_data_args_path
    if by_split and data.split is not None:
        raise ConfigError(
            f"--split {data.split} and {per_split or '--per-split-data-args-path'} cannot be given together: "
            "the paths are split already"
        )
    _check_data_plan(config)
    if data.tokenizer_type is None and not config.command.planning:
        raise ConfigError("--tokenizer-type is needed (for --mock-data alone, --vocab-size is enough)")
    needs = {"GPT2BPETokenizer": ("vocab_file", "merge_file"), "NullTokenizer": (), None: ()}
    for name in needs.get(data.tokenizer_type, ("tokenizer_model",)):
        if getattr(data, name) is None:
            raise ConfigError(f"--tokenizer-type {data.tokenizer_type} needs --{name.replace('_', '-')}")
    if data.tokenizer_type == "NullTokenizer" and config.model.vocab_size is None:
        raise ConfigError("--tokenizer-type NullTokenizer needs --vocab-size")


def _check_data_plan(config: Config) -> None:
    """Refuse what cannot be read as data, and training without training data; files of paths if they are here."""
    data, training = config.data, config.training
    files = [path for path in (data.data_args_path, data.per_split_data_args_path) if path is not None]
    named = data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path
    for name, words in zip(("data", "train-data", "valid-data", "test-data"), named):
        if words is not None and not words:
            raise ConfigError(f"--{name}-path is empty, wanted at least one PREFIX")
    given = data.mock_data or any(named)
    if not (all(Path(path).is_file() for path in files) if files else given):
        return
    plan = plan_data(data)
    if plan.sets["train"] or training.skip_train or 0 in (training.train_iters, training.train_samples):
        return
    if data.split is not None:
        raise ConfigError(
            f"--split {data.split} gives training nothing, wanted a first weight above 0, or --skip-train"
        )
    flag = f"--per-split-data-args-path {files[0]}" if files else _given_paths(config)
    raise ConfigError(f"{flag}: no data for train, wanted some, or --skip-train")


def _given_paths(config: Config) -> str:
    """The flags that name the data of one split, as far as they were given."""
    names = ("train", "valid", "test")
    return "/".join(f"--{n}-data-path" for n in names if getattr(config.data, f"{n}_data_path") is not None)


def missing_files(config: Config) -> list[str]:
    """Files and folders that the flags name and that are not there, each with its flag."""
    data = config.data
    missing = []
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        for prefix in data_prefixes(getattr(data, name) or ()):
            gone = [end for end in (".idx", ".bin") if not _exists(prefix + end)]
            if gone:
                files = " and ".join(prefix + end for end in gone)
                missing.append(f"{flag_name(name)}: there is no {files}{_prefix_hint(prefix)}")
    for concern, names in (
        (data, ("data_args_path", "per_split_data_args_path", "per_dataset_sequences_path")),
        (data, ("vocab_file", "merge_file", "tokenizer_model")),
        (config.checkpoint, ("pretrained_checkpoint",)),
    ):
        for name in names:
            path = getattr(concern, name)
            if path is not None and not _exists(path):
                hint = " (a local file or folder: nothing is downloaded)" if name == "tokenizer_model" else ""
                missing.append(f"{flag_name(name)}: there is no {path}{hint}")
    return missing


def data_prefixes(words: Iterable[str]) -> list[str]:
    """The prefixes among the words of --data-path: PREFIX ..., or WEIGHT PREFIX ... when all weights are numbers."""
    words = list(words)
    weighted = len(words) % 2 == 0 and all(_is_number(word) for word in words[::2])
    return words[1::2] if weighted else words


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _exists(path: str) -> bool:
    return "://" in path or Path(path).exists()  # a remote one is looked at where it is opened


def _prefix_hint(prefix: str) -> str:
    end = Path(prefix).suffix
    if end in (".bin", ".idx"):
        return f" (leave out the ending {end})"
    return ""


def check_checkpoint(config: Config) -> None:
    checkpoint = config.checkpoint
    if checkpoint.load is None:
        for name, alone in (
            ("ckpt_step", checkpoint.ckpt_step is not None),
            ("ckpt_convert_format", checkpoint.ckpt_convert_format is not None),
        ):
            if alone:
                raise ConfigError(f"--{name.replace('_', '-')} needs --load: it says which checkpoint")
    retain, interval = checkpoint.save_retain_interval, checkpoint.save_interval
    if retain is not None and (not interval or retain % interval):
        raise ConfigError(
            f"--save-retain-interval {retain} has to be a multiple of --save-interval, which is "
            f"{interval if interval is not None else 'not given'}"
        )
    optimizer = config.optimizer
    refuse_together(
        "--override-opt_param-scheduler" if optimizer.override_opt_param_scheduler else None,
        "--use-checkpoint-opt_param-scheduler" if optimizer.use_checkpoint_opt_param_scheduler else None,
        because="the learning rate schedule comes from the flags or from the checkpoint",
    )
    if checkpoint.ckpt_convert_save is not None and checkpoint.ckpt_convert_format is None:
        raise ConfigError(
            f"--ckpt-convert-save {checkpoint.ckpt_convert_save} needs --ckpt-convert-format torch or torch_dist"
        )
    if checkpoint.ckpt_convert_format is not None and checkpoint.ckpt_convert_save is None:
        raise ConfigError(
            f"--ckpt-convert-format {checkpoint.ckpt_convert_format} needs --ckpt-convert-save, where to write"
        )


def check_logging(config: Config) -> None:
    logging = config.logging
    if logging.profile and logging.profile_step_end <= logging.profile_step_start:
        raise ConfigError(
            f"--profile-step-end {logging.profile_step_end} is not after --profile-step-start "
            f"{logging.profile_step_start}"
        )
    outside = [rank for rank in logging.profile_ranks if rank >= config.parallel.world_size]
    if logging.profile and outside:
        raise ConfigError(
            f"--profile-ranks {outside[0]} is not one of {config.parallel.world_size} processes"
        )
    if logging.timeline is not None and logging.timeline_step_end <= logging.timeline_step_start:
        raise ConfigError(
            f"--timeline-step-end {logging.timeline_step_end} is not after --timeline-step-start "
            f"{logging.timeline_step_start}"
        )
    if logging.profile and not config.command.planning:
        _check_can_be_made(profile_folder(config), "--profile")


def profile_folder(config: Config) -> Path:
    """Where --profile's traces go."""
    return Path(config.logging.tensorboard_dir or config.checkpoint.save or ".")


def _check_can_be_made(folder: Path, flag: str) -> None:
    there = next(path for path in (folder, *folder.absolute().parents) if os.access(path, os.F_OK))
    if not there.is_dir() or not os.access(there, os.W_OK):
        what = "is not a folder" if not there.is_dir() else "cannot be written to"
        raise ConfigError(
            f"{flag} writes to {folder}, but {there} {what}, wanted a folder that is there or can be made"
        )
