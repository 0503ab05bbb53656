"""Bytes that each pipeline rank holds in a training step, from the flags alone. Imports no torch.

The engine as it is: FSDP2 over dp_shard x cp with fp32 shards, eager blocks without fused activations; where there are
several stages, gradients of a step's microbatches added up unsharded and reduced once. Symbols: a bytes of an
activation's element (2 with --bf16 or --fp16, else 4), T = B S / cp tokens of a microbatch on a rank, t tensor ranks,
s = t with sequence parallelism else 1, n = dp_shard * cp shards, H hidden, q and kv widths of queries and keys, F
feed-forward, V padded vocabulary.

Sources: states sharded as ZeRO (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054); activations tensor by
tensor as Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198) count them, for this model's operators.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_lite.arithmetic.batch_size import pass_size
from megatron_lite.arithmetic.costs import block_matrix_parameters, model_costs
from megatron_lite.arithmetic.mesh_sizes import is_unsharded, mesh_sizes
from megatron_lite.arithmetic.partition import StagePlan, plan_from_config, stages_of_rank
from megatron_lite.arithmetic.pipeline_schedule import runnable_schedule
from megatron_lite.arithmetic.sharding import reduces_each_microbatch, reshards, splits_backward
from megatron_lite.config import Config
from megatron_lite.config.optimizers import OPTIMIZERS
from megatron_lite.planning.activations import (
    activation_width,
    logits_bytes,
    stage_activations,
    tokens_per_microbatch,
    waiting_bytes,
    workspace_bytes,
)
from megatron_lite.planning.moments import Moment, moments_of

# torch's pipeline runtime keeps the weights of at most so many of a rank's stages gathered.
_MOST_ACTIVE_STAGES = 3


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one pipeline rank by purpose; `host` lies in the node's memory (--fsdp-cpu-offload)."""

    rank: int
    parts: dict[str, float]
    host: float = 0.0
    total: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", sum(self.parts.values()))


def shards(config: Config) -> int:
    """n: ranks that one copy of the parameters is cut over; context ranks are data-parallel ranks for parameters."""
    sizes = mesh_sizes(config)
    return sizes["dp_shard"] * sizes["cp"]


def microbatches_of(config: Config) -> tuple[int, int]:
    """(pipeline passes of a step, microbatches of a pass): equal passes of at most --max-microbatches-per-step."""
    samples = config.training.micro_batch_size * config.parallel.data_parallel_size
    count = config.training.global_batch_size // samples
    size = pass_size(count, config.parallel.max_microbatches_per_step)
    return count // size, size


def block_parameters(config: Config) -> float:
    """Parameters of one block (the largest) on a tensor rank."""
    costs = model_costs(config.model, config.data.seq_length)
    t = config.parallel.tensor_model_parallel_size
    return max(layer.on_tensor_rank(t) for layer in costs.layers)


def stage_local_parameters(config: Config, plan: StagePlan) -> float:
    """Parameters of a stage on a tensor rank, before FSDP cuts them."""
    costs, t = model_costs(config.model, config.data.seq_length), config.parallel.tensor_model_parallel_size
    count = sum(costs.layers[number].on_tensor_rank(t) for number in plan.layers)
    if plan.has_embedding:
        count += costs.embedding.on_tensor_rank(t)
    if plan.has_lm_head:
        count += costs.head.on_tensor_rank(t) + (0 if plan.has_embedding else costs.shared_parameters / t)
    return count


def optimizer_bytes(config: Config, plan: StagePlan) -> float:
    """Optimizer state of a stage on a rank, as the optimizer's row in config/optimizers.py says."""
    matrices = len(plan.layers) * block_matrix_parameters(config.model)
    matrices /= config.parallel.tensor_model_parallel_size
    row = OPTIMIZERS[config.optimizer.optimizer]
    return row.bytes_of(stage_local_parameters(config, plan), matrices) / shards(config)


def rank_memory(config: Config, ranks: Sequence[int] | None = None) -> list[RankMemory]:
    """What each pipeline rank (or each of `ranks`) holds at the worst moment of a step.

    parameters 4 P/n, optimizer state (see optimizer_bytes), unsharded gradients, receive buffers, and of the moments of
    its schedule (moments.py) the one that needs most:
      a stage's backward begins: activations of the microbatches in flight, the workspace of a block's backward, the
        gathered weights (where they are freed after forward: of a block and the largest unit only);
      it ends: gathered weights of all its blocks, one microbatch's activations less, or where the backward is split
        what the weight gradient waits for;
      the loss, on the last stage: as when a backward begins, with the head gathered and the logits' workspace; where
        blocks are reduced one by one, no gradient yet, the block before the head gathered too, and of the microbatch
        before the last unit that was reduced;
      when gradients are reduced: gathered weights, the largest unit once more in the reduction's format, gradient
        shards 4 P/n.
    The vocabulary has to be known.
    """
    plans = plan_from_config(config)
    ranks = range(config.parallel.pipeline_model_parallel_size) if ranks is None else ranks
    return [_memory_of(config, rank, stages_of_rank(plans, rank), plans) for rank in ranks]


