"""What flags cannot be together: each refusal is one sentence with the flags and the numbers.

`check_config` looks at a config whose derived values are filled in; nothing here changes one.
"""

from dataclasses import fields

from megatron_lite.arguments.expert_checks import check_experts, expert_notes
from megatron_lite.arguments.input_checks import (
    check_checkpoint,
    check_data_source,
    check_logging,
    check_not_empty,
    missing_files,
)
from megatron_lite.arguments.schedule_checks import check_learning_rate, check_length, check_weight_decay
from megatron_lite.arithmetic.batch_size import BatchSchedule, pass_size
from megatron_lite.arithmetic.costs import FLASH_MAX_WIDTH
from megatron_lite.arithmetic.mesh_sizes import uneven_cut
from megatron_lite.arithmetic.partition import check_split
from megatron_lite.arithmetic.pipeline_schedule import (
    check_microbatches,
    runnable_schedule,
)
from megatron_lite.arithmetic.sharding import splits_backward
from megatron_lite.arithmetic.vocabulary import known_vocabulary, with_vocabulary
from megatron_lite.config import CONCERNS, Config, ConfigError, refuse_together
from megatron_lite.config.declare import broken_limit

# What these flags ask for is so with and without them.
_ALWAYS_SO = {
    "calculate_per_token_loss": "the loss is the mean over the batch's unmasked tokens",
    "init_model_with_meta_device": "a model is built on the meta device",
    "use_cpu_initialization": "initial weights are drawn on the CPU, the same in every layout",
    "cp_comm_type": "context ranks gather keys and values, whatever it says; the result is the same",
}


def check_ranges(config: Config) -> None:
    """Raise ConfigError for a number outside the limits that its field states."""
    for name, concern in CONCERNS.items():
        for item in fields(concern):
            value = getattr(getattr(config, name), item.name)
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, (int, float)) and not isinstance(number, bool):
                    wanted = broken_limit(number, item)
                    if wanted is not None:
                        raise ConfigError(f"--{item.name.replace('_', '-')} is {number}, wanted {wanted}")


def check_config(config: Config) -> list[str]:
    """Raise ConfigError for the first contradiction.

    Returns:
        Notes on flags that do nothing in this combination, and on files that are not there where that is no error.
    """
    for check in (
        _check_model,
        _check_attention,
        _check_world,
        check_experts,
        _check_tensor_and_context,
        _check_vocabulary,
        _check_recompute,
        _check_precision,
        check_length,
        _check_batch,
        _check_pipeline,
        check_learning_rate,
        check_weight_decay,
        check_not_empty,
        check_data_source,
        check_checkpoint,
        check_logging,
    ):
        check(config)
    missing = missing_files(config)
    if missing and not config.command.planning:
        raise ConfigError(
            "; ".join(missing[:3]) + (f"; and {len(missing) - 3} more" if len(missing) > 3 else "")
        )
    notes = [f"not on this machine: {text}" for text in missing] + _left_over(config)
    return notes + _idle_flags(config) + expert_notes(config) + _compile_notes(config)


def _check_model(config: Config) -> None:
    model, seq_length = config.model, config.data.seq_length
    heads, groups = model.num_attention_heads, model.num_query_groups
    if heads % groups:
        raise ConfigError(f"--num-attention-heads {heads} does not divide by --num-query-groups {groups}")
    if seq_length > model.max_position_embeddings:
        raise ConfigError(
            f"--seq-length {seq_length} is more than --max-position-embeddings {model.max_position_embeddings}"
        )
    refuse_together(
        "--swiglu" if model.swiglu else None,
        "--squared-relu" if model.squared_relu else None,
        "--quick-geglu" if model.quick_geglu else None,
        f"--activation {model.activation}" if model.activation else None,
        because="an MLP has one activation",
    )
    rotated = int(model.kv_channels * model.rotary_percent)
    if model.position_embedding_type == "rope" and (rotated == 0 or rotated % 2):
        raise ConfigError(
            f"rotary positions turn pairs: --rotary-percent {model.rotary_percent:g} of --kv-channels "
            f"{model.kv_channels} is {rotated}, wanted an even number above 0"
        )
    if model.use_rope_scaling and model.rope_scaling_low_freq_factor >= model.rope_scaling_high_freq_factor:
        raise ConfigError(
            f"--rope-scaling-low-freq-factor {model.rope_scaling_low_freq_factor:g} has to be below "
            f"--rope-scaling-high-freq-factor {model.rope_scaling_high_freq_factor:g}"
        )
    if model.padded_vocab_size and model.vocab_size and model.padded_vocab_size < model.vocab_size:
        raise ConfigError(
            f"--padded-vocab-size {model.padded_vocab_size} is less than --vocab-size {model.vocab_size}"
        )


