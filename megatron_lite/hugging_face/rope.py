"""The rotary fields of config.json: rope_theta and rope_scaling (transformers 4), rope_parameters (5). No torch."""

from typing import Any

from megatron_lite.config.declare import ConfigError
from megatron_lite.config.model import ModelConfig
from megatron_lite.hugging_face.fields import ConfigFields

PLACES = ("rope_parameters", "rope_scaling")
TOP_LEVEL = ("rope_theta", "partial_rotary_factor")
LLAMA3_FLAGS = {
    "factor": "rope_scaling_factor",
    "low_freq_factor": "rope_scaling_low_freq_factor",
    "high_freq_factor": "rope_scaling_high_freq_factor",
    "original_max_position_embeddings": "rope_scaling_original_max_position_embeddings",
}


def read_rope(fields: ConfigFields, part: float | None = None) -> dict[str, Any]:
    """The flags of the rotary embedding.

    Args:
        part: of a head's channels that the family rotates where the file is silent; None: it always rotates all.

    Raises:
        ConfigError: when two places of the file contradict each other (both values named), or a key is missing.
    """
    values = _merged(fields)
    theta = values.pop("rope_theta", None)
    theta = fields.take("rope_theta", float) if theta is None else theta
    fields.mark(*PLACES, *TOP_LEVEL)
    flags = {
        "position_embedding_type": "rope",
        "rotary_base": fields.checked("rope_theta", theta, float),
    }
    kind = values.pop("rope_type", "default")
    if part is not None:
        factor = values.pop("partial_rotary_factor", part)
        flags["rotary_percent"] = fields.checked("partial_rotary_factor", factor, float)
    elif (
        values.get("partial_rotary_factor") == 1.0
    ):  # other parts transformers' classes do not rotate, or fail
        values.pop("partial_rotary_factor")
    if kind == "llama3":
        missing = [key for key in LLAMA3_FLAGS if key not in values]
        if missing:
            raise ConfigError(f"{fields.where}: rope_type llama3 needs {missing[0]}")
        for key, flag in LLAMA3_FLAGS.items():
            flags[flag] = fields.checked(key, values.pop(key), int if key.startswith("original") else float)
        low, high = flags["rope_scaling_low_freq_factor"], flags["rope_scaling_high_freq_factor"]
        if low >= high:
            raise ConfigError(
                f"{fields.where}: low_freq_factor is {low:g}, wanted less than high_freq_factor {high:g}"
            )
        flags["use_rope_scaling"] = True
    elif kind != "default":
        values = {"rope_type": kind}
    for key, value in values.items():
        fields.refuse(f"{key} = {value!r}")
    return flags


def _merged(fields: ConfigFields) -> dict[str, Any]:
    """{key: value} of all places, logged; the old spelling "type" is rope_type."""
    places = {place: fields.content.get(place) or {} for place in PLACES}
    for place, content in places.items():
        if not isinstance(content, dict):
            raise ConfigError(f"{fields.where}: {place} is {content!r}, wanted an object")
    entries = [
        (f"{place}.{key}", key, value) for place, keys in places.items() for key, value in keys.items()
    ]
    entries += [(key, key, fields.content.get(key)) for key in TOP_LEVEL]
    merged: dict[str, tuple[str, Any]] = {}
    for name, key, value in entries:
        if value is None:
            continue
        other, before = merged.setdefault("rope_type" if key == "type" else key, (name, value))
        if before != value:
            raise ConfigError(f"{fields.where} contradicts itself: {other} is {before}, {name} is {value}")
    fields.log += [f"{name} = {value}" for name, value in merged.values()]
    return {key: value for key, (_, value) in merged.items()}


def write_rope(model: ModelConfig, partial: bool = False) -> dict[str, Any]:
    """The rotary fields of config.json in both spellings: transformers 4 and vLLM read the first, 5 the second.

    partial: the family may rotate a part of a head's channels.
    """
    scaling = None
    if model.use_rope_scaling:
        scaling = {"rope_type": "llama3"} | {key: getattr(model, flag) for key, flag in LLAMA3_FLAGS.items()}
    parameters = (scaling or {"rope_type": "default"}) | {"rope_theta": model.rotary_base}
    part = {"partial_rotary_factor": model.rotary_percent} if partial else {}
    rope = {"rope_theta": model.rotary_base, "rope_scaling": scaling, "rope_parameters": parameters | part}
    return rope | part