def _memory_of(config: Config, rank: int, plans: list[StagePlan], every: list[StagePlan]) -> RankMemory:
    count = shards(config)
    local = [stage_local_parameters(config, plan) for plan in plans]
    parameters = 4 * sum(local) / count
    gathered, unsharded = _unsharded(config, plans, local)
    kept = {
        "parameters": parameters,
        "optimizer state": sum(optimizer_bytes(config, plan) for plan in plans),
        "receive buffers": _receive_buffers(config, plans, every),
    }
    candidates = [_at_reduction(config, plans, local, gathered, unsharded)]
    candidates += _moments(config, rank, plans, local, gathered, unsharded)
    parts = kept | max(candidates, key=lambda moment: sum(moment.values()))
    host = 0.0
    if config.parallel.fsdp_cpu_offload:
        host = parts.pop("parameters") + parts.pop("optimizer state") + parameters
        if "gradient shards" in parts:
            parts["gradient shards"] = 0.0
    return RankMemory(rank, parts, host)


def _at_reduction(
    config: Config, plans: list[StagePlan], local: Sequence[float], gathered: float, unsharded: float
) -> dict[str, float]:
    """What lies beside the states when the gradients of a step or microbatch are reduced; plain ones are not."""
    found = {"gathered weights": gathered, "unsharded gradients": unsharded}
    if is_unsharded(config):
        return found
    unit, whole = _largest_unit(config, plans), adds_up_whole(config)
    found["workspace"] = _reduced_width(config) * unit
    found["gradient shards"] = 4 * sum(local) / shards(config)
    if whole and (shards(config) == 1 or config.parallel.num_stages == 1):
        found["gradient shards"] = 4 * unit / shards(config)  # a unit's whole gradients go as its shards come
    if whole:  # a second pass reduces into others beside the first one's
        found["gradient shards"] += _shards_of_passes(config, local)
    elif reshards(config) and microbatches_of(config) == (1, 1):
        # All shards are there at the end only.
        found["gathered weights"] = min(gathered, _two_units(config, plans))
    return found


def _moments(
    config: Config,
    rank: int,
    plans: list[StagePlan],
    local: Sequence[float],
    gathered: float,
    unsharded: float,
) -> list[dict[str, float]]:
    """What lies beside the states at each moment of a rank's backwards, as rank_memory says.

    Where the backward is split the gradient of a block's input leaves, for the weights' gradient that comes later, what
    was kept (but for the loss) and the gradients of all linears and norms; the weights' gradient then lies in a beside
    the fp32 sum, until the stage's next backward adds it.
    """
    weights = [stage_activations(config, plan) for plan in plans]
    waits = [waiting_bytes(config, plan) for plan in plans]
    frees = reshards(config)
    at_start = min(gathered, _two_units(config, plans)) if frees else gathered
    largest, whole = _largest_unit(config, plans), adds_up_whole(config)
    at_loss = min(gathered, activation_width(config) * largest) if frees and whole else at_start
    workspace, (_, loss) = workspace_bytes(config), logits_bytes(config)
    grown = is_unsharded(config) and microbatches_of(config)[0] > 1  # gradients of the passes before
    shards_held = _shards_of_passes(config, local)
    # FSDP2 lets go of what it reduced last, the embedding's gradient, when it reduces again: in the next backward.
    left = 0.0 if whole or not shards_held else _reduced_width(config) * largest
    found = []
    for moment in moments_in_flight(config, rank, plans):
        if moment.kind == "F":
            continue
        held = sum(n * one for n, one in zip(moment.live, weights))
        held += sum(n * (wait - one) for n, wait, one in zip(moment.waiting, waits, weights))
        mine = moment.chunk
        freed = weights[mine] if moment.kind == "B" else weights[mine] - waits[mine]
        begins = {"activations": held, "unsharded gradients": unsharded, "gradient shards": shards_held}
        ends = begins | {"activations": held - freed}
        if whole and not grown:
            begins["unsharded gradients"] = _gradients(config, local, moment.unadded, moment.summed)
            unadded = [n * (chunk != mine) for chunk, n in enumerate(moment.unadded)]
            added = moment.kind == "B" or moment.unadded[mine]
            summed = [n or (chunk == mine and added) for chunk, n in enumerate(moment.summed)]
            ends["unsharded gradients"] = _gradients(config, local, unadded, summed)
        if plans[mine].has_lm_head:
            at_loss_begins = begins if whole else begins | {"unsharded gradients": 0.0}
            found.append(at_loss_begins | {"gathered weights": at_loss, "workspace": loss + left})
        found.append(begins | {"gathered weights": at_start, "workspace": workspace})
        found.append(ends | {"gathered weights": gathered, "workspace": workspace})
    return found


