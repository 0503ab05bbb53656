"""Qwen3-MoE: Qwen3 with mixtures of experts in some layers or all; a window is in all layers or in none."""

from typing import Any

from megatron_lite.config.model import ModelConfig
from megatron_lite.hugging_face.families.llama import NO_BIAS, ROWS, WEIGHTS
from megatron_lite.hugging_face.family import Family, Row, always, sliding_window_of, window_of
from megatron_lite.hugging_face.fields import ConfigFields
from megatron_lite.hugging_face.mixtures import EXPERTS, FUSED, LAYERS, NORMED, WIDTH, behind_layers
from megatron_lite.hugging_face.mixtures import WEIGHTS as MIXTURE


def _read_window(fields: ConfigFields) -> dict[str, Any]:
    windowed = fields.take("use_sliding_window", bool)
    width = fields.take("sliding_window", int, minimum=1 if windowed else 0)
    return {"window_size": window_of(width if windowed else None)}


def _write_window(model: ModelConfig) -> dict[str, Any]:
    width = sliding_window_of(model)
    return {"use_sliding_window": width is not None, "sliding_window": width}


FAMILY = Family(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    (
        *ROWS,
        NO_BIAS,
        Row(_read_window, _write_window),
        always(qk_layernorm=True),
        *EXPERTS,
        WIDTH,
        NORMED,
        LAYERS,
    ),
    behind_layers(WEIGHTS, MIXTURE),
    FUSED,
)
