"""The one wiring of a run: chunks, pipeline, optimizer and schedules over a mesh; the training step, the evaluation.

pretrain_gpt.py, the dry run, tools/verify_parity.py, the benchmarks and the tests all build theirs here: what they
prove and measure is what trains.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from megatron_lite.arithmetic.batch_size import BatchSchedule
from megatron_lite.arithmetic.lr_schedule import LearningRateSchedule
from megatron_lite.arithmetic.mesh_sizes import mesh_sizes
from megatron_lite.arithmetic.partition import StagePlan, plan_from_config, stages_of_rank
from megatron_lite.checkpoint.checkpointer import Checkpointer
from megatron_lite.config import Config, TrainingConfig
from megatron_lite.config.data import IGNORED_LABEL
from megatron_lite.data.loader import Loader
from megatron_lite.distributed.mesh import ParallelMesh
from megatron_lite.distributed.process_group import seed_everything
from megatron_lite.model.gpt import GPTChunk
from megatron_lite.parallel.parallelize import build_chunks
from megatron_lite.parallel.pipeline import Batch, Pipeline
from megatron_lite.training.evaluate import Evaluator
from megatron_lite.training.experts import Balance, move_expert_biases, take_balance
from megatron_lite.training.gradients import (
    clip_gradients,
    count_zeros,
    gradient_norm,
    parameter_norm,
    scale_gradients,
)
from megatron_lite.training.logged import DECOUPLED
from megatron_lite.training.loss_scale import LossScale
from megatron_lite.training.metrics import StepResult, line_is_due, memory_record, peak_memory
from megatron_lite.training.optimizer import build_optimizer, set_schedule
from megatron_lite.training.signals import StopConditions
from megatron_lite.training.state import TrainState
from megatron_lite.training.timers import Timers


class Batches(Protocol):
    """Where a step's samples come from: the Loader, or what a program prepares by hand."""

    def next_batch(self, global_batch_size: int) -> Batch:
        """Tensors [M*B, S] on the device: this data-parallel rank's part of the next global batch."""
        ...


