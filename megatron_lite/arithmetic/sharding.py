"""What FSDP frees and reduces when: the defaults weigh memory against messages. Imports no torch.

Under a pipeline a rank runs many microbatches forward and backward in turn. Weights that are resharded after each are
all-gathered twice a microbatch; gradients that are reduced with each are sent once a microbatch. Unsharded instead,
both are sent once a step, and cost a rank all of its stages' weights and gradients.
"""

from megatron_lite.arithmetic.costs import block_matrix_parameters
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
    parameters = layers * block_matrix_parameters(model) / parallel.tensor_model_parallel_size
    return width * parameters <= WHOLE_BYTES
