"""Qwen3: Qwen2 with norms of each head's query and key for its biases."""

from megatron_lite.hugging_face.families.llama import NO_BIAS, ROWS, WEIGHTS
from megatron_lite.hugging_face.families.qwen2 import WINDOW
from megatron_lite.hugging_face.family import Family, always

FAMILY = Family("Qwen3ForCausalLM", "qwen3", (*ROWS, NO_BIAS, WINDOW, always(qk_layernorm=True)), WEIGHTS)
