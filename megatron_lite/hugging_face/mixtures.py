"""What families with experts share: rows of config.json and names of tensors. Imports no torch."""

from typing import Any

from megatron_lite.hugging_face.family import Row, Weight, same
from megatron_lite.hugging_face.fields import ConfigFields


def _read_width(fields: ConfigFields) -> dict[str, Any]:
    return dict.fromkeys(
        ("ffn_hidden_size", "moe_ffn_hidden_size"), fields.take("intermediate_size", int, True)
    )


# Families without dense layers have no other name for the width of an expert.
ONLY_WIDTH = Row(_read_width, lambda model: {"intermediate_size": model.moe_ffn_hidden_size})
WIDTH = same("moe_intermediate_size", "moe_ffn_hidden_size", needed=True)
CHOSEN = same("num_experts_per_tok", "moe_router_topk", needed=True)
EXPERTS = (same("num_experts", "num_experts", needed=True), CHOSEN)
# Weights of the chosen experts that sum to one are a softmax over these alone.
NORMED = Row(
    lambda fields: {"moe_router_pre_softmax": not fields.take("norm_topk_prob", bool)},
    lambda model: {"norm_topk_prob": not model.moe_router_pre_softmax},
)


def _read_layers(fields: ConfigFields) -> dict[str, Any]:
    """Layer i is a mixture when i + 1 divides by decoder_sparse_step and mlp_only_layers does not name it."""
    layers, step = fields.take("num_hidden_layers", int), fields.take("decoder_sparse_step", int)
    dense = fields.take("mlp_only_layers", list) or []
    pattern = tuple(int((layer + 1) % step == 0 and layer not in dense) for layer in range(layers))
    if not any(pattern):
        fields.refuse(f"decoder_sparse_step = {step} and mlp_only_layers = {dense} (no layer has experts)")
    return {"moe_layer_freq": pattern}


LAYERS = Row(
    _read_layers,
    lambda model: {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [n for n in range(model.num_layers) if not model.has_experts(n)],
    },
)

THEIRS, OURS = "model.layers.{layer}.mlp", "layers.{layer}.mlp"
ROUTER = (Weight(f"{THEIRS}.gate.weight", f"{OURS}.router.weight"),)
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
WEIGHTS = ROUTER + tuple(
    Weight(f"{THEIRS}.experts.{{expert}}.{name}.weight", f"{OURS}.experts.{name}.weight")
    for name in PROJECTIONS
)
FUSED = (
    Weight(
        f"{THEIRS}.experts.gate_up_proj",
        (f"{OURS}.experts.gate_proj.weight", f"{OURS}.experts.up_proj.weight"),
        rows=1,
    ),
    Weight(f"{THEIRS}.experts.down_proj", f"{OURS}.experts.down_proj.weight"),
)


def shared_weights(name: str) -> tuple[Weight, ...]:
    """The tensors of a shared expert that the family calls so."""
    return tuple(
        Weight(f"{THEIRS}.{name}.{part}.weight", f"{OURS}.shared_expert.{part}.weight")
        for part in PROJECTIONS
    )


def behind_layers(weights: tuple[Weight, ...], more: tuple[Weight, ...]) -> tuple[Weight, ...]:
    """A dense family's table with more tensors of each layer."""
    last = max(number for number, row in enumerate(weights) if "{layer}" in row.theirs) + 1
    return weights[:last] + more + weights[last:]
