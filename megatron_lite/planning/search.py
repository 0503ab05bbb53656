"""Layouts for a number of GPUs: made, checked against memory, ranked by predicted step time. Imports no torch."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import product
from math import gcd

from megatron_lite.arithmetic.batch_size import batch_steps
from megatron_lite.arithmetic.pipeline_schedule import (
    SPLIT_BACKWARD_SCHEDULES,
    V_SCHEDULES,
    check_microbatches,
    runnable_schedule,
)
from megatron_lite.arithmetic.sharding import uneven_cut
from megatron_lite.config import Config, ConfigError
from megatron_lite.config.declare import flag_name
from megatron_lite.planning.devices import GIB, Cluster
from megatron_lite.planning.memory import RankMemory, microbatches_of, rank_memory
from megatron_lite.planning.time import StepTime, least_seconds, step_time

MICRO_BATCHES = (1, 2, 4, 8)
CHUNKS = (1, 2, 4)
MOST_PIPELINE_RANKS = 64
LEAST_TOKENS_PER_CONTEXT_RANK = 2048
RECOMPUTE = ("none", "selective", "full")  # from the fastest on: the first that fits is taken
# A schedule with more actions than this takes seconds to simulate: it is left out, and the summary says so.
MOST_ACTIONS = 300_000
CONTEXT_SIZES = (1, 2, 4, 8, 16, 32)
# Fields whose flag is given at 1 too, which is not its default.
_SAID_AT_1 = ("micro_batch_size", "expert_tensor_parallel_size")
INTERLEAVED = ("interleaved-1f1b", "interleaved-zero-bubble")


@dataclass(frozen=True)
class Layout:
    """One way to run the model; field = the flag that says it."""

    tensor_model_parallel_size: int
    context_parallel_size: int
    pipeline_model_parallel_size: int
    num_virtual_stages_per_pipeline_rank: int
    pipeline_schedule: str
    micro_batch_size: int
    num_distributed_optimizer_instances: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None  # 1 where Megatron would take the tensor ranks
    recompute_granularity: str = "none"
    reshard_after_forward: str = "auto"
    max_microbatches_per_step: int | None = None
    fsdp_cpu_offload: bool = False

    def flags(self) -> list[str]:
        """The flags of pretrain_gpt.py that make it so."""
        out = []
        for item in fields(self):
            value = getattr(self, item.name)
            if value not in ("none", "auto", None, False) and (value != 1 or item.name in _SAID_AT_1):
                out += [flag_name(item.name), *([] if value is True else [str(value)])]
        if self.tensor_model_parallel_size > 1:
            out.append("--sequence-parallel")
        if self.recompute_granularity == "full":
            out += ["--recompute-method", "uniform", "--recompute-num-layers", "1"]
        return out

    def applied_to(self, config: Config, num_gpus: int) -> Config:
        """The config of a run in this layout; what `flags` would make of the same command line."""
        values = vars(self) | {
            "world_size": num_gpus,
            "sequence_parallel": self.tensor_model_parallel_size > 1,
            "recompute_method": None,
            "recompute_num_layers": None,
        }
        micro_batch = replace(config.training, micro_batch_size=values.pop("micro_batch_size"))
        if self.recompute_granularity == "none":
            values["recompute_granularity"] = None
        if self.recompute_granularity == "full":
            values |= {"recompute_method": "uniform", "recompute_num_layers": 1}
        return replace(config, parallel=replace(config.parallel, **values), training=micro_batch)


@dataclass(frozen=True)
class Plan:
    """A layout that fits, its predicted memory by pipeline rank and its predicted step."""

    layout: Layout
    config: Config
    memory: list[RankMemory]
    time: StepTime

    @property
    def worst(self) -> RankMemory:
        """The pipeline rank that holds most."""
        return max(self.memory, key=lambda one: one.total)


@dataclass
class Found:
    """The best plans, and what became of the other layouts."""

    plans: list[Plan] = field(default_factory=list)
    tried: int = 0
    fitting: int = 0
    too_large: int = 0
    least_missing: tuple[float, Layout] | None = None
    refused: dict[str, int] = field(default_factory=dict)

    def refuse(self, reason: str) -> None:
        """Count a layout that cannot run."""
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def miss(self, size: float, layout: Layout) -> None:
        """Count a layout that needs `size` bytes more than there are."""
        self.too_large += 1
        if self.least_missing is None or size < self.least_missing[0]:
            self.least_missing = (size, layout)


def divisors(number: int, most: int | None = None) -> list[int]:
    """The divisors of a number up to `most`, ascending."""
    return [n for n in range(1, min(number, most or number) + 1) if number % n == 0]


def structures(config: Config, cluster: Cluster, fixed: dict, found: Found) -> Iterator[Layout]:
    """Layouts without regard to memory: every tensor size inside a node, context size, pipeline, schedule, micro batch,
    number of ranks that share a layer's experts.

    `fixed` holds fields that the user gave: only those values are tried. What cannot run is counted in `found`.
    """
    num_gpus, length = cluster.num_gpus, config.data.seq_length
    contexts = [n for n in CONTEXT_SIZES if n == 1 or length // n >= LEAST_TOKENS_PER_CONTEXT_RANK]
    for tensor, context in product(
        _choices(fixed, "tensor_model_parallel_size", divisors(cluster.gpus_per_node)),
        _choices(fixed, "context_parallel_size", contexts),
    ):
        uneven = uneven_cut(config, tensor, context, sequence_parallel=tensor > 1)
        rest = max(1, num_gpus // (tensor * context))
        pipelines = _choices(fixed, "pipeline_model_parallel_size", divisors(rest, MOST_PIPELINE_RANKS))
        for pipeline in pipelines:
            data, odd = divmod(num_gpus, tensor * context * pipeline)
            if uneven or odd:
                found.refuse(uneven or f"{num_gpus} GPUs do not divide by tensor x context x pipeline ranks")
                continue
            ways = product(
                _choices(fixed, "micro_batch_size", MICRO_BATCHES),
                _schedules(config, fixed, pipeline),
                _choices(
                    fixed, "num_distributed_optimizer_instances", _copies(cluster, tensor * context, data)
                ),
            )
            for micro, (name, chunks), copies in ways:
                reason = _refused(config, pipeline, chunks, name, micro * data)
                if data % copies:
                    reason = f"--num-distributed-optimizer-instances {copies} does not divide the data ranks"
                if reason:
                    found.refuse(reason)
                    continue
                plain = Layout(tensor, context, pipeline, chunks, name, micro, copies)
                yield from _with_experts(plain, config, fixed, data // copies * context * tensor, found)


def _with_experts(plain: Layout, config: Config, fixed: dict, ranks: int, found: Found) -> Iterator[Layout]:
    """The layout with each number of ranks that a layer's experts may lie on, of the `ranks` with other tokens."""
    experts, tensor = config.model.num_experts or 1, plain.tensor_model_parallel_size
    sizes = divisors(gcd(experts, ranks)) if experts > 1 and not config.parallel.compile else [1]
    whole = fixed.get("expert_tensor_parallel_size", 1 if config.model.num_experts and tensor > 1 else None)
    for size in _choices(fixed, "expert_model_parallel_size", sizes):
        if experts % size or ranks % size:
            found.refuse(
                f"--expert-model-parallel-size {size} does not divide the experts, or the ranks of a replica"
            )
        else:
            yield replace(plain, expert_model_parallel_size=size, expert_tensor_parallel_size=whole)


