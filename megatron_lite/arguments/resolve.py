"""Derived values: what the flags that were not given become. What contradicts itself is refused in cross_checks."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from megatron_lite.arguments.checks import check_config, check_ranges
from megatron_lite.arguments.megatron_flags import accepted_notes, has_effect_with_experts
from megatron_lite.arithmetic.batch_size import parse_step_schedule
from megatron_lite.arithmetic.layer_pattern import pattern_of_layers
from megatron_lite.arithmetic.partition import V_SCHEDULES
from megatron_lite.arithmetic.pipeline_layout import parse_layout
from megatron_lite.config import CONCERNS, Config, ConfigError, experts
from megatron_lite.config.data import TOKENIZER_FLAGS
from megatron_lite.config.declare import flag_of
from megatron_lite.data.blends import DEFAULT_SPLIT, split_words
from megatron_lite.distributed.environment import Environment

# Model flags that may differ from the checkpoint's: they change how it trains, not what its weights mean.
_TRAINING_ONLY = {
    "hidden_dropout",
    "attention_dropout",
    "init_method_std",
    "attention_backend",
    "cross_entropy_loss_fusion",
    "max_position_embeddings",
    *experts.TRAINING_ONLY,
}


def place(values: Mapping[str, Any], accepted: Mapping[str, Any], environment: Environment) -> Config:
    """A Config from the fields given on the command line; nothing derived but the world size."""
    parts, notes = {}, []
    for name, concern in CONCERNS.items():
        chosen = {item.name: item for item in fields(concern) if item.name in values}
        parts[name] = concern(**{k: tuple(v) if isinstance(v := values[k], list) else v for k in chosen})
        idle = {flag_of(item): item.metadata.get("no_effect") for item in chosen.values()}
        notes += [f"{flag} has no effect: {reason}" for flag, reason in idle.items() if reason]
    config = Config(**parts, given=frozenset(values) | has_effect_with_experts(accepted))
    check_ranges(config)
    dense = not config.model.num_experts
    notes += accepted_notes(accepted, config.parallel.tensor_model_parallel_size, dense)
    return _noted(_with(config, "parallel", world_size=_world_size(config, environment)), notes)


def _world_size(config: Config, environment: Environment) -> int:
    asked = config.parallel.world_size
    if asked is None:
        return environment.world_size
    if not config.command.planning and asked != environment.world_size:
        raise ConfigError(
            f"--world-size {asked} only plans, with --check or --dry-run; "
            f"this run has {environment.world_size} processes (start it with torchrun)"
        )
    return asked


def merge_stored(config: Config, stored: dict[str, dict[str, Any]]) -> Config:
    """Model and tokenizer flags from a stored configuration, for --use-checkpoint-args.

    Raises:
        ConfigError: a flag of the model's form was given and contradicts the checkpoint.
    """
    kept = Config.from_dict({name: stored.get(name, {}) for name in ("model", "data")})
    given = {f.name for f in fields(config.model)} & config.given
    if not kept.model.group_query_attention:
        given -= {"num_query_groups"}  # not read there, so it cannot contradict
    tokenizer = config.data.tokenizer_type or kept.data.tokenizer_type
    # A NullTokenizer adds its end of document to --vocab-size; what is stored counts it already. A model that came
    # without a tokenizer goes on with one, as its size alone asks for.
    files = ("tokenizer_model", "vocab_file", "merge_file")
    named = any(getattr(data, name) for data in (config.data, kept.data) for name in files)
    null = tokenizer == "NullTokenizer" or (tokenizer is None and not named)
    added = int(null)
    contradictions = []
    for name in sorted((given - _TRAINING_ONLY) & stored.get("model", {}).keys()):
        here, there = getattr(config.model, name), getattr(kept.model, name)
        if name == "vocab_size":
            there = here if there is None else there - added
        if here != there:
            contradictions.append(
                f"--{name.replace('_', '-')} is {here}, the checkpoint of --use-checkpoint-args has {there}"
            )
    if contradictions:
        raise ConfigError(f"{'; '.join(contradictions)}: leave {'them' if contradictions[1:] else 'it'} out")
    ours = {
        name: getattr(config.model, name)
        for name in given
        if name in _TRAINING_ONLY or name == "vocab_size" or name not in stored.get("model", {})
    }
    if "padded_vocab_size" not in given:
        ours["padded_vocab_size"] = None  # follows from the tensor parallel size at hand
    merged = replace(config, model=replace(kept.model, **ours))
    if not config.given & set(TOKENIZER_FLAGS):
        merged = _with(merged, "data", **{name: getattr(kept.data, name) for name in TOKENIZER_FLAGS})
    if null and kept.model.vocab_size and "vocab_size" not in given:
        merged = _with(merged, "model", vocab_size=kept.model.vocab_size - 1)
    return merged


def complete(config: Config) -> Config:
    """Fill in every derived value and check the whole.

    Raises:
        ConfigError: one sentence, with the flags and the numbers that do not fit.
    """
    for step in (
        _complete_model,
        _complete_experts,
        _complete_recompute,
        _complete_pipeline,
        _complete_data,
        _complete_training,
        _complete_checks,
    ):
        config = step(config)
    return _noted(config, check_config(config))


def _with(config: Config, concern: str, **values: Any) -> Config:
    return replace(config, **{concern: replace(getattr(config, concern), **values)})


def _noted(config: Config, notes: list[str]) -> Config:
    return replace(config, notes=(*config.notes, *notes)) if notes else config


def _needed(config: Config, concern: str, *names: str) -> None:
    missing = [n for n in names if getattr(getattr(config, concern), n) is None]
    if missing:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise ConfigError(f"{flags} {'is' if len(missing) == 1 else 'are'} needed (see --help)")


def _complete_model(config: Config) -> Config:
    _needed(config, "model", "num_layers", "hidden_size", "num_attention_heads")
    _needed(config, "data", "seq_length")
    model = config.model
    hidden, heads = model.hidden_size, model.num_attention_heads
    if model.kv_channels is None and hidden % heads:
        raise ConfigError(
            f"--hidden-size {hidden} does not divide by --num-attention-heads {heads}: "
            "change one of them or give the width of a head by --kv-channels"
        )
    gated = model.mlp_activation.num_inputs == 2
    ffn = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    if model.ffn_hidden_size is None and ffn == 0:
        raise ConfigError(
            f"--hidden-size {hidden} leaves no width for an MLP with {model.activation_name}: give --ffn-hidden-size"
        )
    notes = []
    if "num_query_groups" in config.given and not model.group_query_attention:
        notes.append(
            f"--num-query-groups {model.num_query_groups} is not read without --group-query-attention: every one of "
            f"the {heads} heads has its own keys and values"
        )
    config = _with(
        config,
        "model",
        ffn_hidden_size=model.ffn_hidden_size or ffn,
        kv_channels=model.kv_channels or hidden // heads,
        num_query_groups=model.num_query_groups if model.group_query_attention else heads,
        max_position_embeddings=model.max_position_embeddings or config.data.seq_length,
    )
    return _noted(config, notes)


def _complete_experts(config: Config) -> Config:
    model = config.model
    if not model.num_experts:
        return _with(config, "model", num_experts=None)
    width, notes = model.moe_ffn_hidden_size, []
    if width is None:
        width = model.ffn_hidden_size
        notes = [
            f"--moe-ffn-hidden-size is not given: each expert is as wide as a dense layer's MLP, {width}"
        ]
    pattern = pattern_of_layers(model.moe_layer_freq, model.num_layers)
    return _noted(_with(config, "model", moe_ffn_hidden_size=width, moe_layer_freq=pattern), notes)


def _complete_recompute(config: Config) -> Config:
    """Megatron's rules: --recompute-activations is selective, whatever the granularity says."""
    parallel = config.parallel
    granularity = parallel.recompute_granularity
    if parallel.recompute_activations:
        config = _with(config, "parallel", recompute_granularity="selective")
        if granularity == "full":
            config = _noted(
                config, ["--recompute-activations wins over --recompute-granularity full: selective"]
            )
            config = _with(config, "parallel", recompute_method=None, recompute_num_layers=None)
        granularity = "selective"
    if granularity == "full" and parallel.recompute_method is not None:
        config = _with(config, "parallel", recompute_num_layers=parallel.recompute_num_layers or 1)
    return config