def _shards_of_passes(config: Config, local: Sequence[float]) -> float:
    """Bytes of gradient shards, 4 P/n, that a backward finds there: of the passes or microbatches before."""
    passes, count = microbatches_of(config)
    several = passes > 1 or (count > 1 and not adds_up_whole(config))
    return 4 * sum(local) / shards(config) if several and not is_unsharded(config) else 0.0


def _gradients(
    config: Config, local: Sequence[float], unadded: Sequence[int], summed: Sequence[int]
) -> float:
    """Bytes of unsharded gradients: the sums of some of a rank's stages, the newest ones of some beside them."""
    width, newest = _reduced_width(config), activation_width(config)
    size = sum(width * one for one, there in zip(local, summed) if there)
    return size + sum(
        newest * one for one, there, n in zip(local, summed, unadded) if n and (newest < width or not there)
    )


def moments_in_flight(config: Config, rank: int, plans: list[StagePlan]) -> tuple[Moment, ...]:
    """`moments_of` the pass that a layout runs."""
    parallel = config.parallel
    _, count = microbatches_of(config)
    size = parallel.pipeline_model_parallel_size
    name = runnable_schedule(parallel.pipeline_schedule, size, count)
    return moments_of(name, size, count, len(plans), rank)


def local_unit(config: Config, plan: StagePlan) -> float:
    """Parameters of the largest FSDP unit of a stage on a tensor rank: a block, the embedding or the head."""
    rows = config.model.padded_vocab_size * config.model.hidden_size
    rows /= config.parallel.tensor_model_parallel_size
    return max(
        block_parameters(config) if plan.layers else 0, rows * (plan.has_embedding or plan.has_lm_head)
    )


def _largest_unit(config: Config, plans: Sequence[StagePlan]) -> float:
    """Parameters of the largest FSDP unit of a rank's stages."""
    return max(local_unit(config, plan) for plan in plans)


def _reduced_width(config: Config) -> int:
    """Bytes of a gradient's element when it is added up and reduced: fp32, or bf16 with --grad-reduce-in-bf16."""
    return 2 if config.precision.grad_reduce_in_bf16 else 4


def _unsharded(config: Config, plans: list[StagePlan], local: Sequence[float]) -> tuple[float, float]:
    """Bytes of gathered weights and of unsharded gradients.

    Plain parameters are gathered nowhere, and their gradients are whole (4 P). Of sharded ones, where gradients are
    added up whole, torch's pipeline frees weights and reduces gradients after the last backward only: a rank's stages
    lie gathered (a P, at most three stages) beside their gradients' sums (fp32: 4 P). Else it goes block by block:
    under ZeRO-3 two blocks and the head are gathered, beside one unit's gradient.
    """
    a = activation_width(config)
    if not adds_up_whole(config):
        units = _largest_unit(config, plans)
        blocks = (1 + max(1, config.parallel.fsdp_prefetch_depth)) * block_parameters(config)
        return a * (min(sum(local), blocks + units) if reshards(config) else sum(local)), a * units
    if is_unsharded(config):
        return 0.0, 4 * sum(local)
    split = splits_backward(config)
    active = sum(local) if split or len(local) == 1 else sum(sorted(local)[-_MOST_ACTIVE_STAGES:])
    return a * active, _reduced_width(config) * sum(local)


def adds_up_whole(config: Config) -> bool:
    """Whether the gradients of a step's microbatches are added up unsharded and reduced once, at the end.

    With one microbatch each layer is reduced as it comes in any case, but where the backward is split.
    """
    if is_unsharded(config):
        return True
    one = microbatches_of(config) == (1, 1) and not splits_backward(config)
    return not (reduces_each_microbatch(config) or one)


def _two_units(config: Config, plans: list[StagePlan]) -> float:
    """Bytes of the gathered weights of a block and of the largest unit."""
    return activation_width(config) * (block_parameters(config) + _largest_unit(config, plans))


def _receive_buffers(config: Config, plans: list[StagePlan], every: list[StagePlan]) -> float:
    """A buffer of a T H/s for what is on its way to a rank: one input (from then on an activation), one gradient."""
    parallel = config.parallel
    s = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    hidden = activation_width(config) * tokens_per_microbatch(config) * config.model.hidden_size / s
    rank_of = {plan.stage: plan.rank for plan in every}
    neighbours = [[rank_of.get(plan.stage + step) for plan in plans] for step in (-1, 1)]
    return sum(any(rank not in (None, plans[0].rank) for rank in side) for side in neighbours) * hidden


def activations_in_flight(config: Config, rank: int, plans: list[StagePlan]) -> float:
    """Most bytes of activations that a rank holds at once: schedule.peak_in_flight weighed by stage_activations."""
    weights = [stage_activations(config, plan) for plan in plans]
    moments = moments_in_flight(config, rank, plans)
    return max(sum(n * one for n, one in zip(moment.live, weights)) for moment in moments)
