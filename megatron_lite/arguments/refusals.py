"""Refusals that are alike, as tables: flags that exclude, need or bound one another.

A flag is there when its field has another value than the default.
"""

from megatron_lite.config import FIELDS, Config, ConfigError, refuse_together
from megatron_lite.config.declare import broken_limit, flag_name

# Not together, because.
_EXCLUSIVE = (
    (("swiglu", "quick_geglu", "squared_relu", "activation"), "an MLP has one activation"),
    (("fp16", "bf16"), "one number format computes"),
    (("rampup_batch_size", "step_batch_size_schedule"), "both say how the batch grows"),
    (("lr_warmup_fraction", "lr_warmup_iters"), "both say how long"),
    (("lr_warmup_fraction", "lr_warmup_samples"), "both say how long"),
    (
        ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"),
        "the learning rate schedule comes from the flags or from the checkpoint",
    ),
)
# The first not without the second.
_NEEDS = (
    ("ckpt_step", "load"),
    ("ckpt_convert_format", "load"),
    ("ckpt_convert_format", "ckpt_convert_save"),
    ("ckpt_convert_save", "ckpt_convert_format"),
)
# The first is at most the second, where both have a value.
_AT_MOST = (
    ("seq_length", "max_position_embeddings"),
    ("vocab_size", "padded_vocab_size"),
    ("min_loss_scale", "initial_loss_scale"),
    ("lr_warmup_init", "lr"),
    ("start_weight_decay", "end_weight_decay"),
)
# The first is below the second, where the third is there.
_BELOW = (
    ("rope_scaling_low_freq_factor", "rope_scaling_high_freq_factor", "use_rope_scaling"),
    ("profile_step_start", "profile_step_end", "profile"),
    ("timeline_step_start", "timeline_step_end", "timeline"),
)


def check_ranges(config: Config) -> None:
    """Raise ConfigError for a number outside the limits that its field states."""
    for name, (_, item) in FIELDS.items():
        value = config.value(name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, (int, float)) and not isinstance(number, bool):
                wanted = broken_limit(number, item)
                if wanted is not None:
                    raise ConfigError(f"{flag_name(name)} is {number}, wanted {wanted}")


def check_tables(config: Config) -> None:
    """Raise ConfigError for the first row of the tables that the config breaks."""
    for names, reason in _EXCLUSIVE:
        refuse_together(*(config.shown(name) for name in names if config.is_set(name)), because=reason)
    for name, needed in _NEEDS:
        if config.is_set(name) and not config.is_set(needed):
            raise ConfigError(f"{config.shown(name)} needs {flag_name(needed)}")
    for low, high in _AT_MOST:
        refuse_more(config, low, high)
    for low, high, switch in _BELOW:
        if config.value(switch) and config.value(low) >= config.value(high):
            raise ConfigError(f"{config.shown(low)} has to be below {config.shown(high)}")


def refuse_more(config: Config, low: str, high: str) -> None:
    """Raise ConfigError when the first field is more than the second; None is neither more nor less."""
    if None not in (config.value(low), config.value(high)) and config.value(low) > config.value(high):
        raise ConfigError(f"{config.shown(low)} is more than {config.shown(high)}")


CHECKS = (check_tables,)
