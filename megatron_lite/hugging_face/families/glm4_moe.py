"""GLM-4.5: dense layers first, then mixtures: sigmoid scores with a correction bias, groups, a shared expert."""

import functools
from typing import Any

from megatron_lite.config.model import ModelConfig
from megatron_lite.hugging_face.families.llama import COMMON, NO_BIAS, WEIGHTS
from megatron_lite.hugging_face.families.llama import WIDTH as DENSE_WIDTH
from megatron_lite.hugging_face.family import Family, Row, Weight, always, same
from megatron_lite.hugging_face.fields import ConfigFields
from megatron_lite.hugging_face.mixtures import (
    CHOSEN,
    FUSED,
    OURS,
    THEIRS,
    WIDTH,
    behind_layers,
    shared_weights,
)
from megatron_lite.hugging_face.mixtures import WEIGHTS as MIXTURE
from megatron_lite.hugging_face.rope import read_rope, write_rope

ROTATED = 0.5  # of a head's channels where config.json is silent


def _read_layers(fields: ConfigFields) -> dict[str, Any]:
    layers = fields.take("num_hidden_layers", int)
    dense = fields.take("first_k_dense_replace", int, minimum=0) or 0
    if dense >= layers:
        fields.refuse(f"first_k_dense_replace = {dense} of {layers} layers (no layer has experts)")
    return {"moe_layer_freq": tuple(int(layer >= dense) for layer in range(layers))}


def _write_layers(model: ModelConfig) -> dict[str, Any]:
    first = next((layer for layer in range(model.num_layers) if model.has_experts(layer)), model.num_layers)
    return {"first_k_dense_replace": first}


def _read_router(fields: ConfigFields) -> dict[str, Any]:
    """Their score of a group is the sum of its best two, Megatron's of its best K / (chosen groups)."""
    groups, kept = fields.take("n_group", int), fields.take("topk_group", int)
    chosen, factor = fields.take("num_experts_per_tok", int), fields.take("routed_scaling_factor", float)
    normed = fields.take("norm_topk_prob", bool)
    if normed is (chosen == 1):
        fields.refuse(f"norm_topk_prob = {str(normed).lower()} and num_experts_per_tok = {chosen}")
    flags = {"moe_router_topk_scaling_factor": None if factor == 1 else factor}
    if groups == kept:  # all of them: no choice
        return flags
    if chosen != 2 * kept:
        fields.refuse(
            f"topk_group = {kept} and num_experts_per_tok = {chosen} (wanted two experts of a chosen group)"
        )
    return flags | {"moe_router_num_groups": groups, "moe_router_group_topk": kept}


def _write_router(model: ModelConfig) -> dict[str, Any]:
    return {
        "n_group": model.moe_router_num_groups or 1,
        "topk_group": model.moe_router_group_topk or 1,
        "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
        "norm_topk_prob": model.moe_router_topk > 1,
    }


def _read_shared(fields: ConfigFields) -> dict[str, Any]:
    count, width = fields.take("n_shared_experts", int), fields.take("moe_intermediate_size", int, True)
    return {"moe_shared_expert_intermediate_size": count * width}


def _write_shared(model: ModelConfig) -> dict[str, Any]:
    width = model.moe_shared_expert_intermediate_size or 0
    return {"n_shared_experts": max(1, width // model.moe_ffn_hidden_size) if model.num_experts else 1}


ROUTER = always(
    moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_dtype="fp32"
)
BIAS = Weight(f"{THEIRS}.gate.e_score_correction_bias", f"{OURS}.router.expert_bias")

FAMILY = Family(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    (
        *COMMON,
        DENSE_WIDTH,
        NO_BIAS,
        Row(functools.partial(read_rope, part=ROTATED), functools.partial(write_rope, partial=True)),
        same("attention_bias", "add_qkv_bias", bool),
        same("use_qk_norm", "qk_layernorm", bool),
        same("n_routed_experts", "num_experts", needed=True),
        CHOSEN,
        WIDTH,
        Row(_read_layers, _write_layers),
        Row(_read_router, _write_router),
        Row(_read_shared, _write_shared),
        ROUTER,
    ),
    behind_layers(WEIGHTS, (*MIXTURE, BIAS, *shared_weights("shared_experts"))),
    FUSED,
)
