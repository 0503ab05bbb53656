"""Is my layout right? Trains a few steps in it and in one plain process, and compares every number.

    torchrun --nproc-per-node 8 tools/verify_parity.py <the flags of pretrain_gpt.py> [--parity-steps 2]

All sides start from the same weights and see the same random tokens, some masked. Compared: the loss and the
gradient norm of every step, every parameter's gradient by name, the evaluation loss at the end. The one process
uses plain autograd over the whole batch and torch's own clipping and optimizers. It runs twice: in fp64, which is
the truth, and in the run's format, which shows what rounding costs there; a layout is equal when its error is at
most a small factor of that (see allowed_error). A model too large for one process is made small first, the layout
stays. Computes in fp32 without dropout; --parity-precision keep takes the run's own format. Exit code 0 when
everything is equal, 1 when not, 2 for a wrong flag.
"""

import argparse
import functools
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from megatron_lite.arguments.parse import parse_or_exit
from megatron_lite.arithmetic.vocabulary import known_vocabulary, with_vocabulary
from megatron_lite.config import Config, PrecisionConfig
from megatron_lite.distributed.environment import Environment
from megatron_lite.files.command_line import Parser, guarded, number
from megatron_lite.parallel.miniature import VOCABULARY, describe_change, miniature

# A layout adds up the same numbers in another order and in other pieces, on kernels chosen by other shapes: its error
# is that of one process in the same format times a chance factor. Over all layouts of the tests and five kinds of CPU
# kernels that was at most 3.3; a mistake in a layout is orders of magnitude larger.
FACTOR = 8.0


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """(this tool's own flags, the run's flags)."""
    parser = Parser(__doc__.splitlines()[0], prog="verify_parity.py")
    flag = parser.add_argument
    flag("--parity-steps", type=number(1), default=2, help="steps to train (default 2)")
    flag(
        "--parity-factor",
        type=number(0, float),
        default=FACTOR,
        help="how many times the rounding error of one process a layout may have (default %(default)g)",
    )
    flag("--parity-precision", choices=("fp32", "keep"), default="fp32", help="fp32, or keep the run's")
    flag("--parity-max-parameters", type=number(1), default=20_000_000, help="larger models are made small")
    return parser.parse_known_args(argv)


if __name__ == "__main__":  # a wrong flag is answered before torch is imported
    ENVIRONMENT = Environment.read()
    OWN, FLAGS = guarded(lambda: parse(sys.argv[1:]))
    CONFIG = parse_or_exit(FLAGS, ENVIRONMENT)

# ruff: noqa: E402

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from megatron_lite.distributed.collectives import from_first_rank
from megatron_lite.distributed.mesh import ParallelMesh, build_mesh
from megatron_lite.distributed.process_group import process_group, run_and_exit
from megatron_lite.distributed.tensors import whole_tensor
from megatron_lite.model.gpt import GPTChunk
from megatron_lite.parallel.fsdp import compute_dtype
from megatron_lite.parallel.pipeline import Batch
from megatron_lite.training.optimizer import construct, parameter_groups
from megatron_lite.training.run import build_run

# One learning rate and weight decay for all steps.
SETTINGS = {"lr": 1e-3, "lr_decay_style": "constant", "decoupled_lr": None}
SETTINGS |= {"lr_warmup_iters": 0, "lr_warmup_samples": 0, "lr_warmup_fraction": None}
SETTINGS |= {"weight_decay": 0.1, "start_weight_decay": None, "end_weight_decay": None}
SETTINGS |= {"weight_decay_incr_style": "constant"}
# What one process's error counts as at the least, relative to the number: a sum may come out right by luck. In a half
# format it is the relative error of all its gradients together, which luck cannot make small (see rounding).
FLOOR = 8 * torch.finfo(torch.float32).eps
# A gradient that is zero but for rounding has what rounding leaves of the largest one.
SMALLEST_GRADIENT = 0.01
SHOWN = 8
CLOSE = 1e-5  # scores nearer to each other may change places by the rounding of a few fp32 sums


