"""The optimizer over all of my model chunks: parameter groups and construction."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatron_lite.config.optimizers import OPTIMIZERS
from megatron_lite.config.training import OptimizerConfig

ParameterGroups = list[dict[str, Any]]


def parameter_groups(chunks: list[nn.Module], config: OptimizerConfig) -> ParameterGroups:
    """Groups by weight decay and learning rate, each with `decays` and `decoupled` for the schedule to read.

    Biases and 1-D parameters do not decay; embeddings do (Megatron-LM's rule). With --decoupled-lr the
    embedding and the head have a learning rate of their own. `orthogonal` marks the layers' matrices,
    an expert's among them; a router's rows are scores of experts, which are no matrix's directions (Liu et al. 2025).
    """
    groups: dict[tuple[bool, bool, bool], list[nn.Parameter]] = {}
    by_matrix = OPTIMIZERS[config.optimizer].matrix_state is not None
    for chunk in chunks:
        for name, parameter in chunk.named_global_parameters():
            decays = parameter.dim() > 1 and not name.endswith(".bias")
            decoupled = config.decoupled_lr is not None and name.startswith(("embedding.", "lm_head."))
            orthogonal = by_matrix and _is_matrix_of_a_layer(name, parameter)
            groups.setdefault((decays, decoupled, orthogonal), []).append(parameter)
    return [
        {"params": parameters, "decays": decays, "decoupled": decoupled, "orthogonal": orthogonal}
        for (decays, decoupled, orthogonal), parameters in sorted(groups.items(), reverse=True)
    ]


def _is_matrix_of_a_layer(name: str, parameter: nn.Parameter) -> bool:
    scores = ("mlp.router.weight", "mlp.shared_expert_gate.weight")
    return (
        name.startswith("layers.")
        and parameter.dim() > 1
        and name.endswith(".weight")
        and not name.endswith(scores)
    )


def build_optimizer(chunks: list[nn.Module], config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer that --optimizer names. Learning rate and weight decay are set before every step."""
    return construct(parameter_groups(chunks, config), config)


def construct(groups: ParameterGroups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer that --optimizer names over these groups."""
    row = OPTIMIZERS[config.optimizer]
    module, name = row.factory.split(":")
    arguments = {key: _argument(config, value) for key, value in row.arguments.items()}
    optimizer = getattr(importlib.import_module(module), name)(groups, lr=config.lr, **arguments)
    optimizer.row = row
    return optimizer


def _argument(config: OptimizerConfig, value: object) -> object:
    if isinstance(value, tuple):
        return tuple(_argument(config, part) for part in value)
    return getattr(config, value) if isinstance(value, str) and hasattr(config, value) else value


def set_schedule(
    optimizer: torch.optim.Optimizer,
    learning_rate: Callable[[bool], float],
    weight_decay: float,
) -> None:
    """Put the step's learning rate (by decoupled or not) and weight decay into every group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(group["decoupled"])
        group["weight_decay"] = weight_decay if group["decays"] else 0.0
