"""The flags of the layout: how model and batch are spread over processes."""

from dataclasses import dataclass

from megatron_lite.config.declare import Words, flag


@dataclass(frozen=True)
class ParallelConfig:
    """How the model and the batch are spread over processes."""

    world_size: int | None = flag(None, "ours: processes to plan for, with --check and --dry-run", minimum=1)
    tensor_model_parallel_size: int = flag(
        1,
        "ranks that share each layer's matrices (tensor parallel)",
        aliases=("--model-parallel-size",),
        minimum=1,
    )
    pipeline_model_parallel_size: int = flag(
        1, "ranks that share the layers, one after the other (pipeline parallel)", minimum=1
    )
    context_parallel_size: int = flag(1, "ranks that share one sequence", minimum=1)
    cp_comm_type: Words = flag(
        ("p2p",),
        "how context ranks exchange keys and values",
        nargs="+",
        choices=("p2p", "all_gather", "a2a", "a2a+p2p"),
    )
    expert_model_parallel_size: int = flag(1, "ranks that share the experts of a layer", minimum=1)
    expert_tensor_parallel_size: int | None = flag(
        None, "ranks that share each expert; Megatron's default is the tensor parallel degree", minimum=1
    )
    sequence_parallel: bool = flag(False, "shard norms and dropout over the tensor ranks by sequence")
    pipeline_schedule: str | None = flag(
        None,
        "ours: default 1f1b, with several chunks a rank interleaved-1f1b",
        choices=("gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv", "dualpipev"),
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(None, "layers of one model chunk", minimum=1)
    num_virtual_stages_per_pipeline_rank: int | None = flag(None, "model chunks per pipeline rank", minimum=1)
    decoder_first_pipeline_num_layers: int | None = flag(None, "layers on the first pipeline rank", minimum=1)
    decoder_last_pipeline_num_layers: int | None = flag(None, "layers on the last pipeline rank", minimum=1)
    account_for_embedding_in_pipeline_split: bool = flag(False, "the embedding counts as one layer")
    account_for_loss_in_pipeline_split: bool = flag(False, "head and loss count as one layer")
    pipeline_model_parallel_layout: str | None = flag(None, "stages spelled out, e.g. 'Et*3|t*4|t*4|t*3L'")
    microbatch_group_size_per_virtual_pipeline_stage: int | None = flag(
        None, "microbatches a chunk runs before the next one; default the pipeline size", minimum=1
    )
    max_microbatches_per_step: int | None = flag(None, "ours: most microbatches a pipeline pass", minimum=1)
    num_distributed_optimizer_instances: int = flag(1, "replicas of the sharded model (HSDP)", minimum=1)
    data_parallel_sharding_strategy: str = flag(
        "optim_grads_params",
        "what data parallel ranks shard",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
    )
    reshard_after_forward: str = flag(
        "auto",
        "ours: reshard a layer's weights after its forward; auto: always, but never under a pipeline where a rank's "
        "layers are small (docs/parallelism.md)",
        choices=("auto", "always", "never", "keep-last"),
    )
    reduce_gradients: str = flag(
        "auto",
        "ours: reduce-scatter gradients with each microbatch, which holds one layer's whole, or once a step, which "
        "holds all of a rank's and sends less",
        choices=("auto", "each-microbatch", "last-microbatch"),
    )
    reshard_keep_last_blocks: int = flag(1, "ours: a stage's last layers that stay unsharded", minimum=1)
    fsdp_cpu_offload: bool = flag(False, "ours: shards and optimizer state live in CPU memory")
    fsdp_prefetch_depth: int = flag(1, "ours: layers all-gathered ahead of use", minimum=0)
    compile: bool = flag(False, "ours: torch.compile each layer")
    recompute_granularity: str | None = flag(None, "what backward recomputes", choices=("full", "selective"))
    recompute_method: str | None = flag(None, "which layers, with full", choices=("uniform", "block"))
    recompute_num_layers: int | None = flag(None, "uniform: layers a unit; block: layers a chunk", minimum=1)
    recompute_activations: bool = flag(False, "same as --recompute-granularity selective")
    recompute_modules: Words = flag(
        ("core_attn",),
        "what selective recomputes; moe: a layer's experts and router, also by the names moe_act and shared_experts",
        nargs="+",
        choices=("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"),
    )
    distributed_timeout_minutes: int = flag(10, "minutes after which a collective fails the run", minimum=1)
    device: str = flag(
        "auto",
        "ours: auto takes CUDA where torch or the machine has it, and refuses to fall back to the CPU",
        choices=("auto", "cuda", "cpu"),
    )
    cpu: bool = flag(False, "ours: the same as --device cpu")
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
    def recomputed_modules(self) -> frozenset[str]:
        """--recompute-modules where recomputation is selective; parts of a mixture are recomputed with all of it."""
        if self.recompute_granularity != "selective":
            return frozenset()
        parts = {"moe_act": "moe", "shared_experts": "moe"}
        return frozenset(parts.get(name, name) for name in self.recompute_modules)

    @property
    def num_stages(self) -> int:
        """Positions in the whole pipeline: pp * chunks a rank."""
        return self.pipeline_model_parallel_size * self.num_virtual_stages_per_pipeline_rank
