"""How many ranks lie along each axis of the mesh, from the flags. Imports no torch."""

from megatron_lite.config import Config

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def mesh_sizes(config: Config) -> dict[str, int]:
    """Axis -> size, outermost first. no_shard replicates parameters on every data-parallel rank."""
    parallel = config.parallel
    replicas = parallel.num_distributed_optimizer_instances
    if parallel.data_parallel_sharding_strategy == "no_shard":
        replicas = parallel.data_parallel_size
    return {
        "pp": parallel.pipeline_model_parallel_size,
        "dp_replicate": replicas,
        "dp_shard": parallel.data_parallel_size // replicas,
        "cp": parallel.context_parallel_size,
        "tp": parallel.tensor_model_parallel_size,
    }


def uneven_cut(config: Config, tensor: int, context: int, sequence_parallel: bool) -> str | None:
    """Why a model cannot be cut over so many tensor and context ranks, as one sentence; None when it can.

    Each context rank takes one chunk from the front and one from the back, so that causal work is even.
    """
    model, length = config.model, config.data.seq_length
    for flag, number in (
        ("--num-attention-heads", model.num_attention_heads),
        ("--num-query-groups", model.num_query_groups),
        ("--ffn-hidden-size", model.ffn_hidden_size),
        ("--padded-vocab-size", model.padded_vocab_size or 0),
    ):
        if number % tensor:
            return f"{flag} {number} does not divide by --tensor-model-parallel-size {tensor}"
    if context > 1 and length % (2 * context):
        return f"--seq-length {length} does not divide by twice --context-parallel-size {context} = {2 * context}"
    if sequence_parallel and (length // context) % tensor:
        return (
            f"--sequence-parallel: --seq-length {length} / --context-parallel-size {context} does not divide by "
            f"--tensor-model-parallel-size {tensor}"
        )
    return None


def is_unsharded(config: Config) -> bool:
    """Whether the parameters stay plain tensors: no rank to share them with, and no other dtype to compute in.

    fully_shard over one rank would copy every weight twice and every gradient three times a step. With tensor ranks it
    also sums the partial gradients of replicated weights, so there it stays.
    """
    sizes, precision = mesh_sizes(config), config.precision
    alone = all(size == 1 for axis, size in sizes.items() if axis != "pp")
    return alone and not (precision.bf16 or precision.fp16 or config.parallel.fsdp_cpu_offload)
