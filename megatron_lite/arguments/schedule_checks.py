"""Checks of the run's length, its learning rate and its weight decay: what cannot be together."""

from megatron_lite.arithmetic.lr_schedule import LearningRateSchedule
from megatron_lite.config import Config, ConfigError, refuse_together


def check_length(config: Config) -> None:
    """A run is counted in iterations or in samples, throughout (Megatron's rule)."""
    training, optimizer = config.training, config.optimizer
    iterations = {
        "--train-iters": training.train_iters is not None,
        "--lr-decay-iters": optimizer.lr_decay_iters is not None,
        "--lr-warmup-iters": optimizer.lr_warmup_iters > 0,
        "--lr-wsd-decay-iters": optimizer.lr_wsd_decay_iters is not None,
    }
    samples = {
        "--train-samples": training.train_samples is not None,
        "--lr-decay-samples": optimizer.lr_decay_samples is not None,
        "--lr-warmup-samples": optimizer.lr_warmup_samples > 0,
        "--lr-wsd-decay-samples": optimizer.lr_wsd_decay_samples is not None,
    }
    if not (iterations["--train-iters"] or samples["--train-samples"]):
        raise ConfigError("--train-iters or --train-samples is needed")
    by_iterations = [flag for flag, given in iterations.items() if given]
    by_samples = [flag for flag, given in samples.items() if given]
    if by_iterations and by_samples:
        raise ConfigError(
            f"{', '.join(by_iterations)} and {', '.join(by_samples)} cannot be given together: a run is counted in "
            "iterations or in samples, throughout"
        )
    refuse_together(
        "--rampup-batch-size" if training.rampup_batch_size else None,
        "--step-batch-size-schedule" if training.step_batch_size_schedule else None,
        because="both say how the batch grows",
    )


def check_learning_rate(config: Config) -> None:
    optimizer = config.optimizer
    if optimizer.lr is None:
        raise ConfigError("--lr is needed")
    for name in ("iters", "samples"):
        if optimizer.lr_warmup_fraction is not None and getattr(optimizer, f"lr_warmup_{name}"):
            raise ConfigError(
                f"--lr-warmup-fraction and --lr-warmup-{name} cannot be given together: both say how long"
            )
    schedule = LearningRateSchedule.from_config(config)
    for prefix in ("", "decoupled_"):
        peak, floor = getattr(schedule, f"{prefix}lr"), getattr(schedule, f"{prefix}min_lr")
        if floor > peak and not config.training.skip_train:
            # Without a flag of their own embedding and head have the others' value.
            high, low = (
                f"{prefix}{name}" if getattr(optimizer, f"{prefix}{name}") is not None else name
                for name in ("lr", "min_lr")
            )
            flags = f"--{low.replace('_', '-')} {floor:g}", f"--{high.replace('_', '-')} {peak:g}"
            raise ConfigError(f"{flags[0]} is more than {flags[1]}, wanted at most that")
    if schedule.warmup_init > schedule.lr:
        raise ConfigError(f"--lr-warmup-init {schedule.warmup_init:g} is more than --lr {schedule.lr:g}")
    if config.training.train_iters == 0 or config.training.train_samples == 0:
        return
    if schedule.warmup_samples >= schedule.decay_samples:
        raise ConfigError(
            f"the warm-up of the learning rate ({schedule.warmup_samples:,g} samples) is not shorter than its decay "
            f"({schedule.decay_samples:,} samples): lower {_warmup_flag(config)} or raise the decay "
            "(--lr-decay-iters or -samples, by default the run's length)"
        )
    if schedule.decay_style == "WSD":
        unit = "iters" if config.training.train_iters is not None else "samples"
        if schedule.wsd_decay_samples is None:
            raise ConfigError(f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}")
        if schedule.wsd_decay_samples > schedule.decay_samples:
            raise ConfigError(
                f"--lr-wsd-decay-{unit} is {schedule.wsd_decay_samples:,} samples, more than the whole schedule of "
                f"{schedule.decay_samples:,}"
            )


def _warmup_flag(config: Config) -> str:
    optimizer = config.optimizer
    if optimizer.lr_warmup_fraction is not None:
        return f"--lr-warmup-fraction {optimizer.lr_warmup_fraction:g}"
    if optimizer.lr_warmup_iters:
        return f"--lr-warmup-iters {optimizer.lr_warmup_iters}"
    return f"--lr-warmup-samples {optimizer.lr_warmup_samples}"


def check_weight_decay(config: Config) -> None:
    optimizer = config.optimizer
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    style = optimizer.weight_decay_incr_style
    if style == "constant" and (start is not None or end is not None):
        raise ConfigError(
            "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or cosine, "
            "it is constant"
        )
    if style != "constant" and (start is None or end is None):
        raise ConfigError(
            f"--weight-decay-incr-style {style} needs --start-weight-decay and --end-weight-decay"
        )
    if style != "constant" and end < start:
        raise ConfigError(f"--end-weight-decay {end:g} is less than --start-weight-decay {start:g}")