def _check_attention(config: Config) -> None:
    """Refuse --attention-backend flash with what flash attention does not compute; windows and cp it does."""
    model, precision = config.model, config.precision
    if model.attention_backend != "flash":
        return
    reason = None
    if not (precision.bf16 or precision.fp16):
        reason = "flash attention computes in --bf16 or --fp16, neither is given"
    elif model.kv_channels > FLASH_MAX_WIDTH:
        reason = f"--kv-channels is {model.kv_channels}, flash attention takes at most {FLASH_MAX_WIDTH}"
    elif config.data.reset_attention_mask:
        reason = "flash attention has no document masks, which --reset-attention-mask asks for"
    if reason is not None:
        raise ConfigError(f"--attention-backend flash: {reason}; leave it at auto")


def _check_world(config: Config) -> None:
    parallel = config.parallel
    world, needed = parallel.world_size, parallel.model_parallel_size
    if world % needed:
        raise ConfigError(
            f"{world} processes do not divide by --tensor-model-parallel-size {parallel.tensor_model_parallel_size} x "
            f"--context-parallel-size {parallel.context_parallel_size} x --pipeline-model-parallel-size "
            f"{parallel.pipeline_model_parallel_size} = {needed}"
            + (" (start with torchrun, or plan with --check --world-size N)" if world == 1 else "")
        )
    replicas, data_parallel = parallel.num_distributed_optimizer_instances, parallel.data_parallel_size
    if data_parallel % replicas:
        raise ConfigError(
            f"--num-distributed-optimizer-instances {replicas} does not divide the data-parallel size {data_parallel} "
            f"({world} processes / {needed})"
        )
    if parallel.data_parallel_sharding_strategy == "no_shard" and replicas > 1:
        raise ConfigError(
            f"--num-distributed-optimizer-instances {replicas} counts copies of a sharded model, "
            "--data-parallel-sharding-strategy no_shard has a copy on every rank: leave one of them out"
        )
    if config.command.rank >= world:
        raise ConfigError(f"--rank {config.command.rank} is not one of {world} processes (0 to {world - 1})")


def _check_tensor_and_context(config: Config) -> None:
    model, parallel = config.model, config.parallel
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    reason = uneven_cut(config, tensor, context, parallel.sequence_parallel)
    if reason is not None:
        raise ConfigError(reason)
    if context > 1 and "a2a" in parallel.cp_comm_type:
        heads = model.num_query_groups // tensor
        if heads % context:
            raise ConfigError(
                f"--cp-comm-type a2a gives each of --context-parallel-size {context} ranks whole heads: "
                f"--num-query-groups {model.num_query_groups} / --tensor-model-parallel-size {tensor} = {heads} does "
                "not divide"
            )


def _check_vocabulary(config: Config) -> None:
    """Refuse a padded vocabulary that tensor ranks cannot share, before the tokenizer is read where flags tell it."""
    size = known_vocabulary(config)
    # A run's tokenizer may be larger than --vocab-size; a plan takes the flag's word.
    if size is not None and (config.command.planning or config.data.tokenizer_type == "NullTokenizer"):
        with_vocabulary(config, size)


def _check_recompute(config: Config) -> None:
    parallel = config.parallel
    method, granularity = parallel.recompute_method, parallel.recompute_granularity
    if granularity == "full" and method is None:
        raise ConfigError("--recompute-granularity full needs --recompute-method uniform or block")
    if granularity == "selective" and method is not None:
        raise ConfigError(
            f"--recompute-method {method} is for --recompute-granularity full, which is selective here"
        )
    count, layers = parallel.recompute_num_layers, config.model.num_layers
    if granularity == "full" and count > layers:
        raise ConfigError(f"--recompute-num-layers {count} is more than --num-layers {layers}")
    # torch recomputes for each call of backward; a split one has a call for each weight and keeps what each made.
    if granularity == "full" and splits_backward(config):
        raise ConfigError(
            f"--recompute-granularity full with --pipeline-schedule {parallel.pipeline_schedule}, which runs the "
            "backward in two parts, would hold more than no recomputation does: choose selective, or 1f1b or "
            "interleaved-1f1b"
        )


