"""The idle share of real runs of the pipeline engine, with stages that only wait a fixed time."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_lite.arithmetic.partition import plan_from_config, stages_of_rank
from megatron_lite.arithmetic.pipeline_schedule import StageTimes, schedule_timeline
from megatron_lite.distributed.mesh import build_mesh
from megatron_lite.parallel.pipeline import Pipeline
from tests.parity import SEQ_LENGTH, make_batches, make_config
from tests.ranks import run_ranks

FORWARD_S, BACKWARD_S = 0.04, 0.08


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, busy):
        ctx.busy = busy
        _wait(FORWARD_S, busy)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        _wait(BACKWARD_S, ctx.busy)
        return gradient, gradient.sum(), None


def _wait(seconds, busy):
    """Sleep, and note how long it really was: a loaded machine oversleeps."""
    started = time.perf_counter()
    time.sleep(seconds)
    busy.append(time.perf_counter() - started)


class WaitingChunk(nn.Module):
    """A chunk by contract, whose stage takes FORWARD_S and BACKWARD_S and computes next to nothing."""

    tied = has_tied_copy = False
    embedding = lm_head = None
    mixtures = {}

    def __init__(self, width, first, last):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.width, self.first, self.last = width, first, last
        self.busy = []

    def forward(self, x, *, labels=None):
        if self.first:
            x = x[..., None].float().expand(-1, -1, self.width)
        out = _Wait.apply(x.contiguous(), self.weight, self.busy)
        return out.sum() if self.last else out


def _idle_share(config, microbatches):
    """Idle share of all ranks' time in a step, the least of four steps: what disturbs a step only adds to it."""
    mesh = build_mesh(config, torch.device("cpu"))
    plans = plan_from_config(config)
    mine = stages_of_rank(plans, mesh.rank("pp"))
    chunks = [WaitingChunk(config.model.hidden_size, p.has_embedding, p.has_lm_head) for p in mine]
    pipeline = Pipeline(config, plans, chunks, mesh)
    batch = make_batches(microbatches, 1)[0]
    assert batch["tokens"].shape[1] == SEQ_LENGTH
    shares = []
    for _ in range(5):
        for chunk in chunks:
            chunk.busy.clear()
        dist.barrier()
        started = time.perf_counter()
        pipeline.train_step(batch, microbatches, 1.0)
        seconds = torch.tensor(time.perf_counter() - started)
        busy = torch.tensor(sum(sum(chunk.busy) for chunk in chunks))
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        dist.all_reduce(busy)
        shares.append(1 - busy.item() / (dist.get_world_size() * seconds.item()))
    return min(shares[1:])


@pytest.mark.slow  # it measures time: right on a quiet machine, not where other work runs beside it
@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2)])
def test_idle_share_is_the_theory_s(schedule, chunks):
    """(p-1) / (v m + p-1) for p ranks, v chunks a rank, m microbatches; within a tenth of it."""
    size, microbatches = 4, 8
    config = make_config(pp=size, chunks=chunks, microbatches=microbatches, schedule=schedule)
    idle = run_ranks(_idle_share, size, config, microbatches, init=True)[0]
    theory = (size - 1) / (chunks * microbatches + size - 1)
    times = StageTimes.equal(size * chunks, FORWARD_S, BACKWARD_S)
    timeline = schedule_timeline(schedule, size, microbatches, chunks, times)
    assert timeline.bubble_fraction == pytest.approx(theory)
    assert idle == pytest.approx(theory, rel=0.1)
