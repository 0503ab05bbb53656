"""Learning rate and weight decay as functions of the samples consumed. Imports no torch.

Megatron's rules: every length counts samples; the first step has the learning rate of 0 consumed samples, which is
--lr-warmup-init when there is a warm-up.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from megatron_lite.arithmetic.batch_size import BatchSchedule
from megatron_lite.config import Config, ConfigError

# What of the peak above the floor is left when this part (0 to 1) of the way from warm-up to the end is gone.
ANNEALING: dict[str, Callable[[float], float]] = {
    "linear": lambda part: 1.0 - part,
    "cosine": lambda part: 0.5 * (math.cos(math.pi * part) + 1.0),
    "exponential": lambda part: 2.0 * 0.5**part - 1.0,
    "minus_sqrt": lambda part: 1.0 - math.sqrt(part),
}


@dataclass(frozen=True)
class LearningRateSchedule:
    """Lengths are in samples; warmup_samples may be a fraction (--lr-warmup-fraction is not rounded)."""

    lr: float
    min_lr: float
    decoupled_lr: float
    decoupled_min_lr: float
    warmup_init: float
    warmup_samples: float
    decay_style: str
    decay_samples: int
    wsd_decay_style: str
    wsd_decay_samples: int | None
    start_weight_decay: float
    end_weight_decay: float
    weight_decay_style: str
    weight_decay_samples: int

    @classmethod
    def from_config(cls, config: Config) -> "LearningRateSchedule":
        """The schedule of a resolved config. Lengths in iterations become the samples those iterations consume."""
        optimizer, batches = config.optimizer, BatchSchedule.from_config(config)

        def samples(iterations: int | None, given: int | None) -> int | None:
            return batches.samples_after(iterations) if iterations is not None else given

        total = samples(config.training.train_iters, config.training.train_samples) or 1
        decay = samples(optimizer.lr_decay_iters, optimizer.lr_decay_samples) or total
        if optimizer.lr_warmup_fraction is not None:
            warmup = optimizer.lr_warmup_fraction * decay
        else:
            warmup = samples(optimizer.lr_warmup_iters or None, optimizer.lr_warmup_samples)

        def first_given(*values: float | None) -> float | None:
            return next((value for value in values if value is not None), None)

        return cls(
            lr=optimizer.lr,
            min_lr=optimizer.min_lr,
            decoupled_lr=first_given(optimizer.decoupled_lr, optimizer.lr),
            decoupled_min_lr=first_given(optimizer.decoupled_min_lr, optimizer.min_lr),
            warmup_init=optimizer.lr_warmup_init,
            warmup_samples=warmup,
            decay_style=optimizer.lr_decay_style,
            decay_samples=decay,
            wsd_decay_style=optimizer.lr_wsd_decay_style,
            wsd_decay_samples=samples(optimizer.lr_wsd_decay_iters, optimizer.lr_wsd_decay_samples),
            start_weight_decay=first_given(optimizer.start_weight_decay, optimizer.weight_decay),
            end_weight_decay=first_given(optimizer.end_weight_decay, optimizer.weight_decay),
            weight_decay_style=optimizer.weight_decay_incr_style,
            weight_decay_samples=total,
        )

    def learning_rate(self, consumed_samples: int, decoupled: bool = False) -> float:
        """The learning rate of the step that starts after `consumed_samples` samples.

        Args:
            consumed_samples: samples of all steps whose update was made.
            decoupled: for the embedding and the head, with --decoupled-lr.
        """
        peak = self.decoupled_lr if decoupled else self.lr
        floor = self.decoupled_min_lr if decoupled else self.min_lr
        if self.warmup_samples > 0 and consumed_samples <= self.warmup_samples:
            return self.warmup_init + (peak - self.warmup_init) * consumed_samples / self.warmup_samples
        if self.decay_style == "constant":
            return peak
        if consumed_samples > self.decay_samples:
            return floor
        if self.decay_style == "inverse-square-root":
            return max(
                floor, peak * math.sqrt(max(self.warmup_samples, 1)) / math.sqrt(max(consumed_samples, 1))
            )
        start, shape = self.warmup_samples, self.decay_style
        if (
            shape == "WSD"
        ):  # warm-up, stable, decay (Hu et al. 2024): the peak until wsd_decay_samples before the end
            start, shape = self.decay_samples - self.wsd_decay_samples, self.wsd_decay_style
            if consumed_samples <= start:
                return peak
        part = (consumed_samples - start) / (self.decay_samples - start)
        return floor + ANNEALING[shape](part) * (peak - floor)

    def weight_decay(self, consumed_samples: int) -> float:
        """The weight decay of that step, for the parameters that decay."""
        start, end = self.start_weight_decay, self.end_weight_decay
        if self.weight_decay_style == "constant" or consumed_samples > self.weight_decay_samples:
            return end
        part = consumed_samples / self.weight_decay_samples
        return start + (1.0 - ANNEALING[self.weight_decay_style](part)) * (end - start)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, for a checkpoint."""
        return asdict(self)


