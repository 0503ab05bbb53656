"""`pretrain_gpt.py FLAGS --dry-run --world-size N --rank R`: the run's own code as one rank of N, with fake tensors.

Fake tensors have shapes and no values, and torch's fake process group answers at once: the mesh, the chunks, the
pipeline, the optimizer and the trainer's step are the real ones, and raise what the real job would raise.
"""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_lite.arithmetic.batch_size import pass_size
from megatron_lite.arithmetic.mesh_sizes import AXES, mesh_sizes
from megatron_lite.arithmetic.partition import StagePlan, stages_of_rank
from megatron_lite.arithmetic.pipeline_schedule import (
    SPLIT_BACKWARD_SCHEDULES,
    check_microbatches,
    runnable_schedule,
)
from megatron_lite.arithmetic.vocabulary import known_vocabulary, with_vocabulary
from megatron_lite.config import Config, ConfigError, ModelConfig
from megatron_lite.data.tokenizer import build_tokenizer
from megatron_lite.distributed.mesh import ParallelMesh, build_mesh
from megatron_lite.distributed.torch_private import (
    FakeStore,
    FakeTensor,
    FakeTensorMode,
    forget_sharding_results,
    tree_leaves,
    unset_fake_temporarily,
)
from megatron_lite.model.gpt import GPTChunk
from megatron_lite.model.kernels import AMPERE
from megatron_lite.parallel.experts import Exchange
from megatron_lite.parallel.pipeline import Batch
from megatron_lite.planning.activations import expert_rows
from megatron_lite.rehearsal.accounting import (
    ACTIVATIONS,
    BUFFERS,
    GATHERED,
    OPTIMIZER,
    PARAMETERS,
    WORKSPACE,
    Accounting,
    Message,
    bytes_of,
)
from megatron_lite.training.named_tensors import named_state
from megatron_lite.training.run import build_run

MIB = 1 << 20
_NEVER = 1 << 30  # iterations


@dataclass(frozen=True)
class Rehearsal:
    """What one rank holds, in bytes, and what it sends in one step.

    Args:
        gradients: the shards that the optimizer reads.
        activations: the most that forward passes had left for backward passes at one moment.
            peak_parts: purpose -> bytes at the moment of the peak; they add up to `peak`.
        rehearsed: microbatches of the two steps that were run; the figures are those of a step of `microbatches`.
    """

    rank: int
    coordinates: dict[str, int]
    stages: list[StagePlan]
    microbatches: int
    rehearsed: tuple[int, int]
    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    peak: int
    peak_parts: dict[str, int]
    messages: list[Message]
    seconds: float
    notes: list[str]


def rehearse(config: Config) -> int:
    """Print the rehearsal of --rank, or with --all-stages of one rank of each pipeline rank; the exit code.

    Raises:
        ConfigError: a flag that does not fit, or that a rehearsal cannot follow.
        Exception: whatever the real job would raise on that rank.
    """
    for rank in ranks_to_rehearse(config):
        try:
            print(describe(rehearse_rank(config, rank), config), flush=True)
        except ConfigError:
            raise
        except Exception as error:
            error.add_note(f"(--dry-run: rank {rank} of {config.parallel.world_size:,} would stop with this)")
            raise
    return 0


def ranks_to_rehearse(config: Config) -> list[int]:
    """--rank, or the ranks that differ from it in nothing but the pipeline axis."""
    rank, world = config.command.rank, config.parallel.world_size
    if not config.command.all_stages:
        return [rank]
    stride = world // config.parallel.pipeline_model_parallel_size
    return list(range(rank % stride, world, stride))


def rehearse_rank(config: Config, rank: int) -> Rehearsal:
    """Run two optimizer steps as this rank and count: the first makes optimizer state, the second is like any later."""
    started = time.perf_counter()
    config, notes = prepare(config)
    with fake_world(rank, config.parallel.world_size):
        mesh = build_mesh(config, torch.device("cpu"))
        accounting = ValuelessAccounting(mesh, config)
        with FakeTensorMode(allow_non_fake_inputs=True), accounting:
            return _run(config, rank, mesh, accounting, started, notes)


