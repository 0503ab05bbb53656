"""One GPU: are bf16 and NCCL right, how fast is a step, what does it hold; in eight minutes at most.

Without a GPU everything runs in its smallest form on the CPU, so that it surely starts where there is one.
"""

import gc
import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megatron_lite.arithmetic.flops import peak_flops, tflops_per_device
from megatron_lite.config import Config
from megatron_lite.distributed.environment import Environment
from megatron_lite.distributed.process_group import process_group
from megatron_lite.parallel.pipeline import Batch
from tools.benchmarks.baseline_model import QUICK, Sizes, build_optimizer, random_batches, train_step
from tools.benchmarks.comparison import Options, Table, row_of, speed
from tools.benchmarks.ours import PreparedRun, run_config
from tools.benchmarks.scripts import bare_model

SECONDS = 400.0  # after that no new measurement begins: the last one may take some 30 s
STEPS, WARM_UP = 8, 3
Case = tuple[str, str]  # of MODELS and VARIANTS
MODELS = {
    "125M": Sizes(12, 768, 12, 2048, seq_length=2048, vocabulary=32000, micro_batch=16),
    "1B": Sizes(16, 2048, 16, 5632, seq_length=2048, vocabulary=32000, micro_batch=8),
    "3B": Sizes(28, 3072, 24, 8192, seq_length=2048, vocabulary=32000, micro_batch=4),
}
WANTED_MFU = {"1B": 0.5}
VARIANTS = {
    "fp32": "",
    "bf16": "--bf16",
    "compile": "--bf16 --compile",
    "compile, chunked loss": "--bf16 --compile --cross-entropy-loss-fusion",
    "recompute": "--bf16 --recompute-granularity full --recompute-method uniform",
    "chunked loss": "--bf16 --cross-entropy-loss-fusion",
}
# The loss after three steps, as a share of another's, and how far it may be from 1.
CLOSE = {
    ("fp32", "bare, fp32"): 1e-4,
    ("bf16", "fp32"): 1e-2,
    ("compile", "bf16"): 1e-3,
    ("recompute", "bf16"): 1e-4,
    ("chunked loss", "bf16"): 1e-3,
}
# Most wanted first: what comes after the time limit is left out.
ORDER = (
    *(("1B", variant) for variant in list(VARIANTS)[1:]),
    *(("3B", variant) for variant in ("bf16", "compile, chunked loss")),
    *(("125M", variant) for variant in ("bf16", "compile", "compile, chunked loss")),
    ("3B", "recompute"),
)
# Compiling takes 20 s on the CPU.
QUICK_ORDER = tuple(("1B", variant) for variant in ("bf16", "chunked loss", "recompute"))


@dataclass(frozen=True)
class Measured:
    """seconds: of each step; tflops: model TFLOP/s at the median; memory: peak bytes, 0 on the CPU."""

    seconds: list[float]
    loss: float
    tokens: int
    tflops: float
    memory: int


def run(options: Options) -> list[Table]:
    """One GPU (else the CPU, smallest form): bf16 and NCCL, tokens/s, MFU, memory."""
    started = time.monotonic()
    quick = options.quick or not torch.cuda.is_available()
    threads = torch.get_num_threads()
    with process_group(_config(QUICK, "", quick), Environment()) as (device, _):
        tables, measured = [correctness(device, quick)], {}
        waiting = list(QUICK_ORDER if quick else ORDER)
        while waiting and time.monotonic() - started < SECONDS:
            name, variant = waiting.pop(0)
            sizes, steps = (QUICK, 2) if quick else (MODELS[name], STEPS)
            measured[name, variant] = train(sizes, variant, device, quick, steps)
        peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        tables.append(speeds(measured, waiting, peak))
    torch.set_num_threads(threads)
    return tables


def _config(sizes: Sizes, flags: str, quick: bool) -> Config:
    config = run_config(sizes, f"--global-batch-size {sizes.micro_batch}", flags)
    return replace(config, parallel=replace(config.parallel, cpu=quick))


