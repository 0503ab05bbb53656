"""The flags of what a run leaves behind and logs, and of what it does instead of training."""

from dataclasses import dataclass

from megatron_lite.config.declare import Numbers, flag


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving, loading, resuming."""

    save: str | None = flag(None, "folder to save checkpoints in")
    load: str | None = flag(None, "folder to load a checkpoint from")
    save_interval: int | None = flag(None, "steps between checkpoints; 0 = only at the end", minimum=0)
    save_retain_interval: int | None = flag(None, "keep only multiples of this and the newest", minimum=1)
    keep_last: int | None = flag(None, "ours: keep only the newest N checkpoints", minimum=1)
    overwrite_checkpoints: bool = flag(
        False, "ours: start anew in a --save that holds another run's checkpoints, replacing them one by one"
    )
    async_save: bool = flag(False, "write checkpoints in the background")
    ckpt_step: int | None = flag(None, "iteration to load, instead of the newest", minimum=0)
    finetune: bool = flag(False, "load weights only, start at iteration 0")
    no_load_optim: bool = flag(False, "do not load the optimizer's state")
    no_load_rng: bool = flag(False, "do not load random states")
    no_save_optim: bool = flag(False, "do not save the optimizer's state")
    no_save_rng: bool = flag(False, "do not save random states")
    use_checkpoint_args: bool = flag(False, "the model's flags come from the checkpoint")
    exit_on_missing_checkpoint: bool = flag(False, "stop when --load holds no checkpoint")
    pretrained_checkpoint: str | None = flag(None, "weights to start from when --load holds none")
    ckpt_convert_format: str | None = flag(
        None, "load the checkpoint, save it to --ckpt-convert-save and stop", choices=("torch", "torch_dist")
    )
    ckpt_convert_save: str | None = flag(None, "folder of the converted checkpoint")
    verify_integrity: bool = flag(False, "hash files on load and save")
    exit_on_save_failure: bool = flag(False, "ours: a failed save stops the run")


@dataclass(frozen=True)
class LoggingConfig:
    """What a run logs, and where."""

    log_interval: int = flag(100, "optimizer steps between log lines", minimum=1)
    log_throughput: bool = flag(False, "log model TFLOP/s per device")
    log_params_norm: bool = flag(False, "log the norm of the weights")
    log_num_zeros_in_grad: bool = flag(False, "log the number of zeros in the gradient")
    log_progress: bool = flag(False, "append to SAVE/progress.txt")
    log_memory_to_tensorboard: bool = flag(False, "write memory use to the trackers")
    log_timers_to_tensorboard: bool = flag(False, "write timers to the trackers")
    log_validation_ppl_to_tensorboard: bool = flag(False, "write validation perplexity to the trackers")
    logging_level: int | None = flag(None, "level of Python's logging, e.g. 20", minimum=0)
    metrics_file: str | None = flag(None, "ours: metrics as JSON lines; default SAVE/metrics.jsonl")
    tensorboard_dir: str | None = flag(None, "folder for TensorBoard")
    tensorboard_log_interval: int = flag(1, "steps between TensorBoard points", minimum=1)
    wandb_project: str | None = flag(None, "Weights & Biases project; turns it on")
    wandb_exp_name: str | None = flag(None, "name of the Weights & Biases run")
    wandb_entity: str | None = flag(None, "Weights & Biases team or user")
    wandb_save_dir: str | None = flag(None, "local folder of Weights & Biases")
    timing_log_level: int = flag(0, "0: step only, 1 and 2: more timers", maximum=2)
    timing_log_option: str = flag("minmax", "how ranks' timers are reduced", choices=("max", "minmax", "all"))
    profile: bool = flag(False, "trace a window of steps with torch's profiler")
    profile_step_start: int = flag(10, "first traced step", minimum=0)
    profile_step_end: int = flag(12, "step after the last traced one", minimum=0)
    profile_ranks: Numbers = flag((0,), "ranks that trace", nargs="+", minimum=0)
    timeline: str | None = flag(
        None,
        "ours: file to record when each pipeline action of a few steps ran, for tools/show_schedule.py --from-trace",
    )
    timeline_step_start: int = flag(10, "ours: first recorded step after the run's start", minimum=0)
    timeline_step_end: int = flag(15, "ours: step after the last recorded one", minimum=1)


@dataclass(frozen=True)
class CommandConfig:
    """What to do instead of training (all ours)."""

    check: bool = flag(False, "ours: print the resolved run and stop; no process group")
    dry_run: bool = flag(False, "ours: rehearse a step as one rank without devices, and stop")
    rank: int = flag(0, "ours: the rank that --dry-run rehearses", minimum=0)
    all_stages: bool = flag(False, "ours: --dry-run for one rank of each pipeline stage")
    imbalance: float = flag(
        1.0,
        "ours: rows that the experts of --dry-run's rank, or of a planned one, compute, as a multiple of the mean over "
        "--expert-model-parallel-size ranks",
        minimum=1,
    )

    @property
    def planning(self) -> bool:
        """Whether nothing is trained, so that the data and the devices need not be there."""
        return self.check or self.dry_run
