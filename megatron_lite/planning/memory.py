"""Bytes that each pipeline rank holds in a training step, from the flags alone. Imports no torch.

The engine as it is: FSDP2 over dp_shard x cp with fp32 shards, eager blocks without fused activations; where there are
several stages, gradients of a step's microbatches added up unsharded and reduced once. Tensor ranks share a mixture of
experts as data-parallel ranks do, so it is cut over all three, its experts over --expert-model-parallel-size ranks
before. Symbols: a bytes of an
activation's element (2 with --bf16 or --fp16, else 4), T = B S / cp tokens of a microbatch on a rank, t tensor ranks,
s = t with sequence parallelism else 1, n = dp_shard * cp shards, H hidden, q and kv widths of queries and keys, F
feed-forward, V padded vocabulary.

Sources: states sharded as ZeRO (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054); activations tensor by
tensor as Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198) count them, for this model's operators.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_lite.arithmetic.batch_size import pass_size
from megatron_lite.arithmetic.costs import (
    ComponentCost,
    block_matrix_parameters,
    model_costs,
)
from megatron_lite.arithmetic.mesh_sizes import mesh_sizes
from megatron_lite.arithmetic.partition import StagePlan, plan_from_config, stages_of_rank
from megatron_lite.arithmetic.pipeline_schedule import runnable_schedule
from megatron_lite.arithmetic.sharding import (
    reduces_each_microbatch,
    reshards,
    splits_backward,
    wraps_in_fsdp,
)
from megatron_lite.config import Config
from megatron_lite.config.optimizers import OPTIMIZERS
from megatron_lite.planning.activations import (
    activation_width,
    hidden_bytes,
    logits_bytes,
    stage_activations,
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
    sizes = mesh_sizes(config.parallel)
    return sizes["dp_shard"] * sizes["cp"]


def microbatches_of(config: Config) -> tuple[int, int]:
    """(pipeline passes of a step, microbatches of a pass): equal passes of at most --max-microbatches-per-step."""
    samples = config.training.micro_batch_size * config.parallel.data_parallel_size
    count = config.training.global_batch_size // samples
    size = pass_size(count, config.parallel.max_microbatches_per_step)
    return count // size, size


class Held(NamedTuple):
    """Parameters on a rank: `whole` before FSDP cuts them over `ranks`, and its `shard`."""

    whole: float = 0.0
    shard: float = 0.0
    ranks: int = 0

    @classmethod
    def cut(cls, size: float, ranks: int) -> "Held":
        """So many parameters over ranks, in equal parts."""
        return cls(size, size / ranks, ranks)

    def __add__(self, other: "Held") -> "Held":
        return Held(self.whole + other.whole, self.shard + other.shard, max(self.ranks, other.ranks))

    def times(self, count: int) -> "Held":
        """So many of them."""
        return Held(count * self.whole, count * self.shard, self.ranks)


def units_of(config: Config, cost: ComponentCost) -> list[Held]:
    """What one component has on a rank, unit by unit of FSDP: parts that lie over other ranks are units of their own.

    Those are a mixture where there are tensor ranks, and its experts where they are spread over ranks.
    """
    n, t = shards(config), config.parallel.tensor_model_parallel_size
    ep = config.parallel.expert_model_parallel_size
    units = [Held.cut(cost.on_tensor_rank(t) - cost.mixture, n)]
    if cost.mixture:
        rest = Held.cut(cost.mixture - cost.experts, n * t)
        experts = Held.cut(cost.experts / ep, n * t // ep)
        for unit, own in ((rest, t > 1), (experts, ep > 1)):
            units = [*units, unit] if own else [*units[:-1], units[-1] + unit]
    return units


def blocks_of(config: Config, layers: Sequence[int]) -> list[list[Held]]:
    """The units of each kind of block among these layers."""
    costs = model_costs(config.model, config.data.seq_length).layers
    return [units_of(config, cost) for cost in dict.fromkeys(costs[number] for number in layers)]


def stage_parameters_on_rank(config: Config, *plans: StagePlan) -> list[Held]:
    """Parameters of stages on a rank, those that as many ranks share added up."""
    costs, t = model_costs(config.model, config.data.seq_length), config.parallel.tensor_model_parallel_size
    parts, copy = Counter(costs.layers[number] for plan in plans for number in plan.layers), 0.0
    for plan in plans:
        parts.update([costs.embedding] * plan.has_embedding + [costs.head] * plan.has_lm_head)
        copy += costs.shared_parameters / t if plan.has_lm_head and not plan.has_embedding else 0
    held = {shards(config): Held.cut(copy, shards(config))}
    for part, count in parts.items():
        for unit in units_of(config, part):
            held[unit.ranks] = held.get(unit.ranks, Held()) + unit.times(count)
    return list(held.values())


def adds_up_whole(config: Config) -> bool:
    """Whether the gradients of a step's microbatches are added up unsharded and reduced once, at the end.

    With one microbatch each layer is reduced as it comes in any case, but where the backward is split.
    """
    if not wraps_in_fsdp(config):
        return True
    one = microbatches_of(config) == (1, 1) and not splits_backward(config)
    return not (reduces_each_microbatch(config) or one)


def reduced_width(config: Config) -> int:
    """Bytes of a gradient's element when it is added up and reduced: fp32, or bf16 with --grad-reduce-in-bf16."""
    return 2 if config.precision.grad_reduce_in_bf16 else 4


