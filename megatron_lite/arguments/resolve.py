"""Derived values: what the flags that were not given become. What contradicts itself is refused by the *_checks.py."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from megatron_lite.arguments.megatron_flags import accepted_notes, has_effect_with_experts
from megatron_lite.arguments.refusals import check_ranges
from megatron_lite.arithmetic.batch_size import parse_step_schedule
from megatron_lite.arithmetic.layer_pattern import pattern_of_layers
from megatron_lite.arithmetic.pipeline_layout import parse_layout
from megatron_lite.arithmetic.pipeline_schedule import V_SCHEDULES
from megatron_lite.config import FIELDS, Config, ConfigError
from megatron_lite.config.data import TOKENIZER_FILES, TOKENIZER_FLAGS
from megatron_lite.config.declare import flag_name
from megatron_lite.config.model import TRAINING_ONLY
from megatron_lite.data.blends import DEFAULT_SPLIT, split_words
from megatron_lite.distributed.environment import Environment


def place(values: Mapping[str, Any], accepted: Mapping[str, Any], environment: Environment) -> Config:
    """A Config from the fields given on the command line; nothing derived but the world size."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    idle = {name: FIELDS[name][1].metadata.get("no_effect") for name in values}
    config = replace(_with(Config(), **values), given=frozenset(values) | has_effect_with_experts(accepted))
    check_ranges(config)
    notes = [f"{flag_name(name)} has no effect: {reason}" for name, reason in idle.items() if reason]
    dense = not config.model.num_experts
    notes += accepted_notes(accepted, config.parallel.tensor_model_parallel_size, dense)
    return _noted(_with(config, world_size=_world_size(config, environment)), *notes)


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
    """Model and tokenizer flags of a stored config. Raises ConfigError for flags given that contradict it."""
    there = stored.get("model", {})
    kept = Config.from_dict({"model": there, "data": stored.get("data", {})})
    given = {item.name for item in fields(config.model)} & config.given
    if not kept.model.group_query_attention:
        given -= {"num_query_groups"}  # not read there, so it cannot contradict
    # A NullTokenizer adds its end of document to --vocab-size; what is stored counts it already. A model that came
    # without a tokenizer goes on with one, as its size alone asks for.
    tokenizer = config.data.tokenizer_type or kept.data.tokenizer_type
    named = any(data.value(name) for data in (config, kept) for name in TOKENIZER_FILES)
    if kept.model.vocab_size and (tokenizer == "NullTokenizer" or (tokenizer is None and not named)):
        kept = _with(kept, vocab_size=kept.model.vocab_size - 1)
    unsaid = {name for name in given if name not in there or (name == "vocab_size" and there[name] is None)}
    own = given & {*TRAINING_ONLY, "max_position_embeddings"} | unsaid
    contradictions = [
        f"{flag_name(name)} is {config.value(name)}, the checkpoint of --use-checkpoint-args has {kept.value(name)}"
        for name in sorted(given - own)
        if config.value(name) != kept.value(name)
    ]
    if contradictions:
        raise ConfigError(f"{'; '.join(contradictions)}: leave {'them' if contradictions[1:] else 'it'} out")
    merged = _with(replace(config, model=kept.model), **{name: config.value(name) for name in own})
    if "padded_vocab_size" not in given:
        merged = _with(merged, padded_vocab_size=None)  # follows from the tensor parallel size at hand
    if not config.given & set(TOKENIZER_FLAGS):
        merged = _with(merged, **{name: kept.value(name) for name in TOKENIZER_FLAGS})
    return merged


def complete(config: Config) -> Config:
    """Fill in every derived value; `parse.checked` looks at the whole. Raises ConfigError for what does not fit."""
    for step in (
        _check_needed,
        _complete_model,
        _complete_experts,
        _complete_recompute,
        _complete_pipeline,
        _complete_data,
        _complete_training,
        _complete_test_mode,
    ):
        config = step(config)
    return config


def _with(config: Config, **values: Any) -> Config:
    """The config with other values of these fields, whichever concerns have them."""
    parts: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        parts.setdefault(FIELDS[name][0], {})[name] = value
    return replace(
        config, **{concern: replace(getattr(config, concern), **part) for concern, part in parts.items()}
    )


def _noted(config: Config, *notes: str) -> Config:
    return replace(config, notes=(*config.notes, *notes))


def _check_needed(config: Config) -> Config:
    needed = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size")
    missing = [flag_name(name) for name in needed if config.value(name) is None]
    if missing:
        raise ConfigError(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} needed (see --help)")
    return config


def _complete_model(config: Config) -> Config:
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
    if "num_query_groups" in config.given and not model.group_query_attention:
        config = _noted(
            config,
            f"--num-query-groups {model.num_query_groups} is not read without --group-query-attention: every one of "
            f"the {heads} heads has its own keys and values",
        )
    return _with(
        config,
        ffn_hidden_size=model.ffn_hidden_size or ffn,
        kv_channels=model.kv_channels or hidden // heads,
        num_query_groups=model.num_query_groups if model.group_query_attention else heads,
        max_position_embeddings=model.max_position_embeddings or config.data.seq_length,
    )


