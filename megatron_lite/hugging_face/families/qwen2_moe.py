"""Qwen2-MoE: Qwen2 with mixtures of experts, and beside them a shared expert behind a gate."""

from megatron_lite.hugging_face.families.llama import NO_BIAS, ROWS, WEIGHTS
from megatron_lite.hugging_face.families.qwen2 import WINDOW
from megatron_lite.hugging_face.family import Family, Row, Weight, always, same
from megatron_lite.hugging_face.mixtures import (
    EXPERTS,
    FUSED,
    LAYERS,
    NORMED,
    OURS,
    THEIRS,
    WIDTH,
    behind_layers,
    shared_weights,
)
from megatron_lite.hugging_face.mixtures import WEIGHTS as MIXTURE

BIASES = Row(
    lambda fields: {"add_qkv_bias": fields.take("qkv_bias", bool) is not False},
    lambda model: {"qkv_bias": model.add_qkv_bias},
)
GATE = Weight(f"{THEIRS}.shared_expert_gate.weight", f"{OURS}.shared_expert_gate.weight")

FAMILY = Family(
    "Qwen2MoeForCausalLM",
    "qwen2_moe",
    (
        *ROWS,
        NO_BIAS,
        WINDOW,
        BIASES,
        *EXPERTS,
        WIDTH,
        NORMED,
        LAYERS,
        same("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
        always(moe_shared_expert_gate=True),
    ),
    behind_layers(WEIGHTS, (*MIXTURE, *shared_weights("shared_expert"), GATE)),
    FUSED,
)
