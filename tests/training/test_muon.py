"""Muon: torch's own for one matrix, and the same weights from every layout."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megatron_lite.training.muon import Muon, orthogonalize
from tests.parity import assert_equals_one_process, make_batches, make_config, train_in_layout
from tests.ranks import run_ranks

LAYOUTS = {
    "pp x dp, tied": {"pp": 2, "dp": 2, "model": {"untie_embeddings_and_output_weights": False}},
    "tp + sp x dp": {"tp": 2, "dp": 2, "sequence_parallel": True},
    "hsdp x cp": {"dp": 2, "cp": 2, "num_distributed_optimizer_instances": 2},
}


def _group(parameter):
    return [{"params": [parameter], "orthogonal": True, "lr": 0.02, "weight_decay": 0.1}]


def _gradients(shape, steps=4):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for _ in range(steps)]


def _train(parameter, optimizer, gradients):
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("shape", [(16, 40), (40, 16), (24, 24)])
def test_one_matrix_is_torchs(shape):
    gradients = _gradients(shape)
    mine, judge = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    ours = _train(mine, Muon(_group(mine), 0.02, (0.9, 0.95), 1e-8), gradients)
    theirs = torch.optim.Muon([judge], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    expected = _train(judge, theirs, gradients)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


def test_each_expert_is_a_matrix_of_its_own():
    """A stack of matrices moves as torch's Muon moves each by itself, one without rows on this rank not at all."""
    shape = (5, 16, 40)
    gradients = _gradients(shape)
    stack = torch.nn.Parameter(torch.ones(shape))
    ours = _train(stack, Muon(_group(stack), 0.02, (0.9, 0.95), 1e-8), gradients)
    for expert in range(5):
        alone = torch.nn.Parameter(torch.ones(shape[1:]))
        theirs = torch.optim.Muon([alone], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        expected = _train(alone, theirs, [gradient[expert] for gradient in gradients])
        torch.testing.assert_close(ours[expert], expected, rtol=1e-5, atol=1e-5)
    assert orthogonalize(torch.empty(0, 16, 40)).shape == (0, 16, 40)


def _sharded(shape, dim):
    mesh = init_device_mesh("cpu", (2,))
    parameter = torch.nn.Parameter(distribute_tensor(torch.ones(shape), mesh, [Shard(dim)]))
    gradients = [distribute_tensor(g, mesh, [Shard(dim)]) for g in _gradients(shape)]
    return _train(parameter, Muon(_group(parameter), 0.02, (0.9, 0.95), 1e-8), gradients).full_tensor()


@pytest.mark.parametrize("experts", [1, 5])
def test_sharded_experts_move_as_whole_ones(experts):
    """Each rank orthogonalises the experts that lie on it; with one expert a rank has none."""
    shape = (experts, 16, 40)
    whole = torch.nn.Parameter(torch.ones(shape))
    expected = _train(whole, Muon(_group(whole), 0.02, (0.9, 0.95), 1e-8), _gradients(shape))
    for seen in run_ranks(_sharded, 2, shape, 0, init=True):
        torch.testing.assert_close(seen, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_sharded_matrix_moves_as_the_whole_one(dim):
    """Bit-equal; and orthogonalising each shard by itself, the fault to fear, is far off."""
    shape = (16, 40)
    whole = torch.nn.Parameter(torch.ones(shape))
    expected = _train(whole, Muon(_group(whole), 0.02, (0.9, 0.95), 1e-8), _gradients(shape))
    for seen in run_ranks(_sharded, 2, shape, dim, init=True):
        assert torch.equal(seen, expected)
    gradient = _gradients(shape)[0]
    by_shard = torch.cat([orthogonalize(part) for part in gradient.chunk(2, dim)], dim)
    assert (by_shard - orthogonalize(gradient)).abs().max() > 0.1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_one_process(layout):
    """Losses of two steps; the second follows Muon's update, whose bf16 rounding it shows."""
    row = LAYOUTS[layout]
    row = row | {"model": {"init_method_std": 0.1} | row.get("model", {})}
    config = make_config(optimizer="muon", **row)
    batches = make_batches(config.training.global_batch_size, 2)
    outcomes = run_ranks(train_in_layout, config.parallel.world_size, config, batches, init=True)
    assert_equals_one_process(outcomes, config, batches)