@dataclass
class Outcome:
    """What one side computed: a loss and a norm per step, the first step's gradients, the loss of an evaluation."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    evaluation: float = 0.0
    margin: float = math.inf  # of the closest choice of a router: the score of the last chosen less the next

    def numbers(self) -> list[dict[str, float]]:
        """The scalars by name: those of each step, then the evaluation's."""
        steps = enumerate(zip(self.losses, self.norms, strict=True))
        named = [{f"loss of step {n}": loss, f"gradient norm of step {n}": norm} for n, (loss, norm) in steps]
        return [*named, {"evaluation loss": self.evaluation}]


@dataclass(frozen=True)
class Row:
    """One compared number: the truth, what the layout has, its error, the error of one process in the same format."""

    name: str
    truth: float
    seen: float
    error: float
    allowed: float

    @property
    def fails(self) -> bool:
        """Whether the error is more than allowed; NaN is."""
        return not self.error <= self.allowed


def with_any_vocabulary(config: Config) -> Config:
    """The config with a vocabulary size: tokens are random here, and no tokenizer is read."""
    return with_vocabulary(config, known_vocabulary(config) or VOCABULARY)


def comparable(config: Config, precision: str) -> Config:
    """The run without what makes two sides differ: no dropout, and fp32 unless its format is kept.

    Weights start larger than usual: with 0.02 the gradients of a small model drown in rounding.
    """
    std = max(config.model.init_method_std, 0.6 / config.model.hidden_size**0.5)
    model = replace(config.model, hidden_dropout=0.0, attention_dropout=0.0, init_method_std=std)
    kept = replace(config.precision, loss_scale=config.precision.loss_scale or 1024.0)
    optimizer = replace(config.optimizer, **SETTINGS)
    training = replace(
        config.training, rampup_batch_size=None, step_batch_size_schedule=None, iterations_to_skip=()
    )
    return replace(
        config,
        model=model,
        precision=kept if precision == "keep" else PrecisionConfig(),
        optimizer=optimizer,
        training=training,
    )


def random_batch(config: Config, step: int) -> Batch:
    """A global batch [samples, S], the same on every rank; an uneven part of each sample is masked.

    With --reset-attention-mask or --reset-position-ids a sample holds several documents.
    """
    generator = torch.Generator().manual_seed(config.training.seed + step)
    shape = (config.training.global_batch_size, config.data.seq_length)
    tokens, labels = (torch.randint(0, config.model.vocab_size, shape, generator=generator) for _ in range(2))
    kept = torch.rand(shape[0], 1, generator=generator)
    labels[torch.rand(shape, generator=generator) > kept] = -100
    if shape[0] > 1:
        labels[-1] = -100  # one sample wholly masked
    labels[0, 0] = 0
    batch = {"tokens": tokens, "labels": labels}
    if config.data.reset_attention_mask or config.data.reset_position_ids:
        starts = torch.rand(shape, generator=generator) < 4 / shape[1]
        starts[:, 0] = True
        positions = torch.arange(shape[1]).expand(shape)
        if config.data.reset_attention_mask:
            batch["document_ids"] = starts.cumsum(dim=1)
        if config.data.reset_position_ids:
            batch["position_ids"] = positions - (positions * starts).cummax(dim=1).values
    return batch


def my_samples(batch: Batch, config: Config, mesh: ParallelMesh) -> Batch:
    """Microbatch j gives data-parallel rank r the r-th run of micro_batch_size samples, as the loader does."""
    shape = (-1, mesh.data_parallel_size, config.training.micro_batch_size)
    order = torch.arange(config.training.global_batch_size).view(shape)[:, mesh.data_parallel_rank]
    return {key: t[order.flatten()].to(mesh.device) for key, t in batch.items()}


