"""--compile: training is one graph that all layers share, whatever is recomputed or exchanged; by dynamo's counters."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from megatron_lite.rehearsal.dry_run import fake_world
from tests.model.gpu_on_cpu import forced
from tests.parity import make_batches, make_config, set_up

LAYERS = 12  # more than dynamo's limit of 8 graphs for one function
FULL = {"recompute_granularity": "full"}
SP = {"tp": 2, "sequence_parallel": True}


def selective(*modules):
    return {"recompute_granularity": "selective", "recompute_modules": modules}


EVERY = selective("core_attn", "layernorm", "mlp")
ONE_GRAPH = {
    "none": {},
    "full": FULL,
    "full, units of 5": FULL | {"recompute_method": "uniform", "recompute_num_layers": 5},
    "full, block": FULL | {"recompute_method": "block", "recompute_num_layers": 5},
    "core_attn": selective("core_attn"),
    "layernorm": selective("layernorm"),
    "mlp": selective("mlp"),
    "every module, dropout": EVERY | {"model": {"attention_dropout": 0.1, "hidden_dropout": 0.1}},
    "dp, window": {"dp": 2, "model": {"window_size": (5, 0)}} | EVERY,
    "cp": {"cp": 2},
    "cp, full": {"cp": 2} | FULL,
    "cp, every module": {"cp": 2} | EVERY,
    "cp, documents": {"cp": 2, "documents": True},
    "tp + sp, normed heads": SP | EVERY | {"model": {"qk_layernorm": True}},
}
# The branches of a GPU: flash attention without a mask, FlexAttention (whose CPU kernel has no backward: evaluation).
GPU = {
    "cp, bf16": {"cp": 2, "precision": "bf16"},
    "cp, window, dropout, bf16, every module": EVERY
    | {"cp": 2, "precision": "bf16", "model": {"window_size": (5, 0), "attention_dropout": 0.1}},
    "cp, fp32": {"cp": 2, "evaluate": True},
    "documents": {"documents": True, "evaluate": True},
    "cp, documents, bf16": {"cp": 2, "documents": True, "precision": "bf16", "evaluate": True},
}
# Core attention outside of the graph, which it breaks.
BROKEN = {
    "documents one by one": {"documents": True},
    "a tensor rank's own dropout": {"tp": 2, "model": {"attention_dropout": 0.1}},
}


@pytest.fixture
def train(monkeypatch):
    """train(row) -> (graphs, calls of graphs, breaks) of two steps of two microbatches, as one rank of a fake world."""
    calls = []

    def backend(graph, inputs):
        return lambda *values: calls.append(1) or graph(*values)

    compile_module = nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, **options: compile_module(self, backend=backend, **options)
    )

    def run(model=None, documents=False, evaluate=False, **row):
        config = make_config(
            microbatches=2, compile=True, model={"num_layers": LAYERS} | (model or {}), **row
        )
        config = replace(config, data=replace(config.data, reset_attention_mask=documents))
        torch._dynamo.reset()
        counters.clear()
        with fake_world(0, config.parallel.world_size):
            pipeline = set_up(config).pipeline
            for batch in make_batches(2, steps=2, documents=documents):
                pipeline.eval_step(batch, 2) if evaluate else pipeline.train_step(batch, 2, 1.0)
        return counters["stats"]["unique_graphs"], len(calls), sum(counters["graph_break"].values())

    yield run
    torch._dynamo.reset()


@pytest.mark.parametrize("row", ONE_GRAPH)
def test_training_is_one_graph(row, train):
    graphs, calls, breaks = train(**ONE_GRAPH[row])
    assert (graphs, breaks) == (1, 0)
    again = {"full": 2, "full, units of 5": 2, "cp, full": 2, "full, block": 1 + 5 / LAYERS}.get(row, 1)
    assert calls == 4 * LAYERS * again  # no layer ran without its graph


@pytest.mark.parametrize("row", GPU)
def test_a_gpu_trains_in_one_graph(row, train, monkeypatch):
    with forced(monkeypatch):
        graphs, calls, breaks = train(**GPU[row])
    assert (graphs, calls, breaks) == (1, 4 * LAYERS, 0)


@pytest.mark.parametrize("row", BROKEN)
def test_core_attention_outside_is_no_graph_a_layer(row, train):
    graphs, calls, _ = train(**BROKEN[row])
    assert graphs <= 6 and calls == 4 * LAYERS * graphs
