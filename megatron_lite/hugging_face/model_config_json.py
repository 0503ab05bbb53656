"""ModelConfig -> config.json of a Hugging Face model. Imports no torch."""

from collections.abc import Callable, Mapping
from typing import Any

from megatron_lite.config import ConfigError, ModelConfig
from megatron_lite.hugging_face.families import FAMILIES, GPT2, LLAMA, MISTRAL, QWEN2, QWEN3
from megatron_lite.hugging_face.rope import rope_json


def choose_architecture(model: ModelConfig, wanted: str | None = None) -> str:
    """The architecture of transformers that computes what this model computes.

    Args:
        wanted: the one to take, or None for the first that fits.

    Raises:
        ConfigError: naming the flags that the wanted (or the nearest) architecture has no counterpart for.
    """
    if wanted is not None and wanted not in FAMILIES:
        raise ConfigError(f"--architecture is {wanted}, wanted one of {', '.join(FAMILIES)}")
    misfits = {name: check(model) for name, check in CHECKS.items() if wanted in (None, name)}
    best = min(misfits, key=lambda name: len(misfits[name]))
    if misfits[best]:
        others = "" if wanted else "; no other architecture fits better"
        raise ConfigError(f"{best} has no counterpart for {', '.join(misfits[best])}{others}")
    return best


def model_config_json(
    model: ModelConfig, architecture: str, dtype: str, beside: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of config.json.

    Args:
        model: with vocab_size known; the padding of the vocabulary is not told.
        architecture: as choose_architecture gives it.
        dtype: "float32", "bfloat16" or "float16".
        beside: what stands beside the maths: the ids of special tokens, fields of an imported config.json.
    """
    content = {"use_cache": True, **beside} | {
        "architectures": [architecture],
        "model_type": FAMILIES[architecture].model_type,
        "vocab_size": model.vocab_size,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        # transformers 4 reads the first, 5 the second.
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    content |= _gpt2(model) if architecture == GPT2 else _rotary(model, architecture)
    if not content.get("use_sliding_window", True):  # then these say nothing, as in the imported file
        content |= {key: beside[key] for key in ("sliding_window", "max_window_layers") if key in beside}
    return content


def _rotary(model: ModelConfig, architecture: str) -> dict[str, Any]:
    content = {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "max_position_embeddings": model.max_position_embeddings,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_epsilon,
        "attention_dropout": model.attention_dropout,
    } | rope_json(model)
    window = _sliding_window(model)
    if architecture == LLAMA:
        biases = not model.disable_bias_linear
        return content | {"attention_bias": biases, "mlp_bias": biases}
    if architecture == MISTRAL:
        return content | {"sliding_window": window}
    kind = "full_attention" if window is None else "sliding_attention"
    content |= {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": model.num_layers if window is None else 0,
        "layer_types": [kind] * model.num_layers,
    }
    return content | ({"attention_bias": False} if architecture == QWEN3 else {})


def _gpt2(model: ModelConfig) -> dict[str, Any]:
    return {
        "n_layer": model.num_layers,
        "n_embd": model.hidden_size,
        "n_inner": model.ffn_hidden_size,
        "n_head": model.num_attention_heads,
        "n_positions": model.max_position_embeddings,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": model.norm_epsilon,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
    }


def _sliding_window(model: ModelConfig) -> int | None:
    """transformers counts the token itself, Megatron the tokens to its left."""
    left = model.window_size[0] if model.window_size else -1
    return None if left < 0 else left + 1


def _rotary_misfits(model: ModelConfig) -> list[str]:
    """What no family with rotary positions has."""
    checks = {
        f"--position-embedding-type {model.position_embedding_type}": model.position_embedding_type != "rope",
        f"--normalization {model.normalization}": model.normalization != "RMSNorm",
        "an MLP without --swiglu": not model.swiglu,
        f"--rotary-percent {model.rotary_percent:g}": model.rotary_percent != 1.0,
    }
    return [flag for flag, misfits in checks.items() if misfits]


def _llama_misfits(model: ModelConfig) -> list[str]:
    checks = {
        "--qk-layernorm": model.qk_layernorm,
        "--add-qkv-bias": model.disable_bias_linear and model.add_qkv_bias,
        "--window-size": _sliding_window(model) is not None,
    }
    return _rotary_misfits(model) + [flag for flag, misfits in checks.items() if misfits]


def _mistral_misfits(model: ModelConfig) -> list[str]:
    checks = {
        "--qk-layernorm": model.qk_layernorm,
        "biases (missing --disable-bias-linear)": not model.disable_bias_linear,
        "--add-qkv-bias": model.disable_bias_linear and model.add_qkv_bias,
    }
    return _rotary_misfits(model) + [flag for flag, misfits in checks.items() if misfits]


def _qwen2_misfits(model: ModelConfig) -> list[str]:
    checks = {
        "--qk-layernorm": model.qk_layernorm,
        "biases (missing --disable-bias-linear)": not model.disable_bias_linear,
        "query, key and value without --add-qkv-bias": model.disable_bias_linear and not model.add_qkv_bias,
    }
    return _rotary_misfits(model) + [flag for flag, misfits in checks.items() if misfits]


def _qwen3_misfits(model: ModelConfig) -> list[str]:
    checks = {
        "attention without --qk-layernorm": not model.qk_layernorm,
        "biases (missing --disable-bias-linear)": not model.disable_bias_linear,
        "--add-qkv-bias": model.disable_bias_linear and model.add_qkv_bias,
    }
    return _rotary_misfits(model) + [flag for flag, misfits in checks.items() if misfits]


def _gpt2_misfits(model: ModelConfig) -> list[str]:
    width = model.num_attention_heads * model.kv_channels
    checks = {
        f"--position-embedding-type {model.position_embedding_type}": model.position_embedding_type
        != "learned_absolute",
        f"--normalization {model.normalization}": model.normalization != "LayerNorm",
        "--swiglu": model.swiglu,
        "--squared-relu": model.squared_relu,
        "--disable-bias-linear": model.disable_bias_linear,
        "--qk-layernorm": model.qk_layernorm,
        "--group-query-attention": model.num_query_groups != model.num_attention_heads,
        f"--kv-channels {model.kv_channels}": width != model.hidden_size,
        "--window-size": _sliding_window(model) is not None,
    }
    return [flag for flag, misfits in checks.items() if misfits]


CHECKS: dict[str, Callable[[ModelConfig], list[str]]] = {
    LLAMA: _llama_misfits,
    MISTRAL: _mistral_misfits,
    QWEN2: _qwen2_misfits,
    QWEN3: _qwen3_misfits,
    GPT2: _gpt2_misfits,
}
