"""Derived values: what the flags that were not given become."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from megatron_lite.config import CONCERNS, Config, ConfigError
from megatron_lite.environment import Environment


def place(values: Mapping[str, Any], environment: Environment) -> Config:
    """A Config from the fields given on the command line; nothing derived but the world size."""
    parts = {}
    for name, concern in CONCERNS.items():
        chosen = {f.name: values[f.name] for f in fields(concern) if f.name in values}
        parts[name] = concern(**{k: tuple(v) if isinstance(v, list) else v for k, v in chosen.items()})
    notes = tuple(f"{flag} has no effect: {reason}" for flag, reason in values.get("notes", {}).items())
    config = Config(**parts, given=frozenset(values) - {"notes"}, notes=notes)
    return _with(config, "parallel", world_size=_world_size(config, environment))


def _world_size(config: Config, environment: Environment) -> int:
    asked = config.parallel.world_size
    if asked is None:
        return environment.world_size
    if not (config.command.check or config.command.dry_run) and asked != environment.world_size:
        raise ConfigError(
            f"--world-size {asked} only plans, with --check or --dry-run; "
            f"this run has {environment.world_size} processes (start it with torchrun)"
        )
    return asked


def merge_stored(config: Config, stored: dict[str, dict[str, Any]]) -> Config:
    """Model flags from a stored configuration, for --use-checkpoint-args."""
    model = Config.from_dict({"model": stored.get("model", {})}).model
    return replace(config, model=model)


def complete(config: Config) -> Config:
    """Fill in derived values."""
    config = _complete_model(config)
    config = _complete_parallel(config)
    return _complete_training(config)


def _with(config: Config, concern: str, **values: Any) -> Config:
    return replace(config, **{concern: replace(getattr(config, concern), **values)})


def _complete_model(config: Config) -> Config:
    model = config.model
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if getattr(model, name) is None:
            raise ConfigError(f"--{name.replace('_', '-')} is needed")
    hidden = model.hidden_size
    ffn = int(4 * hidden * 2 / 3 / 64) * 64 if model.swiglu else 4 * hidden
    return _with(
        config,
        "model",
        ffn_hidden_size=model.ffn_hidden_size or ffn,
        kv_channels=model.kv_channels or hidden // model.num_attention_heads,
        num_query_groups=model.num_query_groups if model.group_query_attention else model.num_attention_heads,
        max_position_embeddings=model.max_position_embeddings or config.data.seq_length,
    )


def _complete_parallel(config: Config) -> Config:
    parallel, layers = config.parallel, config.model.num_layers
    chunks = parallel.num_virtual_stages_per_pipeline_rank
    if chunks is None and parallel.num_layers_per_virtual_pipeline_stage is not None:
        chunks = (
            layers // parallel.pipeline_model_parallel_size // parallel.num_layers_per_virtual_pipeline_stage
        )
    chunks = chunks or (2 if parallel.pipeline_schedule in ("zbv", "dualpipev") else 1)
    return _with(
        config,
        "parallel",
        num_virtual_stages_per_pipeline_rank=chunks,
        pipeline_schedule=parallel.pipeline_schedule or ("1f1b" if chunks == 1 else "interleaved-1f1b"),
    )


def _complete_training(config: Config) -> Config:
    training = config.training
    micro = training.micro_batch_size
    return _with(
        config,
        "training",
        global_batch_size=training.global_batch_size or micro * config.parallel.data_parallel_size,
    )
