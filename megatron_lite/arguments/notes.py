"""Notes on flags that were given and do nothing in this combination, as in Megatron."""

from megatron_lite.arithmetic.batch_size import BatchSchedule
from megatron_lite.config import Config
from megatron_lite.config.declare import flag_name, in_words

# What these flags ask for is so with and without them.
_ALWAYS_SO = {
    "calculate_per_token_loss": "the loss is the mean over the batch's unmasked tokens",
    "init_model_with_meta_device": "a model is built on the meta device",
    "use_cpu_initialization": "initial weights are drawn on the CPU, the same in every layout",
    "cp_comm_type": "context ranks gather keys and values, whatever it says; the result is the same",
}
# Flags that nothing reads without one of the flags (with this value) before them.
_IDLE_WITHOUT = (
    ("--save", "save_interval async_save save_retain_interval keep_last log_progress"),
    ("--load", "no_load_optim no_load_rng exit_on_missing_checkpoint"),
    ("--load or --pretrained-checkpoint", "finetune use_checkpoint_args"),
    ("--position-embedding-type rope", "rotary_base rotary_percent rotary_interleaved use_rope_scaling"),
    ("--use-rope-scaling", "rope_scaling_factor"),
    ("--fp16", "loss_scale initial_loss_scale loss_scale_window"),
    ("--recompute-granularity or --recompute-activations", "recompute_method recompute_num_layers"),
    ("--recompute-granularity selective", "recompute_modules"),
    ("--wandb-project", "wandb_exp_name wandb_entity"),
    ("--manual-gc", "manual_gc_interval"),
    ("--profile", "profile_step_start profile_step_end"),
    ("--timeline", "timeline_step_start timeline_step_end"),
)


def notes_on(config: Config) -> list[str]:
    """A sentence for each flag that changes nothing, and for samples or graphs that are not what was asked for."""
    given = {name: reason for name, reason in _ALWAYS_SO.items() if name in config.given}
    notes = [f"{flag_name(name)} changes nothing: {reason}" for name, reason in given.items()]
    return notes + _group_size(config) + _idle_flags(config) + _left_over(config) + _compile_notes(config)


def _idle_flags(config: Config) -> list[str]:
    data, notes = config.data, []
    weights = [float(weight) for weight in (data.split or "0,0,0").split(",")]
    validation = weights[1] or data.valid_data_path or data.per_split_data_args_path
    rows = [(needed, names, _is_given(config, needed)) for needed, names in _IDLE_WITHOUT]
    rows += [
        ("data for validation", "eval_interval", validation),
        (
            "data for validation or test",
            "eval_iters eval_global_batch_size full_validation",
            validation or weights[2] or data.test_data_path,
        ),
    ]
    for needed, names, there in rows:
        idle = [flag_name(name) for name in names.split() if name in config.given]
        if idle and not there:
            notes.append(f"{', '.join(idle)} {'does' if len(idle) == 1 else 'do'} nothing without {needed}")
    return notes


def _is_given(config: Config, needed: str) -> bool:
    """Whether one of '--flag or --flag value' is so."""
    for words in needed.split(" or "):
        flag, _, wanted = words.partition(" ")
        value = config.value(flag.removeprefix("--").replace("-", "_"))
        if in_words(value) == wanted if wanted else value:
            return True
    return False


def _group_size(config: Config) -> list[str]:
    group = config.parallel.microbatch_group_size_per_virtual_pipeline_stage
    size = config.parallel.pipeline_model_parallel_size
    if group in (None, size):
        return []
    return [
        f"--microbatch-group-size-per-virtual-pipeline-stage {group} does nothing: torch's interleaved schedules "
        f"run groups of --pipeline-model-parallel-size {size}; the result is the same"
    ]


def _left_over(config: Config) -> list[str]:
    samples, reached = config.training.train_samples, BatchSchedule.from_config(config).total_samples
    if samples is None or samples == reached:
        return []
    return [
        f"--train-samples {samples:,}: the run ends at {reached:,}, the {samples - reached:,} left over do not fill a "
        "step of the batch size there"
    ]


def _compile_notes(config: Config) -> list[str]:
    """Where --compile leaves core attention out: run document by document, or under a tensor rank's own RNG state."""
    model, parallel = config.model, config.parallel
    own_state = parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel
    if not (parallel.compile and model.attention_dropout and (config.data.reset_attention_mask or own_state)):
        return []
    flag = "--reset-attention-mask" if config.data.reset_attention_mask else "--tensor-model-parallel-size"
    return [
        f"--compile leaves core attention out of its graphs: {config.shown('attention_dropout')} with {flag}"
    ]
