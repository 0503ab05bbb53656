"""Checks of the layout: processes, tensor and context ranks, recomputation, batches, pipeline."""

from megatron_lite.arguments.refusals import refuse_more
from megatron_lite.arithmetic.batch_size import BatchSchedule, pass_size
from megatron_lite.arithmetic.partition import check_split
from megatron_lite.arithmetic.pipeline_schedule import check_microbatches, runnable_schedule
from megatron_lite.arithmetic.sharding import splits_backward, uneven_cut
from megatron_lite.config import Config, ConfigError

# Values that a schedule with the backward in two parts cannot have: why, and what to choose.
_NOT_WITH_SPLIT_BACKWARD = (
    # torch recomputes for each call of backward; a split one has a call for each weight and keeps what each made.
    ("recompute_granularity", "full", "would hold more than no recomputation does, choose selective"),
    ("compile", True, "is one graph, leave it out"),
    (
        "reduce_gradients",
        "each-microbatch",
        "saves nothing, for all weight gradients come at once: choose last-microbatch or auto",
    ),
)


def _check_world(config: Config) -> None:
    parallel = config.parallel
    world, needed = parallel.world_size, parallel.model_parallel_size
    if world % needed:
        degrees = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
        raise ConfigError(
            f"{world} processes do not divide by {' x '.join(map(config.shown, degrees))} = {needed}"
            + (" (start with torchrun, or plan with --check --world-size N)" if world == 1 else "")
        )
    replicas, data_parallel = parallel.num_distributed_optimizer_instances, parallel.data_parallel_size
    if data_parallel % replicas:
        raise ConfigError(
            f"--num-distributed-optimizer-instances {replicas} does not divide the data-parallel size {data_parallel} "
            f"({world} processes / {needed})"
        )
    if parallel.data_parallel_sharding_strategy == "no_shard" and replicas > 1:
        raise ConfigError(
            f"--num-distributed-optimizer-instances {replicas} counts copies of a sharded model, "
            "--data-parallel-sharding-strategy no_shard has a copy on every rank: leave one of them out"
        )
    if config.command.rank >= world:
        raise ConfigError(f"--rank {config.command.rank} is not one of {world} processes (0 to {world - 1})")


def _check_tensor_and_context(config: Config) -> None:
    parallel = config.parallel
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    reason = uneven_cut(config, tensor, context, parallel.sequence_parallel)
    if reason is not None:
        raise ConfigError(reason)
    heads = config.model.num_query_groups // tensor
    if "a2a" in parallel.cp_comm_type and heads % context:
        raise ConfigError(
            f"--cp-comm-type a2a gives each of --context-parallel-size {context} ranks whole heads: "
            f"{config.shown('num_query_groups')} / --tensor-model-parallel-size {tensor} = {heads} does not divide"
        )


def _check_recompute(config: Config) -> None:
    parallel = config.parallel
    method, granularity = parallel.recompute_method, parallel.recompute_granularity
    if granularity == "full" and method is None:
        raise ConfigError("--recompute-granularity full needs --recompute-method uniform or block")
    if granularity == "selective" and method is not None:
        raise ConfigError(f"--recompute-method {method} is for --recompute-granularity full, not selective")
    if granularity == "full":
        refuse_more(config, "recompute_num_layers", "num_layers")


def _check_split_backward(config: Config) -> None:
    for name, value, reason in _NOT_WITH_SPLIT_BACKWARD:
        if splits_backward(config) and config.value(name) == value:
            raise ConfigError(
                f"{config.shown(name)} with {config.shown('pipeline_schedule')}, which runs the backward in two "
                f"parts, {reason}; or choose 1f1b or interleaved-1f1b"
            )
    parallel = config.parallel
    if (parallel.reduce_gradients, parallel.data_parallel_sharding_strategy) == (
        "each-microbatch",
        "no_shard",
    ):
        raise ConfigError(
            "--reduce-gradients each-microbatch has no shards to reduce to under --data-parallel-sharding-strategy "
            "no_shard, wanted last-microbatch or auto"
        )


def _check_batch(config: Config) -> None:
    micro, data_parallel = config.training.micro_batch_size, config.parallel.data_parallel_size
    batches, grows = {}, config.training.rampup_batch_size
    start = "the start {} of --rampup-batch-size" if grows else "--global-batch-size {}"
    for first, size in BatchSchedule.from_config(config).steps:
        batches[f"the batch of {{}} from sample {first:,} on" if first else start] = size
    batches["--eval-global-batch-size {}"] = config.evaluation.eval_global_batch_size
    for name, size in batches.items():
        if size % (micro * data_parallel):
            raise ConfigError(
                f"{name.format(size)} does not divide by --micro-batch-size {micro} x data-parallel size "
                f"{data_parallel} = {micro * data_parallel}"
            )


def _check_pipeline(config: Config) -> None:
    parallel = config.parallel
    size, chunks = parallel.pipeline_model_parallel_size, parallel.num_virtual_stages_per_pipeline_rank
    if size == 1 and chunks > 1:
        raise ConfigError(
            f"{chunks} chunks a rank (--num-virtual-stages-per-pipeline-rank, "
            f"--num-layers-per-virtual-pipeline-stage or {config.shown('pipeline_schedule')}) need "
            f"--pipeline-model-parallel-size of at least 2, it is 1"
        )
    check_split(config)
    if chunks > 1:
        refuse_more(
            config, "pipeline_model_parallel_size", "microbatch_group_size_per_virtual_pipeline_stage"
        )
    batches, evaluation = BatchSchedule.from_config(config), config.evaluation
    sizes = {batch: "" for _, batch in batches.steps}
    if evaluation.eval_iters or evaluation.full_validation:
        sizes.setdefault(evaluation.eval_global_batch_size, f"{config.shown('eval_global_batch_size')}: ")
    for batch_size, where in sorted(sizes.items()):
        microbatches = batch_size // batches.samples_per_microbatch
        microbatches = pass_size(microbatches, parallel.max_microbatches_per_step)
        name = runnable_schedule(parallel.pipeline_schedule, size, microbatches)
        reason = check_microbatches(name, size, chunks, microbatches)
        if reason is not None:
            raise ConfigError(where + reason)


CHECKS = (
    _check_world,
    _check_tensor_and_context,
    _check_recompute,
    _check_batch,
    _check_split_backward,
    _check_pipeline,
)