def _check_precision(config: Config) -> None:
    precision = config.precision
    refuse_together(
        "--fp16" if precision.fp16 else None,
        "--bf16" if precision.bf16 else None,
        because="one number format computes",
    )
    if precision.min_loss_scale > precision.initial_loss_scale:
        raise ConfigError(
            f"--min-loss-scale {precision.min_loss_scale:g} is more than --initial-loss-scale "
            f"{precision.initial_loss_scale:g}"
        )


def _check_batch(config: Config) -> None:
    training, parallel = config.training, config.parallel
    micro, data_parallel = training.micro_batch_size, parallel.data_parallel_size
    ranks = f"--micro-batch-size {micro} x data-parallel size {data_parallel} = {micro * data_parallel}"
    for first, size in BatchSchedule.from_config(config).steps:
        if size % (micro * data_parallel):
            name = f"the batch of {size} from sample {first:,} on" if first else f"--global-batch-size {size}"
            if not first and training.rampup_batch_size:
                name = f"the start {size} of --rampup-batch-size"
            raise ConfigError(f"{name} does not divide by {ranks}")
    size = config.evaluation.eval_global_batch_size
    if size % (micro * data_parallel):
        raise ConfigError(f"--eval-global-batch-size {size} does not divide by {ranks}")


def _check_pipeline(config: Config) -> None:
    parallel, layers = config.parallel, config.model.num_layers
    size, chunks = parallel.pipeline_model_parallel_size, parallel.num_virtual_stages_per_pipeline_rank
    if parallel.compile and splits_backward(config):
        raise ConfigError(
            f"--compile does not go with --pipeline-schedule {parallel.pipeline_schedule}, which runs the backward of "
            "a block in two parts: choose 1f1b or interleaved-1f1b, or leave --compile out"
        )
    if size == 1 and chunks > 1:
        raise ConfigError(
            f"{chunks} chunks a rank (--num-virtual-stages-per-pipeline-rank, "
            f"--num-layers-per-virtual-pipeline-stage or --pipeline-schedule {parallel.pipeline_schedule}) need "
            f"--pipeline-model-parallel-size of at least 2, it is 1"
        )
    uneven = parallel.decoder_first_pipeline_num_layers or parallel.decoder_last_pipeline_num_layers
    if uneven and parallel.num_layers_per_virtual_pipeline_stage:
        raise ConfigError(
            "--num-layers-per-virtual-pipeline-stage makes all chunks equal, "
            "--decoder-first/last-pipeline-num-layers does not: give --num-virtual-stages-per-pipeline-rank instead"
        )
    if size > layers and not (
        parallel.account_for_embedding_in_pipeline_split or parallel.account_for_loss_in_pipeline_split
    ):
        raise ConfigError(f"--pipeline-model-parallel-size {size} is more than --num-layers {layers}")
    check_split(config)
    _check_reduction(config)
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage
    if group is not None and group < size and chunks > 1:
        raise ConfigError(
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} is less than "
            f"--pipeline-model-parallel-size {size}"
        )
    batches = BatchSchedule.from_config(config)
    evaluation = config.evaluation
    sizes = {size: "" for _, size in batches.steps}
    if evaluation.eval_iters or evaluation.full_validation:
        sizes.setdefault(
            evaluation.eval_global_batch_size,
            f"--eval-global-batch-size {evaluation.eval_global_batch_size}: ",
        )
    for batch_size, where in sorted(sizes.items()):
        microbatches = batch_size // batches.samples_per_microbatch
        microbatches = pass_size(microbatches, parallel.max_microbatches_per_step)
        name = runnable_schedule(parallel.pipeline_schedule, size, microbatches)
        reason = check_microbatches(name, size, chunks, microbatches)
        if reason is not None:
            raise ConfigError(where + reason)


def _check_reduction(config: Config) -> None:
    parallel = config.parallel
    if parallel.reduce_gradients != "each-microbatch":
        return
    if splits_backward(config):
        raise ConfigError(
            f"--reduce-gradients each-microbatch saves nothing with --pipeline-schedule {parallel.pipeline_schedule}, "
            "whose weight gradients come all at once: wanted last-microbatch or auto, or 1f1b or interleaved-1f1b"
        )
    if parallel.data_parallel_sharding_strategy == "no_shard":
        raise ConfigError(
            "--reduce-gradients each-microbatch has no shards to reduce to under --data-parallel-sharding-strategy "
            "no_shard, wanted last-microbatch or auto"
        )


