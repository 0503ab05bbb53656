"""What FSDP frees and reduces when: the defaults weigh memory against messages. Imports no torch.

Under a pipeline a rank runs many microbatches forward and backward in turn. Weights that are resharded after each are
all-gathered twice a microbatch; gradients that are reduced with each are sent once a microbatch. Unsharded instead,
both are sent once a step, and cost a rank all of its stages' weights and gradients.
"""

from collections import Counter

from megatron_lite.arithmetic.costs import (
    block_matrix_parameters,
    expert_matrix_parameters,
    mlp_matrix_parameters,
)
from megatron_lite.arithmetic.mesh_sizes import mesh_sizes
from megatron_lite.arithmetic.pipeline_schedule import SPLIT_BACKWARD_SCHEDULES
from megatron_lite.config import Config

# A rank whose layers' weights and gradients lie whole in so many bytes keeps them so under a pipeline: a third of an
# 80 GB GPU. Beyond it they are sharded, as --data-parallel-sharding-strategy says.
WHOLE_BYTES = 24 * 2**30


def reshards(config: Config) -> bool:
    """Whether weights are resharded after a layer's forward and backward (ZeRO-3)."""
    parallel = config.parallel
    if parallel.data_parallel_sharding_strategy != "optim_grads_params" or splits_backward(config):
        return False
    if parallel.reshard_after_forward == "auto":
        return parallel.num_stages == 1 or not keeps_whole(config)
    return parallel.reshard_after_forward != "never"


def reduces_each_microbatch(config: Config) -> bool:
    """Whether gradients are reduce-scattered behind each microbatch's backward; else added up whole, reduced once."""
    parallel = config.parallel
    strategy = parallel.data_parallel_sharding_strategy
    if parallel.reduce_gradients != "auto":
        return parallel.reduce_gradients == "each-microbatch"
    if strategy in ("optim", "no_shard") or splits_backward(config):
        return False
    if parallel.num_stages > 1:
        return not keeps_whole(config)
    return strategy == "optim_grads" or reshards(config)


def splits_backward(config: Config) -> bool:
    """Whether the weights' gradients come in an action of their own.

    torch looks a stage's weights up when it computes the input's gradient, and would silently lose the gradients of
    those that are not gathered then; and all of a stage's gradients are there at once, so nothing is saved by reducing
    them at once.
    """
    return config.parallel.pipeline_schedule in SPLIT_BACKWARD_SCHEDULES


def keeps_whole(config: Config) -> bool:
    """Whether a rank's layers, weights in the compute format and gradients in the reduction's, fit WHOLE_BYTES."""
    model, parallel, precision = config.model, config.parallel, config.precision
    half = precision.bf16 or precision.fp16
    width = (2 if half else 4) + (2 if precision.grad_reduce_in_bf16 else 4)
    layers = -(-model.num_layers // parallel.pipeline_model_parallel_size)
    kinds = Counter(map(model.has_experts, range(model.num_layers)))
    mean = (
        sum(count * matrices_on_rank(config, mixture) for mixture, count in kinds.items()) / model.num_layers
    )
    return width * layers * mean <= WHOLE_BYTES


def matrices_on_rank(config: Config, mixture: bool) -> float:
    """Weights of a layer's matrix products on a rank before FSDP shards them; tensor ranks do not split a mixture."""
    model, parallel, whole = config.model, config.parallel, block_matrix_parameters(config.model, mixture)
    if not mixture:
        return whole / parallel.tensor_model_parallel_size
    inside, experts = (
        mlp_matrix_parameters(model, mixture),
        model.num_experts * expert_matrix_parameters(model),
    )
    outside = (whole - inside) / parallel.tensor_model_parallel_size
    return outside + inside - experts + experts / parallel.expert_model_parallel_size


def uneven_cut(config: Config, tensor: int, context: int, sequence_parallel: bool) -> str | None:
    """Why a model cannot be cut over so many tensor and context ranks, as one sentence; None when it can.

    Each context rank takes one chunk from the front and one from the back, so that causal work is even.
    """
    model, length = config.model, config.data.seq_length
    dense = not all(map(model.has_experts, range(model.num_layers)))
    for flag, number in (
        ("--num-attention-heads", model.num_attention_heads),
        ("--num-query-groups", model.num_query_groups),
        ("--ffn-hidden-size", model.ffn_hidden_size * dense),
        ("--padded-vocab-size", model.padded_vocab_size or 0),
    ):
        if number % tensor:
            return f"{flag} {number} does not divide by --tensor-model-parallel-size {tensor}"
    if tensor > 1 and model.qk_layernorm_across_heads:
        return (
            f"--qk-layernorm-across-heads with --tensor-model-parallel-size {tensor}, wanted 1: a tensor rank has only "
            "its own heads"
        )
    if context > 1 and length % (2 * context):
        return f"--seq-length {length} does not divide by twice --context-parallel-size {context} = {2 * context}"
    if sequence_parallel and (length // context) % tensor:
        return (
            f"--sequence-parallel: --seq-length {length} / --context-parallel-size {context} does not divide by "
            f"--tensor-model-parallel-size {tensor}"
        )
    return None


def wraps_in_fsdp(config: Config) -> bool:
    """Whether FSDP holds the parameters: there is a rank to share them with, or another dtype to compute in.

    fully_shard over one rank would copy every weight twice and every gradient three times a step. With tensor ranks it
    also sums the partial gradients of replicated weights, so there it stays.
    """
    sizes, precision = mesh_sizes(config.parallel), config.precision
    shared = any(size > 1 for axis, size in sizes.items() if axis != "pp")
    return shared or precision.bf16 or precision.fp16 or config.parallel.fsdp_cpu_offload