def prepare(config: Config) -> tuple[Config, list[str]]:
    """The config as it is rehearsed, with its vocabulary, and what a user should know about the difference.

    Raises:
        ConfigError: nothing tells the size of the vocabulary.
    """
    notes = []
    config = replace(
        with_vocabulary(config, _vocabulary(config)),
        # Nothing is read or written: a group of hosts and a stored state would be for that.
        checkpoint=replace(config.checkpoint, save=None, load=None, pretrained_checkpoint=None),
        training=replace(config.training, iterations_to_skip=()),
        # Neither step has a line of the log, nor is it the last: what a line reduces is no part of every step.
        logging=replace(
            config.logging, log_num_zeros_in_grad=False, log_params_norm=False, log_interval=_NEVER
        ),
    )
    if config.parallel.compile:
        notes.append("without --compile: its fused kernels hold less than what is counted here")
        config = replace(config, parallel=replace(config.parallel, compile=False))
    if config.data.reset_attention_mask:
        notes.append("without --reset-attention-mask: its block masks come to the activations")
        config = replace(config, data=replace(config.data, reset_attention_mask=False))
    if config.model.attention_dropout:
        notes.append(
            "without --attention-dropout: a GPU's attention keeps no [S, S] matrix for it, a CPU's does"
        )
        config = replace(config, model=replace(config.model, attention_dropout=0.0))
    if config.parallel.fsdp_cpu_offload:
        notes.append("--fsdp-cpu-offload: parameters, gradients and optimizer state lie in the host's memory")
    return config, notes


