"""What a larger world, model or corpus costs beside the step, counted with fake ranks: no growth worse than it must be.

docs/performance.md has the figures.
"""

import math
import pickle
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from megatron_lite.arguments.parse import parse_arguments
from megatron_lite.arithmetic.vocabulary import with_vocabulary
from megatron_lite.checkpoint.dcp import _Planner
from megatron_lite.checkpoint.manifest import FileEntry, Manifest
from megatron_lite.checkpoint.metadata import parse_metadata
from megatron_lite.checkpoint.shards import LocalShard
from megatron_lite.data.index_kernels import (
    build_document_index,
    build_sample_index,
    build_shuffle_index,
    plan_epochs,
)
from megatron_lite.distributed.environment import Environment
from megatron_lite.distributed.mesh import build_mesh
from megatron_lite.rehearsal.dry_run import fake_world, rehearse_rank

# A message of at most so many bytes is a number for the log or the norm, not data.
SMALL_MESSAGE = 64
MODEL = """
    --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 96 --swiglu --seq-length 32 --disable-bias-linear
    --max-position-embeddings 32 --position-embedding-type rope --normalization RMSNorm --vocab-size 127
    --untie-embeddings-and-output-weights --micro-batch-size 1 --train-iters 10 --lr 1e-4 --mock-data
    --tokenizer-type NullTokenizer --hidden-dropout 0 --attention-dropout 0 --check
"""


def config_of(world, layers, more=""):
    words = f"{MODEL} --num-layers {layers} --global-batch-size {world} --world-size {world} {more}"
    return parse_arguments(words.split(), Environment())


def groups_of(world):
    """(groups that the last rank is in, groups that it is told of)."""
    config = with_vocabulary(
        config_of(world, 8, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4"), 128
    )
    made, new_group = [], distributed_c10d.new_group

    def counted(*args, **kwargs):
        made.append(new_group(*args, **kwargs))
        return made[-1]

    with fake_world(world - 1, world), mock.patch.object(device_mesh, "new_group", counted):
        build_mesh(config, torch.device("cpu"))
    return sum(group != dist.GroupMember.NON_GROUP_MEMBER for group in made), len(made)


def test_a_rank_joins_as_many_groups_in_any_world():
    """One an axis, tokens, checkpoints; DeviceMesh's loop tells it of the others', which sends nothing."""
    (small, told_small), (large, told_large) = groups_of(16), groups_of(64)
    assert small == large
    assert told_large <= 4 * told_small


def messages_of(world):
    """(numbers all-reduced a step, bytes of them, messages besides), as the last of so many data-parallel ranks."""
    found = rehearse_rank(config_of(world, 2), world - 1).messages
    numbers = [m for m in found if m.kind == "all-reduce" and m.bytes <= SMALL_MESSAGE * m.count]
    small = sum(m.count for m in numbers)
    return small, sum(m.bytes for m in numbers), sum(m.count for m in found) - small


def test_a_step_sends_as_many_messages_in_any_world():
    assert messages_of(16) == messages_of(64)


def metadata_of(ranks, layers):
    """What a save plans and a load reads, of weights and Adam's averages that FSDP cuts; no tensor has memory."""
    shapes = {name: shape for prefix in ("", "m.", "v.") for name, shape in shapes_of(prefix, layers)}
    plans = []
    for rank in range(ranks):
        planner = _Planner(None)
        planner.set_up_planner(shards_of(shapes, rank, ranks), StorageMeta(), is_coordinator=rank == 0)
        plans.append(planner.create_local_plan())
    _, metadata = _Planner(None).create_global_plan(plans)
    data = pickle.dumps(with_records(metadata))
    assert len(parse_metadata(data, "the test's metadata")) == len(shapes)
    manifest = Manifest(1, {f"__{rank}_0.distcp": FileEntry(1 << 30, "0" * 64) for rank in range(ranks)})
    return {
        "entries": sum(len(kept.chunks) for kept in metadata.state_dict_metadata.values()),
        "plans on the wire": sum(len(pickle.dumps(plan)) for plan in plans),
        ".metadata": len(data),
        "manifest": len(manifest.to_bytes()),
    }


def shapes_of(prefix, layers, hidden=1024):
    for number in range(layers):
        for name in ("q", "k", "v", "o"):
            yield f"{prefix}layers.{number}.attention.{name}_proj.weight", (hidden, hidden)
        for name in ("gate", "up", "down"):
            yield f"{prefix}layers.{number}.mlp.{name}_proj.weight", (4 * hidden, hidden)
        for name in ("input_norm", "pre_mlp_norm"):
            yield f"{prefix}layers.{number}.{name}.weight", (hidden,)


def shards_of(shapes, rank, ranks):
    """FSDP's cut along dim 0."""
    out = {}
    for name, shape in shapes.items():
        rows = -(-shape[0] // ranks)
        first = min(rank * rows, shape[0])
        local = torch.empty(min(rows, shape[0] - first), *shape[1:], device="meta")
        out[name] = LocalShard(local, shape, (first, *(0 for _ in shape[1:])))
    return out


def with_records(metadata):
    """The metadata as it is stored: where the bytes of each piece lie."""
    records, place = {}, 0
    for name, kept in metadata.state_dict_metadata.items():
        for chunk in kept.chunks:
            length = math.prod(chunk.sizes) * kept.properties.dtype.itemsize
            rank = chunk.offsets[0] // max(1, chunk.sizes[0])
            records[MetadataIndex(name, chunk.offsets)] = _StorageInfo(f"__{rank}_0.distcp", place, length)
            place += length
    return Metadata(metadata.state_dict_metadata, storage_data=records)


@pytest.mark.parametrize(("small", "large"), [((4, 8), (16, 8)), ((16, 2), (16, 8))])
def test_a_checkpoint_s_plans_are_linear_in_tensors_times_ranks(small, large):
    few, many = metadata_of(*small), metadata_of(*large)
    growth = math.prod(large) / math.prod(small)
    assert (
        few["entries"] == math.prod(small) * 9 * 3
    )  # each of nine weights and its averages in a piece a rank
    assert many["entries"] == growth * few["entries"]
    for name in ("plans on the wire", ".metadata", "manifest"):
        assert few[name] < many[name] <= 1.2 * growth * few[name] or name == "manifest"
    assert many["manifest"] <= large[0] / small[0] * few["manifest"]


def index_bytes(documents):
    """Bytes of the index of two epochs over documents of 1,000 tokens. Ranks play no part in it."""
    lengths = np.full(documents, 1000, dtype=np.int32)
    plan = plan_epochs(int(lengths.sum(dtype=np.int64)), 2 * documents * 1000 // 2048 - 1, 2048, 1)
    random = np.random.RandomState(1)
    order = build_document_index(0, documents, plan, random)
    arrays = (order, build_sample_index(lengths, order, 2048, plan, 1), build_shuffle_index(plan, random))
    return sum(array.nbytes for array in arrays)


def test_the_index_is_linear_in_the_documents():
    assert index_bytes(10_000) <= 10.1 * index_bytes(1000)
