"""Seconds of a training step, from the flags and a cluster: an ESTIMATE, with its assumptions in the docstrings.

Imports no torch. Symbols as in memory.py; L layers. What the engine overlaps is hidden behind computation here (FSDP's
gathers and reductions), what it does not is added (tensor and context parallelism's collectives).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lite.arithmetic.costs import (
    ComponentCost,
    block_matrix_parameters,
    expert_matrix_parameters,
    mlp_matrix_parameters,
    model_costs,
)
from megatron_lite.arithmetic.flops import flops_per_step
from megatron_lite.arithmetic.mesh_sizes import mesh_sizes
from megatron_lite.arithmetic.partition import StagePlan, plan_from_config, stages_of_rank
from megatron_lite.arithmetic.pipeline_schedule import (
    StageTimes,
    Timeline,
    build_schedule,
    placement_of,
    runnable_schedule,
    simulate,
)
from megatron_lite.arithmetic.sharding import reshards
from megatron_lite.config import Config
from megatron_lite.planning.activations import (
    activation_width,
    attention_kernel,
    block_activations,
    expert_rows,
    hidden_bytes,
    sequence_ranks,
    tokens_per_microbatch,
)
from megatron_lite.planning.devices import Cluster
from megatron_lite.planning.memory import (
    Held,
    adds_up_whole,
    microbatches_of,
    reduced_width,
    shards,
    stage_parameters_on_rank,
    units_of,
)

# Assumed: core attention's kernels reach this share of what large matrix products reach.
ATTENTION_SHARE = 0.6
# Assumed: the kernel that takes a dense mask reaches half of that.
MASKED_SHARE = 0.3
# Element-wise operators read and write each kept activation about so often, forward and backward.
ELEMENTWISE_PASSES = 2
HOST_BANDWIDTH = 25e9  # bytes/s of a GPU to host memory and back, PCIe 4 x16 in practice


@dataclass(frozen=True)
class StepTime:
    """One step's seconds, and what they are made of.

    Args:
        seconds: the whole step.
        busy: of the slowest pipeline rank, without idle time.
        bubble: the idle share of all ranks' time, from the simulator.
        exposed: seconds of communication that nothing hides, on the slowest rank (tensor, context, FSDP).
        mfu: model FLOPs / (seconds x GPUs x peak).
    """

    seconds: float
    busy: float
    bubble: float
    exposed: float
    optimizer: float
    mfu: float
    tflops: float


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one microbatch on one stage, communication that is exposed included and also by itself."""

    forward: float
    backward_input: float
    backward_weight: float
    exposed: float


def strides(config: Config) -> dict[str, int]:
    """Axis -> distance in ranks between neighbours on it; tp is the innermost, then cp, dp and pp."""
    stride, out = 1, {}
    for axis, size in reversed(list(mesh_sizes(config.parallel).items())):
        out[axis] = stride
        stride *= size
    return out


@dataclass(frozen=True)
class BlockSeconds:
    """Seconds of one block's forward on one microbatch: matrix products, of these the MLP's or the experts', core
    attention, element-wise work, and the collectives that nothing hides, of these the exchange of tokens."""

    matrices: float
    mlp: float
    attention: float
    other: float
    messages: float
    exchange: float

    @property
    def computed(self) -> float:
        """Without the collectives."""
        return self.matrices + self.attention + self.other


def block_seconds(config: Config, cluster: Cluster, mixture: bool = False) -> BlockSeconds:
    """What one block's forward on one microbatch takes.

    matrix products  2 T W / t / (efficiency x peak), W the weights of the block's matrices; of a mixture's experts
                     2 R W / (efficiency x peak), R the rows that they compute and W the weights of one
    core attention   2 T S q / t / (efficiency x 0.6 x peak): causal, the masked half is not counted;
                     where a dense mask is needed 0.3 instead, and with context parallelism 1 + 1/(2 cp) of the work
    element-wise     2 x kept activations / memory bandwidth
    """
    model, device, cp = config.model, cluster.device, config.parallel.context_parallel_size
    tokens = tokens_per_microbatch(config)
    work = 2 * tokens / config.parallel.tensor_model_parallel_size
    speed = device.efficiency * device.flops
    share, seen = ATTENTION_SHARE, 1.0
    if attention_kernel(config) == "masked":
        share, seen = MASKED_SHARE, (2 if cp == 1 else 1 + 1 / (2 * cp))
    queries = config.data.seq_length * model.num_attention_heads * model.kv_channels
    mlp = work * mlp_matrix_parameters(model, mixture)
    if mixture:
        one = expert_matrix_parameters(model)
        shared = mlp_matrix_parameters(model, mixture) - model.num_experts * one
        mlp = 2 * (tokens / sequence_ranks(config) * shared + expert_rows(config)[1] * one)
    attention_weights = block_matrix_parameters(model) - mlp_matrix_parameters(model)
    messages, exchange = block_messages(config, cluster, mixture)
    return BlockSeconds(
        matrices=(work * attention_weights + mlp) / speed,
        mlp=mlp / speed,
        attention=work * queries * seen / (speed * share),
        other=ELEMENTWISE_PASSES * block_activations(config, None, mixture) / device.memory_bandwidth,
        messages=messages + exchange,
        exchange=exchange,
    )


