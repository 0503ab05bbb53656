"""Layouts for a number of GPUs: made, held against memory, ranked by predicted step time. Imports no torch."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, fields, replace

from megatron_lite.arithmetic.batch_size import BatchSchedule
from megatron_lite.arithmetic.partition import V_SCHEDULES
from megatron_lite.arithmetic.pipeline_schedule import (
    SPLIT_BACKWARD_SCHEDULES,
    check_microbatches,
    runnable_schedule,
)
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
# A schedule with more actions than this takes seconds to play: it is left out, and the summary says so.
MOST_ACTIONS = 300_000
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
    recompute_granularity: str = "none"
    reshard_after_forward: str = "auto"
    max_microbatches_per_step: int | None = None
    fsdp_cpu_offload: bool = False

    def flags(self) -> list[str]:
        """The flags of pretrain_gpt.py that make it so."""
        out = []
        for item in fields(self):
            value = getattr(self, item.name)
            if value not in ("none", "auto", None, False) and (value != 1 or item.name == "micro_batch_size"):
                out += [flag_name(item.name), *([] if value is True else [str(value)])]
        if self.tensor_model_parallel_size > 1:
            out.append("--sequence-parallel")
        if self.recompute_granularity == "full":
            out += ["--recompute-method", "uniform", "--recompute-num-layers", "1"]
        return out

    def applied_to(self, config: Config, num_gpus: int) -> Config:
        """The config of a run in this layout; what `flags` would make of the same command line."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "micro_batch_size"}
        full = self.recompute_granularity == "full"
        values |= {
            "world_size": num_gpus,
            "sequence_parallel": self.tensor_model_parallel_size > 1,
            "recompute_granularity": None
            if self.recompute_granularity == "none"
            else self.recompute_granularity,
            "recompute_method": "uniform" if full else None,
            "recompute_num_layers": 1 if full else None,
        }
        return replace(
            config,
            parallel=replace(config.parallel, **values),
            training=replace(config.training, micro_batch_size=self.micro_batch_size),
        )


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
    """Layouts without regard to memory: every tensor size inside a node, context size, pipeline, schedule, micro batch.

    `fixed` holds fields that the user gave: only those values are tried. What cannot run is counted in `found`.
    """
    for tensor in _choices(fixed, "tensor_model_parallel_size", divisors(cluster.gpus_per_node)):
        for context in _choices(fixed, "context_parallel_size", (1, 2, 4, 8, 16, 32)):
            tokens = config.data.seq_length // context
            if (
                context > 1
                and tokens < LEAST_TOKENS_PER_CONTEXT_RANK
                and "context_parallel_size" not in fixed
            ):
                continue
            reason = refused_cut(config, cluster.num_gpus, tensor, context)
            if reason:
                found.refuse(reason)
                continue
            rest = cluster.num_gpus // (tensor * context)
            for pipeline in _choices(
                fixed, "pipeline_model_parallel_size", divisors(rest, MOST_PIPELINE_RANKS)
            ):
                if rest % pipeline:
                    found.refuse(
                        f"{cluster.num_gpus} GPUs do not divide by tensor x context x pipeline ranks"
                    )
                    continue
                yield from _pipelines(config, cluster, fixed, found, (tensor, context, pipeline))


