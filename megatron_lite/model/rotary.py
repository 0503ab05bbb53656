"""Rotary position embeddings (Su et al. 2021, https://arxiv.org/abs/2104.09864), with Llama 3 frequency scaling.

Shapes: B micro batch, S sequence, N heads, D head width, R rotated width (R <= D, even).
"""

import math

import torch

from megatron_lite.config.model import ModelConfig


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Inverse frequencies [R/2] in fp32, scaled as Llama 3.1 does when --use-rope-scaling is set.

    The scaling keeps high frequencies, divides low ones by the factor and blends in between (the reference
    is `_compute_llama3_parameters` of transformers' modeling_rope_utils).
    """
    rotated = int(config.kv_channels * config.rotary_percent)
    rotated -= rotated % 2
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32, device="cpu") / rotated
    frequencies = 1.0 / (config.rotary_base**exponents)
    if not config.use_rope_scaling:
        return frequencies
    factor = config.rope_scaling_factor
    low, high = config.rope_scaling_low_freq_factor, config.rope_scaling_high_freq_factor
    original = config.rope_scaling_original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    blend = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / factor + blend * frequencies


class RotaryEmbedding:
    """Cosines and sines for positions; computed once per device for the positions 0..S-1.

    Not a module: it has no parameters and no buffers, so nothing of it is sharded, saved or cast.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.interleaved = config.rotary_interleaved
        self._frequencies = inverse_frequencies(config)
        self._cached: tuple[tuple[int, torch.device], Rotation] | None = None

    def __call__(
        self, seq_length: int, device: torch.device, position_ids: torch.Tensor | None
    ) -> "Rotation":
        """The rotation for positions 0..seq_length-1, or for position_ids [B, S] when given."""
        if position_ids is not None:
            return self._rotation(position_ids, device)
        key = (seq_length, device)
        if self._cached is None or self._cached[0] != key:
            self._cached = (key, self._rotation(torch.arange(seq_length, device=device)[None], device))
        return self._cached[1]

    def _rotation(self, positions: torch.Tensor, device: torch.device) -> "Rotation":
        if self._frequencies.device != device:
            self._frequencies = self._frequencies.to(device)  # once: the host waits for a copy to a GPU
        angles = positions[..., None].float() * self._frequencies  # [B|1, S, R/2]
        if self.interleaved:
            angles = angles.repeat_interleave(2, dim=-1)
        else:
            angles = torch.cat((angles, angles), dim=-1)  # [B|1, S, R]
        return Rotation(angles.cos()[:, :, None], angles.sin()[:, :, None], self.interleaved)


class Rotation:
    """Cosines and sines [B or 1, S, 1, R], applied to queries and keys.

    A plain object and not a tensor argument: FSDP's mixed precision casts tensor arguments of a layer to
    bf16, and positions past 256 need more than bf16's 8 bits.
    """

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> None:
        self.cos = cos
        self.sin = sin
        self.interleaved = interleaved

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate the first R channels of x [B, S, N, D]; the rest pass through. Computed in fp32 at least."""
        rotated_width = self.cos.shape[-1]
        rotated, rest = x[..., :rotated_width], x[..., rotated_width:]
        wide = rotated.to(torch.promote_types(rotated.dtype, torch.float32))
        turned = (wide * self.cos + _quarter_turn(wide, self.interleaved) * self.sin).to(x.dtype)
        return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), dim=-1)


def _quarter_turn(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """(a, b) -> (-b, a) for each rotated pair: halves (GPT-NeoX, Llama) or neighbours (GPT-J)."""
    if interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
        return torch.stack((-second, first), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
