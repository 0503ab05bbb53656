"""The scripts that our steps are measured against: the bare model in torch's own classes and no more, and peers.

A contestant is built from a Job and gives a Step. Every script starts from our initial weights and takes the same
batches, so all losses have to agree.
"""

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.training import TrainingConfig
from megatron_lite.model.initialization import initial_rows
from megatron_lite.parallel.pipeline import Batch
from tools.benchmarks import baseline_model as by_hand
from tools.benchmarks.baseline_model import BareModel, Sizes, build_optimizer, mean_loss, train_step

Step = Callable[[], float]  # one whole step; the mean loss of the global batch


@dataclass(frozen=True)
class Job:
    """What all contestants do: batches of tokens and labels [M*B, S] of this data-parallel rank, in M microbatches."""

    sizes: Sizes
    batches: list[Batch]
    microbatches: int
    global_batch: int


@torch.no_grad()
def with_initial_weights(model: nn.Module, sizes: Sizes) -> nn.Module:
    """An unsharded bare model, each parameter with the value that our run of this size starts from, by name."""
    config, seed = ModelConfig(num_layers=sizes.layers), TrainingConfig().seed
    for name, parameter in model.named_parameters():
        rows = torch.arange(parameter.shape[0])
        parameter.copy_(initial_rows(name, tuple(parameter.shape), rows, config, seed))
    return model


def bare_model(sizes: Sizes) -> BareModel:
    """The whole bare model with the weights that all start from."""
    return with_initial_weights(BareModel(sizes), sizes)


def loop(job: Job, model: nn.Module) -> Step:
    """The bare loop around a model from tokens to logits; on several ranks each has its own samples."""
    optimizer, following = build_optimizer(model), cycle(job.batches)

    def step() -> float:
        loss = torch.tensor(train_step(model, optimizer, next(following), job.microbatches))
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()

    return step


def bare(job: Job, recompute: bool = False) -> Step:
    """One process, by hand; with `recompute` each block is recomputed in backward."""
    model = bare_model(job.sizes)
    if recompute:
        for layer in model.layers.values():
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    return loop(job, model)


def sharded(job: Job) -> Step:
    """FSDP2 as its tutorial has it: each block, then the rest."""
    model = bare_model(job.sizes)
    for layer in model.layers.values():
        fully_shard(layer)
    return loop(job, fully_shard(model))


def replicated(job: Job) -> Step:
    """DistributedDataParallel."""
    return loop(job, DistributedDataParallel(bare_model(job.sizes)))


class SpreadMixture(by_hand.Mixture):
    """A bare mixture of which each rank has E/P experts: rows go to their ranks and back by torch's all-to-all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, S, H] -> [B, S, H]."""
        tokens, mine = x.flatten(0, 1), self.num_experts // dist.get_world_size()
        logits, experts = self.router(tokens).topk(self.chosen)
        order = experts.flatten().argsort(stable=True)
        counts = torch.bincount(experts.flatten(), minlength=self.num_experts).view(-1, mine)
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts)
        sent, received = torch.stack([counts.sum(1), coming.sum(1)]).tolist()
        rows = all_to_all(tokens[order // self.chosen], sent, received)
        numbers = torch.arange(mine).repeat(len(coming)).repeat_interleave(coming.flatten())
        sort = numbers.argsort(stable=True)
        ends = coming.sum(0).cumsum(0).int()

        def project(rows: torch.Tensor, name: str) -> torch.Tensor:
            return F.grouped_mm(rows, self.experts[name]["weight"].transpose(1, 2), offs=ends)

        rows = rows[sort]
        out = project(F.silu(project(rows, "gate_proj")) * project(rows, "up_proj"), "down_proj")
        out = all_to_all(out[sort.argsort()], received, sent)
        out = out * logits.softmax(dim=-1).flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, order // self.chosen, out).view_as(x)


def all_to_all(rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    """rows [sum of sent, H] to their ranks -> [sum of received, H]; differentiable."""
    out = rows.new_empty(sum(received), rows.shape[1])
    return torch.distributed.nn.functional.all_to_all_single(out, rows, received, sent)


def experts_spread(job: Job) -> Step:
    """FSDP2 but for the experts, of which each of the ranks has its own; the norm and the mean over both by hand."""
    warnings.filterwarnings("ignore", "torch.distributed.nn.functional.all_to_all_single is deprecated")
    model, size, rank = bare_model(job.sizes), dist.get_world_size(), dist.get_rank()
    experts = []
    for layer in model.layers.values():
        layer.mlp.__class__ = SpreadMixture
        for holder in layer.mlp.experts.values():
            holder["weight"] = nn.Parameter(holder["weight"].detach().chunk(size)[rank].clone())
            experts.append(holder["weight"])
        fully_shard(layer, ignored_params=set(experts))
    fully_shard(model, ignored_params=set(experts))
    rest = [p for p in model.parameters() if all(p is not expert for expert in experts)]
    optimizers = [build_optimizer(nn.ParameterList(part)) for part in (rest, experts)]
    following = cycle(job.batches)

    def step() -> float:
        batch = next(following)
        loss = mean_loss(model(batch["tokens"]), batch["labels"])
        loss.backward()
        for expert in experts:
            expert.grad /= size
        ours = nn.utils.get_total_norm([expert.grad for expert in experts]).square()
        totals = torch.stack([ours, loss.detach()])
        dist.all_reduce(totals)
        norm = nn.utils.get_total_norm([p.grad for p in rest]).full_tensor()
        norm = (norm.square() + totals[0]).sqrt()
        for part, optimizer in zip((rest, experts), optimizers):
            nn.utils.clip_grads_with_norm_(part, by_hand.CLIP, norm)
            optimizer.step()
            optimizer.zero_grad()
        return totals[1].item() / size

    return step


def pipelined(job: Job, chunks: int) -> Step:
    """torch's stages and schedule, the norm over all stages, AdamW, the loss for the log; an even split."""
    rank, size, device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    mine, depth = range(rank, size * chunks, size), job.sizes.layers // (size * chunks)
    models = nn.ModuleList()
    for stage in mine:
        layers = range(stage * depth, (stage + 1) * depth)
        model = BareModel(job.sizes, layers, first=stage == 0, last=stage == size * chunks - 1)
        models.append(with_initial_weights(model, job.sizes))
    stages = [PipelineStage(model, stage, size * chunks, device) for model, stage in zip(models, mine)]
    kind, held = (Schedule1F1B, stages[0]) if chunks == 1 else (ScheduleInterleaved1F1B, stages)
    schedule = kind(held, job.microbatches, loss_fn=mean_loss)
    optimizer, following = build_optimizer(models), cycle(job.batches)

    def step() -> float:
        batch, losses = next(following), []
        inputs = (batch["tokens"],) if rank == 0 else ()
        last = {"target": batch["labels"], "losses": losses} if rank == size - 1 else {}
        schedule.step(*inputs, return_outputs=False, **last)
        norm = nn.utils.get_total_norm([p.grad for p in models.parameters()])
        loss = torch.stack(losses).mean() if losses else torch.zeros(())
        totals = torch.stack([norm.square(), loss.detach()])
        dist.all_reduce(totals)
        nn.utils.clip_grads_with_norm_(models.parameters(), by_hand.CLIP, totals[0].sqrt())
        optimizer.step()
        optimizer.zero_grad()
        return totals[1].item()

    return step
