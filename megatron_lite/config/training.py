"""The flags of the run: batch, length, optimizer, evaluation."""

from dataclasses import dataclass

from megatron_lite.config.declare import Numbers, Words, flag
from megatron_lite.config.optimizers import OPTIMIZERS


@dataclass(frozen=True)
class TrainingConfig:
    """Batch, length, seed, stopping."""

    micro_batch_size: int | None = flag(
        None, "samples of one microbatch on a data-parallel rank", aliases=("--batch-size",), minimum=1
    )
    global_batch_size: int | None = flag(
        None,
        "samples of one optimizer step over all ranks; default one microbatch per data-parallel rank",
        minimum=1,
    )
    rampup_batch_size: Numbers | None = flag(None, "START INCREMENT SAMPLES: ramp-up", nargs=3, minimum=1)
    step_batch_size_schedule: Words | None = flag(
        None, "'0:256 10B:512 ...': batch from that many tokens on; wins over --global-batch-size", nargs="+"
    )
    train_iters: int | None = flag(None, "optimizer steps to train", minimum=0)
    train_samples: int | None = flag(None, "samples to train on, instead of --train-iters", minimum=0)
    seed: int = flag(1234, "random seed of weights, dropout and data order", minimum=0, maximum=2**32 - 1)
    exit_interval: int | None = flag(None, "save and stop at multiples of this iteration; 0 = off", minimum=0)
    exit_duration_in_mins: int | None = flag(None, "save and stop after this many minutes", minimum=0)
    exit_signal_handler: bool = flag(False, "SIGTERM or SIGUSR1 to any rank: save and stop within two steps")
    skip_train: bool = flag(False, "evaluate only")
    iterations_to_skip: Numbers = flag((), "iterations whose data is not trained on", nargs="+", minimum=0)
    manual_gc: bool = flag(False, "Python garbage collection only when asked")
    manual_gc_interval: int = flag(0, "steps between collections with --manual-gc; 0 = never", minimum=0)
    deterministic_mode: bool = flag(False, "only kernels that give the same bits each time")
    calculate_per_token_loss: bool = flag(False, "loss per unmasked token of the global batch (always here)")
    no_check_for_nan_in_loss_and_grad: bool = flag(False, "do not stop on a NaN")
    max_consecutive_nonfinite: int = flag(10, "ours: stop after so many skipped steps in a row", minimum=1)
    check_for_spiky_loss: bool = flag(False, "report losses above ten times the largest before")
    check_for_large_grads: bool = flag(False, "report gradient norms above ten times the largest before")
    check_weight_hash_across_dp_replicas_interval: int | None = flag(
        None, "steps between comparisons of replicated weights", minimum=1
    )
    empty_unused_memory_level: int = flag(0, "1: empty the CUDA cache each step, 2: more often", maximum=2)
    test_mode: bool = flag(False, "check replicas each step, checkpoints by hash; a failed save ends the run")


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer, learning rate and weight decay."""

    optimizer: str = flag("adam", "update rule", choices=(*OPTIMIZERS, "dist_muon"))
    lr: float | None = flag(None, "peak learning rate", minimum=0)
    min_lr: float = flag(0.0, "learning rate at the end of the decay")
    lr_decay_style: str = flag(
        "linear", "shape of the decay", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    lr_decay_iters: int | None = flag(
        None, "optimizer steps until the learning rate is --min-lr; default --train-iters", minimum=1
    )
    lr_decay_samples: int | None = flag(
        None, "samples until the learning rate is --min-lr; default --train-samples", minimum=1
    )
    lr_warmup_iters: int = flag(0, "optimizer steps of linear warm-up")
    lr_warmup_samples: int = flag(0, "samples of linear warm-up")
    lr_warmup_fraction: float | None = flag(None, "warm-up as a fraction of the decay length", maximum=1)
    lr_warmup_init: float = flag(0.0, "learning rate at the start of the warm-up")
    lr_wsd_decay_style: str = flag(
        "exponential", "decay after WSD's plateau", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_wsd_decay_iters: int | None = flag(None, "optimizer steps of WSD's last phase", minimum=1)
    lr_wsd_decay_samples: int | None = flag(None, "samples of WSD's last phase", minimum=1)
    weight_decay: float = flag(0.01, "weight decay factor of matrices; biases and norms do not decay")
    start_weight_decay: float | None = flag(None, "weight decay at the start; default --weight-decay")
    end_weight_decay: float | None = flag(None, "weight decay at the end; default --weight-decay")
    weight_decay_incr_style: str = flag(
        "constant", "how weight decay goes from start to end", choices=("constant", "linear", "cosine")
    )
    clip_grad: float = flag(1.0, "gradient norm of the whole model above which it is clipped; 0 = off")
    adam_beta1: float = flag(0.9, "decay rate of Adam's mean gradient", maximum=1)
    adam_beta2: float = flag(0.999, "decay rate of Adam's mean squared gradient", maximum=1)
    adam_eps: float = flag(1e-8, "term added to Adam's denominator")
    sgd_momentum: float = flag(0.9, "momentum factor of --optimizer sgd", maximum=1)
    decoupled_lr: float | None = flag(None, "peak learning rate of embedding and head")
    decoupled_min_lr: float | None = flag(None, "learning rate of embedding and head at the end of the decay")
    override_opt_param_scheduler: bool = flag(
        False,
        "learning rate and decay from the flags, not the checkpoint",
        spelling="--override-opt_param-scheduler",
        aliases=("--override-opt-param-scheduler",),
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        "learning rate and decay from the checkpoint, not the flags",
        spelling="--use-checkpoint-opt_param-scheduler",
        aliases=("--use-checkpoint-opt-param-scheduler",),
    )


@dataclass(frozen=True)
class EvaluationConfig:
    """Validation and test."""

    eval_interval: int | None = flag(None, "optimizer steps between validations; 0 = off", minimum=0)
    eval_iters: int = flag(100, "batches of one validation or test; 0 or -1 = off", minimum=-1)
    eval_global_batch_size: int | None = flag(
        None, "samples of one evaluation batch over all ranks; default --global-batch-size", minimum=1
    )
    full_validation: bool = flag(False, "the whole validation set each time")
