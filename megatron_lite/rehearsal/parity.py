"""Whether a layout computes what one process does: both train on the same random batches, every number is compared."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from megatron_lite.config import Config, PrecisionConfig
from megatron_lite.distributed.mesh import ParallelMesh
from megatron_lite.distributed.tensors import whole_tensor
from megatron_lite.parallel.pipeline import Batch
from megatron_lite.rehearsal.one_process import BIAS, Outcome, run_one_process
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
        if run.balance is not None:
            outcome.balances.append(run.balance)
    outcome.evaluation = run.evaluate(loader, 1, config.training.global_batch_size)
    for chunk in run.chunks:
        outcome.gradients |= {name: bias.cpu().clone() for name, bias in chunk.named_global_buffers()}
    return outcome


def whole_gradients(chunks: list[nn.Module]) -> dict[str, torch.Tensor]:
    """{global name: the whole gradient, on the CPU} of my chunks."""
    gradients = {}
    for chunk in chunks:
        for name, parameter in chunk.named_global_parameters():
            gradients[name] = whole_tensor(parameter.grad).detach().cpu().clone()
    return gradients


def rounding(one_process: Outcome, truth: Outcome) -> float:
    """The relative L2 error of one process's gradients, and FLOOR at the least."""
    pairs = [(one_process.gradients[name], right) for name, right in truth.of_parameters().items()]
    error, size = (
        sum(t.square().sum().item() for t in tensors)
        for tensors in ([one - right for one, right in pairs], [right for _, right in pairs])
    )
    return max(FLOOR, (error / size) ** 0.5 if size else 0.0)


def compare(layout: Outcome, one_process: Outcome, truth: Outcome, factor: float) -> list[Row]:
    """All compared numbers. A row of a gradient, or of a router's bias, holds its largest absolute value and error.

    A parameter that one side lacks has an infinite error. A scalar may be right by luck, so a step's are compared
    with the worst of all up to it, which is also what the next step starts from.
    """
    floor = rounding(one_process, truth)
    rows, worst = [], floor
    for right, seen, one in zip(truth.numbers(), layout.numbers(), one_process.numbers(), strict=True):
        worst = max([worst, *(abs(one[name] - value) / abs(value) for name, value in right.items() if value)])
        rows += [
            Row(name, value, seen[name], abs(seen[name] - value), factor * worst * abs(value))
            for name, value in right.items()
        ]
    largest = max(gradient.abs().max().item() for gradient in truth.of_parameters().values())
    for name in sorted(truth.gradients.keys() | layout.gradients.keys()):
        right, seen, one = (side.gradients.get(name) for side in (truth, layout, one_process))
        sizes = [0.0 if g is None else g.abs().max().item() for g in (right, seen)]
        label = name if name.endswith(BIAS) else f"gradient of {name}"
        if right is None or seen is None or right.shape != seen.shape:
            rows.append(Row(label, *sizes, float("inf"), 0.0))
            continue
        error, own = ((side - right).abs().max().item() for side in (seen, one))
        scale = max(sizes[0], SMALLEST_GRADIENT * largest)
        rows.append(Row(label, *sizes, error, factor * max(own, floor * scale)))
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
