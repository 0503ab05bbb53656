"""The feed-forward block. Shapes: B micro batch, S sequence, H hidden, F feed-forward width."""

import torch
import torch.nn.functional as F
from torch import nn

from megatron_lite.config import ModelConfig


class MLP(nn.Module):
    """Up projection (with a gate beside it where the activation takes two inputs), activation, down projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        bias = not config.disable_bias_linear
        hidden, ffn = config.hidden_size, config.ffn_hidden_size
        self.gate_proj = nn.Linear(hidden, ffn, bias=bias) if config.mlp_activation.num_inputs == 2 else None
        self.up_proj = nn.Linear(hidden, ffn, bias=bias)
        self.down_proj = nn.Linear(ffn, hidden, bias=bias)
        self.activate = config.mlp_activation.apply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, S, H] -> [B, S, H]."""
        up = self.up_proj(x)  # [B, S, F]
        inputs = (up,) if self.gate_proj is None else (self.gate_proj(x), up)
        return self.down_proj(self.activate(F, *inputs))
