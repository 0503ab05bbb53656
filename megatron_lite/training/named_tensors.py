"""Every tensor that a checkpoint holds, by global name: the weights of my chunks and their optimizer state."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from megatron_lite.config.optimizers import SCALAR, OptimizerRow
from megatron_lite.parallel.tied import copied_parameters, counted_parameters

STATE_PREFIX = "optimizer."


def checkpoint_tensors(
    chunks: list[nn.Module], optimizer: torch.optim.Optimizer | None
) -> dict[str, torch.Tensor]:
    """{global name: tensor} of my chunks' weights, buffers and optimizer state. A tied weight's copy is left out."""
    buffers = {name: buffer for chunk in chunks for name, buffer in chunk.named_global_buffers()}
    return named_tensors(counted_parameters(chunks), optimizer) | buffers


def tied_copies(chunks: list[nn.Module], optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """The same for the copies: they read what the first stage's weight reads."""
    return named_tensors(copied_parameters(chunks), optimizer)


def named_tensors(
    parameters: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer | None
) -> dict[str, torch.Tensor]:
    """{global name: tensor} of these (global name, parameter) pairs and of their optimizer state.

    Two parameters of one name would replace each other: with V schedules a weight and its tied copy lie on one rank.
    """
    named = list(parameters)
    weights = {name: parameter.data for name, parameter in named}
    assert len(weights) == len(named), "two parameters of this rank have one global name"
    return weights | (dict(named_state(named, optimizer)) if optimizer is not None else {})


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
