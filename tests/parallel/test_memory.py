"""Bytes per rank, measured: states are total / shards; schedules, recomputation and chunked loss hold less."""

import pytest

from megatron_lite.distributed.tensors import local_part
from megatron_lite.rehearsal.one_process import initial_model
from megatron_lite.rehearsal.parity import my_samples
from megatron_lite.training.named_tensors import named_state
from tests.parallel.live_bytes import MIB, MODEL, peaks
from tests.parity import make_batches, make_config, set_up
from tests.ranks import run_ranks

WIDE = {"hidden_size": 128, "ffn_hidden_size": 256, "kv_channels": 32}


def _state_bytes(config):
    """Bytes on this rank: parameters, gradients, optimizer state (without the steps' counters)."""
    run = set_up(config)
    mesh, chunks, pipeline, optimizer = run.mesh, run.chunks, run.pipeline, run.optimizer
    batch = make_batches(config.training.global_batch_size, 1)[0]
    pipeline.train_step(my_samples(batch, config, mesh), 4, 1.0)
    optimizer.step()
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    states = [t for c in chunks for _, t in named_state(c.named_global_parameters(), optimizer) if t.dim()]
    return [_bytes(tensors) for tensors in (parameters, [p.grad for p in parameters], states)]


def _bytes(tensors):
    """Bytes of the storages of my pieces; FSDP keeps the gradients of a unit in one."""
    storages = [local_part(t).untyped_storage() for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


@pytest.mark.parametrize(
    ("layout", "copies"),
    [
        ({"dp": 4}, 1),
        ({"dp": 4, "num_distributed_optimizer_instances": 2}, 2),
        ({"pp": 2, "tp": 2, "sequence_parallel": True}, 1),
        ({"dp": 2, "cp": 2}, 1),
        ({"dp": 4, "data_parallel_sharding_strategy": "no_shard"}, 4),
    ],
)
def test_states_are_total_over_shards(layout, copies):
    """fp32 weights, gradients of the same size, Adam's two averages; all ranks together hold `copies` of each."""
    config = make_config(model=WIDE, **layout)
    total = sum(p.numel() for p in initial_model(config).parameters()) * 4
    ranks = run_ranks(_state_bytes, 4, config, init=True)
    for kind, per_element in enumerate((1, 1, 2)):
        seen = [rank[kind] for rank in ranks]
        assert sum(seen) == pytest.approx(total * copies * per_element, rel=0.03)
        if "pp" not in layout:
            assert all(n == pytest.approx(total * copies * per_element / 4, rel=0.03) for n in seen)


def test_schedules_and_recomputation_hold_less():
    """pp 2, 8 microbatches: GPipe's first stage holds 8 in flight, 1F1B's 2; recomputation keeps the inputs only."""
    gpipe = peaks(pp=2, schedule="gpipe")[0]
    plain = peaks(pp=2)[0]
    passes = peaks(pp=2, schedule="gpipe", max_microbatches_per_step=2)[0]
    full = peaks(pp=2, recompute_granularity="full")[0]
    every_operator = ("core_attn", "layernorm", "mlp")
    selective = peaks(pp=2, recompute_granularity="selective", recompute_modules=every_operator)[0]
    assert plain < 0.4 * gpipe
    assert passes < 0.4 * gpipe
    assert full < selective < 0.7 * plain


def test_sharded_weights_and_gradients_are_never_whole():
    """dp 2, one block after the other: gathered weights and gradients of two units; else of the whole model."""
    model = {"hidden_size": 128, "ffn_hidden_size": 512, "num_layers": 12}
    total = sum(p.numel() for p in initial_model(make_config(model=MODEL | model)).parameters()) * 4
    sharded = peaks(microbatches=2, samples=1, model=model, dp=2)[0]
    kept = peaks(microbatches=2, samples=1, model=model, dp=2, reshard_after_forward="never")[0]
    assert kept > 2 * total  # weights, and the sums of gradients in fp32
    assert sharded < 1.15 * total  # half of it shards of gradients; then a few units, and the activations


def test_the_chunked_loss_never_holds_all_logits():
    """4,096 tokens x 2,048 words x 4 bytes are 32 MiB of logits; in chunks of 1,024 they are 8."""
    layout = {"microbatches": 1, "samples": 256}
    whole = peaks(model={"num_layers": 1}, **layout)[0]
    chunked = peaks(model={"num_layers": 1, "cross_entropy_loss_fusion": True}, **layout)[0]
    assert whole - chunked > 1.5 * (32 - 8) * MIB  # the logits, their fp32 softmax and its gradient
