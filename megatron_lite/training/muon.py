"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) for the matrices of the blocks, AdamW for the rest.

An orthogonalised update needs the whole matrix: a matrix that is sharded is all-gathered, orthogonalised on every rank
that holds a shard, and each rank applies its own shard; an expert's matrix is whole on its rank. The result is that of
one process in any layout.
"""

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from megatron_lite.distributed.tensors import local_part, local_slices, whole_tensor

MOMENTUM = 0.95
NEWTON_SCHULZ_STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SMALLEST_NORM = 1e-7


class Muon(torch.optim.Optimizer):
    """Groups with `orthogonal` True take Muon's update, the others AdamW's.

    The step is scaled by 0.2 sqrt(max(rows, columns)), so that its size is that of AdamW's and one --lr fits both
    (Liu et al. 2025, arXiv 2502.16982).
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if group["orthogonal"]:
                for parameter in parameters:
                    self._step_matrix(parameter, group["lr"], group["weight_decay"])
            elif parameters:
                self._step_adamw(parameters, group)

    def _step_matrix(self, parameter: torch.Tensor, lr: float, weight_decay: float) -> None:
        state, gradient = self.state[parameter], parameter.grad
        if not state:
            state.update(fresh_momentum(parameter))
        buffer = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - MOMENTUM)
        device = parameter.device_mesh.device_type if isinstance(parameter, DTensor) else parameter.device
        step, local, slices = gradient.lerp(buffer, MOMENTUM), local_part(parameter), local_slices(parameter)
        if all(part == slice(0, size) for part, size in zip(slices[-2:], parameter.shape[-2:])):
            # Whole matrices lie here: experts are sharded by their number.
            update = orthogonalize(local_part(step.to(device)))
        else:
            update = orthogonalize(whole_tensor(step))[slices]
        scaled = lr * 0.2 * math.sqrt(max(parameter.shape[-2:]))
        local.mul_(1 - lr * weight_decay).add_(update.to(local), alpha=-scaled)

    def _step_adamw(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        states = []
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter].update(fresh_averages(parameter))
            states.append(self.state[parameter])
        adamw(
            parameters,
            [p.grad for p in parameters],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def fresh_momentum(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The state Muon and SGD start from."""
    return {"momentum_buffer": torch.zeros_like(parameter)}


def fresh_averages(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The state AdamW starts from."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz towards the nearest orthogonal matrix of each matrix [..., R, C], in bf16 as the reference does it.

    Singular values end between about 0.7 and 1.2, which trains as well as exactly 1 would.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.bfloat16()
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=SMALLEST_NORM)
    multiply_add = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
