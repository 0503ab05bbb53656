"""OLMoE: mixtures in every layer by a softmax over all experts, query and key normed over all heads at once."""

from megatron_lite.hugging_face.families.llama import COMMON, NO_BIAS, ROPE, WEIGHTS
from megatron_lite.hugging_face.family import Family, always
from megatron_lite.hugging_face.mixtures import EXPERTS, FUSED, NORMED, ONLY_WIDTH, behind_layers
from megatron_lite.hugging_face.mixtures import WEIGHTS as MIXTURE

FAMILY = Family(
    "OlmoeForCausalLM",
    "olmoe",
    (
        *COMMON,
        ROPE,
        NO_BIAS,
        always(qk_layernorm=True, qk_layernorm_across_heads=True),
        ONLY_WIDTH,
        *EXPERTS,
        NORMED,
    ),
    behind_layers(WEIGHTS, MIXTURE),
    FUSED,
)
