"""The optimizer over all of my model chunks: parameter groups, construction, state by global parameter name."""

import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from megatron_lite.config import OptimizerConfig
from megatron_lite.config.optimizers import OPTIMIZERS, SCALAR, OptimizerRow

ParameterGroups = list[dict[str, Any]]
STATE_PREFIX = "optimizer."


def parameter_groups(chunks: list[nn.Module], config: OptimizerConfig) -> ParameterGroups:
    """Groups by weight decay and learning rate, each with `decays` and `decoupled` for the schedule to read.

    Biases and 1-D parameters do not decay; embeddings do (Megatron-LM's rule). With --decoupled-lr the
    embedding and the head have a learning rate of their own. `orthogonal` marks the blocks' matrices.
    """
    groups: dict[tuple[bool, bool, bool], list[nn.Parameter]] = {}
    by_matrix = OPTIMIZERS[config.optimizer].matrix_state is not None
    for chunk in chunks:
        for name, parameter in chunk.named_global_parameters():
            decays = parameter.dim() > 1 and not name.endswith(".bias")
            decoupled = config.decoupled_lr is not None and name.startswith(("embedding.", "lm_head."))
            orthogonal = by_matrix and name.startswith("layers.") and parameter.dim() == 2
            groups.setdefault((decays, decoupled, orthogonal), []).append(parameter)
    return [
        {"params": parameters, "decays": decays, "decoupled": decoupled, "orthogonal": orthogonal}
        for (decays, decoupled, orthogonal), parameters in sorted(groups.items(), reverse=True)
    ]


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


def named_state(
    parameters: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    """("optimizer.exp_avg.layers.0....", tensor) for every state tensor of these (global name, parameter) pairs.

    Keys are global parameter names: integer keys of two pipeline ranks would overwrite each other in a
    checkpoint. State is made first where a step has not made it yet, so that a checkpoint can be read into it.
    """
    for name, parameter in parameters:
        for key, value in _state_of(optimizer, parameter).items():
            if isinstance(value, torch.Tensor):
                yield f"{STATE_PREFIX}{key}.{name}", value


def _state_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """The state of one parameter, with the values that the optimizer would start from."""
    state = optimizer.state[parameter]
    row: OptimizerRow = optimizer.row
    orthogonal = row.matrix_state is not None and any(
        parameter is member
        for group in optimizer.param_groups
        if group["orthogonal"]
        for member in group["params"]
    )
    kinds = row.matrix_state if orthogonal else row.state
    if state:
        # What the row does not name would be missing after a resume, without a word.
        kept = {name for name, value in state.items() if value is not None}
        if kept != set(kinds) or not all(isinstance(state[name], torch.Tensor) for name in kept):
            raise ValueError(
                f"config/optimizers.py names the state {sorted(kinds)} for {row.factory}, which keeps "
                f"{ {name: type(state[name]).__name__ for name in sorted(kept)} }; wanted: the same names, all tensors"
            )
        return state
    for name, kind in kinds.items():
        value = torch.zeros((), device=parameter.device) if kind == SCALAR else torch.zeros_like(parameter)
        state[name] = value.fill_(row.initial[name]) if name in row.initial else value
    return state
