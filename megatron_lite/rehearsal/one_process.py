"""The reference of every layout: the whole model in one plain process, by plain autograd and torch's optimizers."""

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from megatron_lite.config import Config
from megatron_lite.model.gpt import GPTChunk
from megatron_lite.parallel.fsdp import compute_dtype
from megatron_lite.parallel.pipeline import Batch
from megatron_lite.training.experts import Balance, move_expert_biases
from megatron_lite.training.optimizer import construct, parameter_groups

BIAS = ".expert_bias"


@dataclass
class Outcome:
    """What one side computed: a loss and a norm per step, the first step's gradients, the loss of an evaluation.

    Of a mixture also what its routers did in each step; among the gradients its expert biases after all steps.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    evaluation: float = 0.0
    balances: list[Balance] = field(default_factory=list)
    margin: float = math.inf  # of the closest choice of a router: the score of the last chosen less the next

    def numbers(self) -> list[dict[str, float]]:
        """The scalars by name: those of each step, then the evaluation's."""
        steps = enumerate(zip(self.losses, self.norms, strict=True))
        named = [{f"loss of step {n}": loss, f"gradient norm of step {n}": norm} for n, (loss, norm) in steps]
        for n, (numbers, balance) in enumerate(zip(named, self.balances)):
            routed = balance.record(balance.numbers().tolist()) | {
                "tokens routed": balance.tokens.sum().item()
            }
            numbers |= {f"{name} of step {n}": value for name, value in routed.items()}
        return [*named, {"evaluation loss": self.evaluation}]

    def of_parameters(self) -> dict[str, torch.Tensor]:
        """The gradients without the biases."""
        return {name: gradient for name, gradient in self.gradients.items() if not name.endswith(BIAS)}


def run_one_process(
    config: Config, batches: Sequence[Batch], device: torch.device, exact: bool = False
) -> Outcome:
    """The reference: the whole model, plain autograd over whole batches, torch's own clipping and optimizers.

    exact: in fp64, on the CPU, whatever the run's format.
    """
    device = torch.device("cpu") if exact else device
    model = initial_model(config).to(device, torch.float64 if exact else None)
    dtype = torch.float64 if exact else compute_dtype(config.precision)
    optimizers = torch_optimizers(config, model)
    outcome = Outcome()
    for mixture in model.mixtures.values():
        mixture.router.register_forward_hook(functools.partial(keep_closest, outcome))
    for batch in batches[:-1]:
        loss = mean_loss(model, batch, config, device, dtype)
        loss.backward()
        limit = config.optimizer.clip_grad or float("inf")
        outcome.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        outcome.losses.append(loss.item())
        if not outcome.gradients:
            outcome.gradients = {n: p.grad.detach().cpu().clone() for n, p in model.named_parameters()}
        for optimizer in optimizers:
            with Exact() if exact else nullcontext():
                optimizer.step()
            optimizer.zero_grad()
        if model.mixtures:
            outcome.balances.append(balance_of(model, config))
            move_expert_biases([model], outcome.balances[-1], config.model.moe_router_bias_update_rate)
    with torch.no_grad():
        outcome.evaluation = mean_loss(model, batches[-1], config, device, dtype).item()
    outcome.gradients |= {name: bias.cpu().clone() for name, bias in model.named_global_buffers()}
    return outcome


@torch.no_grad()
def keep_closest(outcome: Outcome, router: nn.Module, inputs: tuple[torch.Tensor], _: object) -> None:
    """Keep the margin of a router's closest choice: a smaller one than rounding falls otherwise in another layout."""
    logits = router.logits(*inputs)
    best = router.ranked(logits, router.scores(logits)).sort(dim=-1, descending=True).values
    last = router.config.moe_router_topk
    if last < best.shape[-1]:
        outcome.margin = min(outcome.margin, (best[..., last - 1] - best[..., last]).min().item())