def _left_over(config: Config) -> list[str]:
    samples, reached = config.training.train_samples, BatchSchedule.from_config(config).total_samples
    if samples is None or samples == reached:
        return []
    return [
        f"--train-samples {samples:,}: the run ends at {reached:,}, the {samples - reached:,} left over do not fill a "
        "step of the batch size there"
    ]


def _evaluation_data(config: Config) -> tuple[bool, bool]:
    """Whether the flags name data for validation and for the test."""
    data = config.data
    weights = [float(weight) for weight in (data.split or "0,0,0").split(",")]
    validation = weights[1] or data.valid_data_path or data.per_split_data_args_path
    return bool(validation), bool(weights[2] or data.test_data_path)


def _idle_flags(config: Config) -> list[str]:
    """Notes on flags that were given and do nothing in this combination, as in Megatron."""
    checkpoint, model = config.checkpoint, config.model
    rope = model.position_embedding_type == "rope"
    validation, test = _evaluation_data(config)
    evaluation = ("eval_iters", "eval_global_batch_size", "full_validation")
    conditions = (
        ("without data for validation", validation, ("eval_interval",)),
        ("without data for validation or test", validation or test, evaluation),
        (
            "without --save",
            checkpoint.save,
            ("save_interval", "async_save", "save_retain_interval", "keep_last", "log_progress"),
        ),
        ("without --load", checkpoint.load, ("no_load_optim", "no_load_rng", "exit_on_missing_checkpoint")),
        (
            "without --load",
            checkpoint.load or checkpoint.pretrained_checkpoint,
            ("finetune", "use_checkpoint_args"),
        ),
        (
            "without --position-embedding-type rope",
            rope,
            ("rotary_base", "rotary_percent", "rotary_interleaved", "use_rope_scaling"),
        ),
        ("without --use-rope-scaling", model.use_rope_scaling, ("rope_scaling_factor",)),
        ("without --fp16", config.precision.fp16, ("loss_scale", "initial_loss_scale", "loss_scale_window")),
        (
            "without --recompute-granularity or --recompute-activations",
            config.parallel.recompute_granularity,
            ("recompute_method", "recompute_num_layers"),
        ),
        (
            "without --recompute-granularity selective",
            config.parallel.recompute_granularity == "selective",
            ("recompute_modules",),
        ),
        ("without --wandb-project", config.logging.wandb_project, ("wandb_exp_name", "wandb_entity")),
        ("without --manual-gc", config.training.manual_gc, ("manual_gc_interval",)),
        ("without --profile", config.logging.profile, ("profile_step_start", "profile_step_end")),
        ("without --timeline", config.logging.timeline, ("timeline_step_start", "timeline_step_end")),
    )
    notes = [
        f"--{name.replace('_', '-')} changes nothing: {reason}"
        for name, reason in _ALWAYS_SO.items()
        if name in config.given
    ]
    group = config.parallel.microbatch_group_size_per_virtual_pipeline_stage
    size = config.parallel.pipeline_model_parallel_size
    if group not in (None, size):
        notes.append(
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} does nothing: torch's interleaved schedules "
            f"run groups of --pipeline-model-parallel-size {size}; the result is the same"
        )
    for reason, there, names in conditions:
        idle = [f"--{name.replace('_', '-')}" for name in names if name in config.given]
        if idle and not there:
            notes.append(f"{', '.join(idle)} {'does' if len(idle) == 1 else 'do'} nothing {reason}")
    return notes


def _compile_notes(config: Config) -> list[str]:
    """Where --compile leaves core attention out: run document by document, or under a tensor rank's own RNG state."""
    model, parallel = config.model, config.parallel
    own_state = parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel
    if not (parallel.compile and model.attention_dropout and (config.data.reset_attention_mask or own_state)):
        return []
    flag = "--reset-attention-mask" if config.data.reset_attention_mask else "--tensor-model-parallel-size"
    dropout = f"--attention-dropout {model.attention_dropout:g}"
    return [f"--compile leaves core attention out of its graphs: {dropout} with {flag}"]
