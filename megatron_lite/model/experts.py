"""A mixture of experts in place of an MLP: a router, E experts computed together, a shared expert.

Shapes: B micro batch, S sequence, T = B*S tokens, H hidden, F width of an expert, E experts, K experts of a token,
R = T*K rows, a token once for each of its experts, sorted by expert (stable, so that every layout has one order).

    layers.7.mlp.router.weight [E, H]                       layers.7.mlp.router.expert_bias [E], fp32, a buffer
    layers.7.mlp.experts.gate_proj.weight [E, F, H]         layers.7.mlp.experts.gate_proj.bias [E, F]
    layers.7.mlp.experts.down_proj.weight [E, H, F]         layers.7.mlp.shared_expert.up_proj.weight [F', H]
    layers.7.mlp.shared_expert_gate.weight [1, H]
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from megatron_lite.arithmetic.costs import GROUPED_MM_BYTES
from megatron_lite.config.model import ModelConfig
from megatron_lite.model.mlp import MLP
from megatron_lite.model.router import Router


class Choices(NamedTuple):
    """Choices [R] of experts, sorted by expert; of one expert the earlier choice first.

    order [R]: the number of the n-th sorted choice. place [R]: its inverse. experts [R]: sorted. ends [E], int32:
    choices up to each expert's last.
    """

    order: torch.Tensor
    place: torch.Tensor
    experts: torch.Tensor
    ends: torch.Tensor


def by_expert(choices: torch.Tensor, num_experts: int) -> Choices:
    """choices [R] of experts 0..E-1, sorted."""
    experts, order = choices.to(torch.int32).sort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    numbers = torch.arange(num_experts, dtype=torch.int32, device=experts.device)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    return Choices(order, place, experts, ends)


# (rows [A, H], weights [A, 1], which of the rank's experts [A], their number) -> outputs [A, H].
Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
# Rows [R, H], weights [R, 1] and ends [E], as for `Experts.forward`, on their way to the ranks that have the experts;
# what it gives is called with how this rank computes what came to it, and brings the outputs [R, H] of my rows back.
Exchange = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Callable[[Compute], torch.Tensor]]


class Mixture(nn.Module):
    """The sum of a token's experts, each times its weight, and of the shared expert where there is one.

    Set from outside:
        exchange: None where a rank has all experts.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.router = Router(config)
        self.experts = Experts(config)
        width = config.moe_shared_expert_intermediate_size
        self.shared_expert = MLP(config, width, config.expert_activation) if width else None
        gate = config.moe_shared_expert_gate
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False) if gate else None
        self.exchange: Exchange | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, S, H] -> [B, S, H]."""
        routing = self.router(x)
        chosen = routing.experts.shape[-1]
        choices = by_expert(routing.experts.flatten(), self.num_experts)
        order, place = choices.order, choices.place
        rows = Spread.apply(x.flatten(0, 1), order, place, chosen)  # [R, H]
        weights = Spread.apply(routing.weights.flatten(), order, place, 1)[:, None].to(x.dtype)  # [R, 1]
        if self.exchange is None:
            outputs = self.experts(rows, weights, choices.experts, choices.ends)
            shared = self._shared(x)
        else:
            through = self.exchange(rows, weights, choices.ends)
            shared = self._shared(x)  # while the rows are on their way
            outputs = through(self._unsorted)
        out = Collect.apply(outputs, order, place, x.shape)
        return out if shared is None else out + shared

    def _unsorted(
        self, rows: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, count: int
    ) -> torch.Tensor:
        """`Experts.forward` of rows in any order: those of one expert keep theirs."""
        choices = by_expert(experts, count)
        order, place = choices.order, choices.place
        rows, weights = (Spread.apply(part, order, place, 1) for part in (rows, weights))
        outputs = self.experts(rows, weights, choices.experts, choices.ends)
        return Collect.apply(outputs, order, place, outputs.shape)

    def _shared(self, x: torch.Tensor) -> torch.Tensor | None:
        if self.shared_expert is None:
            return None
        shared = self.shared_expert(x)
        if self.shared_expert_gate is not None:
            shared = torch.sigmoid(self.shared_expert_gate(x)) * shared
        return shared


class Experts(nn.Module):
    """E MLPs of one form. A row's weight multiplies between its expert's two linears, as in Megatron."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        count, hidden, ffn = config.num_experts, config.hidden_size, config.moe_ffn_hidden_size
        bias = not config.disable_bias_linear
        activation = config.expert_activation
        self.gate_proj = GroupedLinear(count, hidden, ffn, bias) if activation.num_inputs == 2 else None
        self.up_proj = GroupedLinear(count, hidden, ffn, bias)
        self.down_proj = GroupedLinear(count, ffn, hidden, bias)
        self.activate = activation.apply

    def forward(
        self, rows: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        """Each row through its expert: rows [R, H] by expert, weights [R, 1], experts [R], ends [E] -> [R, H]."""
        up = self.up_proj(rows, experts, ends)  # [R, F]
        inputs = (up,) if self.gate_proj is None else (self.gate_proj(rows, experts, ends), up)
        inner = self.activate(F, *inputs) * weights
        return self.down_proj(inner, experts, ends, weights)


class GroupedLinear(nn.Module):
    """E linears in one: weight [E, out, in], bias [E, out].

    Set from outside:
        local: a parameter's part of the experts of this rank.
    """

    def __init__(self, count: int, width_in: int, width_out: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width_out, width_in))
        self.bias = nn.Parameter(torch.empty(count, width_out)) if bias else None
        self.local: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor

    def forward(
        self,
        rows: torch.Tensor,
        experts: torch.Tensor,
        ends: torch.Tensor,
        weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """rows [R, in] sorted by their experts [R], which end at ends [E] -> [R, out]; weights [R, 1] of the bias."""
        out = grouped_product(rows, self.local(self.weight), ends)
        if self.bias is None:
            return out
        bias = F.embedding(experts, self.local(self.bias))  # [R, out]; its backward adds in a fixed order
        return out + (bias if weights is None else bias * weights)


def grouped_product(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """rows [R, in] sorted by expert, weight [E, out, in], ends [E] -> [R, out]: each row times its expert's matrix.

    By one kernel; fp64, and widths that it cannot take (arguments refuse them for a run), expert by expert, which on
    a CPU gives the same bits.
    """
    if takes_grouped_mm(rows.dtype, *weight.shape[1:]):
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([part @ matrix.T for part, matrix in zip(rows.split(sizes), weight)])


def takes_grouped_mm(dtype: torch.dtype, *widths: int) -> bool:
    """Whether F.grouped_mm computes in this dtype rows of these widths: fp64 not, nor rows of uneven bytes."""
    return dtype != torch.float64 and not any(width * dtype.itemsize % GROUPED_MM_BYTES for width in widths)


class Spread(torch.autograd.Function):
    """[T, ...] -> [R, ...]: row n is the token of the n-th of the sorted choices. `Collect` is its transpose.

    order [R]: number of the n-th sorted choice, token * K + rank; place [R]: its inverse. Both directions gather, so
    that no result depends on the order in which threads add.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, order: torch.Tensor, place: torch.Tensor, chosen: int
    ) -> torch.Tensor:
        ctx.save_for_backward(order, place)
        ctx.chosen, ctx.shape = chosen, tokens.shape
        return _spread(tokens, order, chosen)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _collect(gradient, ctx.saved_tensors[1], ctx.chosen, ctx.shape), None, None, None


class Collect(torch.autograd.Function):
    """[R, H] -> tokens of `shape`, [..., H]: the sum of a token's K rows."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, order: torch.Tensor, place: torch.Tensor, shape: torch.Size
    ) -> torch.Tensor:
        ctx.save_for_backward(order, place)
        ctx.chosen = max(1, rows.numel() // max(1, shape.numel()))
        return _collect(rows, place, ctx.chosen, shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        rows = _spread(gradient.flatten(0, -2), ctx.saved_tensors[0], ctx.chosen)
        return rows, None, None, None


def _spread(tokens: torch.Tensor, order: torch.Tensor, chosen: int) -> torch.Tensor:
    return tokens.index_select(0, order if chosen == 1 else order // chosen)


def _collect(rows: torch.Tensor, place: torch.Tensor, chosen: int, shape: torch.Size) -> torch.Tensor:
    placed = rows.index_select(0, place)
    if placed.shape == shape:
        return placed
    # Of K = 1 too the sum: FSDP warns at a module that returns a view.
    return placed.view(*shape[:-1], chosen, shape[-1]).sum(dim=-2)