def _batches(sizes: Sizes, device: torch.device) -> list[Batch]:
    batches = random_batches(sizes, sizes.micro_batch, 2)
    return [{key: tensor.to(device) for key, tensor in batch.items()} for batch in batches]


def train(sizes: Sizes, variant: str, device: torch.device, quick: bool, steps: int) -> Measured | str:
    """Steps after WARM_UP ones; a sentence when the memory does not hold them. Leaves nothing on the device."""
    config = _config(sizes, VARIANTS[variant], quick)
    try:
        prepared = PreparedRun(config, _batches(sizes, device), device)
        results = [prepared.step() for _ in range(WARM_UP + steps)]  # a step ends with its loss on the host
        seconds = [result.seconds for result in results[WARM_UP:]]
        memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        tflops = tflops_per_device(config, sizes.micro_batch, sorted(seconds)[len(seconds) // 2])
        return Measured(seconds, results[-1].loss, results[-1].tokens, tflops, memory)
    except torch.OutOfMemoryError as error:
        return f"out of memory: {str(error).splitlines()[0]}"
    finally:
        prepared = None
        gc.collect()
        torch._dynamo.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def correctness(device: torch.device, quick: bool) -> Table:
    """Losses after as many steps, as shares of one another."""
    sizes = QUICK if quick else replace(MODELS["125M"], layers=4, micro_batch=4)
    model = bare_model(sizes).to(device)
    optimizer, batches = build_optimizer(model), _batches(sizes, device)
    bare = [train_step(model, optimizer, batches[step % 2], 1) for step in range(WARM_UP + 1)]
    losses = {"bare, fp32": bare[-1]}
    pairs = {pair: most for pair, most in CLOSE.items() if not (quick and "compile" in pair)}
    for variant, _ in pairs:
        losses[variant] = train(sizes, variant, device, quick, steps=1).loss
    rows = [
        row_of(name, other, [losses[name] / losses[other]], 1 - most, 1 + most)
        for (name, other), most in pairs.items()
    ]
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    backend = f"backends {dist.get_backend_config()}, all-reduce of one rank's 1 is {total.item():g}"
    told = ", ".join(f"{name}: {loss:.6f}" for name, loss in losses.items())
    return Table("gpu: the loss after four steps", rows, [f"{sizes}, {backend}.", f"{told}."])


def speeds(
    measured: dict[tuple[str, str], Measured | str], left_out: list[tuple[str, str]], peak: float | None
) -> Table:
    """Each variant against plain bf16, and the fastest of each size against the device's peak (FLOP/s)."""
    rows, facts, best = [], [], {}
    for (name, variant), result in measured.items():
        what, base = f"{name}, {variant}", measured.get((name, "bf16"))
        if isinstance(result, str):
            facts.append(f"{what}: {result}.")
            continue
        best[name] = max(best.get(name, 0.0), result.tflops)
        rate = result.tokens / sorted(result.seconds)[len(result.seconds) // 2]
        mfu = f"{result.tflops * 1e12 / peak:.1%}" if peak else "not available"
        memory = f", {result.memory / 2**30:.1f} GiB" if result.memory else ""
        facts.append(f"{what}: {rate:,.0f} tokens/s, {result.tflops:.3g} TFLOP/s, MFU {mfu}{memory}.")
        if variant != "bf16" and isinstance(base, Measured):
            rows.append(speed(what, {what: result.seconds, "bf16": base.seconds}, "bf16"))
    for name, tflops in best.items() if peak else ():
        rows.append(row_of(f"{name}, MFU", "peak", [tflops * 1e12 / peak], WANTED_MFU.get(name)))
    facts += [f"Left out for want of time: {', '.join(map(' '.join, left_out))}."] if left_out else []
    return Table("gpu: a step, bf16", rows, facts)
