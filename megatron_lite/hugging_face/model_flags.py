"""config.json of a Hugging Face model -> ModelConfig. Imports no torch."""

from dataclasses import fields as fields_of
from typing import Any, get_type_hints

from megatron_lite.config import ConfigError, ModelConfig
from megatron_lite.config.declare import check_stored
from megatron_lite.hugging_face.families import FAMILIES, GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, Family
from megatron_lite.hugging_face.fields import ConfigFields
from megatron_lite.hugging_face.rope import read_rope

# GELU's tanh form under the names of transformers.
TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")


def family_of(content: dict[str, Any], where: str) -> Family:
    """The family that config.json names.

    Raises:
        ConfigError: for an architecture that is not among FAMILIES.
    """
    names = content.get("architectures") or []
    wanted = f"wanted one of {', '.join(FAMILIES)}"
    if not names:
        by_type = [family for family in FAMILIES.values() if family.model_type == content.get("model_type")]
        if not by_type:
            raise ConfigError(
                f"{where} names no architectures and model_type is {content.get('model_type')}, {wanted}"
            )
        return by_type[0]
    if not isinstance(names, list) or len(names) != 1 or str(names[0]) not in FAMILIES:
        shown = ", ".join(map(str, names)) if isinstance(names, list) else names
        raise ConfigError(f"{where}: architectures is {shown}, {wanted}")
    family = FAMILIES[names[0]]
    if content.get("model_type", family.model_type) != family.model_type:
        raise ConfigError(
            f"{where} contradicts itself: architectures is {names[0]}, model_type is {content['model_type']}"
        )
    return family


