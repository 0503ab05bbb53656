"""Layer and RMS norms, plain and zero-centred (--apply-layernorm-1p stores weight - 1)."""

import torch
import torch.nn.functional as F
from torch import nn

from megatron_lite.config.model import ModelConfig


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm whose weight may be stored as w - 1, so that weight decay pulls the gain towards 1."""

    def __init__(self, width: int, eps: float, zero_centered: bool) -> None:
        super().__init__(width, eps=eps)
        self.zero_centered = zero_centered

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., width] -> [..., width]."""
        weight = self.weight + 1 if self.zero_centered else self.weight
        return F.layer_norm(x, self.normalized_shape, weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm (Zhang and Sennrich 2019) whose weight may be stored as w - 1."""

    def __init__(self, width: int, eps: float, zero_centered: bool) -> None:
        super().__init__(width, eps=eps)
        self.zero_centered = zero_centered

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., width] -> [..., width]."""
        weight = self.weight + 1 if self.zero_centered else self.weight
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


def build_norm(config: ModelConfig, width: int) -> nn.Module:
    """The norm that --normalization names, over the last dim of the given width."""
    kind = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}[config.normalization]
    return kind(width, config.norm_epsilon, config.apply_layernorm_1p)
