"""Mistral: Llama with a sliding window and without biases."""

from megatron_lite.hugging_face.families.llama import NO_BIAS, ROWS, WEIGHTS
from megatron_lite.hugging_face.family import Family, Row, sliding_window_of, window_of

WINDOW = Row(
    lambda fields: {"window_size": window_of(fields.take("sliding_window", int))},
    lambda model: {"sliding_window": sliding_window_of(model)},
)

FAMILY = Family("MistralForCausalLM", "mistral", (*ROWS, NO_BIAS, WINDOW), WEIGHTS)
