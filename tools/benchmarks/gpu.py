"""One GPU: are bf16 and NCCL right, how fast is a step, what does it hold; in eight minutes at most.

Without a GPU everything runs in its smallest form on the CPU, so that it surely starts where there is one.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_lite.arithmetic.flops import peak_flops, tflops_per_device
from megatron_lite.config import Config
from megatron_lite.distributed.environment import Environment
from megatron_lite.distributed.process_group import process_group
from megatron_lite.files.command_line import RunError
from megatron_lite.model.attention import DotProductAttention
from megatron_lite.model.documents import Documents, find_documents
from tools.benchmarks.baseline_model import (
    QUICK,
    BareModel,
    Sizes,
    build_optimizer,
    random_batches,
    train_step,
)
from tools.benchmarks.comparison import Options, Row, Table, quartiles, speed, take_turns
from tools.benchmarks.our_run import load_initial_weights, run_config
from tools.benchmarks.our_step import PreparedRun, build_prepared

T = TypeVar("T")

SECONDS = 400.0  # after that no new measurement begins: the last one may take some 30 s
STEPS, WARM_UP = 8, 3

MODELS = {
    "125M": Sizes(12, 768, 12, 2048, seq_length=2048, vocabulary=32000, micro_batch=16),
    "1B": Sizes(16, 2048, 16, 5632, seq_length=2048, vocabulary=32000, micro_batch=8),
    "3B": Sizes(28, 3072, 24, 8192, seq_length=2048, vocabulary=32000, micro_batch=4),
}
WANTED_MFU = {"1B": 0.5}
# Most wanted first: what comes after the time limit is left out.
VARIANTS = {
    "bf16": "",
    "compile": "--compile",
    "compile, chunked loss": "--compile --cross-entropy-loss-fusion",
    "recompute": "--recompute-granularity full --recompute-method uniform",
    "chunked loss": "--cross-entropy-loss-fusion",
    "AdamW not fused": "",
}
ORDER = (
    *(("1B", variant) for variant in VARIANTS),
    ("3B", "bf16"),
    ("3B", "compile, chunked loss"),
    *(("125M", variant) for variant in ("bf16", "compile", "compile, chunked loss")),
    ("3B", "recompute"),
)


QUICK_ORDER = tuple(("1B", variant) for variant in ("bf16", "chunked loss", "recompute", "AdamW not fused"))


@dataclass(frozen=True)
class Measured:
    """seconds: of each step; tflops: model TFLOP/s at the median; memory: peak bytes, 0 on the CPU."""

    seconds: list[float]
    loss: float
    tokens: int
    tflops: float
    memory: int

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return quartiles(self.seconds)[0]


def run(options: Options) -> list[Table]:
    """One GPU (else the CPU, smallest form): bf16, NCCL, tokens/s, MFU, memory, document masks, a profile."""
    started = time.monotonic()
    quick = options.quick or not torch.cuda.is_available()
    threads = torch.get_num_threads()
    with process_group(_config(QUICK, quick=quick), Environment()) as (device, _):
        tables = [correctness(device, quick), attention(device, quick, options.repeats)]
        measured, left_out = {}, []
        for name, variant in QUICK_ORDER if quick else ORDER:
            if time.monotonic() - started > SECONDS:
                left_out.append(f"{name} {variant}")
                continue
            sizes = QUICK if quick else MODELS[name]
            measured[name, variant] = _measure(sizes, variant, device, quick)
        tables.append(speeds(measured, left_out, device, quick))
        tables.append(profile(QUICK if quick else MODELS["1B"], device, options.output, quick))
    torch.set_num_threads(threads)
    return tables


def _config(sizes: Sizes, *more: str, quick: bool) -> Config:
    config = run_config(sizes, f"--global-batch-size {sizes.micro_batch} --train-iters 1000000", *more)
    return replace(config, parallel=replace(config.parallel, cpu=quick))


def correctness(device: torch.device, quick: bool) -> Table:
    """Losses after three steps, as shares of one another."""
    sizes = QUICK if quick else replace(MODELS["125M"], layers=4, micro_batch=4)
    losses = {
        variant: _losses(sizes, flags, device, quick)
        for variant, flags in {
            "fp32": "",
            "bf16": "--bf16",
            "bf16, compile": "--bf16" if quick else "--bf16 --compile",  # compiling takes 20 s on the CPU
            "bf16, recompute": "--bf16 --recompute-granularity full --recompute-method uniform",
            "bf16, chunked loss": "--bf16 --cross-entropy-loss-fusion",
        }.items()
    }
    losses["bare, fp32"] = _bare_loss(sizes, device)
    rows = [
        _close(losses, "fp32", "bare, fp32", 1e-4),
        _close(losses, "bf16", "fp32", 1e-2),
        _close(losses, "bf16, compile", "bf16", 1e-3),
        _close(losses, "bf16, recompute", "bf16", 1e-4),
        _close(losses, "bf16, chunked loss", "bf16", 1e-3),
    ]
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    facts = [
        f"{sizes}, backends {dist.get_backend_config()}, all-reduce of one rank's 1 is {total.item():g}."
    ]
    facts.append(", ".join(f"{name}: {loss:.6f}" for name, loss in losses.items()) + ".")
    return Table("gpu: the loss after three steps", rows, facts)


def _close(losses: dict[str, float], name: str, other: str, tolerance: float) -> Row:
    ratio = losses[name] / losses[other]
    return Row(name, other, ratio, ratio, ratio, at_least=1 - tolerance, at_most=1 + tolerance)


def _losses(sizes: Sizes, flags: str, device: torch.device, quick: bool) -> float:
    def use(trainer: PreparedRun) -> float:
        return [trainer.step().loss for _ in range(3)][-1]

    return _with_trainer(_config(sizes, flags, quick=quick), sizes, device, use)


def _bare_loss(sizes: Sizes, device: torch.device) -> float:
    model = BareModel(sizes)
    load_initial_weights(model, run_config(sizes))
    model.to(device)
    optimizer = build_optimizer(model)
    batches = _batches(sizes, device)
    return [train_step(model, optimizer, batches[step % len(batches)], 1) for step in range(3)][-1]


def _batches(sizes: Sizes, device: torch.device) -> list[dict[str, torch.Tensor]]:
    batches = random_batches(sizes, sizes.micro_batch, 2)
    return [{key: tensor.to(device) for key, tensor in batch.items()} for batch in batches]


def _with_trainer(config: Config, sizes: Sizes, device: torch.device, use: Callable[[PreparedRun], T]) -> T:
    """What `use` makes of our Trainer; afterwards nothing of that is left on the device."""
    try:
        return use(build_prepared(config, _batches(sizes, device), device))
    finally:
        gc.collect()
        torch._dynamo.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def _measure(sizes: Sizes, variant: str, device: torch.device, quick: bool) -> Measured | str:
    """Timed steps; a sentence when the device's memory does not hold them."""
    steps, warm_up = (2, 1) if quick else (STEPS, WARM_UP)
    config = _config(sizes, "--bf16", VARIANTS[variant], quick=quick)

    def use(trainer: PreparedRun) -> Measured:
        if variant == "AdamW not fused":
            for group in trainer.run.optimizer.param_groups:
                group.update(fused=False, foreach=True)
        for _ in range(warm_up):
            trainer.step()
        results = [trainer.step() for _ in range(steps)]  # a step ends with its loss on the host
        seconds = [result.seconds for result in results]
        memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        tflops = tflops_per_device(config, sizes.micro_batch, quartiles(seconds)[0])
        return Measured(seconds, results[-1].loss, results[-1].tokens, tflops, memory)

    try:
        return _with_trainer(config, sizes, device, use)
    except torch.OutOfMemoryError as error:
        return f"out of memory: {str(error).splitlines()[0]}"


