"""A model from stored weights, without a process group."""

from collections.abc import Callable, Sequence

import torch

from megatron_lite.config import ModelConfig
from megatron_lite.model.gpt import GPTChunk

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ReadTensor = Callable[[str], torch.Tensor]
Shape = tuple[int, ...]


def load_chunk(
    model: ModelConfig,
    layers: Sequence[int],
    read: ReadTensor,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    **parts: bool,
) -> GPTChunk:
    """A chunk with the stored weights, ready to be run, not to be trained.

    Args:
        layers: GLOBAL numbers of its layers.
        read: gives a parameter by its global name.
        parts: has_embedding, has_lm_head of GPTChunk.
    """
    with torch.device("meta"):
        chunk = GPTChunk(model, layers, **parts)
    for parameter in chunk.parameters():  # not the buffers, whose format is their own
        parameter.data = parameter.data.to(dtype)
    chunk.to_empty(device=device)
    for name, tensor in (*chunk.named_global_parameters(), *chunk.named_global_buffers()):
        tensor.data.copy_(read(name))
    return chunk.eval().requires_grad_(False)


def parameter_shapes(model: ModelConfig) -> dict[str, Shape]:
    """{global name: shape} of the whole model."""
    with torch.device("meta"):
        chunk = GPTChunk(model, range(model.num_layers))
    return {name: tuple(parameter.shape) for name, parameter in chunk.named_global_parameters()}
