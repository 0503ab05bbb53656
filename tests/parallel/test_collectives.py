"""What travels, how often, in which format: gradients once per step and unit or as sharding says, weights likewise."""

import functools
import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lite.rehearsal.parity import my_samples
from tests.parity import assert_equals_one_process, make_batches, make_config, set_up, train_in_layout
from tests.ranks import run_ranks


class Collectives(TorchDispatchMode):
    """Counts c10d operations by (name, dtype of what travels) and the bytes that come in."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        if name.startswith(("c10d::", "_c10d_functional::")) and "wait" not in name:
            tensor = next(t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor))
            self.seen[name.split("::")[1].strip("_"), tensor.dtype] += 1
        return function(*args, **(kwargs or {}))


def _counted(config):
    """{microbatches: the operations of one step}, on each rank."""
    run = set_up(config)
    mesh, pipeline = run.mesh, run.pipeline
    counters = {}
    for microbatches in (4, 8):
        samples = microbatches * mesh.data_parallel_size
        batch = {key: t[:samples] for key, t in make_batches(config.training.global_batch_size, 1)[0].items()}
        smaller = replace(config, training=replace(config.training, global_batch_size=samples))
        with Collectives() as collectives:
            pipeline.train_step(my_samples(batch, smaller, mesh), microbatches, 1.0)
        counters[microbatches] = collectives.seen
    return counters


@functools.cache
def _counters(layout):
    config = make_config(microbatches=8, **json.loads(layout))
    return run_ranks(_counted, config.parallel.world_size, config, init=True)


def count(kind, microbatches=4, dtype=None, **layout):
    """Per rank, how many operations whose name holds `kind` one step runs."""
    ranks = _counters(json.dumps(layout, sort_keys=True))
    return [
        sum(n for (name, seen), n in rank[microbatches].items() if kind in name and dtype in (None, seen))
        for rank in ranks
    ]


PP_DP = {"pp": 2, "dp": 2}
UNITS = 5  # a rank of pp 2: four of eight blocks, and embedding or head


@pytest.mark.parametrize(
    "layout",
    [
        PP_DP,
        PP_DP | {"schedule": "gpipe"},
        PP_DP | {"chunks": 2},
        PP_DP | {"chunks": 2, "schedule": "zbv"},
        PP_DP | {"recompute_granularity": "full"},
    ],
)
def test_gradients_are_reduced_once_per_step_and_unit(layout):
    """Not once per microbatch: 4 and 8 microbatches reduce the same number of times."""
    expected = {"zbv": [6, 6, 4, 4]}.get(layout.get("schedule"), [UNITS] * 4)  # zbv: both ends lie on rank 0
    assert count("reduce_scatter", 4, **layout) == expected
    assert count("reduce_scatter", 8, **layout) == expected


def test_replicas_add_their_shards_once():
    hsdp = {"pp": 2, "dp": 2, "num_distributed_optimizer_instances": 2}
    assert count("allreduce", 8, **hsdp) == [UNITS] * 4


WHOLE_UNITS = 10  # eight blocks, embedding, head


@pytest.mark.parametrize(
    ("layout", "each_microbatch"),
    [
        ({}, True),
        ({"data_parallel_sharding_strategy": "optim_grads"}, True),
        ({"data_parallel_sharding_strategy": "optim"}, False),
        ({"reshard_after_forward": "never"}, False),
    ],
)
def test_the_whole_model_on_a_rank_reduces_sharded_gradients_with_every_microbatch(layout, each_microbatch):
    """Without a pipeline nothing that is sharded is ever whole; where it is kept whole, it is reduced once."""
    for microbatches in (4, 8):
        expected = WHOLE_UNITS * (microbatches if each_microbatch else 1)
        assert count("reduce_scatter", microbatches, dp=2, **layout) == [expected] * 2


def test_replicas_of_the_whole_model_add_their_shards_once():
    hsdp = {"dp": 4, "num_distributed_optimizer_instances": 2}
    assert count("allreduce", 8, **hsdp) == [WHOLE_UNITS] * 4


def test_weights_are_gathered_once_when_they_are_kept_and_for_every_microbatch_when_not():
    kept = PP_DP | {"reshard_after_forward": "never"}
    assert count("allgather", 4, **kept) == count("allgather", 8, **kept) == [UNITS] * 4
    assert count("allgather", 4, **PP_DP) == [UNITS] * 4  # so small a model is kept under a pipeline
    assert count("allgather", 4, **PP_DP, data_parallel_sharding_strategy="optim_grads") == [UNITS] * 4
    # Freed, each is gathered for each forward and backward, but the head, whose backward follows its forward.
    freed = PP_DP | {"reshard_after_forward": "always", "reduce_gradients": "each-microbatch"}
    assert sorted(count("allgather", 4, **freed)) == [4 * (2 * UNITS - 1)] * 2 + [4 * 2 * UNITS] * 2
    assert count("reduce_scatter", 4, **freed) == [4 * UNITS] * 4


def test_bf16_weights_travel_in_bf16_and_gradients_in_fp32():
    layout = PP_DP | {"precision": "bf16"}
    assert count("reduce_scatter", dtype=torch.float32, **layout) == [UNITS] * 4
    assert count("reduce_scatter", dtype=torch.bfloat16, **layout) == [0] * 4
    # FSDP gathers bytes; the hidden states of the pipeline travel as what they are.
    assert all(n > 0 for n in count("send", dtype=torch.bfloat16, **layout))
    # torch 2.11's stages greet each neighbour with one fp32 number before the first step.
    assert all(n <= 1 for n in count("send", dtype=torch.float32, **layout))


def test_sequence_parallel_scatters_where_tensor_parallel_adds_up():
    """A block ends twice in a sum: without SP an all-reduce, with SP a reduce-scatter; both once more in backward."""
    layers = 2
    plain, scattered = (
        count("reduce_scatter", tp=2, sequence_parallel=on, model={"num_layers": layers})
        for on in (False, True)
    )
    assert all(s - p >= 4 * 2 * 2 * layers for s, p in zip(scattered, plain))


@pytest.mark.parametrize(
    "layout", [PP_DP | {"chunks": 2}, {"tp": 2, "pp": 2, "sequence_parallel": True}, {"cp": 2, "dp": 2}]
)
def test_torchs_own_checks_of_collectives_are_silent(layout):
    """TORCH_DISTRIBUTED_DEBUG=DETAIL compares every collective's shapes and order over the ranks."""
    config = make_config(**layout)
    batches = make_batches(config.training.global_batch_size, 1)
    env = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    outcomes = run_ranks(train_in_layout, 4, config, batches, init=True, env=env)
    assert_equals_one_process(outcomes, config, batches)