def speeds(
    measured: dict[tuple[str, str], Measured | str], left_out: list[str], device: torch.device, quick: bool
) -> Table:
    """Each variant against plain bf16, and the fastest of each size against the device's peak."""
    rows, facts = [], []
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    for (name, variant), result in measured.items():
        if isinstance(result, str):
            facts.append(f"{name}, {variant}: {result}.")
            continue
        note = f"{result.tokens / result.median:,.0f} tokens/s, {result.tflops:.3g} TFLOP/s"
        note += f", MFU {result.tflops * 1e12 / peak:.1%}" if peak else ", MFU not available"
        note += f", {result.memory / 2**30:.1f} GiB" if result.memory else ""
        facts.append(f"{name}, {variant}: {note}.")
        base = measured.get((name, "bf16"))
        if variant != "bf16" and isinstance(base, Measured):
            what = f"{name}, {variant}"
            rows.append(speed(what, {what: result.seconds, "bf16": base.seconds}, "bf16"))
    for name in MODELS if peak else ():
        fastest = [r for (size, _), r in measured.items() if size == name and isinstance(r, Measured)]
        if fastest:
            share = max(r.tflops for r in fastest) * 1e12 / peak
            rows.append(Row(f"{name}, MFU", "peak", share, share, share, at_least=WANTED_MFU.get(name)))
    facts += [f"Left out for want of time: {', '.join(left_out)}."] if left_out else []
    facts += ["Smallest form, on the CPU: no figure of speed."] if quick else []
    return Table("gpu: a step, bf16", rows, facts)


