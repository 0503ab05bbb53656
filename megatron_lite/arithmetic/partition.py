"""Which layers, embedding and head each pipeline stage owns. Imports no torch.

A stage is a position in the whole pipeline, a chunk is a stage on one rank. The loop schedules give rank r the stages
r, r + pp, r + 2 pp, ...; zbv and dualpipev fold the pipeline into a V: rank r owns stages r and 2 pp - 1 - r.
"""

from dataclasses import dataclass
from functools import lru_cache

from megatron_lite.arithmetic.costs import ModelCosts, model_costs
from megatron_lite.arithmetic.pipeline_layout import parse_layout
from megatron_lite.config import Config, ConfigError

V_SCHEDULES = ("zbv", "dualpipev")


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


@dataclass(frozen=True)
class StageWeights:
    """Relative costs by which a split is balanced: compute first; memory (`*_parameters`) decides between equals."""

    block: float = 1.0
    embedding: float = 0.0
    head: float = 0.0
    block_parameters: float = 1.0
    embedding_parameters: float = 0.0
    head_parameters: float = 0.0

    @staticmethod
    def from_costs(costs: ModelCosts) -> "StageWeights":
        """Weights from counted FLOPs and parameters."""
        return StageWeights(
            block=costs.block.flops,
            embedding=costs.embedding.flops,
            head=costs.head.flops,
            block_parameters=costs.block.parameters,
            embedding_parameters=costs.embedding.parameters,
            head_parameters=costs.head.parameters + costs.shared_parameters,
        )


def placement_of(schedule: str) -> str:
    """How `schedule` places stages on ranks: 'loop' or 'v'."""
    return "v" if schedule in V_SCHEDULES else "loop"


