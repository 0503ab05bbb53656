"""Dropout: equal where ranks hold the same activations, different where they hold others; the same when recomputed."""

import torch
import torch.nn.functional as F

from megatron_lite.rehearsal.parity import my_samples
from tests.parity import full, make_batches, make_config, set_up
from tests.ranks import run_ranks

DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}


def _draws(config):
    """(my place, a dropped vector, attention of the same q, k, v on every rank, the draw after it)."""
    run = set_up(config)
    mesh, chunks = run.mesh, run.chunks
    ones = torch.ones(1, 2, 8, 8)
    attention = chunks[0].layers["0"].attention.core
    core = attention.core if config.parallel.context_parallel_size > 1 else attention
    return mesh.coordinates, F.dropout(torch.ones(64), 0.5), core(ones, ones, ones), torch.rand(4)


def _groups(values):
    """How many different tensors there are."""
    return len({tuple(v.flatten().tolist()) for v in values})


def test_tensor_ranks_drop_the_hidden_state_alike_and_heads_differently():
    ranks = run_ranks(_draws, 4, make_config(tp=2, dp=2, model=DROPOUT), init=True)
    for data_parallel in (0, 1):
        mine = [r for r in ranks if r[0]["dp_shard"] == data_parallel]
        assert _groups([hidden for _, hidden, _, _ in mine]) == 1
        assert _groups([attended for _, _, attended, _ in mine]) == 2
        assert _groups([after for *_, after in mine]) == 1
    assert _groups([hidden for _, hidden, _, _ in ranks]) == 2


def test_ranks_with_other_tokens_drop_differently():
    config = make_config(tp=2, cp=2, sequence_parallel=True, model=DROPOUT)
    ranks = run_ranks(_draws, 4, config, init=True)
    assert _groups([hidden for _, hidden, _, _ in ranks]) == 4
    assert _groups([attended for _, _, attended, _ in ranks]) == 4


def _gradients(config, batch):
    run = set_up(config)
    run.pipeline.train_step(my_samples(batch, config, run.mesh), 4, 1.0)
    return {name: full(p.grad) for c in run.chunks for name, p in c.named_global_parameters()}


def test_recomputed_dropout_is_the_same():
    """Every gradient with recomputation is bit-equal to the one without; another seed is not."""
    layout = {"pp": 2, "tp": 2, "model": DROPOUT | {"num_layers": 4}}
    batch = make_batches(4, 1)[0]
    kept = run_ranks(_gradients, 4, make_config(**layout), batch, init=True)
    again = run_ranks(_gradients, 4, make_config(**layout, recompute_granularity="full"), batch, init=True)
    plain = layout | {"model": {"num_layers": 4}}
    without = run_ranks(_gradients, 4, make_config(**plain), batch, init=True)
    for rank, gradients in enumerate(kept):
        for name, gradient in gradients.items():
            assert torch.equal(gradient, again[rank][name]), name
            assert not torch.allclose(gradient, without[rank][name], rtol=1e-3), name
