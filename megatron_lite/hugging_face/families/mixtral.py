"""Mixtral: Mistral with a mixture of experts in every layer, weights by a softmax over the chosen ones."""

from megatron_lite.hugging_face.families.llama import COMMON, NO_BIAS, ROPE, WEIGHTS
from megatron_lite.hugging_face.families.mistral import WINDOW
from megatron_lite.hugging_face.family import Family, Weight
from megatron_lite.hugging_face.mixtures import EXPERTS, FUSED, ONLY_WIDTH, OURS, ROUTER, behind_layers

THEIRS = "model.layers.{layer}.block_sparse_moe"
NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
MIXTURE = (
    Weight(f"{THEIRS}.gate.weight", f"{OURS}.router.weight"),
    *(
        Weight(f"{THEIRS}.experts.{{expert}}.{name}.weight", f"{OURS}.experts.{ours}.weight")
        for name, ours in NAMES.items()
    ),
)

FAMILY = Family(
    "MixtralForCausalLM",
    "mixtral",
    (*COMMON, ROPE, NO_BIAS, WINDOW, ONLY_WIDTH, *EXPERTS),
    behind_layers(WEIGHTS, MIXTURE),
    ROUTER + FUSED,
)
