"""The optimizer over all of my model chunks: parameter groups, construction, state by global parameter name."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from megatron_lite.config import OptimizerConfig
from megatron_lite.training.muon import Muon, fresh_averages, fresh_momentum

ParameterGroups = list[dict[str, Any]]
STATE_PREFIX = "optimizer."


def parameter_groups(chunks: list[nn.Module], config: OptimizerConfig) -> ParameterGroups:
    """Groups by weight decay and learning rate, each with `decays` and `decoupled` for the schedule to read.

    Biases and 1-D parameters do not decay; embeddings do (Megatron-LM's rule). With --decoupled-lr the
    embedding and the head have a learning rate of their own. `orthogonal` marks the blocks' matrices.
    """
    groups: dict[tuple[bool, bool, bool], list[nn.Parameter]] = {}
    for chunk in chunks:
        for name, parameter in chunk.named_global_parameters():
            decays = parameter.dim() > 1 and not name.endswith(".bias")
            decoupled = config.decoupled_lr is not None and name.startswith(("embedding.", "lm_head."))
            orthogonal = config.optimizer == "muon" and name.startswith("layers.") and parameter.dim() == 2
            groups.setdefault((decays, decoupled, orthogonal), []).append(parameter)
    return [
        {"params": parameters, "decays": decays, "decoupled": decoupled, "orthogonal": orthogonal}
        for (decays, decoupled, orthogonal), parameters in sorted(groups.items(), reverse=True)
    ]


def build_adam(groups: ParameterGroups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019), fused: one kernel on CUDA and on the CPU alike."""
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)


def build_sgd(groups: ParameterGroups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.sgd_momentum)


def build_muon(groups: ParameterGroups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Muon for the blocks' matrices, AdamW for embedding, head, norms and biases."""
    betas = (config.adam_beta1, config.adam_beta2)
    return Muon(groups, lr=config.lr, betas=betas, eps=config.adam_eps)


OPTIMIZERS: dict[str, Callable[[ParameterGroups, OptimizerConfig], torch.optim.Optimizer]] = {
    "adam": build_adam,
    "sgd": build_sgd,
    "muon": build_muon,
}


def build_optimizer(chunks: list[nn.Module], config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer that --optimizer names. Learning rate and weight decay are set before every step."""
    return OPTIMIZERS[config.optimizer](parameter_groups(chunks, config), config)


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
    """The state of one parameter, with the zeros that the optimizer would start from."""
    state = optimizer.state[parameter]
    if state:
        return state
    orthogonal = any(
        parameter is member
        for group in optimizer.param_groups
        if group["orthogonal"]
        for member in group["params"]
    )
    if isinstance(optimizer, torch.optim.SGD) or orthogonal:
        state.update(fresh_momentum(parameter))
    else:
        state.update(fresh_averages(parameter))
    return state
