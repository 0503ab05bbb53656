"""Checks of where things come from and go to: data, tokenizer, checkpoints, logs; and whether the files are there."""

import os
from dataclasses import fields
from pathlib import Path

from megatron_lite.config import Config, ConfigError, DataConfig
from megatron_lite.config.data import TOKENIZER_FILES
from megatron_lite.config.declare import flag_name
from megatron_lite.data.blends import Blend, DataPlan, check_trains, data_flags, plan_data
from megatron_lite.data.indexed_dataset import IndexedDataset


def check_not_empty(config: Config) -> None:
    """A script's unset variable (--load "$DIR") must not quietly mean: no checkpoint, no data."""
    for concern in (config.checkpoint, config.data):
        for item in fields(concern):
            if getattr(concern, item.name) == "":
                raise ConfigError(f"{flag_name(item.name)} is empty: give it a value or leave it out")


def check_data_source(config: Config) -> None:
    """Raise ConfigError for data named twice or not at all, with nothing for training, or without a tokenizer."""
    data, training = config.data, config.training
    if data_flags(data) is None and not config.command.planning:
        plan_data(data)  # says what is missing
    plan = _plan_of_what_is_here(data)
    trains = not training.skip_train and 0 not in (training.train_iters, training.train_samples)
    if plan is not None and trains:
        check_trains(plan, data)
    if data.tokenizer_type is None and not config.command.planning:
        raise ConfigError("--tokenizer-type is needed (for --mock-data alone, --vocab-size is enough)")
    needs = {"GPT2BPETokenizer": ("vocab_file", "merge_file"), "NullTokenizer": ("vocab_size",), None: ()}
    for name in needs.get(data.tokenizer_type, ("tokenizer_model",)):
        if config.value(name) is None:
            raise ConfigError(f"--tokenizer-type {data.tokenizer_type} needs {flag_name(name)}")


def _plan_of_what_is_here(data: DataConfig) -> DataPlan | None:
    """The plan; None where nothing names data, or a file of paths is not on this machine."""
    files = [path for path in (data.data_args_path, data.per_split_data_args_path) if path]
    there = data_flags(data) is not None and all(Path(path).is_file() for path in files)
    return plan_data(data) if there else None


def _blends_that_are_here(data: DataConfig) -> list[Blend]:
    plan = None if data.mock_data else _plan_of_what_is_here(data)
    blends = {blend for sets in plan.sets.values() for blend in sets.values()} if plan is not None else ()
    return sorted(blends, key=lambda blend: blend.flag)


def check_pairs(config: Config) -> None:
    """For --check: refuse .bin and .idx files on this machine that are not of the sizes their headers say."""
    for blend in _blends_that_are_here(config.data):
        for prefix in blend.prefixes:
            if all(Path(f"{prefix}.{end}").is_file() for end in ("idx", "bin")):
                IndexedDataset(prefix, trusted=True)


def missing_files(config: Config) -> list[str]:
    """Files and folders that the flags name and that are not there, each with its flag."""
    missing = []
    for blend in _blends_that_are_here(config.data):
        for prefix in (
            blend.prefixes if " " not in blend.flag else ()
        ):  # those in a file are looked at when opened
            files = [prefix + end for end in (".idx", ".bin") if not _exists(prefix + end)]
            end = Path(prefix).suffix
            hint = f" (leave out the ending {end})" if end in (".bin", ".idx") else ""
            if files:
                missing.append(f"{blend.flag}: there is no {' and '.join(files)}{hint}")
    of_data = ("data_args_path", "per_split_data_args_path", "per_dataset_sequences_path")
    for name in (*of_data, *TOKENIZER_FILES, "pretrained_checkpoint"):
        path = config.value(name)
        if path is not None and not _exists(path):
            hint = " (a local file or folder: nothing is downloaded)" if name == "tokenizer_model" else ""
            missing.append(f"{flag_name(name)}: there is no {path}{hint}")
    return missing


def _exists(path: str) -> bool:
    return "://" in path or Path(path).exists()  # a remote one is looked at where it is opened


def check_checkpoint(config: Config) -> None:
    """Raise ConfigError for a checkpoint interval that can never be kept."""
    retain, interval = config.checkpoint.save_retain_interval, config.checkpoint.save_interval
    if retain is not None and (not interval or retain % interval):
        raise ConfigError(
            f"--save-retain-interval {retain} has to be a multiple of --save-interval, which is "
            f"{interval if interval is not None else 'not given'}"
        )


def check_logging(config: Config) -> None:
    """Raise ConfigError for a profile of ranks that are not there, or into a folder that cannot be made."""
    if not config.logging.profile:
        return
    outside = [rank for rank in config.logging.profile_ranks if rank >= config.parallel.world_size]
    if outside:
        raise ConfigError(
            f"--profile-ranks {outside[0]} is not one of {config.parallel.world_size} processes"
        )
    if not config.command.planning:
        _check_can_be_made(profile_folder(config), "--profile")


def profile_folder(config: Config) -> Path:
    """Where --profile's traces go."""
    return Path(config.logging.tensorboard_dir or config.checkpoint.save or ".")


def _check_can_be_made(folder: Path, flag: str) -> None:
    there = next(path for path in (folder, *folder.absolute().parents) if os.access(path, os.F_OK))
    if not there.is_dir() or not os.access(there, os.W_OK):
        what = "is not a folder" if not there.is_dir() else "cannot be written to"
        raise ConfigError(f"{flag} writes to {folder}, but {there} {what}, wanted one that can be made")


CHECKS = (check_not_empty, check_data_source, check_checkpoint, check_logging)
