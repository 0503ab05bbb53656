"""The training loop: step, log, evaluate, save, stop."""

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from megatron_lite.arithmetic.batch_size import BatchSchedule
from megatron_lite.arithmetic.lr_schedule import LearningRateSchedule
from megatron_lite.checkpoint.checkpointer import Checkpointer
from megatron_lite.config import Config
from megatron_lite.data.loader import Loader
from megatron_lite.distributed.mesh import ParallelMesh
from megatron_lite.parallel.pipeline import Batch, Pipeline
from megatron_lite.training.consistency import check_replicas, check_tied_copies, nonfinite_tensors
from megatron_lite.training.evaluate import Evaluator, count_tokens, sum_loss
from megatron_lite.training.gradients import (
    clip_gradients,
    count_zeros,
    gradient_norm,
    parameter_norm,
    scale_gradients,
)
from megatron_lite.training.loss_scale import LossScale
from megatron_lite.training.metrics import (
    DECOUPLED,
    Metrics,
    StepResult,
    line_is_due,
    memory_record,
    peak_memory,
)
from megatron_lite.training.optimizer import set_schedule
from megatron_lite.training.resume import checkpoint_tensors
from megatron_lite.training.signals import StopWatch
from megatron_lite.training.state import TrainState, random_state
from megatron_lite.training.timeline import idle_shares
from megatron_lite.training.timers import Timers
from megatron_lite.training.trackers import ProgressLog


class NonFiniteError(RuntimeError):
    """Too many steps in a row gave a loss or gradient that is not finite."""