def attention(device: torch.device, quick: bool, repeats: int) -> Table:
    """Forward and backward of causal attention, and the same inside documents by block mask and by dense mask."""
    batch, heads, seq_length, width = (1, 2, 64, 16) if quick else (2, 16, 8192, 128)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    q, k, v = (
        torch.randn(batch, heads, seq_length, width, device=device, dtype=dtype, requires_grad=True)
        for _ in range(3)
    )
    config = _config(QUICK, quick=quick).model
    core = DotProductAttention(config)
    ids = (
        torch.arange(seq_length, device=device).div(seq_length // 8, rounding_mode="floor").expand(batch, -1)
    )
    documents = find_documents(ids, config, ((seq_length, seq_length),), q)
    dense = Documents(ids)
    outputs: dict[str, torch.Tensor] = {}

    def turn(name: str, seen: Documents | None) -> float:
        _wait(device)
        started = time.perf_counter()
        out = core(q, k, v, seen)
        out.backward(out.detach())
        _wait(device)
        outputs[name] = out.detach()
        return time.perf_counter() - started

    inside = "documents, block mask" if documents.block_masks else "documents, one by one"
    contestants = {"no documents": None, inside: documents, "documents, dense mask": dense}
    seconds = take_turns(
        {name: lambda n=name, seen=seen: turn(n, seen) for name, seen in contestants.items()}, repeats, 2
    )
    difference = (outputs[inside] - outputs["documents, dense mask"]).abs().max().item()
    if difference > (1e-5 if dtype == torch.float32 else 3e-2):
        raise RunError(f"not the same work: {inside} differs from the dense mask by {difference:.3g}")
    rows = [
        speed(inside, seconds, "no documents"),
        speed(inside, seconds, "documents, dense mask"),
    ]
    facts = [
        f"[{batch}, {heads}, {seq_length}, {width}] {dtype}, 8 documents; largest difference {difference:.2g}."
    ]
    return Table("gpu: attention inside documents, forward and backward", rows, facts)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def profile(sizes: Sizes, device: torch.device, output: Path | None, quick: bool) -> Table:
    """Where the time of a step goes: the kernels that take most of it; the trace as a file with --output."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)

    def use(trainer: PreparedRun) -> torch.profiler.profile:
        for _ in range(1 if quick else WARM_UP):
            trainer.step()
        with torch.profiler.profile(activities=activities) as profiler:
            trainer.step()
        return profiler

    flags = "--bf16" if quick else "--bf16 --compile"
    profiler = _with_trainer(_config(sizes, flags, quick=quick), sizes, device, use)
    key = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    events = sorted(profiler.key_averages(), key=lambda event: getattr(event, key), reverse=True)
    total = sum(getattr(event, key) for event in events)
    facts = [
        f"- {getattr(event, key) / total:.1%} {event.key[:90]} ({event.count} times)" for event in events[:15]
    ]
    if output is not None:
        path = output / "trace.json.gz"
        profiler.export_chrome_trace(str(path))
        facts.append(f"Trace: {path}.")
    return Table(f"gpu: where the time of one step goes ({flags})", [], facts)