def _vocabulary(config: Config) -> int:
    """The tokenizer's size, or where its files cannot be read what the flags tell."""
    try:
        if config.data.tokenizer_type is not None:
            return build_tokenizer(config.data, config.model.vocab_size).vocab_size
    except ConfigError:
        pass
    size = known_vocabulary(config)
    if size is None:
        raise ConfigError("--dry-run does not know the size of the vocabulary: add --vocab-size N")
    return size


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """torch.distributed as one rank of a world in which every message arrives at once and carries nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # DTensor remembers results with their mesh, and the next world's mesh is equal to it but has other groups.
        forget_sharding_results()


def axes_of_groups(mesh: ParallelMesh) -> dict[str, str]:
    """Name of a process group -> the axis, or axes, that it lies along."""
    sharded = {"dp_shard x cp x tp": mesh.token_mesh, "dp_shard x cp": mesh.fsdp_mesh}
    names = {found.get_group(found.ndim - 1).group_name: axes for axes, found in sharded.items()}
    experts = []
    if mesh.size("ep") > 1:
        names[mesh.expert_mesh.get_group("edp").group_name] = "edp"
        experts = ["ep"]
    for axis in sorted(
        (*AXES, *experts), key=mesh.size
    ):  # a group that is all of the world goes by what fills it
        names[mesh.group(axis).group_name] = axis
    return names


class ValuelessAccounting(Accounting):
    """Also answers where the host reads a number that fake tensors do not have: loss and norm are finite, and clipped.

    Integers and truth values are 1; torch's pipeline warm-up reads "all stages know their shapes" from that.
    """

    def __init__(self, mesh: ParallelMesh, config: Config) -> None:
        super().__init__(axes_of_groups(mesh))
        self._number = 2 * max(config.optimizer.clip_grad, 1.0)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Read a number, or run and count the operator; what has real tensors, as a mesh has ranks, stays real."""
        if function is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked so often that the way round through the fake mode is felt
        if not types and any(isinstance(item, torch.Tensor) for item in tree_leaves((args, kwargs))):
            with unset_fake_temporarily():
                return function(*args, **(kwargs or {}))
        if function is not torch.ops.aten._local_scalar_dense.default:
            return super().__torch_dispatch__(function, types, args, kwargs)
        dtype = args[0].dtype
        return self._number if dtype.is_floating_point else dtype == torch.bool or 1

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operator's result; torch gives shapes of the experts' product only in bf16."""
        if function is not torch.ops.aten._grouped_mm.default or args[0].dtype == torch.bfloat16:
            return super().run(function, args, kwargs)
        halves = (factor.bfloat16() for factor in args[:2])
        return super().run(function, (*halves, *args[2:]), kwargs).to(args[0].dtype)


class EvenRouting:
    """Stands for the reading of counts, which have no values: even, but --imbalance times as many rows to this rank.

    One object for all of a rank's mixtures, whose microbatches have the same number of tokens.
    """

    def __init__(self, config: Config, exchange: Exchange) -> None:
        sent, computed = map(round, expert_rows(config))
        ranks, mine = dist.get_world_size(exchange.group), dist.get_rank(exchange.group)
        self._received = _evenly(computed, ranks)
        self._sent = _evenly(sent - self._received[mine], ranks - 1)
        self._sent.insert(mine, self._received[mine])

    def __call__(self, *counts: torch.Tensor) -> tuple[list[int], list[int]]:
        """(sent, received) rows of each rank, as Exchange.read_splits."""
        return self._sent, self._received


def _evenly(number: int, parts: int) -> list[int]:
    return [number * (part + 1) // parts - number * part // parts for part in range(parts)]


class WeightlessChunk(GPTChunk):
    """A chunk whose initial weights have shapes only: to draw them would read values. Attends as on a GPU."""

    def __init__(self, config: ModelConfig, *which: Any) -> None:
        super().__init__(config, *which)
        for layer in self.layers.values():
            layer.attention.core.assumed_generation = AMPERE

    def initial_rows(self, name: str, shape: tuple[int, ...], rows: torch.Tensor, seed: int) -> torch.Tensor:
        """[R, *shape[1:]], nothing drawn."""
        return torch.empty(len(rows), *shape[1:])


class AnyBatches:
    """Stands for the loader: batches of the right shapes."""

    def __init__(self, config: Config, mesh: ParallelMesh) -> None:
        self._data = config.data
        self._ranks = mesh.data_parallel_size
        self._device = mesh.device

    def next_batch(self, global_batch_size: int) -> Batch:
        """Tensors [M*B, S] of this rank's part of a global batch."""
        data = self._data
        wanted = {
            "tokens": True,
            "labels": True,
            "position_ids": data.reset_position_ids,
            "document_ids": data.reset_attention_mask,
        }
        shape = (global_batch_size // self._ranks, data.seq_length)
        return {
            key: torch.zeros(shape, dtype=torch.int64, device=self._device)
            for key, there in wanted.items()
            if there
        }


def _run(
    config: Config, rank: int, mesh: ParallelMesh, accounting: Accounting, started: float, notes: list[str]
) -> Rehearsal:
    run = build_run(config, mesh, chunk_type=WeightlessChunk)
    chunks, optimizer, schedule, loader = run.chunks, run.optimizer, run.batches, AnyBatches(config, mesh)
    wanted = schedule.num_microbatches(schedule.total_samples)
    counts = microbatches_to_run(config, wanted)
    first, second = (count * schedule.samples_per_microbatch for count in counts)
    steps = ((0, first), (first, second))
    run.batches = replace(schedule, steps=steps, total_iterations=_NEVER, total_samples=first + second)

    for mixture in (mixture for chunk in chunks for mixture in chunk.mixtures.values()):
        if mixture.exchange is not None:
            mixture.exchange.read_splits = EvenRouting(config, mixture.exchange)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    accounting.label(parameters, PARAMETERS)
    for chunk in chunks:
        accounting.watch_forward(chunk)
    gradients = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append(bytes_of(p.grad for p in parameters if p.grad is not None))
    )
    buffers, messages = [], []
    for _ in counts:
        gc.collect()
        accounting.start()
        run.step(loader)
        states = [t for c in chunks for _, t in named_state(c.named_global_parameters(), optimizer)]
        accounting.label(states, OPTIMIZER)
        accounting.label_rest(WORKSPACE, BUFFERS)
        buffers.append(accounting.live[BUFFERS])
        messages.append(accounting.messages)
    full = Growth(*counts, wanted)
    more = full.of(*buffers) - buffers[1]
    return Rehearsal(
        rank=rank,
        coordinates=mesh.coordinates,
        stages=stages_of_rank(run.plans, mesh.rank("pp")),
        microbatches=wanted,
        rehearsed=counts,
        parameters=bytes_of(parameters),
        gradients=gradients[-1],
        optimizer=bytes_of(states),
        buffers=buffers[1] + more,
        activations=accounting.most[ACTIVATIONS],
        peak=accounting.peak + more,
        peak_parts=accounting.peak_parts | {BUFFERS: accounting.peak_parts.get(BUFFERS, 0) + more},
        messages=full.of_messages(*messages),
        seconds=time.perf_counter() - started,
        notes=notes,
    )