@dataclass
class Run:
    """What a training step is made of. `step` and `evaluate` are collective over all ranks."""

    config: Config
    mesh: ParallelMesh
    plans: list[StagePlan]
    chunks: list[nn.Module]
    pipeline: Pipeline
    optimizer: torch.optim.Optimizer
    schedule: LearningRateSchedule
    batches: BatchSchedule
    loss_scale: LossScale
    timers: Timers
    stop: StopConditions
    state: TrainState = field(default_factory=TrainState)
    _memory: list[float] = field(default_factory=list, init=False)
    balance: Balance | None = field(default=None, init=False)  # of the last step, of a mixture

    def step(self, loader: Batches) -> StepResult:
        """One optimizer step over one global batch; advances the state."""
        state, started = self.state, time.perf_counter()
        batch_size = self.batches.global_batch_size(state.consumed_samples)
        microbatches = self.batches.num_microbatches(state.consumed_samples)
        with self.timers("batch-generator"):
            batch = loader.next_batch(batch_size)
        waited = time.perf_counter() - started
        if state.iteration in self.config.training.iterations_to_skip:
            # The batch counts as consumed, the weights stay.
            state.advance(batch_size, self.config.data.seq_length, trained=False)
            rate = self.schedule.learning_rate(state.schedule_samples)
            return StepResult(
                math.nan, 0.0, rate, batch_size, 0, time.perf_counter() - started, nonfinite=True, asked=True
            )
        loss, norm, routers = self._forward_backward(batch, microbatches)
        finite = math.isfinite(loss) and math.isfinite(norm)
        extras = self._extras()
        if finite:
            with self.timers("optimizer"):
                self._update_weights(norm)
            if self.balance is not None:
                move_expert_biases(self.chunks, self.balance, self.config.model.moe_router_bias_update_rate)
        self.optimizer.zero_grad(set_to_none=True)
        scale, overflow = self.loss_scale.scale, self.loss_scale.is_overflow(math.isfinite(loss))
        self.loss_scale.update(finite)
        state.loss_scale = self.loss_scale.to_dict()
        state.advance(batch_size, self.config.data.seq_length, trained=finite)
        if self.config.optimizer.decoupled_lr is not None:
            extras[DECOUPLED] = self.schedule.learning_rate(state.schedule_samples, decoupled=True)
        return StepResult(
            loss=loss,
            grad_norm=norm,
            learning_rate=self.schedule.learning_rate(state.schedule_samples),
            global_batch_size=batch_size,
            tokens=batch_size * self.config.data.seq_length,
            seconds=time.perf_counter() - started,
            data_seconds=waited,
            nonfinite=not finite,
            overflow=overflow and not finite,
            loss_scale=scale,
            routers=routers,
            extras=extras,
        )

    def _forward_backward(self, batch: Batch, microbatches: int) -> tuple[float, float, dict[str, float]]:
        """(mean token loss, gradient norm, what routers log) of the global batch; gradients are summed over ranks."""
        tokens, scale = self.pipeline.count_tokens(batch).clamp(min=1), self.loss_scale.scale
        with self.timers("forward-backward"):
            loss_sum = self.pipeline.train_step(batch, microbatches, scale / tokens, scale)
            # [1 + flags] What ranks were asked for is summed beside the loss, which tensor ranks have in common.
            sums = self.pipeline.sum_loss(torch.cat([loss_sum.float().view(1), self.stop.flags()]))
            if len(sums) > 1:
                self.mesh.sum_over(sums[1:], "tp")
        with self.timers("grads-reduce-norm"):
            if scale != 1:
                scale_gradients(self.chunks, 1 / scale)
            norm = gradient_norm(self.chunks, self.mesh)
        memory = peak_memory(self.mesh.device) if self._line_is_due() else sums[:0]
        routers = self._take_balance(microbatches)
        # The one point of a step where the host waits for the device.
        parts = (sums[:1] / tokens, norm.view(1), sums[1:], memory, routers)
        numbers = iter(torch.cat(parts).tolist())
        (loss,), (norm,), flags, self._memory, logged = ([next(numbers) for _ in part] for part in parts)
        self.stop.agree(flags)
        return loss, norm, self.balance.record(logged) if self.balance is not None else {}

    def _take_balance(self, microbatches: int) -> torch.Tensor:
        """Sum what the routers have taken in; the numbers of it that are logged, none for a dense model."""
        if not self.config.model.num_experts:
            return torch.empty(0, device=self.mesh.device)
        count = microbatches * self.mesh.data_parallel_size
        self.balance = take_balance(self.chunks, self.config.model, self.mesh, count)
        return self.balance.numbers()

    def _update_weights(self, norm: float) -> None:
        with self.timers("optimizer-clip"):
            clip_gradients(self.chunks, norm, self.config.optimizer.clip_grad)
        samples = self.state.schedule_samples
        set_schedule(
            self.optimizer,
            lambda decoupled: self.schedule.learning_rate(samples, decoupled),
            self.schedule.weight_decay(samples),
        )
        with self.timers("optimizer-inner-step"):
            self.optimizer.step()

    def _line_is_due(self) -> bool:
        """Whether the step that is under way has a line of the log."""
        return line_is_due(self.state.iteration + 1, self.batches.total_iterations, self.config.logging)

    def _extras(self) -> dict[str, float]:
        """What only a step with a line of the log reduces over ranks."""
        logging = self.config.logging
        due, extras = self._line_is_due(), {}
        if not due and self.stop.due(self.state.iteration + 1) is not None:
            due, self._memory = True, peak_memory(self.mesh.device).tolist()
        if due:
            extras |= memory_record(self._memory)
        if logging.log_num_zeros_in_grad and due:
            extras["num-zeros"] = count_zeros(self.chunks, self.mesh).item()
        if logging.log_params_norm and due:
            extras["params-norm"] = parameter_norm(self.chunks, self.mesh).item()
        if due and self.balance is not None:
            extras |= self.balance.record_of_layers(self.config.model.moe_per_layer_logging)
        if due and self.mesh.size("pp") > 1:
            extras |= self.pipeline.clock.idle_shares()
        return extras

    def evaluate(self, loader: Batches, num_batches: int, global_batch_size: int) -> float | None:
        """The mean token loss over num_batches global batches; None when the run was asked to stop on the way.

        Dropout is off and no random number is drawn, so training goes on as if nothing had been.
        """
        samples = self.config.training.micro_batch_size * self.mesh.data_parallel_size
        totals = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        self.pipeline.set_training(False)
        try:
            for _ in range(num_batches):
                batch = loader.next_batch(global_batch_size)
                totals[1] += (batch["labels"] != IGNORED_LABEL).sum()
                totals[0] += self.pipeline.eval_step(batch, global_batch_size // samples)
                if self.stop.asked() is not None:
                    return None
        finally:
            self.pipeline.set_training(True)
        loss_sum = self.pipeline.sum_loss(totals[0].clone())
        count = self.mesh.sum_over(totals[1].clone(), "dp_replicate", "dp_shard")
        return (loss_sum / count.clamp(min=1)).item()

    def loader(self, dataset: object, consumed_samples: int) -> Loader:
        """My data-parallel rank's batches of a dataset, from this sample on."""
        mesh = self.mesh
        return Loader(
            dataset,
            self.config,
            mesh.data_parallel_rank,
            mesh.data_parallel_size,
            consumed_samples,
            mesh.device,
        )

    def evaluator(self, datasets: Mapping[str, object]) -> Evaluator:
        """Evaluation on these sets: name -> dataset."""
        return Evaluator(self.config, datasets, self.loader, self.evaluate)

    def checkpointer(self, tokenizer_files: tuple[Path, ...] = ()) -> Checkpointer:
        """Saves and loads this run (collective)."""
        layout = mesh_sizes(self.config.parallel)
        layout |= {"chunks": self.config.parallel.num_virtual_stages_per_pipeline_rank}
        return Checkpointer(self.config, self.mesh.host_group, layout, self.mesh.coordinates, tokenizer_files)


def build_run(
    config: Config,
    mesh: ParallelMesh,
    stop: StopConditions | None = None,
    chunk_type: type[nn.Module] = GPTChunk,
) -> Run:
    """My rank's part of a run from its first step on, with initial weights and seeded generators.

    Args:
        config: resolved, with its padded vocabulary.
        stop: what ends the run early; made first of all, so that no signal is lost. None: nothing does.
        chunk_type: called with (config.model, global layer numbers, has the embedding, has the head).
    """
    seed_everything(config, mesh.data_parallel_rank, mesh.coordinates)
    plans = plan_from_config(config)
    chunks = build_chunks(config, stages_of_rank(plans, mesh.rank("pp")), mesh, chunk_type)
    return Run(
        config=config,
        mesh=mesh,
        plans=plans,
        chunks=chunks,
        pipeline=Pipeline(config, plans, chunks, mesh),
        optimizer=build_optimizer(chunks, config.optimizer),
        schedule=LearningRateSchedule.from_config(config),
        batches=BatchSchedule.from_config(config),
        loss_scale=LossScale.from_config(config.precision),
        timers=Timers(config.logging, mesh.device),
        stop=stop or StopConditions(TrainingConfig(), mesh.device),
    )