def block_messages(config: Config, cluster: Cluster, mixture: bool) -> tuple[float, float]:
    """Seconds of the collectives in one block's forward, and of these of the exchange of tokens between expert ranks.

    All are exposed, and backward has as many. Tensor ranks: two all-reduces of a T H; with sequence parallelism two
    all-gathers and two reduce-scatters of the same size, half of it where a mixture takes its own positions. Context
    ranks: the all-gather of keys and values, 2 a B S kv / t; backward scatters as much. Expert ranks: 2 a R H, each
    row of K T/s there and back, of the fullest rank --imbalance times as many.
    """
    model, parallel, apart = config.model, config.parallel, strides(config)
    a, t, cp = activation_width(config), parallel.tensor_model_parallel_size, parallel.context_parallel_size
    tokens = tokens_per_microbatch(config)
    keys_and_values = 2 * a * tokens * cp * model.num_query_groups * model.kv_channels / t
    tensor = (1 if mixture else 2) * cluster.reduce_seconds(a * tokens * model.hidden_size, t, apart["tp"])
    exchange = 0.0
    if mixture:
        rows, size = a * expert_rows(config)[1] * model.hidden_size, parallel.expert_model_parallel_size
        exchange = 2 * cluster.exchange_seconds(rows, size, apart["tp"])
    return tensor + cluster.gather_seconds(keys_and_values, cp, apart["cp"]), exchange


