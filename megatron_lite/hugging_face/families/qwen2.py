"""Qwen2: Llama with biases in query, key and value, and a window that some layers may have."""

from typing import Any

from megatron_lite.config.model import ModelConfig
from megatron_lite.hugging_face.families.llama import NO_BIAS, ROWS, WEIGHTS
from megatron_lite.hugging_face.family import Family, Row, always, sliding_window_of, window_of
from megatron_lite.hugging_face.fields import ConfigFields


def _read_window(fields: ConfigFields) -> dict[str, Any]:
    """The window that all layers have, or none; what some layers have is refused."""
    num_layers = fields.take("num_hidden_layers", int)
    windowed = fields.take("use_sliding_window", bool)
    width = fields.take("sliding_window", int, minimum=1 if windowed else 0)  # 0 is written for none
    width = width if windowed else None
    first, kinds = fields.take("max_window_layers", int, minimum=0), fields.take("layer_types", list)
    if kinds is None:  # layers from max_window_layers on have the window
        count = 0 if width is None else max(0, num_layers - first)
        kinds = ["full_attention"] * (num_layers - count) + ["sliding_attention"] * count
    if len(kinds) != num_layers:
        fields.refuse(f"layer_types of {len(kinds)} layers, num_hidden_layers is {num_layers}")
    elif kinds == ["sliding_attention"] * num_layers and width is not None:
        return {"window_size": window_of(width)}
    elif kinds != ["full_attention"] * num_layers:
        fields.refuse(
            f"sliding_window = {width}, max_window_layers = {first} and layer_types {sorted(set(map(str, kinds)))} "
            f"over {num_layers} layers (a window is in all layers or in none)"
        )
    return {"window_size": None}


def _write_window(model: ModelConfig) -> dict[str, Any]:
    width = sliding_window_of(model)
    if width is None:
        return {"use_sliding_window": False, "layer_types": ["full_attention"] * model.num_layers}
    return {
        "use_sliding_window": True,
        "sliding_window": width,
        "max_window_layers": 0,
        "layer_types": ["sliding_attention"] * model.num_layers,
    }


WINDOW = Row(_read_window, _write_window)

FAMILY = Family("Qwen2ForCausalLM", "qwen2", (*ROWS, NO_BIAS, WINDOW, always(add_qkv_bias=True)), WEIGHTS)
