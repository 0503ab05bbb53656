"""Is my layout right? Trains a few steps in it and in one plain process, and compares every number.

    torchrun --nproc-per-node 8 tools/verify_parity.py <the flags of pretrain_gpt.py> [--parity-steps 2]

Both sides start from the same weights and see the same random tokens, some masked. Compared: the loss and the
gradient norm of every step, every parameter's gradient by name, the evaluation loss at the end. The one process
uses plain autograd over the whole batch and torch's own clipping and optimizers. A model too large for one process
is made small first, the layout stays. Computes in fp32 without dropout; --parity-precision keep takes the run's own
format and a tolerance to match. Exit code 0 when everything is equal, 1 when not, 2 for a wrong flag.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_lite.arguments import parse_or_exit
from megatron_lite.config import Config, PrecisionConfig
from megatron_lite.data.command_line import Parser, number
from megatron_lite.environment import Environment
from megatron_lite.model.vocabulary import known_vocabulary, with_vocabulary
from megatron_lite.parallel.miniature import VOCABULARY, describe_change, miniature

TOLERANCES = {"fp32": 1e-5, "keep": 5e-2}


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """(this tool's own flags, the run's flags)."""
    parser = Parser(__doc__.splitlines()[0], prog="verify_parity.py")
    parser.add_argument("--parity-steps", type=number(1), default=2, help="steps to train (default 2)")
    parser.add_argument("--parity-tolerance", type=float, help="relative; default 1e-5, with keep 5e-2")
    parser.add_argument(
        "--parity-precision", choices=sorted(TOLERANCES), default="fp32", help="fp32, or keep the run's"
    )
    parser.add_argument(
        "--parity-max-parameters", type=number(1), default=20_000_000, help="larger models are made small"
    )
    return parser.parse_known_args(argv)


if __name__ == "__main__":  # a wrong flag is answered before torch is imported
    ENVIRONMENT = Environment.read()
    OWN, FLAGS = parse(sys.argv[1:])
    CONFIG = parse_or_exit(FLAGS, ENVIRONMENT)

# ruff: noqa: E402

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megatron_lite.distributed import process_group, run_and_exit
from megatron_lite.mesh import ParallelMesh, build_mesh, whole_tensor
from megatron_lite.model.gpt import GPTChunk
from megatron_lite.parallel.fsdp import compute_dtype
from megatron_lite.parallel.parallelize import build_chunks
from megatron_lite.parallel.partition import StagePlan, plan_from_config, stages_of_rank
from megatron_lite.parallel.pipeline import Batch, Pipeline
from megatron_lite.training.evaluate import count_tokens, sum_loss
from megatron_lite.training.gradients import clip_gradients, gradient_norm, scale_gradients
from megatron_lite.training.loss_scale import LossScale
from megatron_lite.training.optimizer import build_optimizer, set_schedule

RATE = 1e-3
DECAY = 0.1
# A gradient that is zero but for rounding is held to what rounding leaves of the largest one.
FLOOR = 0.01
SHOWN = 8


@dataclass
class Outcome:
    """What one side computed: a loss and a norm per step, the first step's gradients, the loss of an evaluation."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    evaluation: float = 0.0


@dataclass(frozen=True)
class Row:
    """One compared number: its value in one process, in the layout, their relative difference, what it may be more.

    slack: times the tolerance. From the third step on rounding alone has grown through the optimizer.
    """

    name: str
    expected: float
    seen: float
    difference: float
    slack: float = 1.0


def with_any_vocabulary(config: Config) -> Config:
    """The config with a vocabulary size: tokens are random here, and no tokenizer is read."""
    return with_vocabulary(config, known_vocabulary(config) or VOCABULARY)