class PreparedBatches:
    """Stands for the loader: my part of each global batch, one after the other."""

    def __init__(self, config: Config, mesh: ParallelMesh, batches: Sequence[Batch]) -> None:
        self._mine = iter([my_samples(whole, config, mesh) for whole in batches])

    def next_batch(self, global_batch_size: int) -> Batch:
        """The next one."""
        return next(self._mine)


def run_layout(config: Config, mesh: ParallelMesh, batches: Sequence[Batch]) -> Outcome:
    """My part of the training in the layout; the same losses and norms on every rank, my chunks' gradients.

    batches: global ones of tokens and labels [samples, S], a step each; the last is evaluated.
    """
    run, outcome = build_run(config, mesh), Outcome()
    loader = PreparedBatches(config, mesh, batches)

    def keep_first(*_: object) -> None:
        outcome.gradients = outcome.gradients or whole_gradients(run.chunks)

    run.optimizer.register_step_pre_hook(keep_first)
    for _ in batches[:-1]:
        result = run.step(loader)
        outcome.losses.append(result.loss)
        outcome.norms.append(result.grad_norm)
    outcome.evaluation = run.evaluate(loader, 1, config.training.global_batch_size)
    return outcome


def whole_gradients(chunks: list[nn.Module]) -> dict[str, torch.Tensor]:
    """{global name: the whole gradient, on the CPU} of my chunks."""
    gradients = {}
    for chunk in chunks:
        for name, parameter in chunk.named_global_parameters():
            gradients[name] = whole_tensor(parameter.grad).detach().cpu().clone()
    return gradients


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
        move_biases(model, config)
    with torch.no_grad():
        outcome.evaluation = mean_loss(model, batches[-1], config, device, dtype).item()
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