@dataclass
class Trainer:
    """Everything a run is made of, wired by pretrain_gpt.py; `run` trains to the end or to an early stop."""

    config: Config
    mesh: ParallelMesh
    chunks: list[nn.Module]
    pipeline: Pipeline
    optimizer: torch.optim.Optimizer
    schedule: LearningRateSchedule
    batches: BatchSchedule
    loader: Loader
    validation: Evaluator
    checkpointer: Checkpointer
    metrics: Metrics
    stop: StopWatch
    state: TrainState
    loss_scale: LossScale
    timers: Timers
    progress: ProgressLog
    on_step: Sequence[Callable[[int], None]] = ()
    _nonfinite_in_a_row: int = 0
    _memory: list[float] = field(default_factory=list, init=False)
    _saved_iteration: int | None = field(default=None, init=False)

    def run(self) -> str | None:
        """Train until the last step. Returns why it stopped early, or None when all steps are done.

        Raises:
            NonFiniteError: after --max-consecutive-nonfinite skipped steps; the last good state is saved first.
        """
        self._saved_iteration = self.state.iteration if self.state.iteration else None
        reason = None
        if self.config.training.manual_gc:
            gc.disable()
        while reason is None and self.state.iteration < self.batches.total_iterations:
            result = self.step()
            reason = self.stop.due(self.state.iteration)
            if self.metrics.is_due(self.state.iteration) or reason is not None:
                self._count_sources()
            self.metrics.step(result, self.state)
            for watch in self.on_step:
                watch(self.state.iteration)
            self.checkpointer.poll()
            self._give_up_if_nonfinite(result)
            self._check_replicas()
            reason = self._evaluate_if_due() or reason
            if reason is not None:
                self.metrics.flush(self.state)
            if self._save_is_due():
                self.save()
            self._collect_garbage()
        if self.config.checkpoint.save and self._saved_iteration != self.state.iteration:
            self.save()
        return reason

    def step(self) -> StepResult:
        """One optimizer step over one global batch; advances the state."""
        state, started = self.state, time.perf_counter()
        batch_size = self.batches.global_batch_size(state.consumed_samples)
        microbatches = self.batches.num_microbatches(state.consumed_samples)
        with self.timers("batch-generator"):
            batch = self.loader.next_batch(batch_size)
        waited = time.perf_counter() - started
        if state.iteration in self.config.training.iterations_to_skip:
            return self._skip(batch_size, started)
        loss, norm = self._forward_backward(batch, microbatches)
        finite = math.isfinite(loss) and math.isfinite(norm)
        extras = self._extras()
        if finite:
            with self.timers("optimizer"):
                self._update_weights(norm)
        self.optimizer.zero_grad(set_to_none=True)
        scale, overflow = self.loss_scale.scale, self.loss_scale.is_overflow(math.isfinite(loss))
        self.loss_scale.update(finite)
        self.state.loss_scale = self.loss_scale.to_dict()
        self._advance(batch_size, trained=finite)
        if self.config.optimizer.decoupled_lr is not None:
            extras[DECOUPLED] = self.schedule.learning_rate(state.schedule_samples, decoupled=True)
        if overflow and not finite:
            self.metrics.note(
                f"iteration {state.iteration} skipped: the gradients overflowed at loss scale {scale:g}, "
                f"the next step takes {self.loss_scale.scale:g}"
            )
        else:
            self._note_nonfinite(finite, batch_size, loss, norm)
        return StepResult(
            loss=loss,
            grad_norm=norm,
            learning_rate=self.schedule.learning_rate(state.schedule_samples),
            global_batch_size=batch_size,
            tokens=batch_size * self.config.data.seq_length,
            seconds=time.perf_counter() - started,
            data_seconds=waited,
            nonfinite=not finite,
            loss_scale=scale,
            extras=extras,
        )

    def _update_weights(self, norm: float) -> None:
        with self.timers("optimizer-clip"):
            clip_gradients(self.chunks, norm, self.config.optimizer.clip_grad)
        at = self.state.schedule_samples
        set_schedule(
            self.optimizer,
            lambda decoupled: self.schedule.learning_rate(at, decoupled),
            self.schedule.weight_decay(at),
        )
        with self.timers("optimizer-inner-step"):
            self.optimizer.step()

    def _forward_backward(self, batch: Batch, microbatches: int) -> tuple[float, float]:
        """(mean token loss, gradient norm) of the global batch; gradients are ready, summed over all ranks."""
        tokens, scale = count_tokens(batch, self.mesh).clamp(min=1), self.loss_scale.scale
        with self.timers("forward-backward"):
            loss_sum = self.pipeline.train_step(batch, microbatches, scale / tokens)
            # [1 + flags] What ranks were asked for is summed beside the loss, which tensor ranks have in common.
            sums = sum_loss(torch.cat([loss_sum.float().view(1), self.stop.flags()]), self.mesh)
            if len(sums) > 1:
                self.mesh.sum_over(sums[1:], "tp")
        with self.timers("grads-reduce-norm"):
            if scale != 1:
                scale_gradients(self.chunks, 1 / scale)
            norm = gradient_norm(self.chunks, self.mesh)
        memory = peak_memory(self.mesh.device) if self._line_is_due() else sums[:0]
        # The one point of a step where the host waits for the device.
        loss, norm, *more = torch.cat([sums[:1] / tokens, norm.view(1), sums[1:], memory]).tolist()
        self.stop.agree(more[: len(sums) - 1])
        self._memory = more[len(sums) - 1 :]
        return loss, norm

    def _line_is_due(self) -> bool:
        """Whether the step that is under way has a line of the log."""
        return line_is_due(self.state.iteration + 1, self.batches.total_iterations, self.config.logging)

    def _extras(self) -> dict[str, float]:
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
        if due and self.mesh.size("pp") > 1:
            extras |= idle_shares(self.pipeline.clock, self.mesh.device)
        return extras

    def _advance(self, batch_size: int, trained: bool) -> None:
        state = self.state
        state.iteration += 1
        state.consumed_samples += batch_size
        state.consumed_tokens += batch_size * self.config.data.seq_length
        state.schedule_samples += batch_size if trained else 0
        state.skipped_iterations += 0 if trained else 1

    def _count_sources(self) -> None:
        """Add what all ranks read since the last call to the state (collective)."""
        names, counts = self.loader.take_source_counts()
        samples = torch.tensor(counts, device=self.mesh.device)
        samples = self.mesh.sum_over(samples, "dp_replicate", "dp_shard")
        tokens_of_source = self.state.tokens_of_source
        for name, count in zip(names, samples.tolist()):
            tokens_of_source[name] = tokens_of_source.get(name, 0) + count * self.config.data.seq_length

    def _skip(self, batch_size: int, started: float) -> StepResult:
        """--iterations-to-skip: the batch counts as consumed, the weights stay."""
        self._advance(batch_size, trained=False)
        rate = self.schedule.learning_rate(self.state.schedule_samples)
        seconds = time.perf_counter() - started
        return StepResult(math.nan, 0.0, rate, batch_size, 0, seconds, nonfinite=True)

    def _note_nonfinite(self, finite: bool, batch_size: int, loss: float, norm: float) -> None:
        if finite:
            self._nonfinite_in_a_row = 0
            return
        self._nonfinite_in_a_row += 1
        self.state.nan_iterations += 1
        last = self.state.consumed_samples
        self.metrics.note(
            f"warning: iteration {self.state.iteration} skipped: loss {loss}, gradient norm {norm}; its samples are "
            f"{last - batch_size:,} to {last - 1:,} in data order"
        )

    def _give_up_if_nonfinite(self, result: StepResult) -> None:
        limit = self.config.training.max_consecutive_nonfinite
        if self.config.training.no_check_for_nan_in_loss_and_grad or self._nonfinite_in_a_row < limit:
            return
        self.metrics.flush(self.state)
        if self.config.checkpoint.save:
            self.save()  # skipped steps left the weights as the last good step made them
            self.checkpointer.close()
        raise NonFiniteError(
            f"{self._nonfinite_in_a_row} steps in a row up to iteration {self.state.iteration} had a loss or gradient "
            f"that is not finite (last loss {result.loss}); --max-consecutive-nonfinite is {limit}"
        )

    def _evaluate_if_due(self) -> str | None:
        """Validate every --eval-interval steps; returns the reason when it was asked to stop on the way."""
        interval = self.config.evaluation.eval_interval
        due = self.validation.has_data and interval and self.state.iteration % interval == 0
        if not due or self.stop.reason is not None:
            return None
        losses = self.validation.losses(self.state.iteration // interval - 1)
        self.validation.iteration = self.state.iteration
        if losses is None:
            return self.stop.asked() or "asked to stop during validation"
        self.metrics.evaluation(losses, "validation", self.state, total_only=len(losses) == 1)
        return None

    def _save_is_due(self) -> bool:
        checkpoint = self.config.checkpoint
        return bool(
            checkpoint.save
            and checkpoint.save_interval
            and self.state.iteration % checkpoint.save_interval == 0
            and self._saved_iteration != self.state.iteration
        )

    def save(self) -> None:
        """Save a checkpoint of this step."""
        config = self.config.checkpoint
        started = time.perf_counter()
        rank_state = {} if config.no_save_rng else random_state(self.mesh.device)
        self._count_sources()
        tensors = checkpoint_tensors(self.chunks, None if config.no_save_optim else self.optimizer)
        self._refuse_nonfinite(tensors)
        check_tied_copies(self.chunks, self.optimizer, self.mesh, self.state.iteration)
        train_state = self.state.to_dict() | {"schedule": self.schedule.to_dict()}
        if not self.checkpointer.save(self.state.iteration, tensors, train_state, rank_state):
            return  # it has said why; the next due step, or the end, tries again
        self._saved_iteration = self.state.iteration
        self.progress.saved(self.state)
        how = "is being written to" if config.async_save else "saved in"
        self.metrics.note(
            f"checkpoint of iteration {self.state.iteration} {how} {config.save} "
            f"({time.perf_counter() - started:.2f} s)"
        )

    def _refuse_nonfinite(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """A state that no run can go on from must not become the newest checkpoint, nor let a good one be deleted."""
        names = nonfinite_tensors(tensors, self.mesh)
        if not names:
            return
        self.checkpointer.close()
        last = f"the one of iteration {self._saved_iteration}" if self._saved_iteration else "none"
        raise NonFiniteError(
            f"after iteration {self.state.iteration} {', '.join(names[:4])}"
            f"{f' and {len(names) - 4:,} more' if len(names) > 4 else ''} hold values that are not finite: nothing is "
            f"saved; the last good checkpoint of this run: {last}"
        )

    def _check_replicas(self) -> None:
        interval = self.config.training.check_weight_hash_across_dp_replicas_interval
        if interval and self.state.iteration % interval == 0:
            check_replicas(self.chunks, self.mesh, self.state.iteration)

    def _collect_garbage(self) -> None:
        training = self.config.training
        interval = training.manual_gc_interval
        if training.manual_gc and interval and self.state.iteration % interval == 0:
            gc.collect()
        if training.empty_unused_memory_level and self.mesh.device.type == "cuda":
            torch.cuda.empty_cache()


def evaluate_at_end(
    config: Config, evaluator: Evaluator, kind: str, metrics: Metrics, state: TrainState
) -> None:
    """Evaluate (kind: validation or test) when all steps are done, unless the last step was just evaluated.

    Reads the batches that come next.
    """
    if not evaluator.has_data or evaluator.iteration == state.iteration:
        return
    interval = config.evaluation.eval_interval
    losses = evaluator.losses(state.iteration // interval if interval and kind == "validation" else 0)
    if losses is not None:
        metrics.evaluation(losses, kind, state, total_only=len(losses) == 1)
