"""The feed-forward block. Shapes: B micro batch, S sequence, H hidden, F feed-forward width."""

import torch
import torch.nn.functional as F
from torch import nn

from megatron_lite.config import ModelConfig


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020), squared ReLU (Primer, So et al. 2021) or GELU, by the model's flags.

    GELU is the tanh form: Megatron's fused bias+GELU and GPT-2 use it.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        bias = not config.disable_bias_linear
        hidden, ffn = config.hidden_size, config.ffn_hidden_size
        self.gate_proj = nn.Linear(hidden, ffn, bias=bias) if config.swiglu else None
        self.up_proj = nn.Linear(hidden, ffn, bias=bias)
        self.down_proj = nn.Linear(ffn, hidden, bias=bias)
        self.squared_relu = config.squared_relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, S, H] -> [B, S, H]."""
        up = self.up_proj(x)  # [B, S, F]
        if self.gate_proj is not None:
            return self.down_proj(F.silu(self.gate_proj(x)) * up)
        if self.squared_relu:
            return self.down_proj(F.relu(up).square())
        return self.down_proj(F.gelu(up, approximate="tanh"))
