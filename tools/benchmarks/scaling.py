"""Suite scaling: what a larger world, model or corpus costs beside the step, by counting and with fake ranks.

Seconds are of this process's processor, so that a busy machine changes little. A growth is the cost at the larger size
over the cost at the smaller one; what is wanted of it follows from how it has to grow.
"""

import functools
import math
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from megatron_lite.arguments.parse import parse_arguments
from megatron_lite.arithmetic.partition import plan_from_config, stages_of_rank
from megatron_lite.arithmetic.vocabulary import with_vocabulary
from megatron_lite.checkpoint.dcp import _Planner
from megatron_lite.checkpoint.manifest import FileEntry, Manifest
from megatron_lite.checkpoint.metadata import parse_metadata
from megatron_lite.checkpoint.shards import LocalShard
from megatron_lite.config import Config
from megatron_lite.data.index_kernels import (
    build_document_index,
    build_sample_index,
    build_shuffle_index,
    plan_epochs,
)
from megatron_lite.distributed.environment import Environment
from megatron_lite.distributed.mesh import build_mesh
from megatron_lite.model.gpt import GPTChunk
from megatron_lite.parallel.parallelize import build_chunks
from megatron_lite.rehearsal.dry_run import fake_world, rehearse_rank
from tools.benchmarks.comparison import Options, Row, Table, quartiles

# Seconds are only held against a growth that is off by more than this.
SLACK = 2.0
# A message of at most so many bytes is a number for the log or the norm, not data.
SMALL_MESSAGE = 64

Costs = dict[str, float]  # what is counted -> number, bytes or seconds


@dataclass(frozen=True)
class Growth:
    """How one cost has to grow: with size to the power of `power`, `exactly` for what is counted and not timed."""

    power: float
    unit: str
    exactly: bool = True
    why: str = ""


def run(options: Options) -> list[Table]:
    """Growth of start-up, messages, checkpoint metadata and data index with ranks, layers and documents (counted)."""
    quick = options.quick
    worlds, layers = ((16, 64), (2, 8)) if quick else ((16, 64, 256, 1024), (8, 16, 32, 64))
    saves, documents = (
        ((4, 16), (1000, 10000)) if quick else ((16, 64, 256, 1024), (10_000, 100_000, 1_000_000))
    )
    times = options.repeats
    return [
        table("start-up with the world", "ranks", worlds, start_of_world, START, times),
        table("start-up with the model", "layers", layers, start_of_model, BUILD, times),
        table("a step's messages with the world", "ranks", worlds[:: len(worlds) - 1], messages, MESSAGES, 1),
        table(
            "checkpoint metadata with the world, 8 layers", "ranks", saves, metadata_of_world, METADATA, times
        ),
        table(
            "checkpoint metadata with the model, 16 ranks",
            "layers",
            layers,
            metadata_of_model,
            METADATA,
            times,
        ),
        table("data index with the corpus", "documents", documents, data_index, INDEX, times),
    ]


def table(
    title: str,
    unit: str,
    sizes: Sequence[int],
    cost_at: Callable[[int], Costs],
    growths: Mapping[str, Growth],
    repeats: int,
) -> Table:
    """A row for each cost: its growth from the smallest size to the largest; below, the costs at every size."""
    cost_at(sizes[0])  # what is made once for the process is there from now on
    found = {size: [cost_at(size) for _ in range(repeats)] for size in sizes}
    small, large = sizes[0], sizes[-1]
    rows = []
    for name, growth in growths.items():
        ratios = [a[name] / max(b[name], 1e-9) for a, b in zip(found[large], found[small], strict=True)]
        most = (large / small) ** growth.power * (1.0 if growth.exactly else SLACK)
        rows.append(
            Row(
                f"{name}, {large:,} {unit}",
                f"{small:,} {unit}",
                *quartiles(ratios),
                at_most=most * (1 + 1e-9),
                note=f"{order_of(growth.power, unit)}{'; ' + growth.why if growth.why else ''}",
            )
        )
    facts = [f"| {unit} | " + " | ".join(growths) + " |", "|---|" + "---|" * len(growths)]
    for size in sizes:
        middles = [quartiles([cost[name] for cost in found[size]])[0] for name in growths]
        shown = [
            shown_as(value, growth.unit) for value, growth in zip(middles, growths.values(), strict=True)
        ]
        facts.append(f"| {size:,} | " + " | ".join(shown) + " |")
    return Table(title, rows, facts)


def order_of(power: float, unit: str) -> str:
    """O(1), O(ranks), O(ranks^0.5)."""
    if power == 0:
        return "O(1)"
    return f"O({unit})" if power == 1 else f"O({unit}^{power:g})"


