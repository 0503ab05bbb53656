"""The flags of the run: batch, length, optimizer, evaluation."""

from dataclasses import dataclass

from megatron_lite.config.declare import Numbers, Words, flag
from megatron_lite.config.optimizers import OPTIMIZERS


@dataclass(frozen=True)
class TrainingConfig:
    """Batch, length, seed, stopping."""

    micro_batch_size: int | None = flag(
        None, "samples of one microbatch", aliases=("--batch-size",), minimum=1
    )
    global_batch_size: int | None = flag(
        None, "samples of one step; default one microbatch a rank", minimum=1
    )
    rampup_batch_size: Numbers | None = flag(
        None, "START INCREMENT SAMPLES: batch ramp-up", nargs=3, minimum=1
    )
    step_batch_size_schedule: Words | None = flag(
        None, "'0:256 10B:512 ...': batch from that many tokens on; wins over --global-batch-size", nargs="+"
    )
    train_iters: int | None = flag(None, "steps", minimum=0)
    train_samples: int | None = flag(None, "samples, instead of steps", minimum=0)
    seed: int = flag(1234, "weights, dropout and data order", minimum=0, maximum=2**32 - 1)
    exit_interval: int | None = flag(
        None, "stop, saved, when the step is a multiple of this; 0 = off", minimum=0
    )
    exit_duration_in_mins: int | None = flag(None, "stop, saved, after this many minutes", minimum=0)
    exit_signal_handler: bool = flag(
        False, "SIGTERM or SIGUSR1 to any rank: stop after this or the next step, saved"
    )
    skip_train: bool = flag(False, "only evaluate")
    iterations_to_skip: Numbers = flag(
        (), "steps whose data is read but not trained on", nargs="+", minimum=0
    )
    manual_gc: bool = flag(False, "Python garbage collection only when asked")
    manual_gc_interval: int = flag(0, "steps between collections with --manual-gc; 0 = never", minimum=0)
    deterministic_mode: bool = flag(False, "only kernels that give the same bits each time")
    calculate_per_token_loss: bool = flag(
        False, "loss per unmasked token of the global batch (always so here)"
    )
    no_check_for_nan_in_loss_and_grad: bool = flag(False, "do not stop on a NaN")
    max_consecutive_nonfinite: int = flag(10, "ours: stop after so many skipped steps in a row", minimum=1)
    check_for_spiky_loss: bool = flag(False, "report losses above ten times the largest before")
    check_for_large_grads: bool = flag(False, "report gradient norms above ten times the largest before")
    check_weight_hash_across_dp_replicas_interval: int | None = flag(
        None, "steps between comparisons of replicated weights", minimum=1
    )
    empty_unused_memory_level: int = flag(0, "1: empty the CUDA cache each step, 2: more often", maximum=2)
    test_mode: bool = flag(
        False, "check all along: replicas each step, files by hash; a failed save ends the run"
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer, learning rate and weight decay."""

    optimizer: str = flag("adam", "update rule", choices=(*OPTIMIZERS, "dist_muon"))
    lr: float | None = flag(None, "peak learning rate", minimum=0)
    min_lr: float = flag(0.0, "learning rate at the end")
    lr_decay_style: str = flag(
        "linear", "shape of the decay", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    lr_decay_iters: int | None = flag(None, "steps to the end of the decay; default --train-iters", minimum=1)
    lr_decay_samples: int | None = flag(None, "the same in samples; default --train-samples", minimum=1)
    lr_warmup_iters: int = flag(0, "steps of linear warm-up")
    lr_warmup_samples: int = flag(0, "samples of linear warm-up")
    lr_warmup_fraction: float | None = flag(None, "warm-up as a part of the decay length", maximum=1)
    lr_warmup_init: float = flag(0.0, "learning rate of the first step")
    lr_wsd_decay_style: str = flag(
        "exponential", "decay after WSD's plateau", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_wsd_decay_iters: int | None = flag(None, "steps of WSD's decay", minimum=1)
    lr_wsd_decay_samples: int | None = flag(None, "samples of WSD's decay", minimum=1)
    weight_decay: float = flag(0.01, "decay of matrices; biases and norms do not decay")
    start_weight_decay: float | None = flag(None, "weight decay at the start; default --weight-decay")
    end_weight_decay: float | None = flag(None, "weight decay at the end; default --weight-decay")
    weight_decay_incr_style: str = flag(
        "constant", "how it goes from start to end", choices=("constant", "linear", "cosine")
    )
    clip_grad: float = flag(1.0, "largest global gradient norm; 0 = no clipping")
    adam_beta1: float = flag(0.9, "decay of the mean gradient", maximum=1)
    adam_beta2: float = flag(0.999, "decay of the mean square", maximum=1)
    adam_eps: float = flag(1e-8, "added to the root mean square")
    sgd_momentum: float = flag(0.9, "momentum of sgd", maximum=1)
    decoupled_lr: float | None = flag(None, "peak learning rate of embedding and head")
    decoupled_min_lr: float | None = flag(None, "their learning rate at the end")
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

    eval_interval: int | None = flag(None, "steps between validations; 0 = off", minimum=0)
    eval_iters: int = flag(100, "batches of one validation; 0 or -1 = off", minimum=-1)
    eval_global_batch_size: int | None = flag(None, "samples of one; default --global-batch-size", minimum=1)
    full_validation: bool = flag(False, "the whole validation set each time")