def _complete_pipeline(config: Config) -> Config:
    parallel = config.parallel
    size = parallel.pipeline_model_parallel_size
    chunks = parallel.num_virtual_stages_per_pipeline_rank
    per_stage = parallel.num_layers_per_virtual_pipeline_stage
    if per_stage is not None:
        implied = _chunks_of(config.model.num_layers, size, per_stage)
        if chunks not in (None, implied):
            raise ConfigError(
                f"--num-layers-per-virtual-pipeline-stage {per_stage} makes {implied} chunks a rank of --num-layers "
                f"{config.model.num_layers}, --num-virtual-stages-per-pipeline-rank is {chunks}: give one of them"
            )
        chunks = implied
    if chunks is None and parallel.pipeline_model_parallel_layout is not None:
        chunks = max(1, len(parse_layout(parallel.pipeline_model_parallel_layout)) // size)
    if chunks is None:
        chunks = 2 if parallel.pipeline_schedule in V_SCHEDULES else 1
    notes, sequence_parallel = [], parallel.sequence_parallel
    if sequence_parallel and parallel.tensor_model_parallel_size == 1:
        sequence_parallel = False
        notes = ["--sequence-parallel has no effect: --tensor-model-parallel-size is 1"]
    config = _with(
        config,
        "parallel",
        num_virtual_stages_per_pipeline_rank=chunks,
        pipeline_schedule=parallel.pipeline_schedule or ("1f1b" if chunks == 1 else "interleaved-1f1b"),
        sequence_parallel=sequence_parallel,
    )
    return _noted(config, notes)


def _chunks_of(layers: int, size: int, per_stage: int) -> int:
    """Chunks a rank for --num-layers-per-virtual-pipeline-stage."""
    if layers % (size * per_stage):
        raise ConfigError(
            f"--num-layers {layers} does not divide into --pipeline-model-parallel-size {size} ranks with chunks of "
            f"--num-layers-per-virtual-pipeline-stage {per_stage}: give --num-virtual-stages-per-pipeline-rank for "
            "an uneven split"
        )
    return layers // (size * per_stage)


def _complete_data(config: Config) -> Config:
    data = config.data
    by_split = (
        data.train_data_path,
        data.valid_data_path,
        data.test_data_path,
        data.per_split_data_args_path,
    )
    split = data.split
    if split is None and not any(path is not None for path in by_split):
        split = DEFAULT_SPLIT
    if split is not None:
        split = ",".join(split_words(split))
    kind, notes = data.tokenizer_type, []
    if kind is None and (data.vocab_file or data.merge_file):
        kind = "GPT2BPETokenizer"  # the default of Megatron's pretrain_gpt.py
    elif kind is None and data.tokenizer_model is None and config.model.vocab_size is not None:
        kind = "NullTokenizer"
        notes = [f"no tokenizer flags: NullTokenizer with --vocab-size {config.model.vocab_size}"]
    config = _with(
        config, "data", split=split, tokenizer_type=kind, dataloader_type=data.dataloader_type or "single"
    )
    return _noted(config, notes)


def _complete_training(config: Config) -> Config:
    _needed(config, "training", "micro_batch_size")
    training, notes = config.training, []
    if training.train_iters is None and training.train_samples is None and training.skip_train:
        config = _with(config, "training", train_iters=0)
    if config.optimizer.optimizer == "dist_muon":
        config = _with(config, "optimizer", optimizer="muon")  # the same update; FSDP shards it by itself
    if config.optimizer.lr is None and training.skip_train:
        config = _with(config, "optimizer", lr=0.0)
    size = training.global_batch_size
    if training.step_batch_size_schedule is not None:
        last = parse_step_schedule(training.step_batch_size_schedule, config.data.seq_length)[-1][1]
        if size not in (None, last):
            notes = [f"--step-batch-size-schedule wins over --global-batch-size {size}"]
        size = last
    size = size or training.micro_batch_size * max(1, config.parallel.data_parallel_size)
    config = _with(config, "training", global_batch_size=size)
    evaluation = config.evaluation.eval_global_batch_size or size
    batches = max(0, config.evaluation.eval_iters)
    return _noted(_with(config, "evaluation", eval_global_batch_size=evaluation, eval_iters=batches), notes)


def _complete_checks(config: Config) -> Config:
    """--test-mode: what costs too much for every day is checked too, all along the run."""
    if not config.training.test_mode:
        return config
    interval = config.training.check_weight_hash_across_dp_replicas_interval or 1
    config = _with(config, "training", check_weight_hash_across_dp_replicas_interval=interval)
    return _with(config, "checkpoint", verify_integrity=True, exit_on_save_failure=True)