def _complete_experts(config: Config) -> Config:
    model = config.model
    if not model.num_experts:
        return _with(config, num_experts=None)
    width = model.moe_ffn_hidden_size
    if width is None:
        width = model.ffn_hidden_size
        config = _noted(
            config,
            f"--moe-ffn-hidden-size is not given: each expert is as wide as a dense layer's MLP, {width}",
        )
    pattern = pattern_of_layers(model.moe_layer_freq, model.num_layers)
    return _with(config, moe_ffn_hidden_size=width, moe_layer_freq=pattern)


def _complete_recompute(config: Config) -> Config:
    """Megatron's rules: --recompute-activations is selective, whatever the granularity says."""
    parallel = config.parallel
    if parallel.recompute_activations:
        if parallel.recompute_granularity == "full":
            config = _noted(config, "--recompute-activations wins over --recompute-granularity full")
            config = _with(config, recompute_method=None, recompute_num_layers=None)
        return _with(config, recompute_granularity="selective")
    if parallel.recompute_granularity == "full" and parallel.recompute_method is not None:
        return _with(config, recompute_num_layers=parallel.recompute_num_layers or 1)
    return config


def _complete_pipeline(config: Config) -> Config:
    parallel = config.parallel
    size, layers = parallel.pipeline_model_parallel_size, config.model.num_layers
    chunks = parallel.num_virtual_stages_per_pipeline_rank
    per_stage = parallel.num_layers_per_virtual_pipeline_stage
    if per_stage is not None:
        implied, rest = divmod(layers, size * per_stage)
        if rest:
            raise ConfigError(
                f"--num-layers {layers} does not divide into --pipeline-model-parallel-size {size} ranks with chunks "
                f"of --num-layers-per-virtual-pipeline-stage {per_stage}: give --num-virtual-stages-per-pipeline-rank "
                "for an uneven split"
            )
        if chunks not in (None, implied):
            raise ConfigError(
                f"--num-layers-per-virtual-pipeline-stage {per_stage} makes {implied} chunks a rank of --num-layers "
                f"{layers}, --num-virtual-stages-per-pipeline-rank is {chunks}: give one of them"
            )
        chunks = implied
    if chunks is None and parallel.pipeline_model_parallel_layout is not None:
        chunks = max(1, len(parse_layout(parallel.pipeline_model_parallel_layout)) // size)
    if chunks is None:
        chunks = 2 if parallel.pipeline_schedule in V_SCHEDULES else 1
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        config = _noted(config, "--sequence-parallel has no effect: --tensor-model-parallel-size is 1")
    return _with(
        config,
        num_virtual_stages_per_pipeline_rank=chunks,
        pipeline_schedule=parallel.pipeline_schedule or ("1f1b" if chunks == 1 else "interleaved-1f1b"),
        sequence_parallel=parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1,
    )


def _complete_data(config: Config) -> Config:
    data = config.data
    per_split = ("train_data_path", "valid_data_path", "test_data_path", "per_split_data_args_path")
    split = data.split
    if split is None and not any(config.is_set(name) for name in per_split):
        split = DEFAULT_SPLIT
    if split is not None:
        split = ",".join(split_words(split))
    kind = data.tokenizer_type
    if kind is None and (data.vocab_file or data.merge_file):
        kind = "GPT2BPETokenizer"  # the default of Megatron's pretrain_gpt.py
    elif kind is None and data.tokenizer_model is None and config.model.vocab_size is not None:
        kind = "NullTokenizer"
        config = _noted(config, f"no tokenizer flags: NullTokenizer with {config.shown('vocab_size')}")
    return _with(config, split=split, tokenizer_type=kind, dataloader_type=data.dataloader_type or "single")


def _complete_training(config: Config) -> Config:
    training, optimizer, evaluation = config.training, config.optimizer, config.evaluation
    if training.skip_train:
        lr = 0.0 if optimizer.lr is None else optimizer.lr
        none = training.train_iters is None and training.train_samples is None
        config = _with(config, lr=lr, train_iters=0 if none else training.train_iters)
    if optimizer.optimizer == "dist_muon":
        config = _with(config, optimizer="muon")  # the same update; FSDP shards it by itself
    size = training.global_batch_size
    if training.step_batch_size_schedule is not None:
        last = parse_step_schedule(training.step_batch_size_schedule, config.data.seq_length)[-1][1]
        if size not in (None, last):
            config = _noted(config, f"--step-batch-size-schedule wins over --global-batch-size {size}")
        size = last
    size = size or training.micro_batch_size * max(1, config.parallel.data_parallel_size)
    return _with(
        config,
        global_batch_size=size,
        eval_global_batch_size=evaluation.eval_global_batch_size or size,
        eval_iters=max(0, evaluation.eval_iters),
    )


def _complete_test_mode(config: Config) -> Config:
    """--test-mode: what is too expensive otherwise is checked too, all along the run."""
    if not config.training.test_mode:
        return config
    config = _with(config, verify_integrity=True, exit_on_save_failure=True)
    interval = config.training.check_weight_hash_across_dp_replicas_interval or 1
    return _with(config, check_weight_hash_across_dp_replicas_interval=interval)