@dataclass(frozen=True)
class Growth:
    """What a step of `wanted` microbatches has, from steps of `first` and `second`: each more adds the same."""

    first: int
    second: int
    wanted: int

    def of(self, at_first: int, at_second: int) -> int:
        """The number at `wanted`."""
        if self.wanted == self.second:
            return at_second
        return at_second + (at_second - at_first) * (self.wanted - self.second) // (self.second - self.first)

    def of_messages(self, at_first: list[Message], at_second: list[Message]) -> list[Message]:
        """The messages at `wanted`, those of each kind and axis by themselves."""
        before = {(m.kind, m.axis): m for m in at_first}
        return [
            replace(m, count=self.of(before[key].count, m.count), bytes=self.of(before[key].bytes, m.bytes))
            for m in at_second
            for key in [(m.kind, m.axis)]
        ]


def microbatches_to_run(config: Config, wanted: int) -> tuple[int, int]:
    """How many microbatches the two rehearsed steps have, so that a step of `wanted` follows from them.

    From two a pipeline rank on, one more microbatch holds no more activations and sends as much as the one before.
    GPipe holds all of them, and torch's split backwards something of each: they are run with all.
    A step of several passes follows from one pass and two.
    """
    parallel = config.parallel
    size, chunks = parallel.pipeline_model_parallel_size, parallel.num_virtual_stages_per_pipeline_rank
    kind = runnable_schedule(parallel.pipeline_schedule, size, wanted)
    one_pass = pass_size(wanted, parallel.max_microbatches_per_step)
    if one_pass < wanted:
        return one_pass, 2 * one_pass

    def fewest(least: int) -> int:
        fitting = (n for n in range(least, wanted) if check_microbatches(kind, size, chunks, n) is None)
        return next(fitting, wanted)

    if kind == "gpipe" or kind in SPLIT_BACKWARD_SCHEDULES:
        return fewest(min(2, wanted)), wanted
    return fewest(max(size, 2)), fewest(max(2 * size, 3))


def describe(found: Rehearsal, config: Config) -> str:
    """The rehearsal as text."""
    place = ", ".join(
        f"{axis} {found.coordinates[axis]}/{size}"
        for axis, size in mesh_sizes(config.parallel).items()
        if size > 1
    )
    lines = [
        f"rank {found.rank:,} of {config.parallel.world_size:,}" + (f" ({place})" if place else ""),
        *(f"  note: {note}" for note in found.notes),
        *(f"  {_stage(plan)}" for plan in found.stages),
        "  memory, MiB",
        *_row("parameters (fp32 shards)", found.parameters),
        *_row("gradients (shards)", found.gradients),
        *_row(f"optimizer state ({config.optimizer.optimizer})", found.optimizer),
        *_row("receive buffers", found.buffers),
        *_row("activations, at most", found.activations),
        *_row("peak", found.peak),
    ]
    order = (PARAMETERS, OPTIMIZER, BUFFERS, ACTIVATIONS, GATHERED, WORKSPACE)
    lines += [line for part in order for line in _row(f"  {part}", found.peak_parts.get(part, 0))]
    lines.append(f"  messages of a step ({found.microbatches:,} microbatches)")
    lines.append(f"    {'kind':<16}{'axis':<16}{'ranks':>6}{'number':>10}{'MiB':>14}{'MiB sent':>14}")
    lines += [
        f"    {m.kind:<16}{m.axis:<16}{m.group_size:>6,}{m.count:>10,}{m.bytes / MIB:>14,.2f}{m.sent / MIB:>14,.2f}"
        for m in found.messages
    ]
    first, second = found.rehearsed
    lines.append(
        f"  a step of {first:,} and one of {second:,} microbatches rehearsed without an error in {found.seconds:.1f} s"
    )
    return "\n".join(lines)


def _row(name: str, size: int) -> list[str]:
    return [f"    {name:<34}{size / MIB:>14,.2f}"]


def _stage(plan: StagePlan) -> str:
    layers = f"layers {plan.layers[0]} to {plan.layers[-1]}" if plan.layers else "no layers"
    ends = (", embedding" if plan.has_embedding else "") + (", head" if plan.has_lm_head else "")
    return f"stage {plan.stage}: {layers}{ends}"
