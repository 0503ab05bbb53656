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

# The same for the weight decay's way from start to end.
INCREMENT: dict[str, Callable[[float], float]] = {
    "linear": lambda part: part,
    "cosine": lambda part: 0.5 * (math.cos(math.pi * (1.0 - part)) + 1.0),
}


@dataclass(frozen=True)
class Schedule:
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
    def from_config(cls, config: Config) -> "Schedule":
        """The schedule of a resolved config. Lengths in iterations become the samples those iterations consume."""
        optimizer, batches = config.optimizer, BatchSchedule.from_config(config)

        def samples(iterations: int | None, given: int | None) -> int | None:
            return batches.samples_after(iterations) if iterations is not None else given

        total = (
            batches.total_samples
            if config.training.train_iters is not None
            else config.training.train_samples
        )
        decay = samples(optimizer.lr_decay_iters, optimizer.lr_decay_samples) or total or 1
        if optimizer.lr_warmup_fraction is not None:
            warmup = optimizer.lr_warmup_fraction * decay
        else:
            warmup = samples(optimizer.lr_warmup_iters or None, optimizer.lr_warmup_samples)
        start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
        min_lr, lr = optimizer.min_lr, optimizer.lr
        decoupled_lr, decoupled_min_lr = optimizer.decoupled_lr, optimizer.decoupled_min_lr
        return cls(
            lr=lr,
            min_lr=min_lr,
            decoupled_lr=lr if decoupled_lr is None else decoupled_lr,
            decoupled_min_lr=min_lr if decoupled_min_lr is None else decoupled_min_lr,
            warmup_init=optimizer.lr_warmup_init,
            warmup_samples=warmup,
            decay_style=optimizer.lr_decay_style,
            decay_samples=decay,
            wsd_decay_style=optimizer.lr_wsd_decay_style,
            wsd_decay_samples=samples(optimizer.lr_wsd_decay_iters, optimizer.lr_wsd_decay_samples),
            start_weight_decay=optimizer.weight_decay if start is None else start,
            end_weight_decay=optimizer.weight_decay if end is None else end,
            weight_decay_style=optimizer.weight_decay_incr_style,
            weight_decay_samples=total or 1,
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
        return DECAY_STYLES[self.decay_style](self, consumed_samples, peak, floor)

    def weight_decay(self, consumed_samples: int) -> float:
        """The weight decay of that step, for the parameters that decay."""
        start, end = self.start_weight_decay, self.end_weight_decay
        if self.weight_decay_style == "constant" or consumed_samples > self.weight_decay_samples:
            return end
        part = consumed_samples / self.weight_decay_samples
        return start + INCREMENT[self.weight_decay_style](part) * (end - start)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, for a checkpoint."""
        return asdict(self)


def _constant(schedule: Schedule, consumed: int, peak: float, floor: float) -> float:
    return peak


def _inverse_square_root(schedule: Schedule, consumed: int, peak: float, floor: float) -> float:
    if consumed > schedule.decay_samples:
        return floor
    return max(floor, peak * math.sqrt(max(schedule.warmup_samples, 1)) / math.sqrt(max(consumed, 1)))


def _wsd(schedule: Schedule, consumed: int, peak: float, floor: float) -> float:
    """Warm-up, stable, decay (Hu et al. 2024): the peak until `wsd_decay_samples` before the end."""
    if consumed > schedule.decay_samples:
        return floor
    start = schedule.decay_samples - schedule.wsd_decay_samples
    if consumed <= start:
        return peak
    part = (consumed - start) / schedule.wsd_decay_samples
    return floor + ANNEALING[schedule.wsd_decay_style](part) * (peak - floor)


def _annealed(schedule: Schedule, consumed: int, peak: float, floor: float) -> float:
    if consumed > schedule.decay_samples:
        return floor
    part = (consumed - schedule.warmup_samples) / (schedule.decay_samples - schedule.warmup_samples)
    return floor + ANNEALING[schedule.decay_style](part) * (peak - floor)


# --lr-decay-style -> learning rate after the warm-up, of (schedule, consumed samples, peak, floor).
DECAY_STYLES: dict[str, Callable[[Schedule, int, float, float], float]] = {
    "constant": _constant,
    "linear": _annealed,
    "cosine": _annealed,
    "inverse-square-root": _inverse_square_root,
    "WSD": _wsd,
}

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


def resumed_schedule(config: Config, stored: dict[str, Any] | None) -> Schedule:
    """The schedule with which a run goes on after a checkpoint that holds `stored` (Schedule.to_dict(); None: none).

    --override-opt_param-scheduler takes the flags, --use-checkpoint-opt_param-scheduler the checkpoint; without
    either the two have to be the same, as in Megatron.

    Raises:
        ConfigError: they are not; the differences are listed.
    """
    wanted = Schedule.from_config(config)
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
    kept = Schedule(**stored)
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


def _matters(name: str, wanted: Schedule, kept: Schedule) -> bool:
    """Whether a difference in this field can change a number: a constant schedule does not care for its length."""
    both = (wanted, kept)
    if name in ("decay_samples", "min_lr", "decoupled_min_lr"):
        return any(schedule.decay_style != "constant" for schedule in both)
    if name.startswith("wsd"):
        return any(schedule.decay_style == "WSD" for schedule in both)
    if name in ("start_weight_decay", "weight_decay_samples"):
        return any(schedule.weight_decay_style != "constant" for schedule in both)
    return True