@torch.no_grad()
def move_biases(model: GPTChunk, config: Config) -> None:
    """Move each expert's bias towards the mean load of the step."""
    for mixture in model.mixtures.values():
        tokens, bias = mixture.router.take_tally().tokens.double(), mixture.router.expert_bias
        if bias is not None:
            bias += config.model.moe_router_bias_update_rate * torch.sign(tokens.mean() - tokens).to(
                bias.dtype
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


def rounding(one_process: Outcome, truth: Outcome) -> float:
    """The relative L2 error of one process's gradients, and FLOOR at the least."""
    pairs = [(one_process.gradients[name], right) for name, right in truth.gradients.items()]
    error, size = (
        sum(t.square().sum().item() for t in tensors)
        for tensors in ([one - right for one, right in pairs], [right for _, right in pairs])
    )
    return max(FLOOR, (error / size) ** 0.5 if size else 0.0)


def compare(layout: Outcome, one_process: Outcome, truth: Outcome, factor: float = FACTOR) -> list[Row]:
    """All compared numbers. A gradient's row holds its largest absolute value and its largest error.

    A parameter that one side lacks has an infinite error. A scalar may be right by luck, so a step's are compared
    with the worst of all up to it, which is also what the next step starts from.
    """
    floor = rounding(one_process, truth)
    rows, worst = [], floor
    for right, seen, one in zip(truth.numbers(), layout.numbers(), one_process.numbers(), strict=True):
        worst = max([worst, *(abs(one[name] - value) / abs(value) for name, value in right.items())])
        rows += [
            Row(name, value, seen[name], abs(seen[name] - value), factor * worst * abs(value))
            for name, value in right.items()
        ]
    largest = max(gradient.abs().max().item() for gradient in truth.gradients.values())
    for name in sorted(truth.gradients.keys() | layout.gradients.keys()):
        right, seen, one = (side.gradients.get(name) for side in (truth, layout, one_process))
        sizes = [0.0 if g is None else g.abs().max().item() for g in (right, seen)]
        if right is None or seen is None or right.shape != seen.shape:
            rows.append(Row(f"gradient of {name}", *sizes, float("inf"), 0.0))
            continue
        error, own = ((side - right).abs().max().item() for side in (seen, one))
        scale = max(sizes[0], SMALLEST_GRADIENT * largest)
        rows.append(Row(f"gradient of {name}", *sizes, error, factor * max(own, floor * scale)))
    return rows


def report(rows: Sequence[Row], factor: float, margin: float = math.inf) -> str:
    """The table: losses, norms, the worst gradients; then the verdict. margin: see Outcome."""
    gradients = [row for row in rows if row.name.startswith("gradient of")]

    def badness(row: Row) -> float:
        return row.error / row.allowed if row.allowed and row.error == row.error else float("inf")

    worst = sorted(gradients, key=badness, reverse=True)
    shown = [row for row in rows if row not in gradients] + worst[:SHOWN]
    width = max(len(row.name) for row in shown)
    lines = [f"{'':{width}}  {'one, fp64':>14}  {'this layout':>14}  {'error':>8}  {'allowed':>8}"]
    for row in shown:
        mark = "  <-- differs" if row.fails else ""
        numbers = f"{row.truth:14.6e}  {row.seen:14.6e}  {row.error:8.1e}  {row.allowed:8.1e}"
        lines.append(f"{row.name:{width}}  {numbers}{mark}")
    lines.append(f"{len(gradients)} gradients compared, the {min(SHOWN, len(gradients))} worst shown")
    if margin < math.inf:
        turned = "; rounding can turn it, and then gradients jump" * (margin < CLOSE)
        lines.append(f"the closest choice of a router: by {margin:.1e}{turned}")
    failed = sum(row.fails for row in rows)
    verdict = "EQUAL" if not failed else f"DIFFERENT: {failed} of {len(rows)} numbers"
    lines.append(f"{verdict} (allowed: {factor:g} times the rounding error of one process)")
    return "\n".join(lines)


def compare_with_one_process(
    config: Config, layout: Outcome, batches: Sequence[Batch], device: torch.device, factor: float
) -> tuple[list[Row], float]:
    """The layout against one process, in its own format and in fp64; and the margin of the latter."""
    one, truth = (run_one_process(config, batches, device, exact) for exact in (False, True))
    return compare(layout, one, truth, factor), truth.margin


def verify(config: Config, device: torch.device, steps: int, factor: float) -> tuple[str, bool]:
    """(report, equal), on every rank; rank 0 compares."""
    mesh = build_mesh(config, device)
    batches = [random_batch(config, step) for step in range(steps + 1)]
    layout = run_layout(config, mesh, batches)
    collected: list[dict[str, torch.Tensor] | None] = [None] * dist.get_world_size()
    first = all(mesh.rank(axis) == 0 for axis in ("dp_replicate", "dp_shard", "cp", "tp"))
    gathered = collected if dist.get_rank() == 0 else None
    dist.gather_object(layout.gradients if first else {}, gathered, dst=0)
    answer = None
    if dist.get_rank() == 0:
        layout.gradients = {name: g for part in collected for name, g in part.items()}
        rows, margin = compare_with_one_process(config, layout, batches, device, factor)
        answer = report(rows, factor, margin), not any(row.fails for row in rows)
    return from_first_rank(answer)


def main(own: argparse.Namespace, given: Config, environment: Environment) -> int:
    """Shrink, run both sides, print; the exit code."""
    given = with_any_vocabulary(given)
    config = miniature(given, own.parity_max_parameters, max_tokens=16_384)
    change = describe_change(given, config)
    with process_group(config, environment) as (device, _):
        text, equal = verify(
            comparable(config, own.parity_precision), device, own.parity_steps, own.parity_factor
        )
        if environment.rank == 0:
            print(f"made small: {change}" if change else "the run's own size", text, sep="\n")
    return 0 if equal else 1


if __name__ == "__main__":
    run_and_exit(lambda: main(OWN, CONFIG, ENVIRONMENT), ENVIRONMENT)
