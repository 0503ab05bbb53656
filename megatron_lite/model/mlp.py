"""The MLP of a layer. Shapes: B micro batch, S sequence, H hidden, F feed-forward width."""

import torch
import torch.nn.functional as F
from torch import nn

from megatron_lite.config.activations import Activation
from megatron_lite.config.model import ModelConfig


class MLP(nn.Module):
    """Up projection (with a gate beside it where the activation takes two inputs), activation, down projection.

    width and activation: those of a shared expert; default a dense layer's.
    """

    def __init__(
        self, config: ModelConfig, width: int | None = None, activation: Activation | None = None
    ) -> None:
        super().__init__()
        bias = not config.disable_bias_linear
        hidden, ffn = config.hidden_size, width or config.ffn_hidden_size
        activation = activation or config.mlp_activation
        self.gate_proj = nn.Linear(hidden, ffn, bias=bias) if activation.num_inputs == 2 else None
        self.up_proj = nn.Linear(hidden, ffn, bias=bias)
        self.down_proj = nn.Linear(ffn, hidden, bias=bias)
        self.activate = activation.apply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, S, H] -> [B, S, H]."""
        up = self.up_proj(x)  # [B, S, F]
        inputs = (up,) if self.gate_proj is None else (self.gate_proj(x), up)
        return self.down_proj(self.activate(F, *inputs))
