"""The training loop around a run's steps: log, evaluate, save, stop."""

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from megatron_lite.checkpoint.checkpointer import Checkpointer
from megatron_lite.config import ConfigError
from megatron_lite.data.build import Datasets
from megatron_lite.distributed.collectives import from_first_rank
from megatron_lite.distributed.environment import Environment
from megatron_lite.files.command_line import RunError
from megatron_lite.training.consistency import check_replicas, check_tied_copies, nonfinite_tensors
from megatron_lite.training.evaluate import Evaluator
from megatron_lite.training.metrics import Metrics, StepResult
from megatron_lite.training.named_tensors import checkpoint_tensors
from megatron_lite.training.profile import profiled
from megatron_lite.training.run import Run
from megatron_lite.training.state import random_state
from megatron_lite.training.timeline import timeline
from megatron_lite.training.trackers import ProgressLog, build_tracker


class NonFiniteError(RuntimeError):
    """Too many steps in a row gave a loss or gradient that is not finite."""


class Trainer:
    """Trains a run on its datasets from where it stands (after `resume`): `train` goes to the end or an early stop."""

    def __init__(
        self, run: Run, datasets: Datasets, checkpointer: Checkpointer, environment: Environment
    ) -> None:
        """Opens the logs; collective."""
        config, state = run.config, run.state
        self.run = run
        self.config, self.mesh, self.stop = config, run.mesh, run.stop
        self.checkpointer = checkpointer
        checkpointer.overlap_copy_with(run.optimizer)
        tracker = build_tracker(config, environment, state.wandb_run_id)
        state.wandb_run_id = from_first_rank(tracker.wandb_run_id, run.mesh.host_group)
        self.tracker, self.progress = tracker, ProgressLog(config, environment)
        self.total_iterations = run.batches.total_iterations
        self.metrics = Metrics(
            config, run.mesh.device, environment.world_size, self.total_iterations, tracker, run.timers
        )
        self.progress.started(state)
        self.train_dataset = datasets.train
        self.validation, self.test = run.evaluator(datasets.valid), run.evaluator(datasets.test)
        self._nonfinite_in_a_row = 0
        checkpointer.saved_iteration = state.iteration or None

    def train(self) -> None:
        """Train, evaluate at the end, close everything.

        Raises:
            NonFiniteError: after --max-consecutive-nonfinite skipped steps; the last good state is saved first.
            RunError: the last step could not be saved, also when it was tried again.
        """
        with self.tracker, self._saves_ended():
            reason, state = None, self.run.state
            if not self.config.training.skip_train:
                self.loader = self.run.loader(self.train_dataset, state.consumed_samples)
                with (
                    profiled(self.config, self.mesh, state.iteration) as profile_step,
                    timeline(self.config, self.mesh, self.run.pipeline.clock) as timeline_step,
                ):
                    self.on_step = (profile_step, timeline_step)
                    reason = self.steps()
                self.loader.close()
            if reason is not None:
                self.metrics.note(f"stopped after iteration {state.iteration}: {reason}")
            else:
                self._evaluate_at_end(self.validation, "validation")
                self._evaluate_at_end(self.test, "test")
            for evaluator in (self.validation, self.test):
                evaluator.close()
            self._finish_saving()

    @contextmanager
    def _saves_ended(self) -> Iterator[None]:
        """Before the run stops at an error of its own, let a background save of an earlier step come to its end."""
        try:
            yield
        except (ConfigError, NonFiniteError):
            self.checkpointer.close()
            raise

    def steps(self) -> str | None:
        """Train until the last step. Returns why it stopped early, or None when all steps are done."""
        reason, state = None, self.run.state
        if self.config.training.manual_gc:
            gc.disable()
        while reason is None and state.iteration < self.total_iterations:
            result = self.run.step(self.loader)
            self._note_nonfinite(result)
            reason = self.stop.due(state.iteration)
            if self.metrics.is_due(state.iteration) or reason is not None:
                self._count_sources()
            self.metrics.step(result, state)
            for watch in self.on_step:
                watch(state.iteration)
            self.checkpointer.poll()
            self._give_up_if_nonfinite(result)
            self._check_replicas()
            reason = self._evaluate_if_due() or reason
            if reason is not None:
                self.metrics.flush(state)
            if self._save_is_due():
                self.save()
            self._collect_garbage()
        if self._last_is_not_saved():
            self.save()
        return reason

    def _count_sources(self) -> None:
        """Add what all ranks read since the last call to the state (collective)."""
        names, counts = self.loader.take_source_counts()
        samples = torch.tensor(counts, device=self.mesh.device)
        samples = self.mesh.sum_over(samples, "dp_replicate", "dp_shard")
        tokens_of_source = self.run.state.tokens_of_source
        for name, count in zip(names, samples.tolist()):
            tokens_of_source[name] = tokens_of_source.get(name, 0) + count * self.config.data.seq_length

    def _note_nonfinite(self, result: StepResult) -> None:
        state = self.run.state
        if result.overflow:
            self.metrics.note(
                f"iteration {state.iteration} skipped: the gradients overflowed at loss scale {result.loss_scale:g}, "
                f"the next step takes {self.run.loss_scale.scale:g}"
            )
        elif not result.nonfinite:
            self._nonfinite_in_a_row = 0
        elif not result.asked:
            self._nonfinite_in_a_row += 1
            state.nan_iterations += 1
            last = state.consumed_samples
            self.metrics.note(
                f"warning: iteration {state.iteration} skipped: loss {result.loss}, gradient norm {result.grad_norm}; "
                f"its samples are {last - result.global_batch_size:,} to {last - 1:,} in data order"
            )

    def _give_up_if_nonfinite(self, result: StepResult) -> None:
        limit = self.config.training.max_consecutive_nonfinite
        if self.config.training.no_check_for_nan_in_loss_and_grad or self._nonfinite_in_a_row < limit:
            return
        self.metrics.flush(self.run.state)
        if self.config.checkpoint.save:
            self.save()  # skipped steps left the weights as the last good step made them
            self.checkpointer.close()
        raise NonFiniteError(
            f"{self._nonfinite_in_a_row} steps in a row up to iteration {self.run.state.iteration} had a loss or "
            f"gradient that is not finite (last loss {result.loss}); --max-consecutive-nonfinite is {limit}"
        )

    def _evaluate_if_due(self) -> str | None:
        """Validate every --eval-interval steps; returns the reason when it was asked to stop on the way."""
        interval = self.config.evaluation.eval_interval
        due = self.validation.has_data and interval and self.run.state.iteration % interval == 0
        if not due or self.stop.reason is not None:
            return None
        losses = self.validation.losses(self.run.state.iteration // interval - 1)
        self.validation.iteration = self.run.state.iteration
        if losses is None:
            return self.stop.asked() or "asked to stop during validation"
        self.metrics.evaluation(losses, "validation", self.run.state, total_only=len(losses) == 1)
        return None

    def _save_is_due(self) -> bool:
        checkpoint = self.config.checkpoint
        return bool(
            checkpoint.save
            and checkpoint.save_interval
            and self.run.state.iteration % checkpoint.save_interval == 0
            and self.checkpointer.saved_iteration != self.run.state.iteration
        )

    def _last_is_not_saved(self) -> bool:
        trains = self.config.checkpoint.save and not self.config.training.skip_train
        return bool(trains) and self.checkpointer.saved_iteration != self.run.state.iteration

    def _finish_saving(self) -> None:
        """Wait for a background save; where that of the last step failed, save once more, or say that it is lost."""
        self.checkpointer.close()
        if self._last_is_not_saved():
            self.save()
            self.checkpointer.close()
        if self._last_is_not_saved():
            raise RunError(
                f"the run is at its end, but iteration {self.run.state.iteration} is not saved in "
                f"{self.config.checkpoint.save}; the last good checkpoint of this run: {self._newest_saved()}"
            )

    def _newest_saved(self) -> str:
        iteration = self.checkpointer.saved_iteration
        return f"the one of iteration {iteration}" if iteration else "none"

    def save(self) -> None:
        """Save a checkpoint of this step."""
        config = self.config.checkpoint
        started = time.perf_counter()
        rank_state = {} if config.no_save_rng else random_state(self.mesh.device)
        self._count_sources()
        tensors = checkpoint_tensors(self.run.chunks, None if config.no_save_optim else self.run.optimizer)
        self._refuse_nonfinite(tensors)
        check_tied_copies(self.run.chunks, self.run.optimizer, self.mesh, self.run.state.iteration)
        train_state = self.run.state.to_dict() | {"schedule": self.run.schedule.to_dict()}
        if not self.checkpointer.save(self.run.state.iteration, tensors, train_state, rank_state):
            return  # it has said why; the next due step, or the end, tries again
        self.progress.saved(self.run.state)
        how = "is being written to" if config.async_save else "saved in"
        self.metrics.note(
            f"checkpoint of iteration {self.run.state.iteration} {how} {config.save} "
            f"({time.perf_counter() - started:.2f} s)"
        )

    def _refuse_nonfinite(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """A state that no run can go on from must not become the newest checkpoint, nor let a good one be deleted."""
        names = nonfinite_tensors(tensors, self.mesh)
        if not names:
            return
        self.checkpointer.close()
        raise NonFiniteError(
            f"after iteration {self.run.state.iteration} {', '.join(names[:4])}"
            f"{f' and {len(names) - 4:,} more' if len(names) > 4 else ''} hold values that are not finite: nothing is "
            f"saved; the last good checkpoint of this run: {self._newest_saved()}"
        )

    def _check_replicas(self) -> None:
        interval = self.config.training.check_weight_hash_across_dp_replicas_interval
        if interval and self.run.state.iteration % interval == 0:
            check_replicas(self.run.chunks, self.mesh, self.run.state.iteration)

    def _collect_garbage(self) -> None:
        training = self.config.training
        interval = training.manual_gc_interval
        if training.manual_gc and interval and self.run.state.iteration % interval == 0:
            gc.collect()
        if training.empty_unused_memory_level and self.mesh.device.type == "cuda":
            torch.cuda.empty_cache()

    def _evaluate_at_end(self, evaluator: Evaluator, kind: str) -> None:
        """Evaluate (kind: validation or test) when all steps are done, unless the last step was just evaluated.

        Reads the batches that come next.
        """
        iteration, interval = self.run.state.iteration, self.config.evaluation.eval_interval
        if not evaluator.has_data or evaluator.iteration == iteration:
            return
        losses = evaluator.losses(iteration // interval if interval and kind == "validation" else 0)
        if losses is not None:
            self.metrics.evaluation(losses, kind, self.run.state, total_only=len(losses) == 1)
