"""Our side of a comparison on ranks: the package's own Trainer, put together as pretrain_gpt.py does, fed by hand."""

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import torch
from torch import nn

from megatron_lite.arithmetic.batch_size import BatchSchedule
from megatron_lite.arithmetic.lr_schedule import LearningRateSchedule
from megatron_lite.arithmetic.partition import StagePlan, plan_from_config, stages_of_rank
from megatron_lite.config import Config, TrainingConfig
from megatron_lite.distributed.mesh import ParallelMesh, build_mesh
from megatron_lite.model.gpt import GPTChunk
from megatron_lite.parallel.parallelize import build_chunks
from megatron_lite.parallel.pipeline import Batch, Pipeline
from megatron_lite.training.loop import Trainer
from megatron_lite.training.loss_scale import LossScale
from megatron_lite.training.optimizer import build_optimizer
from megatron_lite.training.signals import StopWatch
from megatron_lite.training.state import TrainState
from megatron_lite.training.timers import Timers


class PreparedBatches:
    """Stands in for the Loader: gives this rank's prepared batches, round and round."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = cycle(batches)

    def next_batch(self, global_batch_size: int) -> Batch:
        """The next batch."""
        return next(self._batches)


def build_model(config: Config, mesh: ParallelMesh) -> tuple[list[nn.Module], Pipeline]:
    """This rank's chunks, sharded and initialised, and the pipeline around them."""
    plans = plan_from_config(config)

    def build(stage: StagePlan) -> GPTChunk:
        return GPTChunk(config.model, stage.layers, stage.has_embedding, stage.has_lm_head)

    chunks = build_chunks(config, stages_of_rank(plans, mesh.rank("pp")), mesh, build)
    return chunks, Pipeline(config, plans, chunks, mesh)


def build_trainer(
    config: Config,
    batches: Sequence[Batch],
    device: torch.device = torch.device("cpu"),  # noqa: B008  a constant
) -> Trainer:
    """A Trainer whose `step()` is the program's whole step, but for reading data.

    batches: tokens and labels [M*B, S] of this data-parallel rank, on the device. What a step does not touch
    (evaluation, checkpoints, the log) is left out.
    """
    mesh = build_mesh(config, device)
    chunks, pipeline = build_model(config, mesh)
    left_out: Any = None
    return Trainer(
        config=config,
        mesh=mesh,
        chunks=chunks,
        pipeline=pipeline,
        optimizer=build_optimizer(chunks, config.optimizer),
        schedule=LearningRateSchedule.from_config(config),
        batches=BatchSchedule.from_config(config),
        loader=PreparedBatches(batches),
        validation=left_out,
        checkpointer=left_out,
        metrics=left_out,
        stop=StopWatch(TrainingConfig(), device),
        state=TrainState(),
        loss_scale=LossScale.from_config(config.precision),
        timers=Timers(config.logging, device),
        progress=left_out,
    )