class Exact(TorchFunctionMode):
    """torch's Muon computes its update in bf16; here it does so in the format it is given."""

    def __torch_function__(
        self, function: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if function is torch.Tensor.bfloat16:
            return args[0].clone()
        return function(*args, **(kwargs or {}))


def initial_model(config: Config) -> GPTChunk:
    """The whole model in one process with the initial weights, by name."""
    model = GPTChunk(config.model, range(config.model.num_layers))
    with torch.no_grad():
        for name, parameter in model.named_global_parameters():
            rows = torch.arange(parameter.shape[0])
            parameter.copy_(model.initial_rows(name, tuple(parameter.shape), rows, config.training.seed))
    return model


def mean_loss(
    model: nn.Module, batch: Batch, config: Config, device: torch.device, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Mean cross-entropy over unmasked tokens; in a half format the model computes with cast parameters."""
    parameters = {name: parameter.to(dtype) for name, parameter in model.named_parameters()}
    whole = {key: t.to(device) for key, t in batch.items()}
    labels = whole.pop("labels")
    # A router's losses are a microbatch's, and their mean over the microbatches is trained with.
    size = config.training.micro_batch_size if model.mixtures else len(labels)
    parts = [
        {key: t[start : start + size] for key, t in whole.items()} for start in range(0, len(labels), size)
    ]
    for mixture in model.mixtures.values():
        mixture.router.loss_factor = 1 / len(parts)
    logits = torch.cat(
        [torch.func.functional_call(model, parameters, (part.pop("tokens"),), part) for part in parts]
    )
    logits = logits[..., : config.model.vocab_size].to(torch.promote_types(dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def balance_of(model: GPTChunk, config: Config) -> Balance:
    """What the routers took in over the global batch of one process."""
    names = tuple(config.model.router_losses)
    microbatches = config.training.global_batch_size // config.training.micro_batch_size
    tallies = {layer: mixture.router.take_tally() for layer, mixture in sorted(model.mixtures.items())}
    losses = [[tally.losses[name].double() / microbatches for name in names] for tally in tallies.values()]
    return Balance(
        layers=tuple(tallies),
        tokens=torch.stack([tally.tokens.double() for tally in tallies.values()]),
        losses=torch.tensor(losses, dtype=torch.float64).view(len(tallies), len(names)),
        names=names,
    )


def torch_optimizers(config: Config, model: nn.Module) -> list[torch.optim.Optimizer]:
    """What --optimizer names, from torch, with decay on matrices only; another one as its row constructs it.

    torch's Muon takes no experts' matrices in one tensor: theirs is the run's.
    """
    settings, kind = config.optimizer, config.optimizer.optimizer
    if kind == "muon" and config.model.num_experts:
        groups = parameter_groups([model], settings)
        return [
            construct([g | {"weight_decay": g["decays"] * settings.weight_decay} for g in groups], settings)
        ]
    names = {n for n, p in model.named_parameters() if n.startswith("layers.") and p.dim() == 2}
    muon = [p for n, p in model.named_parameters() if kind == "muon" and n in names]
    rest = [p for n, p in model.named_parameters() if kind != "muon" or n not in names]
    decaying = {p for n, p in model.named_parameters() if p.dim() > 1 and not n.endswith(".bias")}
    groups = [
        {"params": [p for p in rest if p in decaying], "weight_decay": settings.weight_decay},
        {"params": [p for p in rest if p not in decaying], "weight_decay": 0.0},
    ]
    if kind == "sgd":
        return [torch.optim.SGD(groups, lr=settings.lr, momentum=settings.sgd_momentum)]
    if kind not in ("adam", "muon"):
        return [construct(groups, settings)]
    betas = (settings.adam_beta1, settings.adam_beta2)
    optimizers = [torch.optim.AdamW(groups, lr=settings.lr, betas=betas, eps=settings.adam_eps)]
    if muon:
        shape = {"lr": settings.lr, "weight_decay": settings.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
        optimizers.append(torch.optim.Muon(muon, **shape))
    return optimizers
