"""What a run logs: Megatron's line, and the records that the trackers get."""

import math
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron_lite.arithmetic.flops import flops_per_step, peak_flops
from megatron_lite.config import Config, LoggingConfig
from megatron_lite.training.logged import EXPERT_LOAD, LOGGED, MEMORY, STARVED, duration, values_of_layers
from megatron_lite.training.state import TrainState
from megatron_lite.training.timers import Timers
from megatron_lite.training.trackers import Tracker


@dataclass(frozen=True)
class StepResult:
    """One training step, the same on every rank.

    loss: mean over the unmasked tokens; grad_norm before clipping; nonfinite: the step was skipped, asked: by
    --iterations-to-skip, overflow: because the loss scale was too large; data_seconds: how long this rank waited for
    data; routers: what a mixture's routers log.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    global_batch_size: int
    tokens: int
    seconds: float
    data_seconds: float = 0.0
    nonfinite: bool = False
    asked: bool = False
    overflow: bool = False
    loss_scale: float = 1.0
    routers: dict[str, float] = field(default_factory=dict)
    extras: dict[str, float] = field(default_factory=dict)


def peak_memory(device: torch.device) -> torch.Tensor:
    """[2] most bytes allocated and reserved on a GPU since the last call; [1] on a CPU: resident since the start.

    The largest over all ranks (collective), on the device: the host waits for nothing.
    """
    if device.type == "cuda":
        mine = [torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)]
        torch.cuda.reset_peak_memory_stats(device)
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        mine = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit]
    largest = torch.stack([torch.full((), float(size), device=device) for size in mine])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest


def memory_record(sizes: Sequence[float]) -> dict[str, int]:
    """What `peak_memory` gave, under the names of a record."""
    return {name: int(size) for name, size in zip(MEMORY, sizes)}


def line_is_due(iteration: int, total: int, logging: LoggingConfig) -> bool:
    """Whether the line of the log is printed after this iteration of `total`."""
    return iteration % logging.log_interval == 0 or iteration == total


class Metrics:
    """Prints Megatron's line every --log-interval steps, and hands each step's record to the trackers.

    Only rank 0 prints and tracks: the values are reduced over all ranks before they come here.
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        world_size: int,
        total_iterations: int,
        tracker: Tracker,
        timers: Timers | None = None,
    ) -> None:
        """tracker: a no-op one on every rank but 0."""
        self._config = config
        self._world_size = world_size
        self._total = total_iterations
        self._tracker = tracker
        self._timers = timers or Timers(config.logging, device)
        self._steps: list[StepResult] = []
        self._peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self._largest = {"loss": 0.0, "gradient norm": 0.0}

    def step(self, result: StepResult, state: TrainState) -> None:
        """Take one step in; print and track when the interval is full."""
        self._warn_if_large(result, state)
        self._steps.append(result)
        state.flops += flops_per_step(self._config, result.global_batch_size)
        if state.iteration % self._config.logging.tensorboard_log_interval == 0:
            self._tracker.track(self._record([result], state), state.iteration)
        self._tracker.show(self._now(result, state))
        if self.is_due(state.iteration):
            self.flush(state)

    def flush(self, state: TrainState) -> None:
        """Print the line of the steps since the last one, at the end of an interval or of the run (collective).

        The last step of a run is tracked whatever --tensorboard-log-interval says.
        """
        if not self._steps:
            return
        last = not self.is_due(state.iteration) or state.iteration == self._total
        if last and state.iteration % self._config.logging.tensorboard_log_interval:
            self._tracker.track(self._record(self._steps[-1:], state), state.iteration)
        if of_source := {f"consumed-tokens/{name}": n for name, n in state.tokens_of_source.items()}:
            self._tracker.track({"iteration": state.iteration, **of_source}, state.iteration)
        record = self._record(self._steps, state)
        self._tracker.say(self.line(record))
        if self._config.model.moe_per_layer_logging:
            loads, starved = (values_of_layers(record, key) for key in (EXPERT_LOAD, STARVED))
            layers = ", ".join(f"{layer}: {load:.2f} {starved[layer]:.0%}" for layer, load in loads.items())
            self._tracker.say(f"expert load (fullest / mean) and starved experts by layer | {layers} |")
        lines, seconds = self._timers.report(len(self._steps))
        if lines:
            self._tracker.say(lines)
            self._tracker.track({"iteration": state.iteration, **seconds}, state.iteration)
        self._steps.clear()

    def is_due(self, iteration: int) -> bool:
        """Whether the line of the log is printed after this iteration."""
        return line_is_due(iteration, self._total, self._config.logging)

    def _now(self, result: StepResult, state: TrainState) -> str:
        left = (self._total - state.iteration) * result.seconds
        return (
            f"iteration {state.iteration}/{self._total} ({state.iteration / max(1, self._total):.0%}), "
            f"loss {result.loss:.4f}, {result.tokens / result.seconds:,.0f} tokens/s, ETA {duration(left)}"
        )

    def _record(self, steps: list[StepResult], state: TrainState) -> dict[str, Any]:
        last = steps[-1]
        trained = [step for step in steps if not step.nonfinite] or steps
        seconds = sum(step.seconds for step in steps) / len(steps)
        flops = sum(flops_per_step(self._config, step.global_batch_size) for step in steps) / len(steps)
        per_device = flops / seconds / self._world_size
        record = {
            "iteration": state.iteration,
            "consumed-samples": state.consumed_samples,
            "consumed-tokens": state.consumed_tokens,
            "lm loss": sum(step.loss for step in trained) / len(trained),
            "grad-norm": last.grad_norm,
            "learning-rate": last.learning_rate,
            "batch-size": last.global_batch_size,
            "loss-scale": last.loss_scale,
            "iteration-time": seconds,
            "data-wait-time": sum(step.data_seconds for step in steps) / len(steps),
            "tokens-per-second": sum(step.tokens for step in steps) / (seconds * len(steps)),
            "throughput": per_device / 1e12,
            "mfu": per_device / self._peak if self._peak else None,
            "skipped-iterations": state.skipped_iterations,
            "nan-iterations": state.nan_iterations,
            "eta-seconds": (self._total - state.iteration) * seconds,
        }
        routed = [step.routers for step in trained if step.routers]
        means = {name: sum(step[name] for step in routed) / len(routed) for name in (routed or [{}])[0]}
        return record | means | last.extras

    def line(self, record: dict[str, Any]) -> str:
        """Megatron's line with ours added; the learning rate is the next step's, as it is there."""
        text = f"{_stamp()} iteration {record['iteration']:8d}/{self._total:8d}"
        for row in LOGGED:
            value, flag = record.get(row.key), row.line_flag
            if row.line and value is not None and (not flag or getattr(self._config.logging, flag)):
                words = row.line(value * row.factor)
                text += words if words.startswith(", ") else f" | {words}"
        return text + " |"

    def evaluation(self, losses: dict[str, float], kind: str, state: TrainState, total_only: bool) -> None:
        """Print and track the losses of one evaluation (kind: validation or test)."""
        record: dict[str, Any] = {"iteration": state.iteration, "consumed-samples": state.consumed_samples}
        for name, loss in losses.items():
            perplexity = math.exp(min(20.0, loss))  # capped as in Megatron
            which = f"{kind} loss" if total_only else f"{kind} loss on {name}"
            self._tracker.say(
                f"{_stamp()} {which} at iteration {state.iteration} | lm loss value: {loss:.6E} | "
                f"lm loss PPL: {perplexity:.6E} |"
            )
            suffix = kind if total_only else f"{kind} {name}"
            record[f"lm loss {suffix}"] = loss
            if self._config.logging.log_validation_ppl_to_tensorboard:
                record[f"lm loss {suffix} ppl"] = perplexity
        self._tracker.track(record, state.iteration)

    def note(self, text: str) -> None:
        """A line of the log that is no metric."""
        self._tracker.say(f"{_stamp()} {text}")

    def _warn_if_large(self, result: StepResult, state: TrainState) -> None:
        """--check-for-spiky-loss and --check-for-large-grads: ten times the largest value so far, as in Megatron."""
        training = self._config.training
        if result.nonfinite:
            return
        for wanted, name, value in (
            (training.check_for_spiky_loss, "loss", result.loss),
            (training.check_for_large_grads, "gradient norm", result.grad_norm),
        ):
            largest = self._largest[name]
            self._largest[name] = max(largest, value)
            if wanted and 0 < 10 * largest < value:
                self.note(
                    f"warning: {name} {value:.4g} at iteration {state.iteration} is more than ten times the largest "
                    f"before ({largest:.4g}); samples {state.consumed_samples - result.global_batch_size:,} to "
                    f"{state.consumed_samples - 1:,} in data order"
                )


def _stamp() -> str:
    return time.strftime("[%Y-%m-%d %H:%M:%S]")
