"""Every flag of the program, one frozen dataclass per concern.

A field is a flag: `--num-layers` is `ModelConfig.num_layers`; its default, type, help, choices and limits stand
here and nowhere else. Names, meanings and defaults are Megatron's; the ones that are ours say so in their help.
A field that is None in a fresh object gets its value from the others in `megatron_lite.resolution`.
"""

from dataclasses import asdict, dataclass, field, fields
from typing import Any

Words = tuple[str, ...]
Numbers = tuple[int, ...]


class ConfigError(ValueError):
    """What a user can cause: one sentence with the flag or file, the value seen and the value wanted."""


def flag(default: Any, text: str, **options: Any) -> Any:
    """A field that is a flag.

    Options: choices; nargs; minimum (default 0; None = any), maximum, above (exclusive minimum);
    spelling and aliases where the name alone does not give the flag; parse (a named parser of
    megatron_lite.arguments) for values that are neither a word nor a number; no_effect (why it does nothing here).
    """
    return field(default=default, metadata={"help": text, **options})


@dataclass(frozen=True)
class ModelConfig:
    """The transformer."""

    num_layers: int | None = flag(None, "transformer layers, total over all pipeline stages", minimum=1)
    hidden_size: int | None = flag(None, "model width H", minimum=1)
    ffn_hidden_size: int | None = flag(
        None, "MLP width; default 4H, with --swiglu int(8H/3/64)*64", minimum=1
    )
    num_attention_heads: int | None = flag(None, "query heads", minimum=1)
    group_query_attention: bool = flag(False, "share each key/value head among several query heads")
    num_query_groups: int = flag(1, "key/value heads, read only with --group-query-attention", minimum=1)
    kv_channels: int | None = flag(None, "width of a head; default hidden size / heads", minimum=1)
    max_position_embeddings: int | None = flag(
        None, "rows of the learned position table; at least --seq-length", minimum=1
    )
    position_embedding_type: str = flag(
        "learned_absolute", "how positions enter", choices=("learned_absolute", "rope", "none")
    )
    rotary_base: float = flag(10000.0, "base of the rotary frequencies", above=0)
    rotary_percent: float = flag(1.0, "part of a head's width that is rotated", above=0, maximum=1)
    rotary_interleaved: bool = flag(False, "rotate neighbouring pairs (GPT-J) instead of halves")
    use_rope_scaling: bool = flag(False, "Llama 3.1's stretch of the rotary frequencies")
    rope_scaling_factor: float = flag(8.0, "stretch of the long wavelengths", above=0)
    rope_scaling_low_freq_factor: float = flag(
        1.0, "ours: long wavelengths begin at original / this", above=0
    )
    rope_scaling_high_freq_factor: float = flag(4.0, "ours: short ones end at original / this", above=0)
    rope_scaling_original_max_position_embeddings: int = flag(
        8192, "ours: context length before the stretch", minimum=1
    )
    normalization: str = flag("LayerNorm", "normalisation of the residual", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = flag(1e-5, "added to the variance", aliases=("--layernorm-epsilon",), above=0)
    apply_layernorm_1p: bool = flag(False, "norm weights are stored as weight - 1")
    swiglu: bool = flag(False, "SiLU-gated MLP instead of GELU")
    squared_relu: bool = flag(False, "relu(x)^2 in the MLP instead of GELU")
    disable_bias_linear: bool = flag(False, "no bias in linear layers")
    add_qkv_bias: bool = flag(False, "bias in the query, key and value projections even so")
    qk_layernorm: bool = flag(False, "normalise each head's query and key")
    untie_embeddings_and_output_weights: bool = flag(False, "the head has its own weight")
    hidden_dropout: float = flag(0.1, "dropout on the residual branches", maximum=1)
    attention_dropout: float = flag(0.1, "dropout on attention weights", maximum=1)
    init_method_std: float = flag(0.02, "std of the initial weights; output projections / sqrt(2 layers)")
    window_size: tuple[int, int] | None = flag(
        None, "sliding window LEFT,RIGHT in tokens, e.g. 4096,0; -1 = no bound", parse="window", minimum=-1
    )
    vocab_size: int | None = flag(None, "true vocabulary size; default: the tokenizer's", minimum=1)
    make_vocab_size_divisible_by: int = flag(128, "the vocabulary is padded to a multiple of this", minimum=1)
    padded_vocab_size: int | None = flag(None, "padded vocabulary, instead of the multiple", minimum=1)
    attention_backend: str = flag(
        "auto", "attention kernels", choices=("flash", "fused", "unfused", "local", "auto")
    )
    cross_entropy_loss_fusion: bool = flag(False, "compute the loss without keeping all logits in fp32")


@dataclass(frozen=True)
class ParallelConfig:
    """How the model and the batch are spread over processes."""

    world_size: int | None = flag(None, "ours: processes to plan for, with --check and --dry-run", minimum=1)
    tensor_model_parallel_size: int = flag(
        1, "tensor parallel degree", aliases=("--model-parallel-size",), minimum=1
    )
    pipeline_model_parallel_size: int = flag(1, "pipeline stages' ranks", minimum=1)
    context_parallel_size: int = flag(1, "ranks that share one sequence", minimum=1)
    cp_comm_type: Words = flag(
        ("p2p",),
        "how context ranks exchange keys and values",
        nargs="+",
        choices=("p2p", "all_gather", "a2a"),
    )
    sequence_parallel: bool = flag(False, "shard norms and dropout over the tensor ranks by sequence")
    pipeline_schedule: str | None = flag(
        None,
        "ours: default 1f1b, with several chunks a rank interleaved-1f1b",
        choices=("gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv", "dualpipev"),
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(None, "layers of one model chunk", minimum=1)
    num_virtual_stages_per_pipeline_rank: int | None = flag(None, "model chunks a rank", minimum=1)
    decoder_first_pipeline_num_layers: int | None = flag(None, "layers on the first pipeline rank", minimum=1)
    decoder_last_pipeline_num_layers: int | None = flag(None, "layers on the last pipeline rank", minimum=1)
    account_for_embedding_in_pipeline_split: bool = flag(False, "the embedding counts as one layer")
    account_for_loss_in_pipeline_split: bool = flag(False, "head and loss count as one layer")
    pipeline_model_parallel_layout: str | None = flag(None, "stages spelled out, e.g. 'Et*3|t*4|t*4|t*3L'")
    microbatch_group_size_per_virtual_pipeline_stage: int | None = flag(
        None, "microbatches a chunk runs before the next one; default the pipeline size", minimum=1
    )
    max_microbatches_per_step: int | None = flag(
        None, "ours: bound on microbatches (receive buffers) of one pipeline pass", minimum=1
    )
    num_distributed_optimizer_instances: int = flag(1, "replicas of the sharded model (HSDP)", minimum=1)
    data_parallel_sharding_strategy: str = flag(
        "optim_grads_params",
        "what data parallel ranks shard",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
    )
    reshard_after_forward: str = flag(
        "always",
        "ours: free gathered weights after the forward pass",
        choices=("always", "never", "keep-last"),
    )
    reshard_keep_last_blocks: int = flag(1, "ours: blocks that keep them, with keep-last", minimum=1)
    fsdp_cpu_offload: bool = flag(False, "ours: shards and optimizer state live in CPU memory")
    fsdp_prefetch_depth: int = flag(1, "ours: blocks gathered ahead", minimum=0)
    compile: bool = flag(False, "ours: torch.compile each block")
    recompute_granularity: str | None = flag(
        None, "what is recomputed in backward", choices=("full", "selective")
    )
    recompute_method: str | None = flag(None, "which layers, with full", choices=("uniform", "block"))
    recompute_num_layers: int | None = flag(
        None, "uniform: layers a unit; block: recomputed layers a chunk", minimum=1
    )
    recompute_activations: bool = flag(False, "same as --recompute-granularity selective")
    recompute_modules: Words = flag(
        ("core_attn",), "what selective recomputes", nargs="+", choices=("core_attn", "layernorm", "mlp")
    )
    distributed_timeout_minutes: int = flag(10, "a collective older than this fails the run", minimum=1)
    cpu: bool = flag(False, "ours: run on CPU with gloo even where a GPU is there")
    use_cpu_initialization: bool = flag(False, "draw initial weights on the CPU")
    init_model_with_meta_device: bool = flag(False, "build on the meta device (always so here)")

    @property
    def model_parallel_size(self) -> int:
        """Ranks that together hold one copy of the model's work on one microbatch: tp * cp * pp."""
        return (
            self.tensor_model_parallel_size * self.context_parallel_size * self.pipeline_model_parallel_size
        )

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different samples (context parallel ranks see the same ones)."""
        return self.world_size // self.model_parallel_size

    @property
    def num_stages(self) -> int:
        """Positions in the whole pipeline: pp * chunks a rank."""
        return self.pipeline_model_parallel_size * self.num_virtual_stages_per_pipeline_rank


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats and loss scaling."""

    bf16: bool = flag(False, "bf16 compute, fp32 main weights and gradients")
    fp16: bool = flag(False, "fp16 compute with loss scaling, fp32 main weights")
    loss_scale: float | None = flag(None, "fixed loss scale; default: dynamic", above=0)
    initial_loss_scale: float = flag(float(2**32), "dynamic scale at start", above=0)
    min_loss_scale: float = flag(1.0, "dynamic scale never below", above=0)
    loss_scale_window: float = flag(1000.0, "good steps before the scale doubles", minimum=1)
    hysteresis: int = flag(2, "bad steps before the scale halves", minimum=1)
    grad_reduce_in_bf16: bool = flag(False, "reduce gradients in bf16 instead of fp32")


@dataclass(frozen=True)
class DataConfig:
    """Data and tokenizer."""

    seq_length: int | None = flag(
        None, "tokens of a training sample", aliases=("--encoder-seq-length",), minimum=1
    )
    data_path: Words | None = flag(None, "PREFIX ..., or WEIGHT PREFIX ...", nargs="*")
    train_data_path: Words | None = flag(None, "as --data-path, for training only", nargs="*")
    valid_data_path: Words | None = flag(None, "as --data-path, for validation only", nargs="*")
    test_data_path: Words | None = flag(None, "as --data-path, for the test only", nargs="*")
    split: str | None = flag(None, "weights of train,valid,test; with --data-path default 969,30,1")
    data_args_path: str | None = flag(None, "file with the words of --data-path")
    per_split_data_args_path: str | None = flag(None, "JSON file {train: [...], valid: [...], test: [...]}")
    data_cache_path: str | None = flag(None, "folder for index arrays")
    per_dataset_sequences_path: str | None = flag(None, "JSON file {prefix: [sequences, documents]}")
    mock_data: bool = flag(False, "synthetic samples instead of files")
    num_workers: int = flag(2, "loader workers a rank", minimum=0)
    dataloader_type: str | None = flag(None, "order of samples; default single", choices=("single", "cyclic"))
    dataloader_fast_cache_load: bool = flag(False, "trust cached index arrays, skip the scan")
    dataloader_defer_npy_index_mmap: bool = flag(False, "map cached index arrays on first use")
    no_mmap_bin_files: bool = flag(False, "read .bin files instead of mapping them")
    reset_position_ids: bool = flag(False, "positions restart after each end of document")
    reset_attention_mask: bool = flag(False, "attention stops at each end of document")
    eod_mask_loss: bool = flag(False, "no loss where the input is end of document")
    allow_data_change: bool = flag(False, "ours: a resumed run may change data, seed or sequence length")
    tokenizer_type: str | None = flag(
        None,
        "kind of tokenizer",
        choices=(
            "GPT2BPETokenizer",
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "HuggingFaceTokenizer",
            "Llama2Tokenizer",
            "TikTokenizer",
            "NullTokenizer",
        ),
    )
    tokenizer_model: str | None = flag(None, "file or folder of the tokenizer")
    vocab_file: str | None = flag(None, "GPT-2 vocab.json")
    merge_file: str | None = flag(None, "GPT-2 merges.txt")
    tiktoken_pattern: str | None = flag(None, "pattern of TikTokenizer", choices=("v1", "v2"))
    tiktoken_num_special_tokens: int = flag(1000, "special tokens of TikTokenizer", minimum=0)
    tokenizer_metadata: str | None = flag(None, "", no_effect="the tokenizer files say all that is needed")


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
    exit_interval: int | None = flag(None, "stop, saved, when the step is a multiple of this", minimum=1)
    exit_duration_in_mins: int | None = flag(None, "stop, saved, after this many minutes", minimum=0)
    exit_signal_handler: bool = flag(False, "on SIGTERM finish the step, save, stop")
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
    check_for_spiky_loss: bool = flag(False, "report losses far above the running mean")
    check_for_large_grads: bool = flag(False, "report gradient norms far above the running mean")
    check_weight_hash_across_dp_replicas_interval: int | None = flag(
        None, "steps between comparisons of replicated weights", minimum=1
    )
    empty_unused_memory_level: int = flag(0, "1: empty the CUDA cache each step, 2: more often", maximum=2)
    test_mode: bool = flag(False, "run the checks of continuous integration")


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer, learning rate and weight decay."""

    optimizer: str = flag("adam", "update rule", choices=("adam", "sgd", "muon"))
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
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False, "from the checkpoint, not the flags", spelling="--use-checkpoint-opt_param-scheduler"
    )


@dataclass(frozen=True)
class EvaluationConfig:
    """Validation and test."""

    eval_interval: int | None = flag(None, "steps between validations", minimum=1)
    eval_iters: int = flag(100, "batches of one validation; 0 = off", minimum=0)
    eval_global_batch_size: int | None = flag(None, "samples of one; default --global-batch-size", minimum=1)
    full_validation: bool = flag(False, "the whole validation set each time")


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving, loading, resuming."""

    save: str | None = flag(None, "folder to save in")
    load: str | None = flag(None, "folder to load from")
    save_interval: int | None = flag(None, "steps between saves", minimum=1)
    save_retain_interval: int | None = flag(None, "keep only multiples of this and the newest", minimum=1)
    keep_last: int | None = flag(None, "ours: keep only the newest N checkpoints", minimum=1)
    async_save: bool = flag(False, "write in the background")
    ckpt_step: int | None = flag(None, "load this step, not the newest", minimum=0)
    finetune: bool = flag(False, "load weights only, start at step 0")
    no_load_optim: bool = flag(False, "do not load the optimizer's state")
    no_load_rng: bool = flag(False, "do not load random states")
    no_save_optim: bool = flag(False, "do not save the optimizer's state")
    no_save_rng: bool = flag(False, "do not save random states")
    use_checkpoint_args: bool = flag(False, "the model's flags come from the checkpoint")
    exit_on_missing_checkpoint: bool = flag(False, "stop when --load holds no checkpoint")
    pretrained_checkpoint: str | None = flag(None, "weights to start from when --load holds none")
    ckpt_convert_format: str | None = flag(None, "load, save again, stop", choices=("torch", "torch_dist"))
    ckpt_convert_save: str | None = flag(None, "folder of the converted checkpoint")
    verify_integrity: bool = flag(False, "hash files on load and save")
    exit_on_save_failure: bool = flag(False, "ours: a failed save stops the run")


@dataclass(frozen=True)
class LoggingConfig:
    """What a run tells, and where."""

    log_interval: int = flag(100, "steps between log lines", minimum=1)
    log_throughput: bool = flag(False, "TFLOP/s per GPU in the line")
    log_params_norm: bool = flag(False, "norm of the weights")
    log_num_zeros_in_grad: bool = flag(False, "zeros in the gradient")
    log_progress: bool = flag(False, "append to SAVE/progress.txt")
    log_memory_to_tensorboard: bool = flag(False, "memory to the trackers")
    log_timers_to_tensorboard: bool = flag(False, "timers to the trackers")
    log_validation_ppl_to_tensorboard: bool = flag(False, "perplexity to the trackers")
    logging_level: int | None = flag(None, "level of Python's logging, e.g. 20", minimum=0)
    metrics_file: str | None = flag(None, "ours: metrics as JSON lines; default SAVE/metrics.jsonl")
    tensorboard_dir: str | None = flag(None, "folder for TensorBoard")
    tensorboard_log_interval: int = flag(1, "steps between TensorBoard points", minimum=1)
    wandb_project: str | None = flag(None, "Weights & Biases project; turns it on")
    wandb_exp_name: str | None = flag(None, "name of the run there")
    wandb_entity: str | None = flag(None, "team or user there")
    wandb_save_dir: str | None = flag(None, "its local folder")
    timing_log_level: int = flag(0, "0: step only, 1 and 2: more timers", maximum=2)
    timing_log_option: str = flag("minmax", "timers over ranks", choices=("max", "minmax", "all"))
    profile: bool = flag(False, "trace a window of steps with torch's profiler")
    profile_step_start: int = flag(10, "first traced step", minimum=0)
    profile_step_end: int = flag(12, "step after the last traced one", minimum=0)
    profile_ranks: Numbers = flag((0,), "ranks that trace", nargs="+", minimum=0)


@dataclass(frozen=True)
class CommandConfig:
    """What to do instead of training (all ours)."""

    check: bool = flag(False, "ours: print the resolved run and stop; no process group")
    dry_run: bool = flag(False, "ours: rehearse a step as one rank without devices, and stop")
    rank: int = flag(0, "ours: the rank that --dry-run rehearses", minimum=0)
    all_stages: bool = flag(False, "ours: --dry-run for one rank of each pipeline stage")
    timeline: bool = flag(False, "ours: --check prints the pipeline's timetable")


@dataclass(frozen=True)
class Config:
    """The whole run. `given` names the fields set on the command line, `notes` what rank 0 tells at start."""

    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    command: CommandConfig = CommandConfig()
    given: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """{concern: {field: value}} in plain JSON types (tuples become lists)."""
        return {name: _plain(asdict(getattr(self, name))) for name in CONCERNS}

    @classmethod
    def from_dict(cls, stored: dict[str, dict[str, Any]]) -> "Config":
        """The reverse of to_dict; absent keys take their default, unknown ones raise ConfigError."""
        unknown = [name for name in stored if name not in CONCERNS]
        parts = {}
        for name, concern in CONCERNS.items():
            values = stored.get(name, {})
            known = {f.name for f in fields(concern)}
            unknown += [f"{name}.{key}" for key in values if key not in known]
            parts[name] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        if unknown:
            raise ConfigError(
                f"the stored configuration has keys this version does not know: {', '.join(unknown)}"
            )
        return cls(**{name: CONCERNS[name](**values) for name, values in parts.items()})


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


CONCERNS: dict[str, type] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "precision": PrecisionConfig,
    "data": DataConfig,
    "training": TrainingConfig,
    "optimizer": OptimizerConfig,
    "evaluation": EvaluationConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
    "command": CommandConfig,
}
