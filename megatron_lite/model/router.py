"""The router of a mixture of experts: which experts a token is sent to, with what weights, and the losses that
balance them.

Shapes: B micro batch, S sequence (the positions of this rank), H hidden, E experts, K experts of a token, G groups.

Experts of equal score are chosen by the lowest number, on every device and in every layout. The losses are attached
to the weights: they change gradients, not outputs. What the log and the expert bias need of a microbatch (tokens of
each expert, the losses) is taken in when the backward passes the attachment, which it does once, whatever is
recomputed, and never in evaluation.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from megatron_lite.config.model import LOSS_NAMES, ModelConfig

SMALLEST_SUM = 1e-20  # added to the sum of sigmoid scores, as in Megatron
_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Routing(NamedTuple):
    """What the router says of each token: its experts [B, S, K] and the weights [B, S, K] of their outputs."""

    experts: torch.Tensor
    weights: torch.Tensor


@dataclass
class Tally:
    """Sums over the microbatches whose backward has run: tokens of each expert [E], losses without coefficients."""

    tokens: torch.Tensor | None = None
    losses: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, tokens: torch.Tensor, losses: dict[str, torch.Tensor]) -> None:
        """One microbatch."""
        self.tokens = tokens if self.tokens is None else self.tokens + tokens
        for name, value in losses.items():
            self.losses[name] = value if name not in self.losses else self.losses[name] + value


class Router(nn.Module):
    """Linear scores of the experts, the choice of K, their weights.

    Set from outside:
        loss_factor: what each microbatch's losses are multiplied by in the training loss, 1 / the microbatches of the
            global batch (times the fp16 loss scale).
        sequence_ranks, sum_over_sequence: ranks that share this microbatch's sequences, and the sum over them of a
            tensor that needs no gradient.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        biased = not config.disable_bias_linear
        self.bias = nn.Parameter(torch.empty(config.num_experts)) if biased else None
        balanced = config.moe_router_enable_expert_bias
        self.register_buffer(
            "expert_bias", torch.zeros(config.num_experts, dtype=torch.float32) if balanced else None
        )
        self.loss_factor: float | torch.Tensor = 1.0
        self.sequence_ranks = 1
        self.sum_over_sequence: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
        self.tally = Tally()

    def forward(self, x: torch.Tensor) -> Routing:
        """x [B, S, H] -> Routing."""
        logits = self.logits(x)
        scores = self.scores(logits)
        experts, weights = self.choose(logits, scores)
        if self.training and torch.is_grad_enabled() and weights.requires_grad:
            weights = self.with_losses(logits, scores, experts, weights)
        return Routing(experts, weights)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, S, H] -> [B, S, E], in the dtype of x or of --moe-router-dtype."""
        dtype = _DTYPES.get(self.config.moe_router_dtype, x.dtype)
        bias = self.bias.to(dtype) if self.bias is not None else None
        return F.linear(x.to(dtype), self.weight.to(dtype), bias)

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [B, S, E] -> [B, S, E] in fp32 (fp64 stays): softmax over all experts, or sigmoids."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return wide.sigmoid() if self._by_sigmoid else wide.softmax(dim=-1)

    @property
    def _by_sigmoid(self) -> bool:
        return self.config.moe_router_score_function == "sigmoid"

    def choose(self, logits: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """logits and scores [B, S, E] -> experts [B, S, K], best first, and their weights [B, S, K] as the logits."""
        config = self.config
        experts = largest(self.ranked(logits, scores), config.moe_router_topk)
        if self._over_chosen:
            chosen = logits.gather(-1, experts)
            weights = chosen.softmax(dim=-1, dtype=scores.dtype)
        else:
            weights = scores.gather(-1, experts)
            if self._by_sigmoid and config.moe_router_topk > 1:
                weights = weights / (weights.sum(dim=-1, keepdim=True) + SMALLEST_SUM)
        if config.moe_router_topk_scaling_factor is not None:
            weights = weights * config.moe_router_topk_scaling_factor
        return experts, weights.to(logits.dtype)

    def ranked(self, logits: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """logits and scores [B, S, E] -> what experts are chosen by [B, S, E], without gradient."""
        ranked = (logits if self._over_chosen else scores).detach()
        if self.expert_bias is not None:
            ranked = ranked + self.expert_bias
        return self._within_groups(ranked) if self.config.moe_router_num_groups else ranked

    @property
    def _over_chosen(self) -> bool:
        return not (self._by_sigmoid or self.config.moe_router_pre_softmax)

    def _within_groups(self, ranked: torch.Tensor) -> torch.Tensor:
        """ranked [B, S, E] -> the same, -inf outside of the best groups: by the sum of a group's largest K / g."""
        config = self.config
        count, kept = config.moe_router_num_groups, config.moe_router_group_topk
        groups = ranked.unflatten(-1, (count, -1))  # [B, S, G, E / G]
        best = groups.topk(config.moe_router_topk // kept, dim=-1).values.sum(dim=-1)  # [B, S, G]
        outside = torch.ones_like(best, dtype=torch.bool).scatter(-1, largest(best, kept), False)
        return groups.masked_fill(outside[..., None], float("-inf")).flatten(-2)

    def with_losses(
        self, logits: torch.Tensor, scores: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The weights [B, S, K], with the losses attached and the microbatch's tally prepared."""
        config = self.config
        chosen = one_hot(experts, config.num_experts)  # [B, S, E]
        losses, total = {}, weights.new_zeros((), dtype=scores.dtype)
        for kind, coefficient in config.balancing_coefficients.items():
            loss = self.balancing_loss(kind, scores, chosen)
            losses[LOSS_NAMES[kind]] = loss.detach()
            total = total + coefficient * loss
        if config.moe_z_loss_coeff:
            largest_sums = logits.to(scores.dtype).logsumexp(dim=-1)
            loss = largest_sums.square().mean() / self.sequence_ranks
            losses["z_loss"] = loss.detach()
            total = total + config.moe_z_loss_coeff * loss
        tokens = chosen.sum(dim=(0, 1))
        return attach_losses(weights, total, self, tokens, losses)

    def balancing_loss(self, kind: str, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """E * sum over e of f_e P_e, scalar: f_e the share of choices, P_e the mean score of expert e.

        Over the microbatch (aux_loss), or over each sequence, then averaged (seq_aux_loss). The choices are the plain
        best K of the scores, without bias and groups. Of several ranks that share a sequence each gives its part: f of
        all their tokens, P of its own.
        """
        config = self.config
        if self._by_sigmoid:
            scores = scores / (scores.sum(dim=-1, keepdim=True) + SMALLEST_SUM)
        if self.expert_bias is not None or config.moe_router_num_groups:
            chosen = one_hot(largest(scores.detach(), config.moe_router_topk), config.num_experts)
        if kind == "aux_loss":
            scores, chosen = (
                scores.flatten(0, 1)[None],
                chosen.flatten(0, 1)[None],
            )  # one sequence [1, B*S, E]
        tokens = scores.shape[1] * self.sequence_ranks
        shares = self.sum_over_sequence(chosen.sum(dim=1)).to(scores.dtype) / (
            tokens * config.moe_router_topk
        )
        return config.num_experts * (shares * scores.sum(dim=1) / tokens).sum(dim=-1).mean()

    def take_tally(self) -> Tally:
        """What has come in since the last call."""
        taken, self.tally = self.tally, Tally()
        return taken


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """values [..., E] -> numbers [..., count] of the largest, largest first; of equal ones the lowest number first.

    topk leaves open which of equal ones it takes, and CPU and GPU differ. argmax takes the first, and for the few that
    a router wants it is faster than topk and a stable sort.
    """
    values, found = values.clone(), []
    for _ in range(count):
        found.append(values.argmax(dim=-1, keepdim=True))
        values.scatter_(-1, found[-1], float("-inf"))
    return torch.cat(found, dim=-1)


def one_hot(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """experts [..., K] -> bool [..., E], True for the K."""
    chosen = torch.zeros(*experts.shape[:-1], num_experts, dtype=torch.bool, device=experts.device)
    return chosen.scatter_(-1, experts, True)


@torch.compiler.disable  # what it does beside its result is done in backward, outside of a graph
def attach_losses(
    weights: torch.Tensor,
    total: torch.Tensor,
    router: Router,
    tokens: torch.Tensor,
    losses: dict[str, torch.Tensor],
) -> torch.Tensor:
    """The weights [B, S, K]; backward adds router.loss_factor times the gradient of total, and fills the tally."""
    return _AttachLosses.apply(weights, total, router, tokens, losses)


class _AttachLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weights: torch.Tensor,
        total: torch.Tensor,
        router: Router,
        tokens: torch.Tensor,
        losses: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        ctx.router, ctx.tokens, ctx.losses = router, tokens, losses
        ctx.total = total.detach()
        return weights.clone()  # no view: a schedule that splits the backward detaches outputs in place

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        ctx.router.tally.add(ctx.tokens, ctx.losses)
        return gradient, torch.ones_like(ctx.total) * ctx.router.loss_factor, None, None, None
