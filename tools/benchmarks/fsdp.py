"""Suite fsdp: a whole data-parallel step on 2 and 4 ranks against scripts that use torch's own classes and no more."""

from collections.abc import Callable
from itertools import cycle

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from megatron_lite.parallel.pipeline import Batch
from tools.benchmarks.baseline_model import (
    CLIP,
    QUICK,
    BareModel,
    Sizes,
    build_optimizer,
    mean_loss,
    random_batches,
)
from tools.benchmarks.comparison import Options, Table, refuse_unlike, speed, take_turns
from tools.benchmarks.our_run import load_initial_weights, run_config
from tools.benchmarks.our_step import build_prepared
from tools.benchmarks.ranks import run_ranks, timed

STEPS_A_TURN = 2
BATCHES = 4
FULLY_SHARD, DDP = "torch fully_shard", "torch DDP"
SHARDED, REPLICATED = "ours, sharded", "ours, no_shard"
WANTED = 0.95


def run(options: Options) -> list[Table]:
    """FSDP and DDP-like steps on 2 and 4 ranks against minimal scripts with torch's own classes."""
    worlds = (2,) if options.quick else (2, 4)
    return [_table(world_size, options) for world_size in worlds]


def _table(world_size: int, options: Options) -> Table:
    sizes = QUICK if options.quick else Sizes()
    answers = run_ranks(compete, world_size, sizes, options.repeats)
    seconds, losses = answers[0]
    for name in (SHARDED, REPLICATED):
        refuse_unlike("the last loss", {other: losses[other] for other in (FULLY_SHARD, DDP, name)})
    rows = [
        speed(SHARDED, seconds, FULLY_SHARD, at_least=WANTED if world_size == 2 else None),
        speed(REPLICATED, seconds, DDP, at_least=WANTED if world_size == 2 else None),
        speed(DDP, seconds, FULLY_SHARD),
    ]
    per_step = {name: min(turns) / STEPS_A_TURN for name, turns in seconds.items()}
    facts = [
        f"{sizes.layers} layers of {sizes.hidden}, {world_size} ranks with one thread each, "
        f"{sizes.micro_batch} samples of {sizes.seq_length} tokens a rank, fp32, AdamW; the losses are equal.",
        "Shortest step: " + ", ".join(f"{name} {value * 1000:.0f} ms" for name, value in per_step.items()),
    ]
    return Table(f"Data parallel on {world_size} ranks", rows, facts)


def compete(sizes: Sizes, repeats: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """On every rank: seconds of each contestant's turns, and the loss of its last step (mean over all ranks)."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    samples = slice(rank * sizes.micro_batch, (rank + 1) * sizes.micro_batch)
    whole = random_batches(sizes, world_size * sizes.micro_batch, BATCHES)
    batches = [{key: t[samples] for key, t in batch.items()} for batch in whole]
    steps = {
        FULLY_SHARD: torch_step(sizes, batches, sharded),
        SHARDED: our_step(sizes, batches),
        DDP: torch_step(sizes, batches, DistributedDataParallel),
        REPLICATED: our_step(sizes, batches, "--data-parallel-sharding-strategy no_shard"),
    }
    losses: dict[str, float] = {}

    def turn(name: str) -> None:
        for _ in range(STEPS_A_TURN):
            losses[name] = steps[name]()

    turns = {name: timed(lambda name=name: turn(name)) for name in steps}
    return take_turns(turns, repeats), losses


def our_step(sizes: Sizes, batches: list[Batch], *flags: str) -> Callable[[], float]:
    """The step of our Trainer; gives the mean loss of the global batch."""
    world_size = dist.get_world_size()
    batch_size = f"--global-batch-size {world_size * sizes.micro_batch}"
    trainer = build_prepared(run_config(sizes, batch_size, *flags, world_size=world_size), batches)
    return lambda: trainer.step().loss


def sharded(model: BareModel) -> nn.Module:
    """FSDP2 as its tutorial has it: each block, then the rest."""
    for layer in model.layers.values():
        fully_shard(layer)
    return fully_shard(model)


def torch_step(
    sizes: Sizes, batches: list[Batch], spread: Callable[[nn.Module], nn.Module]
) -> Callable[[], float]:
    """The minimal script: `spread` over the ranks, forward, backward, clip, AdamW, the loss for the log."""
    model = BareModel(sizes)
    load_initial_weights(model, run_config(sizes, f"--global-batch-size {sizes.micro_batch}"))
    model = spread(model)
    optimizer = build_optimizer(model)
    following = cycle(batches)

    def step() -> float:
        batch = next(following)
        loss = mean_loss(model(batch["tokens"]), batch["labels"])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return mean_over_ranks(loss.detach())

    return step


def mean_over_ranks(loss: torch.Tensor) -> float:
    """The mean of every rank's own mean loss."""
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()
