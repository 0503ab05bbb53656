"""Which layers, embedding and head each pipeline stage owns. Imports no torch.

A stage is a position in the whole pipeline, a chunk is a stage on one rank. The loop schedules give rank r the stages
r, r + pp, r + 2 pp, ...; zbv and dualpipev fold the pipeline into a V: rank r owns stages r and 2 pp - 1 - r.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from megatron_lite.arithmetic.costs import ComponentCost, ModelCosts, model_costs
from megatron_lite.arithmetic.pipeline_layout import parse_layout
from megatron_lite.arithmetic.pipeline_schedule import placement_of, rank_of_stage
from megatron_lite.config import Config, ConfigError, refuse_together


@dataclass(frozen=True)
class StagePlan:
    """What one stage owns: `layers` are global layer numbers, in order."""

    stage: int
    rank: int
    chunk: int
    layers: tuple[int, ...]
    has_embedding: bool
    has_lm_head: bool

    @property
    def holds(self) -> str:
        """What lies on the stage, in words."""
        parts = ["embedding"] if self.has_embedding else []
        if self.layers:
            first, last = self.layers[0], self.layers[-1]
            parts.append(f"layer {first}" if first == last else f"layers {first}-{last}")
        return ", ".join(parts + (["head"] if self.has_lm_head else []))


def stages_of_rank(plans: list[StagePlan], rank: int) -> list[StagePlan]:
    """The stages of one rank, in chunk order."""
    return [plan for plan in plans if plan.rank == rank]


def unit_costs(layer: float = 1.0, embedding: float = 0.0, head: float = 0.0) -> ModelCosts:
    """Costs of compute alone, to balance by: of one layer, of the embedding, of the head."""
    return ModelCosts(ComponentCost(0, embedding), (ComponentCost(1, layer),), ComponentCost(0, head))


def plan_stages(
    num_layers: int,
    pipeline_size: int,
    chunks_per_rank: int = 1,
    placement: str = "loop",
    costs: ModelCosts | None = None,
) -> list[StagePlan]:
    """Split `num_layers` into pipeline_size * chunks_per_rank stages of consecutive layers, in pipeline order.

    The busiest rank's compute is as small as it can be, then its stages as even as they can be; between equals the
    rank with fewer parameters takes the layer. Without costs, an even split.

    Raises:
        ConfigError: a stage would be left without layers.
    """
    ranks = _ranks_of_stages(pipeline_size, chunks_per_rank, placement)
    counts = _counts_balanced(num_layers, ranks, chunks_per_rank, costs or unit_costs(), lowest=1)
    return _plans_of_counts(counts, ranks, pipeline_size)


def plan_from_config(config: Config) -> list[StagePlan]:
    """The stages of a run: as the flags say, else balanced by counted FLOPs and parameters.

    The padded vocabulary has to be known, for the head's cost; `check_split` needs no vocabulary.

    Raises:
        ConfigError: when a stage would be left without layers or the numbers do not fit, naming flags and numbers.
    """
    return _plan_with(config, model_costs(config.model, config.data.seq_length))


def check_split(config: Config) -> None:
    """Raise the ConfigError that `plan_from_config` would raise; works before the vocabulary is known."""
    _plan_with(config, unit_costs())


def _plan_with(config: Config, costs: ModelCosts) -> list[StagePlan]:
    parallel = config.parallel
    size, chunks = parallel.pipeline_model_parallel_size, parallel.num_virtual_stages_per_pipeline_rank
    ranks = _ranks_of_stages(size, chunks, placement_of(parallel.pipeline_schedule))
    return _plans_of_counts(_counts(config, ranks, costs), ranks, size)


def _ranks_of_stages(pipeline_size: int, chunks: int, placement: str) -> tuple[int, ...]:
    return tuple(rank_of_stage(stage, pipeline_size, placement) for stage in range(pipeline_size * chunks))


def _counts(config: Config, ranks: tuple[int, ...], costs: ModelCosts) -> list[int]:
    """Layers of each stage. The first of these flags that is given decides:

    --pipeline-model-parallel-layout: the stages written out.
    --decoder-first/last-pipeline-num-layers: layers of the first / last rank, divided evenly over its chunks; the other
        ranks share the rest evenly.
    --account-for-embedding/loss-in-pipeline-split: the embedding / the head counts as one layer, so that stage may be
        left without a layer.
    --num-layers-per-virtual-pipeline-stage: exactly that many on every stage.
    """
    parallel, num_layers = config.parallel, config.model.num_layers
    layout = parallel.pipeline_model_parallel_layout
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    embedding, head = (
        parallel.account_for_embedding_in_pipeline_split,
        parallel.account_for_loss_in_pipeline_split,
    )
    uneven = first is not None or last is not None
    refuse_together(
        "--pipeline-model-parallel-layout" if layout is not None else None,
        "--decoder-first/last-pipeline-num-layers" if uneven else None,
        "--account-for-embedding/loss-in-pipeline-split" if embedding or head else None,
        because="each says where the layers go",
    )
    refuse_together(
        "--num-layers-per-virtual-pipeline-stage" if parallel.num_layers_per_virtual_pipeline_stage else None,
        "--decoder-first/last-pipeline-num-layers" if uneven else None,
        because="the one makes all chunks equal; --num-virtual-stages-per-pipeline-rank goes with the other",
    )
    chunks = parallel.num_virtual_stages_per_pipeline_rank
    if layout is not None:
        return _counts_of_layout(layout, num_layers, parallel.pipeline_model_parallel_size, chunks)
    if uneven:
        return _counts_first_last(num_layers, ranks, chunks, first, last)
    if embedding or head:
        return _counts_balanced(num_layers, ranks, chunks, unit_costs(1.0, embedding, head))
    if parallel.num_layers_per_virtual_pipeline_stage is not None:
        return [parallel.num_layers_per_virtual_pipeline_stage] * len(ranks)
    return _counts_balanced(num_layers, ranks, chunks, costs, lowest=1)


def _plans_of_counts(counts: list[int], ranks: tuple[int, ...], pipeline_size: int) -> list[StagePlan]:
    plans, start = [], 0
    for stage, count in enumerate(counts):
        plans.append(
            StagePlan(
                stage=stage,
                rank=ranks[stage],
                chunk=stage // pipeline_size,
                layers=tuple(range(start, start + count)),
                has_embedding=stage == 0,
                has_lm_head=stage == len(counts) - 1,
            )
        )
        start += count
    return plans


@lru_cache(maxsize=1024)  # a search asks for the same splits a hundred thousand times
def _counts_balanced(
    num_layers: int, ranks: tuple[int, ...], chunks: int, costs: ModelCosts, lowest: int = 0
) -> list[int]:
    """Layers per stage: one at a time to the rank that has least, there to the stage that has least.

    Where layers cost the same, what a rank starts with is fixed, so taking them one at a time gives the smallest
    possible maximum. The rank goes before the stage: in steady state a rank's period is the sum of its stages, and
    the simulator finds such splits up to 7% faster. A stage without embedding and head never ends without a layer.
    Dense layers and mixtures differ: there this is the start of `_counts_evened`.
    """
    stages = len(ranks)
    layer = sum(cost.flops for cost in costs.layers) / len(costs.layers)
    layer_parameters = sum(cost.parameters for cost in costs.layers) / len(costs.layers)
    compute = [0.0] * stages
    compute[0] += costs.embedding.flops
    compute[-1] += costs.head.flops
    counts = [0 if compute[stage] and lowest == 0 else 1 for stage in range(stages)]
    if sum(counts) > num_layers:
        raise ConfigError(
            f"--num-layers {num_layers} does not fill {stages} pipeline stages (--pipeline-model-parallel-size "
            f"{stages // chunks}, {chunks} stages per rank): {sum(counts)} of them need at least one layer"
        )
    rank_compute, rank_memory = dict.fromkeys(ranks, 0.0), dict.fromkeys(ranks, 0.0)
    rank_memory[ranks[0]] += costs.embedding.parameters
    rank_memory[ranks[-1]] += costs.head.parameters + costs.shared_parameters
    for stage, rank in enumerate(ranks):
        compute[stage] += counts[stage] * layer
        rank_compute[rank] += compute[stage]
        rank_memory[rank] += counts[stage] * layer_parameters

    def order(stage: int) -> tuple[float, float, float, int]:
        return rank_compute[ranks[stage]], compute[stage], rank_memory[ranks[stage]], stage

    for _ in range(num_layers - sum(counts)):
        stage = min(range(stages), key=order)
        counts[stage] += 1
        compute[stage] += layer
        rank_compute[ranks[stage]] += layer
        rank_memory[ranks[stage]] += layer_parameters
    return counts if len(set(costs.layers)) == 1 else _counts_evened(counts, ranks, costs)


def _counts_evened(counts: list[int], ranks: tuple[int, ...], costs: ModelCosts) -> list[int]:
    """The counts after single layers have moved from the busiest rank's stages, all layers between shifting by one.

    As long as its compute, then the sum of squares over ranks, then over stages falls. With one stage a rank that ends
    at the smallest possible maximum in every case tried against all splits; with several within 1% of it on average.
    """
    before = (0, *accumulate(cost.flops for cost in costs.layers))

    def loads(counts: Sequence[int]) -> tuple[dict[int, float], list[float]]:
        """Compute of each rank, and of each stage."""
        ends = list(accumulate(counts))
        stages = [before[end] - before[end - count] for end, count in zip(ends, counts)]
        stages[0] += costs.embedding.flops
        stages[-1] += costs.head.flops
        of_rank = dict.fromkeys(ranks, 0.0)
        for rank, load in zip(ranks, stages):
            of_rank[rank] += load
        return of_rank, stages

    def order(counts: Sequence[int]) -> tuple[float, float, float]:
        of_rank, stages = loads(counts)
        squares = (sum(load**2 for load in these) for these in (of_rank.values(), stages))
        return max(of_rank.values()), *squares

    while True:
        of_rank, _ = loads(counts)
        busiest = max(of_rank, key=of_rank.__getitem__)
        moved = [
            [count - (stage == source) + (stage == target) for stage, count in enumerate(counts)]
            for source, rank in enumerate(ranks)
            for target in range(len(ranks))
            if rank == busiest and counts[source] > 1 and source != target
        ]
        best = min(moved, key=order, default=counts)
        if order(best) >= order(counts):
            return counts
        counts = best


def _counts_first_last(
    num_layers: int, ranks: tuple[int, ...], chunks: int, first: int | None, last: int | None
) -> list[int]:
    """Layers per stage when the first and/or the last rank's total is given, as Megatron means it."""
    pipeline_size = len(ranks) // chunks
    given = {}
    for name, rank, total in (("first", 0, first), ("last", pipeline_size - 1, last)):
        if total is None:
            continue
        flag = f"--decoder-{name}-pipeline-num-layers {total}"
        if total <= 0 or total % chunks:
            raise ConfigError(
                f"{flag} has to be a positive multiple of the {chunks} stages per pipeline rank"
            )
        if pipeline_size == 1:
            raise ConfigError(f"{flag} needs --pipeline-model-parallel-size of at least 2, it is 1")
        given[rank] = total
    rest = [stage for stage, rank in enumerate(ranks) if rank not in given]
    left = num_layers - sum(given.values())
    if (left != 0) if not rest else (left < len(rest)):
        wanted = f"at least {len(rest)} (one for each other stage)" if rest else "none"
        raise ConfigError(
            f"--decoder-first/last-pipeline-num-layers {first or 'none'}/{last or 'none'} leave {left} of "
            f"--num-layers {num_layers} for the other ranks, wanted: {wanted}"
        )
    counts = [given.get(rank, 0) // chunks for rank in ranks]
    if rest:
        shared = _counts_balanced(left, tuple(ranks[s] for s in rest), chunks, unit_costs(), lowest=1)
        for stage, count in zip(rest, shared, strict=True):
            counts[stage] = count
    return counts


def _counts_of_layout(layout: str, num_layers: int, pipeline_size: int, chunks: int) -> list[int]:
    counts = parse_layout(layout)
    if len(counts) != pipeline_size * chunks:
        raise ConfigError(
            f"--pipeline-model-parallel-layout '{layout}' has {len(counts)} stages, wanted {pipeline_size * chunks} "
            f"(--pipeline-model-parallel-size {pipeline_size}, {chunks} stages per rank)"
        )
    if sum(counts) != num_layers:
        raise ConfigError(
            f"--pipeline-model-parallel-layout '{layout}' has {sum(counts)} decoder layers (t), "
            f"--num-layers is {num_layers}"
        )
    return counts


def stage_compute(plan: StagePlan, costs: ModelCosts) -> int:
    """Forward and backward FLOPs of one stage for one sequence."""
    ends = plan.has_embedding * costs.embedding.flops + plan.has_lm_head * costs.head.flops
    return ends + sum(costs.layers[number].flops for number in plan.layers)


def stage_parameters(plan: StagePlan, costs: ModelCosts) -> int:
    """Parameters a stage stores, its copy of a tied matrix included."""
    ends = plan.has_embedding * costs.embedding.parameters + plan.has_lm_head * costs.head.parameters
    copy = costs.shared_parameters if plan.has_lm_head and not plan.has_embedding else 0
    return ends + copy + sum(costs.layers[number].parameters for number in plan.layers)


def describe(plans: list[StagePlan], costs: ModelCosts) -> str:
    """The table printed at start: stage, rank, what it holds, parameters, share of compute; then the slowest rank."""
    compute = [stage_compute(plan, costs) for plan in plans]
    total = sum(compute)
    rows = [("stage", "rank", "holds", "parameters", "compute")]
    for plan, flops in zip(plans, compute, strict=True):
        copied = plan.has_lm_head and costs.shared_parameters and not plan.has_embedding
        holds = plan.holds + (" (copy of the embedding)" if copied else "")
        parameters = f"{stage_parameters(plan, costs):,}"
        rows.append((str(plan.stage), str(plan.rank), holds, parameters, f"{flops / total:.1%}"))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, ">><>>", widths)) for row in rows
    ]
    ranks = sorted({plan.rank for plan in plans})
    loads = {r: sum(f for plan, f in zip(plans, compute, strict=True) if plan.rank == r) for r in ranks}
    slowest = max(ranks, key=lambda rank: loads[rank])
    if len(ranks) > 1:
        excess = loads[slowest] * len(ranks) / total
        lines.append(f"most compute: rank {slowest}, {excess:.2f} times the mean")
    return "\n".join(lines)