def refused_cut(config: Config, num_gpus: int, tensor: int, context: int) -> str | None:
    """Why a model cannot be cut over so many tensor and context ranks, in words without numbers of the layout."""
    model = config.model
    for name, number in (
        ("--num-attention-heads", model.num_attention_heads),
        ("--num-query-groups", model.num_query_groups),
        ("--ffn-hidden-size", model.ffn_hidden_size),
        ("the padded vocabulary", model.padded_vocab_size),
    ):
        if number % tensor:
            return f"{name} {number:,} does not divide by the tensor ranks"
    if num_gpus % (tensor * context):
        return f"{num_gpus} GPUs do not divide by tensor x context x pipeline ranks"
    length = config.data.seq_length
    if (context > 1 and length % (2 * context)) or (tensor > 1 and (length // context) % tensor):
        return f"--seq-length {length:,} does not divide by twice the context ranks, or its part by the tensor ranks"
    return None


def _choices(fixed: dict, name: str, values: Collection) -> Collection:
    return (fixed[name],) if name in fixed else values


def _pipelines(
    config: Config, cluster: Cluster, fixed: dict, found: Found, cut: tuple[int, int, int]
) -> Iterator[Layout]:
    """The schedules, micro batch sizes and replicas of one cut into (tensor, context, pipeline) ranks."""
    tensor, context, pipeline = cut
    data = cluster.num_gpus // (tensor * context * pipeline)
    batches = sorted({size for _, size in BatchSchedule.from_config(config).steps})
    for micro in _choices(fixed, "micro_batch_size", MICRO_BATCHES):
        odd = [size for size in batches if size % (micro * data)]
        if odd:
            found.refuse(f"a batch of {odd[0]:,} does not divide by micro batch x data-parallel ranks")
            continue
        counts = [size // (micro * data) for size in batches]
        for name, chunks in _schedules(config, fixed, pipeline):
            if pipeline * chunks > config.model.num_layers:
                found.refuse(
                    f"--num-layers {config.model.num_layers} does not fill the stages of the pipeline"
                )
                continue
            if not all(_runs(name, pipeline, chunks, count) for count in counts):
                found.refuse(f"--pipeline-schedule {name} cannot run the number of microbatches")
                continue
            if 3 * pipeline * chunks * counts[-1] > MOST_ACTIONS:
                found.refuse("the pipeline has too many actions to be played here")
                continue
            for replicas in _choices(
                fixed, "num_distributed_optimizer_instances", _replicas(cluster, cut, data)
            ):
                if data % replicas:
                    found.refuse(
                        f"--num-distributed-optimizer-instances {replicas} does not divide the data ranks"
                    )
                    continue
                yield Layout(tensor, context, pipeline, chunks, name, micro, replicas)


def _schedules(config: Config, fixed: dict, pipeline: int) -> list[tuple[str, int]]:
    """(schedule, chunks a rank) to try. gpipe is what 1f1b becomes with few microbatches, and never better."""
    if pipeline == 1:
        pairs = [("1f1b", 1)]
    else:
        pairs = [("gpipe", 1), ("1f1b", 1), *((name, 2) for name in V_SCHEDULES)]
        pairs += [(name, chunks) for name in INTERLEAVED for chunks in (*CHUNKS[1:], 3, 5, 6, 7, 8)]
    asked, chunks = fixed.get("pipeline_schedule"), fixed.get("num_virtual_stages_per_pipeline_rank")
    return [
        (name, number)
        for name, number in pairs
        if (name == asked if asked else name != "gpipe")
        and (number == chunks if chunks else number in CHUNKS)
        and not (name in SPLIT_BACKWARD_SCHEDULES and _whole_backward(config, fixed))
    ]


def _whole_backward(config: Config, fixed: dict) -> bool:
    """Whether something is asked for that a split backward cannot do."""
    return config.parallel.compile or fixed.get("recompute_granularity") == "full"


def _replicas(cluster: Cluster, cut: tuple[int, int, int], data: int) -> list[int]:
    """One copy of the sharded model, or one in each node's worth of data-parallel ranks (HSDP)."""
    tensor, context, _ = cut
    inside = cluster.gpus_per_node // (tensor * context)
    return [1, data // inside] if inside > 1 and data > inside and data % inside == 0 else [1]


def fitting(
    config: Config, cluster: Cluster, fixed: dict, found: Found, offload: bool
) -> Iterator[tuple[Layout, Config]]:
    """The structures with the least recomputation that makes them fit, weights freed after forward or kept."""
    for structure in structures(config, cluster, fixed, found):
        policies = ["always", "never"]
        if structure.pipeline_schedule in SPLIT_BACKWARD_SCHEDULES:
            policies = ["always"]  # these keep the weights whatever it says
        for policy in _choices(fixed, "reshard_after_forward", policies):
            found.tried += 1
            layout = replace(structure, reshard_after_forward=policy, fsdp_cpu_offload=offload)
            fit = _first_fit(config, cluster, fixed, layout)
            if isinstance(fit, tuple):
                found.fitting += 1
                yield fit
            else:
                found.miss(fit.missing, fit.layout)


@dataclass(frozen=True)
class _Miss:
    """The layout of a structure that needs least, and the bytes that it needs more than there are."""

    missing: float
    layout: Layout


def _first_fit(
    config: Config, cluster: Cluster, fixed: dict, layout: Layout
) -> tuple[Layout, Config] | _Miss:
    """The layout with the least recomputation that fits, else the one that comes nearest."""
    nearest = _Miss(float("inf"), layout)
    pipeline = layout.pipeline_model_parallel_size
    limits = [None, 4 * pipeline] if pipeline > 1 else [None]
    # Where the backward is split, whole blocks made again would hold more than is saved: the parser refuses it.
    kinds = RECOMPUTE[:2] if layout.pipeline_schedule in SPLIT_BACKWARD_SCHEDULES else RECOMPUTE
    for recompute in _choices(fixed, "recompute_granularity", kinds):
        for limit in limits:
            one = replace(layout, recompute_granularity=recompute, max_microbatches_per_step=limit)
            applied = one.applied_to(config, cluster.num_gpus)
            passes, count = microbatches_of(applied)
            if limit is not None and (
                passes == 1
                or not _runs(one.pipeline_schedule, pipeline, one.num_virtual_stages_per_pipeline_rank, count)
            ):
                continue
            ranks = sorted({0, 1, pipeline - 1} & set(range(pipeline)))
            over = max(m.total for m in rank_memory(applied, ranks)) - cluster.memory_limit
            if over <= 0:
                return one, applied
            if over < nearest.missing:
                nearest = _Miss(over, one)
    return nearest


def _runs(name: str, pipeline: int, chunks: int, count: int) -> bool:
    return check_microbatches(runnable_schedule(name, pipeline, count), pipeline, chunks, count) is None


def search(
    config: Config,
    cluster: Cluster,
    fixed: dict,
    top: int,
    accepts: Callable[[Layout], str | None] | None = None,
) -> Found:
    """The `top` fastest layouts that fit; with the weights in host memory only where no layout fits without.

    Layouts are played in the order of a lower bound of their step (the slowest rank's own work), until no bound is
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
            reason = accepts(layout)
            if reason is not None:
                found.fitting -= 1
                found.refuse(reason)
                continue
            memory = rank_memory(applied)
            over = max(one.total for one in memory) - cluster.memory_limit
            if over > 0:
                found.fitting -= 1
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
