"""The optimizer over all of my model chunks: parameter groups, construction, state by global parameter name."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from megatron_lite.config import OptimizerConfig

ParameterGroups = list[dict[str, Any]]
STATE_PREFIX = "optimizer."


def parameter_groups(chunks: list[nn.Module], config: OptimizerConfig) -> ParameterGroups:
    """Groups by weight decay and learning rate, each with `decays` and `decoupled` for the schedule to read.

    Biases and 1-D parameters do not decay; embeddings do (Megatron-LM's rule). With --decoupled-lr the
    embedding and the head have a learning rate of their own.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for chunk in chunks:
        for name, parameter in chunk.named_global_parameters():
            decays = parameter.dim() > 1 and not name.endswith(".bias")
            decoupled = config.decoupled_lr is not None and name.startswith(("embedding.", "lm_head."))
            groups.setdefault((decays, decoupled), []).append(parameter)
    return [
        {"params": parameters, "decays": decays, "decoupled": decoupled}
        for (decays, decoupled), parameters in sorted(groups.items(), reverse=True)
    ]


def build_adam(groups: ParameterGroups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019), fused: one kernel on CUDA and on the CPU alike."""
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)


def build_sgd(groups: ParameterGroups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.sgd_momentum)


OPTIMIZERS: dict[str, Callable[[ParameterGroups, OptimizerConfig], torch.optim.Optimizer]] = {
    "adam": build_adam,
    "sgd": build_sgd,
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
    chunks: list[nn.Module], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    """("optimizer.exp_avg.layers.0....", tensor) for every state tensor.

    Keys are global parameter names: integer keys of two pipeline ranks would overwrite each other in a
    checkpoint. State is made first where a step has not made it yet, so that a checkpoint can be read into it.
    """
    for chunk in chunks:
        for name, parameter in chunk.named_global_parameters():
            for key, value in _state_of(optimizer, parameter).items():
                if isinstance(value, torch.Tensor):
                    yield f"{STATE_PREFIX}{key}.{name}", value


def _state_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """The state of one parameter, with the zeros that the optimizer would start from."""
    state = optimizer.state[parameter]
    if state:
        return state
    if isinstance(optimizer, torch.optim.SGD):
        state["momentum_buffer"] = torch.zeros_like(parameter)
    else:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    return state