def shard_gather_seconds(config: Config, cluster: Cluster, units: Sequence[Held], width: float) -> float:
    """All-gathers or reduce-scatters of units whose numbers have `width` bytes, each over the ranks that share it.

    Those are the n shards (cp inside dp_shard), of a mixture the tensor ranks too, of its experts those that have the
    same ones, --expert-model-parallel-size ranks apart.
    """
    ranks = shards(config) * config.parallel.tensor_model_parallel_size
    return sum(
        cluster.gather_seconds(width * unit.whole, unit.ranks, max(1, ranks // unit.ranks)) for unit in units
    )


def stage_seconds(config: Config, cluster: Cluster, plan: StagePlan) -> StageSeconds:
    """One microbatch on one stage.

    Forward: the blocks, and the head's 2 T H V / t. Backward: the same once for the input's gradient and once for the
    weights' (core attention twice in the first), element-wise work again in the first. Recomputation repeats core
    attention and the MLP (selective, as --recompute-modules says) or whole blocks with their collectives (full).
    The gathering of a block's weights (where they are freed after forward: for each microbatch, forward and backward)
    hides behind the block before it: max(0, gathering - block) is exposed.
    """
    parallel, model, device = config.parallel, config.model, cluster.device
    costs, head = model_costs(model, config.data.seq_length).layers, 0.0
    if plan.has_lm_head:
        rows = model.padded_vocab_size / parallel.tensor_model_parallel_size
        head = (
            2 * tokens_per_microbatch(config) * model.hidden_size * rows / (device.efficiency * device.flops)
        )
    parts = [(head, head, head, 0.0)]
    again = plan.layers[: layers_recomputed(config, len(plan.layers))]
    for cost in {costs[number] for number in plan.layers}:
        layers = sum(costs[number] == cost for number in plan.layers)
        recomputed = sum(costs[number] == cost for number in again)
        parts.append(_layers_seconds(config, cluster, cost, layers, recomputed))
    return StageSeconds(*map(sum, zip(*parts)))


def _layers_seconds(
    config: Config, cluster: Cluster, cost: ComponentCost, layers: int, recomputed: int
) -> tuple[float, float, float, float]:
    """The fields of StageSeconds for so many layers of one cost, so many of them recomputed whole."""
    block = block_seconds(config, cluster, bool(cost.mixture))
    again, forward_wait, backward_wait = recomputed * (block.computed + block.messages), 0.0, 0.0
    modules = config.parallel.recomputed_modules
    if "core_attn" in modules:
        again += layers * block.attention
    mlp_again = layers * (("moe" if cost.mixture else "mlp") in modules)
    again += mlp_again * (block.mlp + block.exchange)
    if reshards(config) or microbatches_of(config) == (1, 1):
        gathering = shard_gather_seconds(config, cluster, units_of(config, cost), activation_width(config))
        forward_wait = layers * max(0.0, gathering - block.computed)
        backward_wait = layers * max(0.0, gathering - 2 * block.computed) if reshards(config) else 0.0
    return (
        layers * (block.computed + block.messages) + forward_wait,
        layers * (block.computed + block.attention + block.other + block.messages) + again + backward_wait,
        layers * block.matrices,
        (2 * layers + recomputed) * block.messages
        + mlp_again * block.exchange
        + forward_wait
        + backward_wait,
    )


def layers_recomputed(config: Config, layers: int) -> int:
    """Of a chunk's layers, how many run their forward twice."""
    parallel = config.parallel
    if parallel.recompute_granularity != "full":
        return 0
    return min(layers, parallel.recompute_num_layers) if parallel.recompute_method == "block" else layers


def step_edges(
    config: Config, cluster: Cluster, plans: list[StagePlan], last_backward: float
) -> tuple[float, float]:
    """(exposed communication, optimizer) seconds of one rank around the pipeline, once a step.

    The first gathering of its largest block, or of all weights where they are kept, overlaps with nothing / with the
    forwards of a microbatch; the reduce-scatter of its gradients (fp32: 4 P) hides behind the last microbatch's
    backward (where the model is one stage and gradients are sharded: each microbatch's behind its own); between
    replicas an all-reduce of the shards, 4 P / n, follows. The optimizer reads and writes 28 bytes
    a parameter; offloaded it moves gradients and weights over PCIe (8 bytes) and computes at a tenth of that speed.
    """
    local, width = stage_parameters_on_rank(config, *plans), reduced_width(config)
    mine, copies = sum(unit.shard for unit in local), mesh_sizes(config.parallel)["dp_replicate"]
    costs = model_costs(config.model, config.data.seq_length).layers
    exposed = max(
        shard_gather_seconds(config, cluster, units_of(config, cost), activation_width(config))
        for cost in set(costs)
    )
    if not reshards(config):
        gathering = shard_gather_seconds(config, cluster, local, activation_width(config))
        exposed += max(0.0, gathering - last_backward / 2)
    reduction = shard_gather_seconds(config, cluster, local, width)
    replicas = cluster.reduce_seconds(width * mine, copies, strides(config)["dp_replicate"])
    exposed += max(0.0, reduction + replicas - last_backward)
    if not adds_up_whole(config):
        passes, size = microbatches_of(config)
        exposed += (passes * size - 1) * max(0.0, reduction - last_backward)
    if config.parallel.fsdp_cpu_offload:
        return exposed, (8 + 80) * mine / HOST_BANDWIDTH
    return exposed, 28 * mine / cluster.device.memory_bandwidth


def pass_timeline(config: Config, cluster: Cluster) -> Timeline:
    """One pipeline pass, simulated with this model's seconds per stage."""
    parallel, (_, count) = config.parallel, microbatches_of(config)
    size, chunks = parallel.pipeline_model_parallel_size, parallel.num_virtual_stages_per_pipeline_rank
    name = runnable_schedule(parallel.pipeline_schedule, size, count)
    times = stage_times(config, cluster, plan_from_config(config))
    schedule = build_schedule(name, size, count, chunks)
    return simulate(schedule, times, placement_of(name), message_seconds(config, cluster))


def stage_times(config: Config, cluster: Cluster, plans: list[StagePlan]) -> StageTimes:
    """The seconds that the simulator takes."""
    stages = [stage_seconds(config, cluster, plan) for plan in plans]
    parts = ((one.forward, one.backward_input, one.backward_weight) for one in stages)
    return StageTimes(*zip(*parts, strict=True))


def message_seconds(config: Config, cluster: Cluster) -> float:
    """One hidden state, a T H / s, to the next pipeline rank."""
    if config.parallel.pipeline_model_parallel_size == 1:
        return 0.0
    return cluster.send_seconds(hidden_bytes(config), strides(config)["pp"])


def _around(config: Config, cluster: Cluster) -> list[tuple[float, float, float, float]]:
    """Of each pipeline rank: seconds that it computes in a step, exposed inside of it, exposed around it, optimizer."""
    plans, (passes, count) = plan_from_config(config), microbatches_of(config)
    out = []
    for rank in range(config.parallel.pipeline_model_parallel_size):
        mine = stages_of_rank(plans, rank)
        stages = [stage_seconds(config, cluster, plan) for plan in mine]
        backward = sum(stage.backward_input + stage.backward_weight for stage in stages)
        busy = passes * count * (backward + sum(stage.forward for stage in stages))
        exposed = passes * count * sum(stage.exposed for stage in stages)
        out.append((busy, exposed, *step_edges(config, cluster, mine, backward)))
    return out


def least_seconds(config: Config, cluster: Cluster) -> float:
    """No schedule makes the step faster than this: its slowest rank's own work (a bound that is cheap to compute)."""
    return max(busy + around + optimizer for busy, _, around, optimizer in _around(config, cluster))


def step_time(config: Config, cluster: Cluster) -> StepTime:
    """The step: passes x the simulated pass, the exposed communication around it and the optimizer."""
    ranks, timeline = _around(config, cluster), pass_timeline(config, cluster)
    busy, inside, _, _ = max(ranks)
    edges, optimizer = max(rank[2] for rank in ranks), max(rank[3] for rank in ranks)
    seconds = microbatches_of(config)[0] * timeline.seconds + edges + optimizer
    rate = flops_per_step(config, config.training.global_batch_size) / seconds / cluster.num_gpus
    return StepTime(
        seconds=seconds,
        busy=busy,
        bubble=timeline.bubble_fraction,
        exposed=inside + edges,
        optimizer=optimizer,
        mfu=rate / cluster.device.flops,
        tflops=rate / 1e12,
    )
