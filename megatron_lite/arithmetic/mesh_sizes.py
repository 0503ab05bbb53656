"""How many ranks lie along each axis of the mesh, from the flags. Imports no torch."""

from megatron_lite.config.parallel import ParallelConfig

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def mesh_sizes(parallel: ParallelConfig) -> dict[str, int]:
    """Axis -> size, outermost first. no_shard replicates parameters on every data-parallel rank."""
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
