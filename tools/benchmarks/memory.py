"""Suite memory: the most bytes of tensors alive at once in a step: ours against bare loops and torch's classes."""

import functools
from collections.abc import Callable
from dataclasses import replace

import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megatron_lite.rehearsal.accounting import Accounting
from tools.benchmarks import fsdp, pipeline
from tools.benchmarks.baseline_model import (
    QUICK,
    BareModel,
    Sizes,
    build_optimizer,
    random_batches,
    train_step,
)
from tools.benchmarks.comparison import Options, Row, Table, refuse_unlike
from tools.benchmarks.our_run import load_initial_weights, run_config
from tools.benchmarks.ranks import run_ranks

MOST = 1.02
MIB = 1 << 20
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
BARE, BARE_RECOMPUTE = "bare loop", "bare loop, each block under checkpoint"
DDP, FULLY_SHARD = "torch DDP", "torch fully_shard"
ONE_F_ONE_B, TORCH_INTERLEAVED = "torch Schedule1F1B", "torch ScheduleInterleaved1F1B"

Counted = dict[str, tuple[int, float]]  # contestant -> (peak bytes of a step, its loss)

# Contestant -> (what it is held against, whether it may hold no more).
ONE_PROCESS = {
    "ours": (BARE, True),
    "ours, recompute full": (BARE_RECOMPUTE, True),
    "ours, recompute core_attn, layernorm, mlp": (BARE, False),
    "ours, loss in chunks": (BARE, False),
    "ours, recompute full, loss in chunks": (BARE_RECOMPUTE, False),
}
DATA_PARALLEL = {
    "ours, sharded": (FULLY_SHARD, True),
    "ours, sharded, reshard never": (FULLY_SHARD, False),
    "ours, no_shard": (DDP, False),
}
STAGES = {"ours, 1f1b": (ONE_F_ONE_B, True), "ours, interleaved": (TORCH_INTERLEAVED, True)}


def run(options: Options) -> list[Table]:
    """Peak bytes of a step, counted: ours against the bare loop and torch's classes, with and without recompute."""
    # Long enough that activations and logits, not weights, are what is seen; small chunks need 1,024 tokens and more.
    sizes = replace(QUICK, layers=4, seq_length=256, micro_batch=8) if options.quick else Sizes(micro_batch=8)
    parts = [
        ("One process", 1, one_process, sizes, ONE_PROCESS),
        ("Data parallel on 2 ranks", 2, data_parallel, sizes, DATA_PARALLEL),
        ("Pipeline of 2 ranks, 4 microbatches", 2, stages, replace(sizes, micro_batch=4), STAGES),
    ]
    return [_table(*part) for part in parts]


def _table(
    title: str,
    world_size: int,
    count: Callable[[Sizes], Counted],
    sizes: Sizes,
    pairs: dict[str, tuple[str, bool]],
) -> Table:
    answers = run_ranks(count, world_size, sizes)
    refuse_unlike("the last loss", {name: loss for name, (_, loss) in answers[0].items()})
    peaks = {name: max(answer[name][0] for answer in answers) for name in answers[0]}
    rows = []
    for name, (baseline, bounded) in pairs.items():
        ratio = peaks[name] / peaks[baseline]
        rows.append(Row(name, baseline, ratio, ratio, ratio, at_most=MOST if bounded else None))
    bytes_held = ", ".join(f"{name} {peak / MIB:.1f} MiB" for name, peak in peaks.items())
    facts = [
        f"{sizes.layers} layers of {sizes.hidden}, microbatches of {sizes.micro_batch} samples of {sizes.seq_length} "
        "tokens, fp32, AdamW; the second step, with weights and optimizer state; the ratio is of bytes (below 1: "
        "ours holds less), counted, the same in every run; the losses are equal.",
        f"The most on a rank: {bytes_held}",
    ]
    return Table(f"Peak bytes: {title}", rows, facts)


def one_process(sizes: Sizes) -> Counted:
    """On the one rank: the bare loop without and with recomputation, and ours."""
    batches = random_batches(sizes, sizes.micro_batch, 2)
    every_operator = "--recompute-granularity selective --recompute-modules core_attn layernorm mlp"
    chunked = "--cross-entropy-loss-fusion"
    flags = dict(
        zip(ONE_PROCESS, ["", FULL_RECOMPUTE, every_operator, chunked, f"{FULL_RECOMPUTE} {chunked}"])
    )
    contestants = {
        BARE: lambda: bare_step(sizes, batches, recompute=False),
        BARE_RECOMPUTE: lambda: bare_step(sizes, batches, recompute=True),
    } | {name: functools.partial(fsdp.our_step, sizes, batches, more) for name, more in flags.items()}
    return {name: peak_of_step(build) for name, build in contestants.items()}


def data_parallel(sizes: Sizes) -> Counted:
    """On every rank: torch's two ways, and ours."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    samples = slice(rank * sizes.micro_batch, (rank + 1) * sizes.micro_batch)
    whole = random_batches(sizes, world_size * sizes.micro_batch, 2)
    batches = [{key: t[samples] for key, t in batch.items()} for batch in whole]
    never, no_shard = "--reshard-after-forward never", "--data-parallel-sharding-strategy no_shard"
    contestants = {
        FULLY_SHARD: lambda: fsdp.torch_step(sizes, batches, fsdp.sharded),
        DDP: lambda: fsdp.torch_step(sizes, batches, fsdp.DistributedDataParallel),
    } | {
        name: functools.partial(fsdp.our_step, sizes, batches, more)
        for name, more in zip(DATA_PARALLEL, ("", never, no_shard))
    }
    return {name: peak_of_step(build) for name, build in contestants.items()}


def stages(sizes: Sizes) -> Counted:
    """On every rank: torch's schedules around bare stages, and ours."""
    batches = random_batches(sizes, 4 * sizes.micro_batch, 2)
    contestants = {
        ONE_F_ONE_B: lambda: pipeline.torch_step(sizes, batches, 4, chunks=1),
        TORCH_INTERLEAVED: lambda: pipeline.torch_step(sizes, batches, 4, chunks=2),
    } | {
        name: functools.partial(pipeline.our_step, sizes, batches, more)
        for name, more in zip(STAGES, (pipeline.even_split(sizes, 1), pipeline.even_split(sizes, 2)))
    }
    return {name: peak_of_step(build) for name, build in contestants.items()}


def peak_of_step(build: Callable[[], Callable[[], float]]) -> tuple[int, float]:
    """(the most bytes alive at once in the second step, its loss); what `build` makes counts too."""
    with Accounting({}) as counted:
        step = build()
        step()
        counted.start()
        loss = step()
    return counted.peak, loss


def bare_step(sizes: Sizes, batches: list[dict], recompute: bool) -> Callable[[], float]:
    """The bare loop's step; with `recompute` each block is recomputed in backward."""
    model = BareModel(sizes)
    load_initial_weights(model, run_config(sizes, f"--global-batch-size {sizes.micro_batch}"))
    if recompute:
        for layer in model.layers.values():
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    optimizer, following = build_optimizer(model), iter(batches)
    return lambda: train_step(model, optimizer, next(following), 1)
