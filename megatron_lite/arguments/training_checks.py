"""Checks of the run's length, its learning rate and its weight decay: what cannot be together."""

from megatron_lite.arithmetic.lr_schedule import LearningRateSchedule
from megatron_lite.config import Config, ConfigError
from megatron_lite.config.declare import flag_name


def _check_length(config: Config) -> None:
    """A run is counted in iterations or in samples, throughout (Megatron's rule)."""
    names = ("train", "lr_decay", "lr_warmup", "lr_wsd_decay")
    by_iterations, by_samples = (
        [flag_name(f"{name}_{unit}") for name in names if config.is_set(f"{name}_{unit}")]
        for unit in ("iters", "samples")
    )
    if not {"--train-iters", "--train-samples"} & {*by_iterations, *by_samples}:
        raise ConfigError("--train-iters or --train-samples is needed")
    if by_iterations and by_samples:
        raise ConfigError(
            f"{', '.join(by_iterations)} and {', '.join(by_samples)} cannot be given together: a run is counted in "
            "iterations or in samples, throughout"
        )


def _check_learning_rate(config: Config) -> None:
    optimizer, training = config.optimizer, config.training
    if optimizer.lr is None:
        raise ConfigError("--lr is needed")
    schedule = LearningRateSchedule.from_config(config)
    for prefix in ("", "decoupled_"):
        peak, floor = getattr(schedule, f"{prefix}lr"), getattr(schedule, f"{prefix}min_lr")
        if floor > peak and not training.skip_train:
            # Without a flag of their own embedding and head have the others' value.
            own = {name: prefix + name for name in ("lr", "min_lr")}
            high, low = (name if config.value(own[name]) is None else own[name] for name in own)
            raise ConfigError(f"{config.shown(low)} is more than {config.shown(high)}, wanted at most that")
    if 0 in (training.train_iters, training.train_samples):
        return
    unit = "iters" if training.train_iters is not None else "samples"
    if schedule.warmup_samples >= schedule.decay_samples:
        warmup = "lr_warmup_fraction" if optimizer.lr_warmup_fraction is not None else f"lr_warmup_{unit}"
        raise ConfigError(
            f"the warm-up of the learning rate ({schedule.warmup_samples:,g} samples) is not shorter than its decay "
            f"({schedule.decay_samples:,} samples): lower {config.shown(warmup)} or raise the decay "
            "(--lr-decay-iters or -samples, by default the run's length)"
        )
    if schedule.decay_style == "WSD":
        if schedule.wsd_decay_samples is None:
            raise ConfigError(f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}")
        if schedule.wsd_decay_samples > schedule.decay_samples:
            raise ConfigError(
                f"--lr-wsd-decay-{unit} is {schedule.wsd_decay_samples:,} samples, more than the whole schedule of "
                f"{schedule.decay_samples:,}"
            )


def _check_weight_decay(config: Config) -> None:
    style = config.optimizer.weight_decay_incr_style
    ends = [config.is_set("start_weight_decay"), config.is_set("end_weight_decay")]
    if style == "constant" and any(ends):
        raise ConfigError(
            "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or cosine, "
            "it is constant"
        )
    if style != "constant" and not all(ends):
        raise ConfigError(f"--weight-decay-incr-style {style} needs --start-weight-decay, --end-weight-decay")


CHECKS = (_check_length, _check_learning_rate, _check_weight_decay)