def comparable(config: Config, precision: str) -> Config:
    """The run without what makes two sides differ by chance: no dropout, and fp32 unless its format is kept.

    Weights start larger than usual: with 0.02 the gradients of a small model drown in rounding.
    """
    std = max(config.model.init_method_std, 0.6 / config.model.hidden_size**0.5)
    model = replace(config.model, hidden_dropout=0.0, attention_dropout=0.0, init_method_std=std)
    kept = replace(config.precision, loss_scale=config.precision.loss_scale or 1024.0)
    optimizer = replace(config.optimizer, lr=RATE, decoupled_lr=None)
    return replace(
        config, model=model, precision=kept if precision == "keep" else PrecisionConfig(), optimizer=optimizer
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


def run_layout(config: Config, mesh: ParallelMesh, steps: int) -> Outcome:
    """My part of the training in the layout; the same losses and norms on every rank, my chunks' gradients."""
    plans = plan_from_config(config)

    def build(stage: StagePlan) -> nn.Module:
        return GPTChunk(config.model, stage.layers, stage.has_embedding, stage.has_lm_head)

    chunks = build_chunks(config, stages_of_rank(plans, mesh.rank("pp")), mesh, build)
    pipeline = Pipeline(config, plans, chunks, mesh)
    optimizer = build_optimizer(chunks, config.optimizer)
    scale = LossScale.from_config(config.precision).scale
    samples = config.training.micro_batch_size * mesh.data_parallel_size
    microbatches = config.training.global_batch_size // samples
    outcome = Outcome()
    for step in range(steps):
        batch = my_samples(random_batch(config, step), config, mesh)
        tokens = count_tokens(batch, mesh).item()
        loss_sum = sum_loss(pipeline.train_step(batch, microbatches, scale / tokens), mesh)
        scale_gradients(chunks, 1 / scale)
        outcome.losses.append(loss_sum.item() / tokens)
        outcome.norms.append(gradient_norm(chunks, mesh).item())
        if step == 0:
            outcome.gradients = whole_gradients(chunks)
        clip_gradients(chunks, outcome.norms[-1], config.optimizer.clip_grad)
        set_schedule(optimizer, lambda decoupled: RATE, DECAY)
        optimizer.step()
        optimizer.zero_grad()
    batch = my_samples(random_batch(config, steps), config, mesh)
    tokens = count_tokens(batch, mesh).item()
    outcome.evaluation = sum_loss(pipeline.eval_step(batch, microbatches), mesh).item() / tokens
    return outcome


def whole_gradients(chunks: list[nn.Module]) -> dict[str, torch.Tensor]:
    """{global name: the whole gradient, on the CPU} of my chunks."""
    gradients = {}
    for chunk in chunks:
        for name, parameter in chunk.named_global_parameters():
            gradients[name] = whole_tensor(parameter.grad).detach().cpu().clone()
    return gradients


def run_one_process(config: Config, steps: int, device: torch.device) -> Outcome:
    """The judge: the whole model, plain autograd over whole batches, torch's own clipping and optimizers."""
    model = GPTChunk(config.model, range(config.model.num_layers))
    with torch.no_grad():
        for name, parameter in model.named_global_parameters():
            rows = torch.arange(parameter.shape[0])
            parameter.copy_(model.initial_rows(name, tuple(parameter.shape), rows, config.training.seed))
    model.to(device)
    optimizers = torch_optimizers(config, model)
    outcome = Outcome()
    for step in range(steps):
        loss = mean_loss(model, random_batch(config, step), config, device)
        loss.backward()
        if step == 0:
            outcome.gradients = {n: p.grad.detach().cpu().clone() for n, p in model.named_parameters()}
        limit = config.optimizer.clip_grad or float("inf")
        outcome.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        outcome.losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        outcome.evaluation = mean_loss(model, random_batch(config, steps), config, device).item()
    return outcome


def mean_loss(model: nn.Module, batch: Batch, config: Config, device: torch.device) -> torch.Tensor:
    """Mean cross-entropy over unmasked tokens; in a half format the model computes with cast parameters."""
    dtype = compute_dtype(config.precision)
    parameters = {name: parameter.to(dtype) for name, parameter in model.named_parameters()}
    whole = {key: t.to(device) for key, t in batch.items()}
    tokens, labels = whole.pop("tokens"), whole.pop("labels")
    logits = torch.func.functional_call(model, parameters, (tokens,), whole)
    logits = logits[..., : config.model.vocab_size].float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def torch_optimizers(config: Config, model: nn.Module) -> list[torch.optim.Optimizer]:
    """What --optimizer names, from torch, with decay on matrices only."""
    kind = config.optimizer.optimizer
    names = {n for n, p in model.named_parameters() if n.startswith("layers.") and p.dim() == 2}
    muon = [p for n, p in model.named_parameters() if kind == "muon" and n in names]
    rest = [p for n, p in model.named_parameters() if kind != "muon" or n not in names]
    groups = [
        {"params": [p for p in rest if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in rest if p.dim() == 1], "weight_decay": 0.0},
    ]
    settings = config.optimizer
    if kind == "sgd":
        return [torch.optim.SGD(groups, lr=RATE, momentum=settings.sgd_momentum)]
    betas = (settings.adam_beta1, settings.adam_beta2)
    optimizers = [torch.optim.AdamW(groups, lr=RATE, betas=betas, eps=settings.adam_eps)]
    if muon:
        shape = {"lr": RATE, "weight_decay": DECAY, "adjust_lr_fn": "match_rms_adamw"}
        optimizers.append(torch.optim.Muon(muon, **shape))
    return optimizers


def compare(layout: Outcome, judge: Outcome) -> list[Row]:
    """All compared numbers. A gradient's row holds its largest absolute value and its largest difference.

    A parameter that one side lacks has the difference infinity.
    """
    rows = []
    for kind, name in (("losses", "loss"), ("norms", "gradient norm")):
        pairs = zip(getattr(judge, kind), getattr(layout, kind), strict=True)
        rows += [_row(f"{name} of step {n}", *pair, _slack(n)) for n, pair in enumerate(pairs)]
    rows.append(_row("evaluation loss", judge.evaluation, layout.evaluation, _slack(len(judge.losses) - 1)))
    largest = max(gradient.abs().max().item() for gradient in judge.gradients.values())
    for name in sorted(judge.gradients.keys() | layout.gradients.keys()):
        expected, seen = judge.gradients.get(name), layout.gradients.get(name)
        sizes = [0.0 if g is None else g.abs().max().item() for g in (expected, seen)]
        difference = float("inf")
        if expected is not None and seen is not None and expected.shape == seen.shape:
            scale = max(sizes[0], FLOOR * largest)
            difference = (expected - seen).abs().max().item() / scale
        rows.append(Row(f"gradient of {name}", *sizes, difference))
    return rows


def _row(name: str, expected: float, seen: float, slack: float) -> Row:
    return Row(name, expected, seen, abs(expected - seen) / max(abs(expected), 1e-12), slack)


def _slack(step: int) -> float:
    """1 for the first two steps, then tenfold a step, at most 1,000: Adam makes steps of rounding."""
    return 10.0 ** min(3, max(0, step - 1))


def fails(row: Row, tolerance: float) -> bool:
    """Whether a row is outside the tolerance; NaN is."""
    return not row.difference <= tolerance * row.slack


def report(rows: Sequence[Row], tolerance: float) -> str:
    """The table: losses, norms, the worst gradients; then the verdict."""
    gradients = [row for row in rows if row.name.startswith("gradient of")]
    worst = sorted(gradients, key=lambda r: -r.difference if r.difference == r.difference else -float("inf"))
    shown = [row for row in rows if row not in gradients] + worst[:SHOWN]
    width = max(len(row.name) for row in shown)
    lines = [f"{'':{width}}  {'one process':>14}  {'this layout':>14}  {'difference':>10}"]
    for row in shown:
        mark = "  <-- differs" if fails(row, tolerance) else ""
        numbers = f"{row.expected:14.6e}  {row.seen:14.6e}  {row.difference:10.1e}"
        lines.append(f"{row.name:{width}}  {numbers}{mark}")
    lines.append(f"{len(gradients)} gradients compared, the {min(SHOWN, len(gradients))} worst shown")
    failed = sum(fails(row, tolerance) for row in rows)
    verdict = "EQUAL" if not failed else f"DIFFERENT: {failed} of {len(rows)} numbers"
    lines.append(f"{verdict} (tolerance {tolerance:g}, relative)")
    return "\n".join(lines)


def verify(config: Config, device: torch.device, steps: int, tolerance: float) -> tuple[str, bool]:
    """(report, equal), on every rank; rank 0 is the judge."""
    mesh = build_mesh(config, device)
    layout = run_layout(config, mesh, steps)
    collected: list[dict[str, torch.Tensor] | None] = [None] * dist.get_world_size()
    first = all(mesh.rank(axis) == 0 for axis in ("dp_replicate", "dp_shard", "cp", "tp"))
    gathered = collected if dist.get_rank() == 0 else None
    dist.gather_object(layout.gradients if first else {}, gathered, dst=0)
    answer: list[tuple[str, bool] | None] = [None]
    if dist.get_rank() == 0:
        layout.gradients = {name: g for part in collected for name, g in part.items()}
        rows = compare(layout, run_one_process(config, steps, device))
        answer = [(report(rows, tolerance), not any(fails(row, tolerance) for row in rows))]
    dist.broadcast_object_list(answer, src=0)
    return answer[0]


def main(own: argparse.Namespace, given: Config, environment: Environment) -> int:
    """Shrink, run both sides, print; the exit code."""
    given = with_any_vocabulary(given)
    config = miniature(given, own.parity_max_parameters, max_tokens=16_384)
    change = describe_change(given, config)
    tolerance = own.parity_tolerance or TOLERANCES[own.parity_precision]
    with process_group(config, environment) as device:
        text, equal = verify(comparable(config, own.parity_precision), device, own.parity_steps, tolerance)
        if environment.rank == 0:
            print(f"made small: {change}" if change else "the run's own size", text, sep="\n")
    return 0 if equal else 1


if __name__ == "__main__":
    run_and_exit(lambda: main(OWN, CONFIG, ENVIRONMENT), ENVIRONMENT)