def rank_of_stage(stage: int, pipeline_size: int, placement: str = "loop") -> int:
    """The pipeline rank that owns `stage`."""
    position = stage % pipeline_size
    folded = placement == "v" and (stage // pipeline_size) % 2 == 1
    return pipeline_size - 1 - position if folded else position


def stages_of_rank(plans: list[StagePlan], rank: int) -> list[StagePlan]:
    """The stages of one rank, in chunk order."""
    return [plan for plan in plans if plan.rank == rank]


@lru_cache(maxsize=1024)  # a search asks for the same splits a hundred thousand times
def plan_stages(
    num_layers: int,
    pipeline_size: int,
    chunks_per_rank: int = 1,
    placement: str = "loop",
    *,
    first_layers: int | None = None,
    last_layers: int | None = None,
    account_for_embedding: bool = False,
    account_for_loss: bool = False,
    layers_per_stage: int | None = None,
    layout: str | None = None,
    weights: StageWeights | None = None,
) -> list[StagePlan]:
    """Split `num_layers` into pipeline_size * chunks_per_rank stages of consecutive layers, in pipeline order.

    The first argument that is given of these decides how many layers each stage gets:
      layout: --pipeline-model-parallel-layout, the stages written out.
      first_layers / last_layers: layers of the first / last rank (--decoder-first/last-pipeline-num-layers), divided
        evenly over its chunks; the other ranks share the rest evenly.
      account_for_embedding / account_for_loss: the embedding / the head counts as one layer
        (--account-for-embedding/loss-in-pipeline-split), so that stage may be left without a layer.
      layers_per_stage: exactly that many on every stage (--num-layers-per-virtual-pipeline-stage).
      weights: the busiest rank's compute is as small as it can be, then its stages as even as they can be; between
        equals the rank with fewer parameters takes the layer. Without weights, an even split.

    Raises:
        ConfigError: when a stage would be left without layers or the numbers do not fit, naming flags and numbers.
    """
    stages = pipeline_size * chunks_per_rank
    ranks = [rank_of_stage(stage, pipeline_size, placement) for stage in range(stages)]
    uneven = first_layers is not None or last_layers is not None
    account = account_for_embedding or account_for_loss
    if layout is not None and (uneven or account):
        raise ConfigError(
            "--pipeline-model-parallel-layout says where every layer goes: leave out "
            "--decoder-first/last-pipeline-num-layers and --account-for-embedding/loss-in-pipeline-split"
        )
    if uneven and account:
        raise ConfigError(
            "--decoder-first/last-pipeline-num-layers and --account-for-embedding/loss-in-pipeline-split are two ways "
            "to say the same: give one of them"
        )
    if layout is not None:
        counts = _counts_of_layout(layout, num_layers, pipeline_size, chunks_per_rank)
    elif uneven:
        counts = _counts_first_last(num_layers, ranks, chunks_per_rank, first_layers, last_layers)
    elif account:
        accounted = StageWeights(embedding=float(account_for_embedding), head=float(account_for_loss))
        counts = _counts_balanced(num_layers, ranks, chunks_per_rank, accounted)
    elif layers_per_stage is not None:
        if layers_per_stage * stages != num_layers:
            raise ConfigError(
                f"--num-layers-per-virtual-pipeline-stage {layers_per_stage} on {stages} stages is "
                f"{layers_per_stage * stages} layers, --num-layers is {num_layers}"
            )
        counts = [layers_per_stage] * stages
    else:
        counts = _counts_balanced(num_layers, ranks, chunks_per_rank, weights or StageWeights(), lowest=1)
    return _plans_of_counts(counts, ranks, pipeline_size)


def plan_from_config(config: Config) -> list[StagePlan]:
    """The stages of a run: `plan_stages` with what the flags say, balanced by counted FLOPs and parameters.

    The padded vocabulary has to be known, for the head's cost; `check_split` needs no vocabulary.

    Raises:
        ConfigError: as `plan_stages`.
    """
    return _plan_with(config, StageWeights.from_costs(model_costs(config.model, config.data.seq_length)))


def check_split(config: Config) -> None:
    """Raise the ConfigError that `plan_from_config` would raise; works before the vocabulary is known."""
    _plan_with(config, None)


def _plan_with(config: Config, weights: StageWeights | None) -> list[StagePlan]:
    parallel = config.parallel
    return plan_stages(
        config.model.num_layers,
        parallel.pipeline_model_parallel_size,
        parallel.num_virtual_stages_per_pipeline_rank,
        placement_of(parallel.pipeline_schedule),
        first_layers=parallel.decoder_first_pipeline_num_layers,
        last_layers=parallel.decoder_last_pipeline_num_layers,
        account_for_embedding=parallel.account_for_embedding_in_pipeline_split,
        account_for_loss=parallel.account_for_loss_in_pipeline_split,
        layers_per_stage=parallel.num_layers_per_virtual_pipeline_stage,
        layout=parallel.pipeline_model_parallel_layout,
        weights=weights,
    )


def _plans_of_counts(counts: list[int], ranks: list[int], pipeline_size: int) -> list[StagePlan]:
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


def _counts_balanced(
    num_layers: int, ranks: list[int], chunks: int, weights: StageWeights, lowest: int = 0
) -> list[int]:
    """Layers per stage: one at a time to the rank that has least, there to the stage that has least.

    Blocks cost the same and what a rank starts with is fixed, so taking them one at a time gives the smallest
    possible maximum. The rank goes before the stage: in steady state a rank's period is the sum of its stages, and
    the simulator finds such splits up to 7% faster. A stage without embedding and head never ends without a layer.
    """
    stages = len(ranks)
    ends = [0.0] * stages
    ends[0] += weights.embedding
    ends[-1] += weights.head
    counts = [0 if ends[stage] and lowest == 0 else 1 for stage in range(stages)]
    if sum(counts) > num_layers:
        raise ConfigError(
            f"--num-layers {num_layers} does not fill {stages} pipeline stages (--pipeline-model-parallel-size "
            f"{stages // chunks}, {chunks} stages per rank): {sum(counts)} of them need at least one layer"
        )
    compute = [end + count * weights.block for end, count in zip(ends, counts, strict=True)]
    rank_compute, rank_memory = dict.fromkeys(ranks, 0.0), dict.fromkeys(ranks, 0.0)
    rank_memory[ranks[0]] += weights.embedding_parameters
    rank_memory[ranks[-1]] += weights.head_parameters
    for stage, rank in enumerate(ranks):
        rank_compute[rank] += compute[stage]
        rank_memory[rank] += counts[stage] * weights.block_parameters

    def order(stage: int) -> tuple[float, float, float, int]:
        return rank_compute[ranks[stage]], compute[stage], rank_memory[ranks[stage]], stage

    for _ in range(num_layers - sum(counts)):
        stage = min(range(stages), key=order)
        counts[stage] += 1
        compute[stage] += weights.block
        rank_compute[ranks[stage]] += weights.block
        rank_memory[ranks[stage]] += weights.block_parameters
    return counts


def _counts_first_last(
    num_layers: int, ranks: list[int], chunks: int, first: int | None, last: int | None
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
        shared = _counts_balanced(left, [ranks[s] for s in rest], chunks, StageWeights(), lowest=1)
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
    return ends + len(plan.layers) * costs.block.flops


def stage_parameters(plan: StagePlan, costs: ModelCosts) -> int:
    """Parameters a stage stores, its copy of a tied matrix included."""
    ends = plan.has_embedding * costs.embedding.parameters + plan.has_lm_head * costs.head.parameters
    copy = costs.shared_parameters if plan.has_lm_head and not plan.has_embedding else 0
    return ends + copy + len(plan.layers) * costs.block.parameters


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
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = [
        f"{row[0]:>{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:<{widths[2]}}  "
        f"{row[3]:>{widths[3]}}  {row[4]:>{widths[4]}}"
        for row in rows
    ]
    ranks = sorted({plan.rank for plan in plans})
    loads = {r: sum(f for plan, f in zip(plans, compute, strict=True) if plan.rank == r) for r in ranks}
    slowest = max(ranks, key=lambda rank: loads[rank])
    if len(ranks) > 1:
        excess = loads[slowest] * len(ranks) / total
        lines.append(f"most compute: rank {slowest}, {excess:.2f} times the mean")
    return "\n".join(lines)