def shown_as(value: float, unit: str) -> str:
    """A number, bytes or seconds for people."""
    if unit == "s":
        return f"{value * 1000:,.1f} ms" if value < 1 else f"{value:,.1f} s"
    if unit == "B" and value >= 1024:
        power = min(3, int(math.log(value, 1024)))
        return f"{value / 1024**power:,.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"
    return f"{value:,.0f}{' B' if unit == 'B' else ''}"


def timed(work: Callable[[], object]) -> float:
    """Processor seconds."""
    started = time.process_time()
    work()
    return time.process_time() - started


MODEL = """
    --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 96 --swiglu --seq-length 32 --disable-bias-linear
    --max-position-embeddings 32 --position-embedding-type rope --normalization RMSNorm --vocab-size 127
    --untie-embeddings-and-output-weights --micro-batch-size 1 --train-iters 10 --lr 1e-4 --mock-data
    --tokenizer-type NullTokenizer --hidden-dropout 0 --attention-dropout 0
"""


def words_of(world: int, layers: int, more: str = "") -> list[str]:
    """A run's command line, one microbatch a data-parallel rank and pipeline rank."""
    return f"{MODEL} --num-layers {layers} --global-batch-size {world} --check --world-size {world} {more}".split()


def config_of(world: int, layers: int, more: str = "") -> Config:
    """The same, parsed."""
    return with_vocabulary(parse_arguments(words_of(world, layers, more), Environment()), 128)


LAYOUT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4"
START = {
    "flags to a checked config": Growth(0, "s", exactly=False),
    "groups that a rank is in": Growth(0, "", why="one an axis, tokens, checkpoints"),
    "groups that a rank is told of": Growth(
        1, "", why="DeviceMesh's loop over all; no message for others' groups"
    ),
    "mesh and groups": Growth(1, "s", exactly=False),
}


def start_of_world(world: int) -> Costs:
    """Parsing, and the last rank's mesh, in a world of so many ranks."""
    seconds = timed(lambda: parse_arguments(words_of(world, 8, LAYOUT), Environment()))
    config, made, mine = config_of(world, 8, LAYOUT), [], []
    new_group = distributed_c10d.new_group

    def counted(*args: object, **kwargs: object) -> object:
        made.append(new_group(*args, **kwargs))
        if made[-1] != dist.GroupMember.NON_GROUP_MEMBER:
            mine.append(made[-1])
        return made[-1]

    with fake_world(world - 1, world), mock.patch.object(device_mesh, "new_group", counted):
        building = timed(lambda: build_mesh(config, torch.device("cpu")))
    return dict(zip(START, (seconds, len(mine), len(made), building), strict=True))


BUILD = {
    "flags to a checked config": Growth(0, "s", exactly=False),
    "split into stages": Growth(1, "s", exactly=False),
    "chunks built and initialised": Growth(1, "s", exactly=False),
}


def start_of_model(layers: int) -> Costs:
    """Parsing, the split and one rank's sharded chunk of a model of so many layers, on 16 ranks."""
    parsing = timed(lambda: parse_arguments(words_of(16, layers), Environment()))
    config = config_of(16, layers)

    with fake_world(15, 16):
        mesh = build_mesh(config, torch.device("cpu"))
        splitting = timed(lambda: plan_from_config(config))
        stages = stages_of_rank(plan_from_config(config), 0)
        building = timed(lambda: build_chunks(config, stages, mesh, GPTChunk))
    return dict(zip(BUILD, (parsing, splitting, building), strict=True))


MESSAGES = {
    "numbers all-reduced a step": Growth(0, "", why="tokens, loss, gradient norm: one an axis"),
    "bytes of them": Growth(0, "B"),
    "messages besides": Growth(0, "", why="FSDP's own"),
}


def messages(world: int) -> Costs:
    """What the trainer's step sends, rehearsed as the last of so many data-parallel ranks."""
    config = parse_arguments(words_of(world, 2), Environment())
    found = rehearse_rank(config, world - 1).messages
    numbers = [m for m in found if m.kind == "all-reduce" and m.bytes <= SMALL_MESSAGE * m.count]
    rest = sum(m.count for m in found) - sum(m.count for m in numbers)
    costs = (sum(m.count for m in numbers), sum(m.bytes for m in numbers), rest)
    return dict(zip(MESSAGES, map(float, costs), strict=True))


METADATA = {
    "entries": Growth(1, "", why="a piece of each tensor on each rank that holds some"),
    "plans on the wire": Growth(1, "B", exactly=False),
    "planning on rank 0": Growth(1, "s", exactly=False),
    ".metadata": Growth(1, "B", exactly=False),
    "reading it, each rank": Growth(1, "s", exactly=False),
    "manifest": Growth(1, "B", exactly=False),
}
OF_TENSORS = {name: growth for name, growth in METADATA.items() if name != "manifest"}
HIDDEN = 1024


