"""Suite pipeline: a whole step on 2 and 4 stages' ranks against scripts that use torch's own classes and no more."""

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from megatron_lite.arithmetic.partition import plan_from_config
from megatron_lite.arithmetic.pipeline_layout import write_layout
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

BATCHES = 4
MICROBATCHES_A_RANK = 2
WANTED = 0.95
TORCH, TORCH_INTERLEAVED = "torch Schedule1F1B", "torch ScheduleInterleaved1F1B"
EVEN, EVEN_INTERLEAVED = "ours, 1f1b, same split", "ours, interleaved, same split"
OURS, OURS_INTERLEAVED = "ours, 1f1b", "ours, interleaved"
INTERLEAVED = "--num-virtual-stages-per-pipeline-rank 2"


def run(options: Options) -> list[Table]:
    """Pipeline steps (1F1B, interleaved) on 2 and 4 ranks against minimal scripts with torch's own classes."""
    return [_table(size, options) for size in ((2,) if options.quick else (2, 4))]


def _table(size: int, options: Options) -> Table:
    sizes = replace(QUICK, layers=4) if options.quick else Sizes()
    seconds, losses = run_ranks(compete, size, sizes, options.repeats)[0]
    refuse_unlike("the last loss", losses)
    wanted = WANTED if size == 2 else None
    rows = [
        speed(EVEN, seconds, TORCH, at_least=wanted),
        speed(OURS, seconds, TORCH, at_least=wanted, note=layers_of_stages(sizes, size)),
        speed(EVEN_INTERLEAVED, seconds, TORCH_INTERLEAVED, at_least=wanted),
        speed(
            OURS_INTERLEAVED,
            seconds,
            TORCH_INTERLEAVED,
            at_least=wanted,
            note=layers_of_stages(sizes, size, INTERLEAVED),
        ),
        speed(TORCH_INTERLEAVED, seconds, TORCH),
    ]
    shortest = ", ".join(f"{name} {min(turns) * 1000:.0f} ms" for name, turns in seconds.items())
    facts = [
        f"{sizes.layers} layers of {sizes.hidden}, {size} ranks with one thread each, {MICROBATCHES_A_RANK * size} "
        f"microbatches of {sizes.micro_batch} samples of {sizes.seq_length} tokens, fp32, AdamW; interleaved with 2 "
        "chunks a rank; the losses are equal. The scripts cut the layers evenly; ours weighs the head when it cuts, "
        "and is also run with the scripts' split.",
        f"Shortest step: {shortest}",
    ]
    return Table(f"Pipeline of {size} ranks", rows, facts)


def compete(sizes: Sizes, repeats: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """On every rank: seconds of each contestant's steps, and the loss of its last one."""
    microbatches = MICROBATCHES_A_RANK * dist.get_world_size()
    batches = random_batches(sizes, microbatches * sizes.micro_batch, BATCHES)
    steps = {
        TORCH: torch_step(sizes, batches, microbatches, chunks=1),
        EVEN: our_step(sizes, batches, even_split(sizes, chunks=1)),
        OURS: our_step(sizes, batches),
        TORCH_INTERLEAVED: torch_step(sizes, batches, microbatches, chunks=2),
        EVEN_INTERLEAVED: our_step(sizes, batches, even_split(sizes, chunks=2)),
        OURS_INTERLEAVED: our_step(sizes, batches, INTERLEAVED),
    }
    losses: dict[str, float] = {}

    def turn(name: str) -> None:
        losses[name] = steps[name]()

    return take_turns({name: timed(lambda name=name: turn(name)) for name in steps}, repeats), losses


def even_split(sizes: Sizes, chunks: int) -> str:
    """The flag for the scripts' split: as many layers in each stage."""
    stages = dist.get_world_size() * chunks
    return f"--pipeline-model-parallel-layout {write_layout([sizes.layers // stages] * stages)}"


def layers_of_stages(sizes: Sizes, size: int, *flags: str) -> str:
    """How our own split cuts the layers, for the table."""
    layout = f"--pipeline-model-parallel-size {size} --global-batch-size {size * sizes.micro_batch}"
    plans = plan_from_config(run_config(sizes, layout, *flags, world_size=size))
    return "layers of the stages: " + ", ".join(str(len(plan.layers)) for plan in plans)


def our_step(sizes: Sizes, batches: list[Batch], *flags: str) -> Callable[[], float]:
    """The step of our Trainer; gives the mean loss of the global batch."""
    size = dist.get_world_size()
    layout = f"--pipeline-model-parallel-size {size} --global-batch-size {batches[0]['tokens'].shape[0]}"
    trainer = build_prepared(run_config(sizes, layout, *flags, world_size=size), batches)
    return lambda: trainer.step().loss


def torch_step(sizes: Sizes, batches: list[Batch], microbatches: int, chunks: int) -> Callable[[], float]:
    """The minimal script: stages, schedule, the norm over all stages, AdamW, the loss for the log."""
    rank, size, device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    num_stages = size * chunks
    depth = sizes.layers // num_stages
    config = run_config(sizes, f"--global-batch-size {sizes.micro_batch}")
    models = nn.ModuleList()
    for stage in range(rank, num_stages, size):
        layers = range(stage * depth, (stage + 1) * depth)
        models.append(BareModel(sizes, layers, first=stage == 0, last=stage == num_stages - 1))
        load_initial_weights(models[-1], config)
    stages = [
        PipelineStage(model, stage, num_stages, device)
        for model, stage in zip(models, range(rank, num_stages, size), strict=True)
    ]
    if chunks == 1:
        schedule = Schedule1F1B(stages[0], microbatches, loss_fn=mean_loss)
    else:
        schedule = ScheduleInterleaved1F1B(stages, microbatches, loss_fn=mean_loss)
    optimizer, following = build_optimizer(models), cycle(batches)

    def step() -> float:
        batch, losses = next(following), []
        inputs = (batch["tokens"],) if rank == 0 else ()
        last = {"target": batch["labels"], "losses": losses} if rank == size - 1 else {}
        schedule.step(*inputs, return_outputs=False, **last)
        norm = nn.utils.get_total_norm([p.grad for p in models.parameters()])
        loss = torch.stack(losses).mean() if losses else torch.zeros(())
        totals = torch.stack([norm.square(), loss.detach()])
        dist.all_reduce(totals)
        nn.utils.clip_grads_with_norm_(models.parameters(), CLIP, totals[0].sqrt())
        optimizer.step()
        optimizer.zero_grad()
        return totals[1].item()

    return step