def _choices(fixed: dict, name: str, values: Collection) -> Collection:
    return (fixed[name],) if name in fixed else values


def _refused(config: Config, pipeline: int, chunks: int, schedule: str, samples: int) -> str | None:
    """Why a pipeline cannot run the batches, `samples` to a microbatch of all ranks; None when it can."""
    batches = sorted({size for _, size in batch_steps(config)})
    odd = [size for size in batches if size % samples]
    if odd:
        return f"a batch of {odd[0]:,} does not divide by micro batch x data-parallel ranks"
    if pipeline * chunks > config.model.num_layers:
        return f"--num-layers {config.model.num_layers} does not fill the stages of the pipeline"
    if not all(_runs(schedule, pipeline, chunks, size // samples) for size in batches):
        return f"--pipeline-schedule {schedule} cannot run the number of microbatches"
    if 3 * pipeline * chunks * (batches[-1] // samples) > MOST_ACTIONS:
        return "the pipeline has too many actions to be simulated here"
    return None


def _runs(name: str, pipeline: int, chunks: int, count: int) -> bool:
    return check_microbatches(runnable_schedule(name, pipeline, count), pipeline, chunks, count) is None


def _schedules(config: Config, fixed: dict, pipeline: int) -> list[tuple[str, int]]:
    """(schedule, chunks a rank) to try. gpipe is what 1f1b becomes with few microbatches, and never better."""
    pairs = [("1f1b", 1)]
    if pipeline > 1:
        pairs += [("gpipe", 1), *((name, 2) for name in V_SCHEDULES)]
        pairs += [(name, chunks) for name in INTERLEAVED for chunks in (*CHUNKS[1:], 3, 5, 6, 7, 8)]
    whole_backward = config.parallel.compile or fixed.get("recompute_granularity") == "full"
    asked, chunks = fixed.get("pipeline_schedule"), fixed.get("num_virtual_stages_per_pipeline_rank")
    return [
        (name, number)
        for name, number in pairs
        if (name == asked if asked else name != "gpipe")
        and (number == chunks if chunks else number in CHUNKS)
        and not (name in SPLIT_BACKWARD_SCHEDULES and whole_backward)
    ]


def _copies(cluster: Cluster, cut: int, data: int) -> list[int]:
    """One copy of the sharded model, or one in each node's worth of data-parallel ranks (HSDP)."""
    inside = cluster.gpus_per_node // cut
    return [1, data // inside] if inside > 1 and data > inside and data % inside == 0 else [1]


def fitting(
    config: Config, cluster: Cluster, fixed: dict, found: Found, offload: bool
) -> Iterator[tuple[Layout, Config]]:
    """The structures with the least recomputation that makes them fit, weights freed after forward or kept."""
    for structure in structures(config, cluster, fixed, found):
        # Schedules that split the backward keep the weights whatever the flag says.
        policies = (
            ["always", "never"] if structure.pipeline_schedule not in SPLIT_BACKWARD_SCHEDULES else ["always"]
        )
        for policy in _choices(fixed, "reshard_after_forward", policies):
            found.tried += 1
            layout = replace(structure, reshard_after_forward=policy, fsdp_cpu_offload=offload)
            over, layout, applied = _first_fit(config, cluster, fixed, layout)
            if over <= 0:
                found.fitting += 1
                yield layout, applied
            else:
                found.miss(over, layout)


def _first_fit(config: Config, cluster: Cluster, fixed: dict, layout: Layout) -> tuple[float, Layout, Config]:
    """(bytes above the limit, layout, its config): the least recomputation that fits, else what comes nearest."""
    nearest = (float("inf"), layout, config)
    pipeline = layout.pipeline_model_parallel_size
    # Where the backward is split, recomputed blocks would hold more than is saved: the parser refuses it.
    kinds = RECOMPUTE[:2] if layout.pipeline_schedule in SPLIT_BACKWARD_SCHEDULES else RECOMPUTE
    limits = [None, 4 * pipeline] if pipeline > 1 else [None]
    for recompute, limit in product(_choices(fixed, "recompute_granularity", kinds), limits):
        one = replace(layout, recompute_granularity=recompute, max_microbatches_per_step=limit)
        applied = one.applied_to(config, cluster.num_gpus)
        passes, count = microbatches_of(applied)
        chunks = one.num_virtual_stages_per_pipeline_rank
        if limit is not None and (passes == 1 or not _runs(one.pipeline_schedule, pipeline, chunks, count)):
            continue
        ranks = sorted({0, 1, pipeline - 1} & set(range(pipeline)))
        over = max(m.total for m in rank_memory(applied, ranks)) - cluster.memory_limit
        if over < nearest[0]:
            nearest = over, one, applied
        if over <= 0:
            break
    return nearest


def search(
    config: Config,
    cluster: Cluster,
    fixed: dict,
    top: int,
    accepts: Callable[[Layout], str | None] | None = None,
) -> Found:
    """The `top` fastest layouts that fit; with the weights in host memory only where no layout fits without.

    Layouts are simulated in the order of a lower bound of their step (the slowest rank's own work), until no bound is
    below the top-th best: so none that is left out could be among them.

    Args:
        config: complete, with its vocabulary; its own layout is not looked at.
        fixed: field of Layout -> the value that the user gave.
        accepts: a last word on a layout, None or why it cannot run.
    """
    accepts = accepts or (lambda layout: None)
    for offload in (False, True) if "fsdp_cpu_offload" not in fixed else (fixed["fsdp_cpu_offload"],):
        found = Found()
        fits = [
            (least_seconds(applied, cluster), number, layout, applied)
            for number, (layout, applied) in enumerate(fitting(config, cluster, fixed, found, offload))
        ]
        for bound, _, layout, applied in sorted(fits, key=lambda fit: fit[:2]):
            if len(found.plans) >= top and bound > found.plans[top - 1].time.seconds:
                break
            reason, memory = accepts(layout), rank_memory(applied)
            over = max(one.total for one in memory) - cluster.memory_limit
            if reason is not None or over > 0:
                found.fitting -= 1
                if reason is not None:
                    found.refuse(reason)
                else:
                    found.miss(over, layout)
                continue
            found.plans.append(Plan(layout, applied, memory, step_time(applied, cluster)))
            found.plans.sort(key=lambda plan: (plan.time.seconds, plan.worst.total))
            del found.plans[top:]
        if found.plans:
            break
    return found


def nothing_fits(found: Found) -> ConfigError:
    """One sentence about why there is no plan."""
    if found.least_missing is not None:
        size, layout = found.least_missing
        return ConfigError(
            f"no layout fits: of {found.tried:,} the closest ({' '.join(layout.flags())}) needs {size / GIB:,.1f} GiB "
            "more on a GPU; give more --num-gpus or a GPU with more memory"
        )
    reasons = sorted(found.refused.items(), key=lambda item: -item[1])
    return ConfigError(
        "no layout can run: " + (reasons[0][0] if reasons else "the flags given leave none to try")
    )