def metadata_of_world(ranks: int) -> Costs:
    """Planning a save of 8 layers that FSDP cuts over so many ranks."""
    return metadata_costs(ranks, 8)


def metadata_of_model(layers: int) -> Costs:
    """Planning a save of so many layers that FSDP cuts over 16 ranks."""
    return metadata_costs(16, layers)


def metadata_costs(ranks: int, layers: int) -> Costs:
    """What a save plans and a load reads, of weights and Adam's two averages; no tensor has memory."""
    shapes = dict(_shapes(layers))
    plans = []
    for rank in range(ranks):
        planner = _Planner(None)
        planner.set_up_planner(_pieces(shapes, rank, ranks), StorageMeta(), is_coordinator=rank == 0)
        plans.append(planner.create_local_plan())
    wire = sum(len(pickle.dumps(plan)) for plan in (plans[0], plans[-1])) / 2 * ranks
    started = time.process_time()
    _, metadata = _Planner(None).create_global_plan(plans)
    planning = time.process_time() - started
    stored = _with_records(metadata)
    data = pickle.dumps(stored)
    reading = timed(lambda: parse_metadata(data, "the benchmark's metadata"))
    manifest = Manifest(1, {f"__{rank}_0.distcp": FileEntry(1 << 30, "0" * 64) for rank in range(ranks)})
    entries = sum(len(kept.chunks) for kept in metadata.state_dict_metadata.values())
    costs = (entries, wire, planning, len(data), reading, len(manifest.to_bytes()))
    return dict(zip(METADATA, map(float, costs), strict=True))


def _shapes(layers: int) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of all tensors of a Llama-like model's checkpoint."""
    block = {
        "attention.q_proj": (HIDDEN, HIDDEN),
        "attention.k_proj": (HIDDEN, HIDDEN),
        "input_norm": (HIDDEN,),
    }
    block |= {
        "attention.v_proj": (HIDDEN, HIDDEN),
        "attention.o_proj": (HIDDEN, HIDDEN),
        "pre_mlp_norm": (HIDDEN,),
    }
    block |= {f"mlp.{name}_proj": (4 * HIDDEN, HIDDEN) for name in ("gate", "up", "down")}
    weights = [(f"layers.{n}.{name}.weight", shape) for n in range(layers) for name, shape in block.items()]
    return [
        (f"{prefix}{name}", shape)
        for prefix in ("", "optimizer.m.", "optimizer.v.")
        for name, shape in weights
    ]


def _pieces(shapes: Mapping[str, tuple[int, ...]], rank: int, ranks: int) -> dict[str, LocalShard]:
    """FSDP's cut along dim 0."""
    out = {}
    for name, shape in shapes.items():
        rows = -(-shape[0] // ranks)
        first = min(rank * rows, shape[0])
        local = torch.empty(min(rows, shape[0] - first), *shape[1:], device="meta")
        out[name] = LocalShard(local, shape, (first, *(0 for _ in shape[1:])))
    return out


def _with_records(metadata: Metadata) -> Metadata:
    """The metadata as it is stored: where the bytes of each piece lie."""
    records, place = {}, 0
    for name, kept in metadata.state_dict_metadata.items():
        for chunk in kept.chunks:
            length = math.prod(chunk.sizes) * kept.properties.dtype.itemsize
            rank = chunk.offsets[0] // max(1, chunk.sizes[0])
            records[MetadataIndex(name, chunk.offsets)] = _StorageInfo(f"__{rank}_0.distcp", place, length)
            place += length
    return Metadata(metadata.state_dict_metadata, storage_data=records)


INDEX = {
    "index built, one process a machine": Growth(1, "s", exactly=False),
    "bytes on disk, mapped by all": Growth(1, "B", exactly=False),
    "document lengths in memory": Growth(1, "B"),
}


@functools.cache
def _lengths(documents: int) -> np.ndarray:
    return np.full(documents, 1000, dtype=np.int32)


def data_index(documents: int) -> Costs:
    """The index of two epochs over documents of 1,000 tokens, sequence length 2,048. Ranks play no part in it."""
    lengths = _lengths(documents)
    started = time.process_time()
    plan = plan_epochs(int(lengths.sum(dtype=np.int64)), 2 * documents * 1000 // 2048 - 1, 2048, 1)
    random = np.random.RandomState(1)
    order = build_document_index(0, documents, plan, random)
    arrays = (order, build_sample_index(lengths, order, 2048, plan, 1), build_shuffle_index(plan, random))
    seconds = time.process_time() - started
    costs = (seconds, sum(array.nbytes for array in arrays), lengths.nbytes)
    return dict(zip(INDEX, map(float, costs), strict=True))
