"""The rotary fields of config.json: rope_theta and rope_scaling (transformers 4), rope_parameters (5). No torch."""

from typing import Any

from megatron_lite.config import ConfigError, ModelConfig
from megatron_lite.hugging_face.fields import ConfigFields

LLAMA3_KEYS = {
    "factor": "rope_scaling_factor",
    "low_freq_factor": "rope_scaling_low_freq_factor",
    "high_freq_factor": "rope_scaling_high_freq_factor",
    "original_max_position_embeddings": "rope_scaling_original_max_position_embeddings",
}


def read_rope(fields: ConfigFields) -> dict[str, Any]:
    """The ModelConfig fields of the rotary embedding.

    Raises:
        ConfigError: when two places of the file contradict each other (both values named), or a key is missing.
    """
    places = {name: _place(fields, name) for name in ("rope_parameters", "rope_scaling")}
    top = {
        name: fields.content[name]
        for name in ("rope_theta", "partial_rotary_factor")
        if name in fields.content
    }
    merged: dict[str, tuple[str, Any]] = {}
    for place, content in (*places.items(), ("", top)):
        for key, value in content.items():
            name = f"{place}.{key}" if place else key
            if value is not None and key in merged and merged[key][1] != value:
                other, seen = merged[key]
                raise ConfigError(f"{fields.where} contradicts itself: {other} is {seen}, {name} is {value}")
            if value is not None:
                merged.setdefault(key, (name, value))
    values = {key: value for key, (_, value) in merged.items()}
    fields.log += [f"{name} = {value}" for name, value in merged.values()]
    return _flags(fields, values)


def _place(fields: ConfigFields, name: str) -> dict[str, Any]:
    """A dict of rotary settings with the old spelling "type" put right."""
    fields.mark(name, "rope_theta", "partial_rotary_factor")
    content = fields.content.get(name)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{fields.where}: {name} is {content!r}, wanted an object")
    content = dict(content)
    old = content.pop("type", None)
    if old is not None and content.setdefault("rope_type", old) != old:
        raise ConfigError(
            f"{fields.where} contradicts itself: {name}.rope_type is {content['rope_type']}, {name}.type is {old}"
        )
    return content


def _flags(fields: ConfigFields, values: dict[str, Any]) -> dict[str, Any]:
    kind = values.pop("rope_type", "default")
    theta = values.pop("rope_theta", None)
    if theta is None:
        theta = fields.take("rope_theta", float)
    flags = {"position_embedding_type": "rope", "rotary_base": _positive(fields, "rope_theta", theta)}
    if values.get("partial_rotary_factor", 1.0) != 1.0:
        # transformers' classes of these families rotate the whole head, or fail, whatever the field says.
        fields.refuse(f"partial_rotary_factor = {values['partial_rotary_factor']}")
    values.pop("partial_rotary_factor", None)
    if kind == "llama3":
        flags["use_rope_scaling"] = True
        for key, flag in LLAMA3_KEYS.items():
            if key not in values:
                raise ConfigError(f"{fields.where}: rope_type llama3 needs {key}")
            number = _positive(fields, key, values.pop(key))
            flags[flag] = int(number) if key == "original_max_position_embeddings" else number
        low, high = flags["rope_scaling_low_freq_factor"], flags["rope_scaling_high_freq_factor"]
        if low >= high:
            raise ConfigError(
                f"{fields.where}: low_freq_factor is {low:g}, wanted less than high_freq_factor {high:g}"
            )
    elif kind != "default":
        fields.refuse(f"rope_type = {kind!r}")
        return flags
    for key, value in values.items():
        fields.refuse(f"the rotary setting {key} = {value}")
    return flags


def _positive(fields: ConfigFields, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError(f"{fields.where}: {name} is {value!r}, wanted a positive number")
    return float(value)


def rope_json(model: ModelConfig) -> dict[str, Any]:
    """The rotary fields of config.json in both spellings: transformers 4 and vLLM read the first, 5 the second."""
    scaling = None
    if model.use_rope_scaling:
        scaling = {"rope_type": "llama3"} | {key: getattr(model, flag) for key, flag in LLAMA3_KEYS.items()}
    parameters = (scaling or {"rope_type": "default"}) | {"rope_theta": model.rotary_base}
    return {"rope_theta": model.rotary_base, "rope_scaling": scaling, "rope_parameters": parameters}
