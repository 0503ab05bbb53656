"""What a step of a mixture of experts leaves behind: loads and losses summed over all ranks, the expert bias moved.

The routers of my chunks have taken in each microbatch (model/router.py); here their sums become those of the global
batch and of the whole model.

Shapes: L layers with experts, E experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from megatron_lite.arithmetic.mesh_sizes import AXES
from megatron_lite.config.model import ModelConfig
from megatron_lite.distributed.mesh import ParallelMesh
from megatron_lite.training.logged import EXPERT_LOAD, STARVED, name_of_layer


@dataclass(frozen=True)
class Balance:
    """A step's sums over its microbatches and all ranks, the same on every rank.

    layers: the L global layer numbers. tokens: [L, E] fp64, assignments to each expert. losses: [L, losses] fp64, means
    over the microbatches, without coefficients. names: of the losses.
    """

    layers: tuple[int, ...]
    tokens: torch.Tensor
    losses: torch.Tensor
    names: tuple[str, ...]

    @property
    def loads(self) -> torch.Tensor:
        """[L] how many times the mean the fullest expert of each layer has: 1 is even."""
        smallest = 1 / self.tokens.shape[1]  # the mean of one choice; only where there is none it is less
        return self.tokens.amax(dim=1) / self.tokens.mean(dim=1).clamp(min=smallest)

    @property
    def starved(self) -> torch.Tensor:
        """[L] the share of each layer's experts that no token of the step was sent to."""
        return (self.tokens == 0).double().mean(dim=1)

    def numbers(self) -> torch.Tensor:
        """What a line of the log has, fp32 [losses + 2]: means over the layers, but the largest load."""
        others = torch.stack([self.loads.max(), self.starved.mean()])
        return torch.cat([self.losses.mean(dim=0), others]).float()

    def record(self, numbers: list[float]) -> dict[str, float]:
        """`numbers` by the names of a record."""
        return dict(zip((*self.names, EXPERT_LOAD, STARVED), numbers, strict=True))

    def record_of_layers(self, with_losses: bool) -> dict[str, float]:
        """Each layer's load and starved experts, with --moe-per-layer-logging its losses too (the host waits)."""
        columns = {EXPERT_LOAD: self.loads, STARVED: self.starved}
        if with_losses:
            columns |= dict(zip(self.names, self.losses.unbind(dim=1), strict=True))
        table = torch.stack([*columns.values()], dim=1).tolist()
        return {
            name_of_layer(name, layer): value
            for layer, row in zip(self.layers, table)
            for name, value in zip(columns, row)
        }


def take_balance(
    chunks: list[nn.Module], model: ModelConfig, mesh: ParallelMesh, microbatches: int
) -> Balance:
    """The sums since the last call, over all ranks (collective).

    Args:
        chunks: with `.mixtures`: {global layer number: a module with `.router`}.
        microbatches: of the global batch, over all data-parallel ranks.
    """
    layers = tuple(layer for layer in range(model.num_layers) if model.has_experts(layer))
    names = tuple(model.router_losses)
    sums = torch.zeros(len(layers), model.num_experts + len(names), dtype=torch.float64, device=mesh.device)
    for layer, router in _routers(chunks):
        tally = router.take_tally()
        if tally.tokens is not None:
            row = sums[layers.index(layer)]
            row[: model.num_experts] = tally.tokens
            for column, name in enumerate(names, model.num_experts):
                row[column] = tally.losses[name]
    mesh.sum_over(sums, *AXES)  # tensor ranks too: each routes its own positions
    tokens, losses = sums.split([model.num_experts, len(names)], dim=1)
    return Balance(layers, tokens, losses / microbatches, names)


@torch.no_grad()
def move_expert_biases(chunks: list[nn.Module], balance: Balance, rate: float) -> None:
    """Add rate to the bias of each expert that had fewer tokens than the mean, subtract it from one that had more."""
    for layer, router in _routers(chunks):
        if router.expert_bias is not None:
            tokens = balance.tokens[balance.layers.index(layer)]
            router.expert_bias += rate * torch.sign(tokens.mean() - tokens).to(router.expert_bias)


def _routers(chunks: list[nn.Module]) -> Iterator[tuple[int, nn.Module]]:
    return ((layer, mixture.router) for chunk in chunks for layer, mixture in chunk.mixtures.items())
