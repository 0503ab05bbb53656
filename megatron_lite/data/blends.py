"""What to read: the paths and weights of --data-path and related flags, and --split, as Megatron-core does."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from megatron_lite.config.data import DataConfig
from megatron_lite.config.declare import ConfigError, refuse_together
from megatron_lite.files.reading import read_object, read_text

SPLITS = ("train", "valid", "test")
DEFAULT_SPLIT = "969,30,1"

Bounds = tuple[float, float]


@dataclass(frozen=True)
class Blend:
    """Path prefixes, and their weights (summing to 1) or None: each source as long as it is."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None
    flag: str  # that named them, for messages


@dataclass(frozen=True)
class DataPlan:
    """For each of train, valid, test the sets to read: name -> blend; and which part of each source they take.

    bounds: None for a split that takes nothing. shared: all splits cut the same sources (--data-path).
    """

    sets: dict[str, dict[str, Blend]]
    bounds: dict[str, Bounds | None]
    shared: bool
    split_words: str = ""


def data_flags(config: DataConfig) -> str | None:
    """The flags that name the data, or None. Raises ConfigError for two ways at once, or --split beside split paths."""
    given = [name for name in SPLITS if getattr(config, f"{name}_data_path") is not None]
    ways = {
        "--data-path": config.data_path is not None,
        f"--data-args-path {config.data_args_path}": config.data_args_path,
        f"--per-split-data-args-path {config.per_split_data_args_path}": config.per_split_data_args_path,
        "--mock-data": config.mock_data,
        "/".join(f"--{name}-data-path" for name in given): given,
    }
    chosen = [way for way, value in ways.items() if value]
    refuse_together(*chosen, because="training has one source of data")
    if config.split is not None and (given or config.per_split_data_args_path):
        refuse_together(f"--split {config.split}", chosen[0], because="the paths are split already")
    return chosen[0] if chosen else None


def plan_data(config: DataConfig) -> DataPlan:
    """What the flags say to read. With --mock-data the one source is "mock".

    Raises:
        ConfigError: as data_flags; or no data, a bad split, bad weights, an unreadable file of paths.
    """
    flag = data_flags(config)
    if flag is None:
        raise ConfigError("--data-path is needed (or --train-data-path, --valid-data-path, or --mock-data)")
    if config.mock_data:
        return _one_for_all(Blend(("mock",), None, flag), config)
    if config.data_path is not None:
        return _one_for_all(parse_blend(config.data_path, flag), config)
    if config.data_args_path:
        return _one_for_all(parse_blend(read_text(config.data_args_path, flag).split(), flag), config)
    if config.per_split_data_args_path:
        sets = _read_per_split(config.per_split_data_args_path, flag)
    else:
        sets = {
            name: {name: parse_blend(words, f"--{name}-data-path")}
            for name in SPLITS
            if (words := getattr(config, f"{name}_data_path")) is not None
        }
    sets = {name: sets.get(name, {}) for name in SPLITS}
    return DataPlan(sets, {name: (0.0, 1.0) if sets[name] else None for name in SPLITS}, shared=False)


def check_trains(plan: DataPlan, config: DataConfig) -> None:
    """Raise ConfigError when the plan has no data for training."""
    if not plan.sets["train"]:
        flag = f"--split {plan.split_words}" if plan.shared else data_flags(config)
        raise ConfigError(f"{flag} gives training nothing, wanted data to train on, or --skip-train")


def _one_for_all(blend: Blend, config: DataConfig) -> DataPlan:
    words = config.split if config.split is not None else DEFAULT_SPLIT
    bounds = split_bounds(parse_split(words))
    sets = {name: {name: blend} if bounds[name] else {} for name in SPLITS}
    return DataPlan(sets, bounds, shared=True, split_words=words)


def split_words(text: str) -> list[str]:
    """--split's words for train, valid, test, else '0', bare. Raises ConfigError unless numbers with a sum above 0."""
    words = re.split(r"\s*[,/;:\s]\s*", text.strip().strip("'\"[]() "))
    valid = all(re.fullmatch(r"\+?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", word) for word in words)
    if not valid or len(words) > len(SPLITS) or not 0 < sum(map(float, words)) < math.inf:
        raise ConfigError(
            f"--split is '{text}', wanted up to three weights of 0 or more with a sum above 0, like {DEFAULT_SPLIT}"
        )
    return (words + ["0", "0"])[: len(SPLITS)]


def parse_split(text: str) -> list[float]:
    """--split's weights of train, valid, test, summing to 1. Raises ConfigError as `split_words`."""
    return normalize([float(word) for word in split_words(text)])


def split_bounds(weights: Sequence[float]) -> dict[str, Bounds | None]:
    """The part of each source, from 0 to 1, that each split takes; None for one that takes nothing."""
    ends = list(accumulate(weights, initial=0.0))
    return {name: (a, b) if b > a else None for name, a, b in zip(SPLITS, ends, ends[1:])}


def split_range(bounds: Bounds, num_sequences: int) -> tuple[int, int]:
    """First and last + 1 of the sequences between the bounds; Python's rounding, as in Megatron-core."""
    return round(bounds[0] * float(num_sequences)), round(bounds[1] * float(num_sequences))


def normalize(weights: Sequence[float]) -> list[float]:
    """Divide by the sum, with numpy's rounding as in Megatron-core."""
    array = np.asarray(weights, dtype=np.float64)
    return (array / array.sum()).tolist()


def parse_blend(words: Sequence[str], flag: str) -> Blend:
    """PREFIX ..., or (by numbers) WEIGHT PREFIX ... Raises ConfigError for a weight that is missing or not above 0."""
    words = [str(word).strip() for word in words]
    if not words or not all(words):
        raise ConfigError(f"{flag} is empty, wanted PREFIX ... or WEIGHT PREFIX WEIGHT PREFIX ...")
    weights = [_weight(word) for word in words[::2]]
    if len(words) == 1 or all(weight is None for weight in weights):
        return Blend(tuple(words), None, flag)
    missing = next((word for word, weight in zip(words[::2], weights) if weight is None), None)
    if missing is not None:
        raise ConfigError(f"{flag} has weights, but '{missing}' where one is wanted: WEIGHT PREFIX ...")
    if len(words) % 2:
        raise ConfigError(f"{flag} ends with the weight {words[-1]}, wanted a prefix behind it")
    for weight, prefix in zip(weights, words[1::2]):
        if not 0 < weight < math.inf:
            raise ConfigError(f"{flag}: the weight of {prefix} is {weight:g}, wanted a number above 0")
    return Blend(tuple(words[1::2]), tuple(normalize(weights)), flag)


def _weight(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _read_per_split(path: str, flag: str) -> dict[str, dict[str, Blend]]:
    """{"train": [words], "valid": [words] or {"name": [words], ...}, "test": as valid}; any may be absent or null."""
    stored = read_object(path, flag)
    if not set(stored) <= set(SPLITS):
        raise ConfigError(f"{flag} holds {', '.join(stored)}, wanted the keys train, valid, test")
    sets = {}
    for split, value in stored.items():
        named = value if isinstance(value, dict) and split != "train" else {split: value}
        sets[split] = {
            name: parse_blend(_words(words, f"{flag}: {name}"), f"{flag}: {name}")
            for name, words in named.items()
            if words is not None
        }
    return sets


def _words(value: Any, where: str) -> list[str]:
    words = value.split() if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str | int | float) for word in words):
        raise ConfigError(f'{where} is {json.dumps(value)[:60]}, wanted words like ["0.3", "PREFIX", ...]')
    return [str(word) for word in words]
