"""Tied weights on two stages: bit-equal copies after training, also when several passes make one step."""

import torch

from megatron_lite.mesh import build_mesh
from megatron_lite.training.optimizer import build_optimizer
from tests.parity import bare_loss, full, initial_whole_model, make_batches, make_config, my_part, set_up
from tests.ranks import run_ranks

NAME = "embedding.word_embeddings.weight"


def _copies_and_gradient(config, batch):
    """Two train_step calls before the optimizer's step, as an outer accumulation would make."""
    mesh = build_mesh(config, torch.device("cpu"))
    chunks, pipeline = set_up(config, mesh)
    optimizer = build_optimizer(chunks, config.optimizer)
    tokens = int((batch["labels"] != -100).sum())
    mine = my_part(batch, config, mesh)
    half = mine["tokens"].shape[0] // 2
    for part in (slice(0, half), slice(half, None)):
        pipeline.train_step({key: t[part] for key, t in mine.items()}, 4, 1 / tokens)
    gradients = [full(p.grad) for c in chunks for name, p in c.named_global_parameters() if name == NAME]
    optimizer.step()
    return gradients, [full(p) for c in chunks for name, p in c.named_global_parameters() if name == NAME]


def test_copies_stay_equal_over_accumulated_passes():
    config = make_config(pp=2, dp=2, microbatches=8, model={"untie_embeddings_and_output_weights": False})
    batch = make_batches(config.training.global_batch_size, 1)[0]
    results = run_ranks(_copies_and_gradient, 4, config, batch, init=True)
    gradients = [g for gradients, _ in results for g in gradients]
    weights = [w for _, weights in results for w in weights]
    assert len(weights) == 4  # each of two dp ranks gathers the copy of each of two stages
    assert all(torch.equal(weights[0], other) for other in weights)
    model = initial_whole_model(config)
    bare_loss(model, batch).backward()
    judge = model.embedding.word_embeddings.weight.grad
    for gradient in gradients:
        torch.testing.assert_close(gradient, judge, rtol=1e-5, atol=1e-5 * judge.abs().max().item())
