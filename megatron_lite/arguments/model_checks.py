"""Checks of the model: its heads, positions, attention kernel and vocabulary."""

from megatron_lite.arithmetic.vocabulary import known_vocabulary, with_vocabulary
from megatron_lite.config import Config, ConfigError
from megatron_lite.config.model import FLASH_MAX_WIDTH


def _check_model(config: Config) -> None:
    model = config.model
    if model.num_attention_heads % model.num_query_groups:
        raise ConfigError(
            f"{config.shown('num_attention_heads')} does not divide by {config.shown('num_query_groups')}"
        )
    if model.qk_layernorm_across_heads and not model.qk_layernorm:
        raise ConfigError(
            "--qk-layernorm-across-heads says over what --qk-layernorm normalises, which is not given: give it too"
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
    """Refuse a padded vocabulary that is too small, before the tokenizer is read where flags tell it."""
    size = known_vocabulary(config)
    # A run's tokenizer may be larger than --vocab-size; a plan takes the flag's word.
    if size is not None and (config.command.planning or config.data.tokenizer_type == "NullTokenizer"):
        with_vocabulary(config, size)


CHECKS = (_check_model, _check_attention, _check_vocabulary)
