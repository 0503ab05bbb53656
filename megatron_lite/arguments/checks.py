"""What flags cannot be together: each refusal is one sentence with the flags and the numbers.

`check_config` looks at a config whose derived values are filled in; nothing here changes one. Another concern's
checks are a file beside this one and a name in the list of `check_config`.
"""

from megatron_lite.arguments.expert_checks import check_experts, expert_notes
from megatron_lite.arguments.input_checks import (
    check_checkpoint,
    check_data_source,
    check_logging,
    check_not_empty,
    missing_files,
)
from megatron_lite.arguments.layout_checks import (
    check_pipeline,
    check_recompute,
    check_split_backward,
    check_tensor_and_context,
    check_world,
)
from megatron_lite.arguments.notes import notes_on
from megatron_lite.arguments.refusals import check_tables
from megatron_lite.arguments.training_checks import (
    check_batch,
    check_learning_rate,
    check_length,
    check_weight_decay,
)
from megatron_lite.arithmetic.costs import FLASH_MAX_WIDTH
from megatron_lite.arithmetic.vocabulary import known_vocabulary, with_vocabulary
from megatron_lite.config import FIELDS, Config, ConfigError
from megatron_lite.config.declare import broken_limit, flag_name


def check_ranges(config: Config) -> None:
    """Raise ConfigError for a number outside the limits that its field states."""
    for name, (_, item) in FIELDS.items():
        value = config.value(name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, (int, float)) and not isinstance(number, bool):
                wanted = broken_limit(number, item)
                if wanted is not None:
                    raise ConfigError(f"{flag_name(name)} is {number}, wanted {wanted}")


def check_config(config: Config) -> list[str]:
    """Raise ConfigError for the first contradiction.

    Returns:
        Notes on flags that do nothing in this combination, and on files that are not there where that is no error.
    """
    for check in (
        check_not_empty,
        check_length,
        check_learning_rate,
        check_tables,
        check_weight_decay,
        _check_model,
        _check_attention,
        check_world,
        check_experts,
        check_tensor_and_context,
        _check_vocabulary,
        check_recompute,
        check_batch,
        check_split_backward,
        check_pipeline,
        check_data_source,
        check_checkpoint,
        check_logging,
    ):
        check(config)
    missing = missing_files(config)
    if missing and not config.command.planning:
        more = f"; and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ConfigError("; ".join(missing[:3]) + more)
    return [f"not on this machine: {text}" for text in missing] + notes_on(config) + expert_notes(config)


def _check_model(config: Config) -> None:
    model = config.model
    if model.num_attention_heads % model.num_query_groups:
        raise ConfigError(
            f"{config.shown('num_attention_heads')} does not divide by {config.shown('num_query_groups')}"
        )
    rotated = int(model.kv_channels * model.rotary_percent)
    if model.position_embedding_type == "rope" and (rotated == 0 or rotated % 2):
        raise ConfigError(
            f"rotary positions turn pairs: {config.shown('rotary_percent')} of {config.shown('kv_channels')} is "
            f"{rotated}, wanted an even number above 0"
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


def _check_vocabulary(config: Config) -> None:
    """Refuse a padded vocabulary that tensor ranks cannot share, before the tokenizer is read where flags tell it."""
    size = known_vocabulary(config)
    # A run's tokenizer may be larger than --vocab-size; a plan takes the flag's word.
    if size is not None and (config.command.planning or config.data.tokenizer_type == "NullTokenizer"):
        with_vocabulary(config, size)