def read_model_config(
    content: dict[str, Any], where: str, vocabulary_multiple: int = 128
) -> tuple[ModelConfig, Family, list[str]]:
    """What config.json says, as flags.

    Args:
        content: the parsed file.
        where: its name, for messages.
        vocabulary_multiple: --make-vocab-size-divisible-by.

    Returns:
        The model's flags (vocab_size and padded_vocab_size filled in), the family, one line per value taken.

    Raises:
        ConfigError: for a field that is missing, contradicts another, or changes the maths in a way this model
            cannot follow.
    """
    family = family_of(content, where)
    fields = ConfigFields(content, family, where)
    flags = _gpt2(fields) if family.architecture == GPT2 else _rotary(fields)
    heads, hidden = flags["num_attention_heads"], flags["hidden_size"]
    if flags["kv_channels"] is None:
        if hidden % heads:
            raise ConfigError(f"{where}: the width {hidden:,} does not divide by {heads:,} heads")
        flags["kv_channels"] = hidden // heads
    if heads % flags["num_query_groups"]:
        raise ConfigError(
            f"{where}: num_attention_heads {heads:,} does not divide by num_key_value_heads "
            f"{flags['num_query_groups']:,}"
        )
    flags["group_query_attention"] = flags["num_query_groups"] != heads
    fields.finish()
    vocabulary = flags["vocab_size"]
    model = ModelConfig(
        **flags,
        make_vocab_size_divisible_by=vocabulary_multiple,
        padded_vocab_size=-(-vocabulary // vocabulary_multiple) * vocabulary_multiple,
    )
    _check_limits(model, where)
    return model, family, fields.log


def _check_limits(model: ModelConfig, where: str) -> None:
    kinds = get_type_hints(ModelConfig)
    for item in fields_of(ModelConfig):
        name = f"{where}: --{item.name.replace('_', '-')} by its fields"
        check_stored(name, getattr(model, item.name), item, kinds[item.name])


def command_line_of(model: ModelConfig) -> list[str]:
    """The words of a command line that give these model flags: what differs from the defaults."""
    words = []
    for item in fields_of(ModelConfig):
        value = getattr(model, item.name)
        if value == item.default or item.name == "padded_vocab_size":  # it follows from vocab_size
            continue
        shown = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        words += [f"--{item.name.replace('_', '-')}", *([] if value is True else [shown])]
    return words


def _rotary(fields: ConfigFields) -> dict[str, Any]:
    """Llama and its kin: RMSNorm, rotary positions, SwiGLU."""
    architecture = fields.family.architecture
    heads = fields.take("num_attention_heads", int)
    flags = {
        "num_layers": fields.take("num_hidden_layers", int),
        "hidden_size": fields.take("hidden_size", int),
        "ffn_hidden_size": fields.take("intermediate_size", int),
        "num_attention_heads": heads,
        "num_query_groups": fields.take("num_key_value_heads", int) or heads,
        "kv_channels": fields.take("head_dim", int),
        "max_position_embeddings": fields.take("max_position_embeddings", int),
        "normalization": "RMSNorm",
        "norm_epsilon": fields.take("rms_norm_eps", float),
        "swiglu": True,
        "disable_bias_linear": True,
        "add_qkv_bias": architecture == QWEN2,
        "qk_layernorm": architecture == QWEN3,
        "untie_embeddings_and_output_weights": not fields.take("tie_word_embeddings", bool),
        "hidden_dropout": 0.0,
        "attention_dropout": fields.take("attention_dropout", float) or 0.0,
        "init_method_std": fields.take("initializer_range", float),
        "vocab_size": fields.take("vocab_size", int),
    }
    activation = fields.take("hidden_act", str)
    if activation not in ("silu", "swish"):
        fields.refuse(f"hidden_act = {activation!r}")
    flags |= read_rope(fields)
    if architecture == LLAMA:
        flags["disable_bias_linear"] = not _llama_biases(fields)
    elif architecture == MISTRAL:
        flags["window_size"] = _window(fields.take("sliding_window", int))
    else:
        flags["window_size"] = _window_of_layers(fields, flags["num_layers"])
    return flags


def _llama_biases(fields: ConfigFields) -> bool:
    """Biases are on all linear layers here or on none."""
    attention, mlp = (fields.take(name, bool) or False for name in ("attention_bias", "mlp_bias"))
    if attention != mlp:
        fields.refuse(f"attention_bias = {str(attention).lower()} but mlp_bias = {str(mlp).lower()}")
    return attention and mlp


def _window(sliding_window: int | None) -> tuple[int, int] | None:
    """transformers counts the token itself, Megatron the tokens to its left."""
    return None if sliding_window is None else (sliding_window - 1, 0)


def _window_of_layers(fields: ConfigFields, num_layers: int) -> tuple[int, int] | None:
    """Qwen's window, which may be set for some layers only; here all layers have one, or none has."""
    asked = fields.take("use_sliding_window", bool)
    width = fields.take("sliding_window", int)
    first = fields.content.get("max_window_layers", fields.family.defaults["max_window_layers"])
    kinds = fields.take("layer_types", list)
    fields.mark("max_window_layers")
    windowed = asked and width is not None
    if kinds is None:
        kinds = [
            "sliding_attention" if windowed and i >= first else "full_attention" for i in range(num_layers)
        ]
        if windowed:
            fields.log.append(f"max_window_layers = {first}: layers from there on have the window")
    if not all(isinstance(kind, str) for kind in kinds) or len(kinds) != num_layers:
        fields.refuse(f"layer_types of {len(kinds)} layers, num_hidden_layers is {num_layers}")
        return None
    if set(kinds) == {"full_attention"}:
        return None
    if set(kinds) == {"sliding_attention"} and windowed:
        return _window(width)
    fields.refuse(
        f"use_sliding_window = {str(bool(asked)).lower()}, sliding_window = {width}, max_window_layers = {first} and "
        f"layer_types {sorted(set(map(str, kinds)))} over {num_layers} layers (a window is in all layers or in none)"
    )
    return None


# Names that transformers' GPT2Config takes for others.
GPT2_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


def _gpt2(fields: ConfigFields) -> dict[str, Any]:
    for alias, name in GPT2_ALIASES.items():
        fields.join(name, alias)
    hidden, heads = fields.take("n_embd", int), fields.take("n_head", int)
    activation = fields.take("activation_function", str)
    if activation not in TANH_GELU:
        fields.refuse(f"activation_function = {activation!r}")
    residual, embedding = fields.take("resid_pdrop", float), fields.take("embd_pdrop", float)
    if residual != embedding:
        fields.refuse(f"resid_pdrop = {residual} but embd_pdrop = {embedding}")
    return {
        "num_layers": fields.take("n_layer", int),
        "hidden_size": hidden,
        "ffn_hidden_size": fields.take("n_inner", int) or 4 * hidden,
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "kv_channels": None,
        "max_position_embeddings": fields.take("n_positions", int),
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "norm_epsilon": fields.take("layer_norm_epsilon", float),
        "untie_embeddings_and_output_weights": not fields.take("tie_word_embeddings", bool),
        "hidden_dropout": residual,
        "attention_dropout": fields.take("attn_pdrop", float),
        "init_method_std": fields.take("initializer_range", float),
        "vocab_size": fields.take("vocab_size", int),
    }