# What a difference between the flags and a checkpoint is called by.
_FLAGS = {
    "lr": "--lr",
    "min_lr": "--min-lr",
    "decoupled_lr": "--decoupled-lr",
    "decoupled_min_lr": "--decoupled-min-lr",
    "warmup_init": "--lr-warmup-init",
    "warmup_samples": "warm-up samples (--lr-warmup-iters, -samples or -fraction)",
    "decay_style": "--lr-decay-style",
    "decay_samples": "decay samples (--lr-decay-iters, -samples or the run's length)",
    "wsd_decay_style": "--lr-wsd-decay-style",
    "wsd_decay_samples": "WSD's decay samples (--lr-wsd-decay-iters or -samples)",
    "start_weight_decay": "--start-weight-decay",
    "end_weight_decay": "--end-weight-decay",
    "weight_decay_style": "--weight-decay-incr-style",
    "weight_decay_samples": "weight decay samples (the run's length)",
}


def resumed_schedule(config: Config, stored: dict[str, Any] | None) -> LearningRateSchedule:
    """The schedule with which a run goes on after a checkpoint.

    `stored` is the LearningRateSchedule.to_dict() that the checkpoint holds, None where it holds none.

    --override-opt_param-scheduler takes the flags, --use-checkpoint-opt_param-scheduler the checkpoint; without
    either the two have to be the same, as in Megatron.

    Raises:
        ConfigError: they are not; the differences are listed.
    """
    wanted = LearningRateSchedule.from_config(config)
    if config.optimizer.override_opt_param_scheduler:
        return wanted
    if not isinstance(stored, dict):
        raise ConfigError(
            "the checkpoint holds no learning rate schedule; give --override-opt_param-scheduler to take the flags"
        )
    unknown = sorted(set(stored) ^ set(_FLAGS))
    if unknown:
        raise ConfigError(
            f"the checkpoint's learning rate schedule differs in its keys: {', '.join(unknown)}"
        )
    kept = LearningRateSchedule(**stored)
    if config.optimizer.use_checkpoint_opt_param_scheduler:
        return kept
    differences = [
        f"{text} is {getattr(wanted, name)} here and {getattr(kept, name)} there"
        for name, text in _FLAGS.items()
        if getattr(wanted, name) != getattr(kept, name) and _matters(name, wanted, kept)
    ]
    if differences:
        raise ConfigError(
            f"the learning rate schedule is not the checkpoint's: {'; '.join(differences)}; give "
            "--override-opt_param-scheduler to take the flags or --use-checkpoint-opt_param-scheduler to take the "
            "checkpoint"
        )
    return kept


def _matters(name: str, wanted: LearningRateSchedule, kept: LearningRateSchedule) -> bool:
    """Whether a difference in this field can change a number: a constant schedule does not care for its length."""
    both = (wanted, kept)
    if name in ("decay_samples", "min_lr", "decoupled_min_lr"):
        return any(schedule.decay_style != "constant" for schedule in both)
    if name.startswith("wsd"):
        return any(schedule.decay_style == "WSD" for schedule in both)
    if name in ("start_weight_decay", "weight_decay_samples"):
        return any(schedule.weight_decay_style != "constant" for schedule in both)
    return True
