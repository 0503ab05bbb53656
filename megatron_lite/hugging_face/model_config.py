"""config.json of a Hugging Face model <-> ModelConfig. Imports no torch."""

from collections.abc import Mapping
from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any, get_type_hints

from megatron_lite.arithmetic.vocabulary import padded_vocabulary
from megatron_lite.config.declare import ConfigError, check_stored, flag_name
from megatron_lite.config.model import ModelConfig
from megatron_lite.hugging_face.families import FAMILIES
from megatron_lite.hugging_face.family import Family
from megatron_lite.hugging_face.fields import ConfigFields, words

# Flags that change no logits, follow from others, or are compared by what they mean (activation_name).
NOT_COMPARED = words(
    """
    hidden_dropout attention_dropout init_method_std attention_backend cross_entropy_loss_fusion
    make_vocab_size_divisible_by padded_vocab_size group_query_attention swiglu squared_relu activation
    moe_router_dtype moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff
    moe_router_bias_update_rate moe_per_layer_logging
    """
)
# What no family of transformers has; the weights are rewritten where that changes nothing.
REWRITTEN = frozenset(("apply_layernorm_1p", "rotary_interleaved"))


def family_of(content: dict[str, Any], where: str) -> Family:
    """The family that config.json names.

    Raises:
        ConfigError: for an architecture that is not among FAMILIES.
    """
    names, model_type = content.get("architectures"), content.get("model_type")
    if not names:  # then the type alone decides
        names = [family.architecture for family in FAMILIES.values() if family.model_type == model_type]
    if not isinstance(names, list) or len(names) != 1 or str(names[0]) not in FAMILIES:
        raise ConfigError(
            f"{where}: architectures is {content.get('architectures')} and model_type {model_type}, wanted one of "
            f"{', '.join(FAMILIES)}"
        )
    family = FAMILIES[names[0]]
    if model_type not in (None, family.model_type):
        raise ConfigError(
            f"{where} contradicts itself: architectures is {names[0]}, model_type is {model_type}"
        )
    return family


def read_model_config(
    content: dict[str, Any], where: str, vocabulary_multiple: int = 128
) -> tuple[ModelConfig, Family, list[str]]:
    """The flags of a model by its config.json.

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
    fields = ConfigFields(content, family.architecture, family.model_type, where)
    flags = family.read(fields)
    heads, groups, hidden = (
        flags[name] for name in ("num_attention_heads", "num_query_groups", "hidden_size")
    )
    if hidden % heads and flags["kv_channels"] == hidden // heads:
        raise ConfigError(f"{where}: the width {hidden:,} does not divide by {heads:,} heads")
    if heads % groups:
        raise ConfigError(
            f"{where}: num_attention_heads {heads:,} does not divide by num_key_value_heads {groups:,}"
        )
    fields.finish()
    model = ModelConfig(**flags, make_vocab_size_divisible_by=vocabulary_multiple)
    model = replace(model, padded_vocab_size=padded_vocabulary(model, model.vocab_size, tensor_size=1))
    kinds = get_type_hints(ModelConfig)
    for item in fields_of(ModelConfig):
        name = f"{where}: {flag_name(item.name)} by its fields"
        check_stored(name, getattr(model, item.name), item, kinds[item.name])
    return model, family, fields.log


def command_line_of(model: ModelConfig) -> list[str]:
    """The words of a command line that give these model flags: what differs from the defaults."""
    line = []
    for item in fields_of(ModelConfig):
        value = getattr(model, item.name)
        if value == item.default or item.name == "padded_vocab_size":  # it follows from vocab_size
            continue
        line += [flag_name(item.name), *([] if value is True else [_shown(value)])]
    return line


def choose_family(model: ModelConfig, wanted: str | None = None) -> Family:
    """The family that computes what this model computes.

    Args:
        wanted: the architecture to take, or None for the first that fits.

    Raises:
        ConfigError: naming the flags that the wanted (or the nearest) architecture has no counterpart for.
    """
    if wanted is not None and wanted not in FAMILIES:
        raise ConfigError(f"--architecture is {wanted}, wanted one of {', '.join(FAMILIES)}")
    mixture = bool(model.num_experts)
    asked = {
        name: family
        for name, family in FAMILIES.items()
        if name == wanted or (wanted is None and family.is_mixture == mixture)
    }
    misfits = {name: _misfits(model, family) for name, family in asked.items()}
    best = min(misfits, key=lambda name: len(misfits[name]))
    if misfits[best]:
        others = "" if wanted else "; no other architecture fits better"
        raise ConfigError(f"{best} has no counterpart for {', '.join(misfits[best])}{others}")
    return FAMILIES[best]


def model_config_json(
    model: ModelConfig, family: Family, dtype: str, beside: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of config.json.

    Args:
        model: with vocab_size known; the padding of the vocabulary is not written.
        dtype: "float32", "bfloat16" or "float16".
        beside: what stands beside the maths: the ids of special tokens, fields of an imported config.json.
    """
    return (
        {"use_cache": True, **beside}
        | {"architectures": [family.architecture], "model_type": family.model_type}
        | {"torch_dtype": dtype, "dtype": dtype}  # transformers 4 reads the first, 5 the second
        | family.write(model)
    )


def _misfits(model: ModelConfig, family: Family) -> list[str]:
    """The flags that are lost when the model is written as config.json of the family and read back."""
    if family.is_mixture != bool(model.num_experts):
        return [
            f"--num-experts {model.num_experts}" if model.num_experts else "a model without --num-experts"
        ]
    fields = ConfigFields(family.write(model), family.architecture, family.model_type, "config.json")
    before, after = _computed(model), _computed(ModelConfig(**family.read(fields)))
    names = [name for name in before if before[name] != after.get(name)]
    return [
        f"a model without {flag_name(name)}"
        if before[name] is False
        else flag_name(name)
        if before[name] is True
        else f"{flag_name(name)} {_shown(before[name])}"
        for name in names
    ]


def _computed(model: ModelConfig) -> dict[str, Any]:
    """{flag: value} of what decides a model's logits, in one form for models that compute the same."""
    unread = NOT_COMPARED | REWRITTEN
    values = {item.name: getattr(model, item.name) for item in fields_of(model) if item.name not in unread}
    values["activation"] = model.activation_name
    values["add_qkv_bias"] = model.add_qkv_bias and model.disable_bias_linear
    mixtures = tuple(model.has_experts(layer) for layer in range(model.num_layers))
    values["moe_layer_freq"] = mixtures
    if all(mixtures):  # there is no dense MLP
        values.pop("ffn_hidden_size")
    if model.moe_router_score_function == "sigmoid":
        values.pop("moe_router_pre_softmax")
    values["moe_router_topk_scaling_factor"] = model.moe_router_topk_scaling_factor or 1.0
    if model.window_size and model.window_size[0] < 0:
        values["window_size"] = None
    values["num_experts"] = model.num_experts or None
    idle = () if model.num_experts else ("moe_",)
    idle += () if model.use_rope_scaling else ("rope_scaling",)
    idle += () if model.position_embedding_type == "rope" else ("rope_", "rotary_", "use_rope_")
    return {name: value for name, value in values.items() if not name.startswith(idle)}


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