def rank_memory(config: Config, ranks: Sequence[int] | None = None) -> list[RankMemory]:
    """What each pipeline rank (or each of `ranks`) holds at the worst moment of a step.

    parameters 4 P/n, optimizer state (as its row in config/optimizers.py says), unsharded gradients, receive buffers,
    and of the moments of its schedule (moments.py) the one that needs most:
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
    return [_Rank(config, stages_of_rank(plans, rank), plans).memory() for rank in ranks]


class _Rank:
    """One pipeline rank with its stages: counts of parameters, bytes that do not change during the step."""

    def __init__(self, config: Config, plans: list[StagePlan], every: list[StagePlan]) -> None:
        self.config, self.plans, self.every = config, plans, every
        self.width, self.reduced = activation_width(config), reduced_width(config)
        self.shards = shards(config)
        self.passes, self.count = microbatches_of(config)
        self.plain, self.whole, self.frees = (
            not wraps_in_fsdp(config),
            adds_up_whole(config),
            reshards(config),
        )
        held = [sum(stage_parameters_on_rank(config, plan), Held()) for plan in plans]
        self.local, self.shard = [one.whole for one in held], sum(one.shard for one in held)
        rows = config.model.padded_vocab_size * config.model.hidden_size
        rows /= config.parallel.tensor_model_parallel_size
        ends = [Held.cut(rows, self.shards)] * any(plan.has_embedding or plan.has_lm_head for plan in plans)
        blocks = blocks_of(config, [number for plan in plans for number in plan.layers])
        # The largest FSDP unit: a block (or part of one), the embedding or the head.
        self.unit = max(sum(blocks, ends), key=lambda unit: unit.whole)
        self.block = max((sum(unit.whole for unit in units) for units in blocks), default=0.0)
        # FSDP holds the gathered weights of a block and of the largest unit at once; at the loss the head's and the
        # first unit's of the last block.
        self.two_units = self.width * (self.block + self.unit.whole)
        ahead = max((units[0].whole for units in blocks), default=0.0)
        self.at_loss = self.width * (rows if self.whole else rows + ahead)
        self.first = rows if plans[0].has_embedding else self.unit.whole
        self.gathered, self.unsharded = self._unsharded()

    def memory(self) -> RankMemory:
        """The states, and the moment that needs most beside them."""
        config, model = self.config, self.config.model
        layers = [number for plan in self.plans for number in plan.layers]
        kinds = Counter(map(model.has_experts, layers))
        matrices = sum(count * block_matrix_parameters(model, kind) for kind, count in kinds.items())
        matrices /= config.parallel.tensor_model_parallel_size * self.shards
        states = {
            "parameters": 4 * self.shard,
            "optimizer state": OPTIMIZERS[config.optimizer.optimizer].bytes_of(self.shard, matrices),
            "receive buffers": self._receive_buffers(),
        }
        moments = [self._at_reduction(), *self._in_backward()]
        parts, host = states | max(moments, key=lambda moment: sum(moment.values())), 0.0
        if config.parallel.fsdp_cpu_offload:
            host = 2 * parts.pop("parameters") + parts.pop(
                "optimizer state"
            )  # gradient shards as large as weights
            parts["gradient shards"] = 0.0
        return RankMemory(self.plans[0].rank, parts, host)

    def _unsharded(self) -> tuple[float, float]:
        """Bytes of gathered weights and of unsharded gradients.

        Plain parameters are gathered nowhere, and their gradients are whole (4 P). Of sharded ones, where gradients
        are added up whole, torch's pipeline frees weights and reduces gradients after the last backward only: a rank's
        stages lie gathered (a P, at most three stages) beside their gradients' sums (fp32: 4 P). Else it goes block by
        block: under ZeRO-3 two blocks and the head are gathered, beside one unit's gradient.
        """
        total = sum(self.local)
        if self.plain:
            return 0.0, 4 * total
        if not self.whole:
            blocks = (1 + max(1, self.config.parallel.fsdp_prefetch_depth)) * self.block
            return self.width * (
                min(total, blocks + self.unit.whole) if self.frees else total
            ), self.width * self.unit.whole
        most = None if splits_backward(self.config) else _MOST_ACTIVE_STAGES
        return self.width * sum(sorted(self.local, reverse=True)[:most]), self.reduced * total

    def _at_reduction(self) -> dict[str, float]:
        """What lies beside the states when the gradients of a step or microbatch are reduced; plain ones are not."""
        found = {"gathered weights": self.gathered, "unsharded gradients": self.unsharded}
        if self.plain:
            return found
        found["workspace"] = self.reduced * self.unit.whole
        found["gradient shards"] = 4 * self.shard
        if self.whole:
            found["gradient shards"] = 4 * self.unit.shard  # a unit's whole gradients go as its shards come
        if self.whole:  # a second pass reduces into others beside the first one's
            found["gradient shards"] += self._shards_before()
        elif (
            self.frees
        ):  # a unit's weights are freed before its gradients are reduced, those behind it are gathered
            depth = max(1, self.config.parallel.fsdp_prefetch_depth)
            found["gathered weights"] = min(self.gathered, self.width * depth * self.block)
        return found

    def _in_backward(self) -> list[dict[str, float]]:
        """What lies beside the states at each moment of the rank's backwards, as rank_memory says.

        Where the backward is split the gradient of a block's input leaves, for the weights' gradient that comes later,
        what was kept (but for the loss) and the gradients of all linears and norms; the weights' gradient then lies in
        a beside the fp32 sum, until the stage's next backward adds it.
        """
        config = self.config
        weights = [stage_activations(config, plan) for plan in self.plans]
        waits = [waiting_bytes(config, plan) for plan in self.plans]
        at_start = min(self.gathered, self.two_units) if self.frees else self.gathered
        at_loss = min(self.gathered, self.at_loss) if self.frees else at_start
        workspaces, loss = [workspace_bytes(config, plan) for plan in self.plans], logits_bytes(config)[1]
        before = self._shards_before()
        # FSDP2 lets go of what it reduced last, the embedding's gradient, when it reduces again: in the next backward.
        left = 0.0 if self.whole or not before else self.reduced * self.first
        found = []
        for moment in self._moments():
            held = sum(n * one for n, one in zip(moment.live, weights))
            held += sum(n * (wait - one) for n, wait, one in zip(moment.waiting, waits, weights))
            mine, workspace = moment.chunk, workspaces[moment.chunk]
            freed = weights[mine] if moment.kind == "B" else weights[mine] - waits[mine]
            begins, ends = self._gradients(moment)
            at_head = begins if self.whole else 0.0
            beside = {"activations": held, "gradient shards": before}
            for gradients, gathered, work, less in (
                (at_head, at_loss, loss + left, 0.0),
                (begins, at_start, workspace, 0.0),
                (ends, self.gathered, workspace, freed),
            )[0 if self.plans[mine].has_lm_head else 1 :]:
                moment_bytes = {
                    "unsharded gradients": gradients,
                    "gathered weights": gathered,
                    "workspace": work,
                }
                found.append(beside | moment_bytes | {"activations": held - less})
        return found

    def _moments(self) -> list[Moment]:
        """The moments of the rank's backwards in the pass that its layout runs."""
        parallel = self.config.parallel
        size = parallel.pipeline_model_parallel_size
        name = runnable_schedule(parallel.pipeline_schedule, size, self.count)
        every = moments_of(name, size, self.count, len(self.plans), self.plans[0].rank)
        return [moment for moment in every if moment.kind != "F"]

    def _gradients(self, moment: Moment) -> tuple[float, float]:
        """Bytes of unsharded gradients when a moment's action begins and when it ends.

        Sums of some of a rank's stages, the newest ones of some beside them; plain ones of a pass before stay.
        """
        if not self.whole or (self.plain and self.passes > 1):
            return self.unsharded, self.unsharded

        def size(unadded: Sequence[int], summed: Sequence[int]) -> float:
            sums = sum(self.reduced * one for one, there in zip(self.local, summed) if there)
            newest = (
                self.width * one
                for one, there, n in zip(self.local, summed, unadded)
                if n and (self.width < self.reduced or not there)
            )
            return sums + sum(newest)

        unadded, summed, mine = list(moment.unadded), list(moment.summed), moment.chunk
        summed[mine] = summed[mine] or moment.kind == "B" or unadded[mine]
        unadded[mine] = 0
        return size(moment.unadded, moment.summed), size(unadded, summed)

    def _shards_before(self) -> float:
        """Bytes of gradient shards, 4 P/n, that a backward finds there: of the passes or microbatches before."""
        several = self.passes > 1 or (self.count > 1 and not self.whole)
        return 4 * self.shard if several and not self.plain else 0.0

    def _receive_buffers(self) -> float:
        """A buffer of a T H/s for what comes to a rank: one input (from then on an activation), one gradient."""
        rank_of = {plan.stage: plan.rank for plan in self.every}
        mine = self.plans[0].rank
        sides = [{rank_of.get(plan.stage + step, mine) for plan in self.plans} - {mine} for step in (-1, 1)]
        return sum(map(bool, sides)) * hidden_bytes(self.config)
