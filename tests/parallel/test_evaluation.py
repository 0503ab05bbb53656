"""Evaluation by the pipeline: right over several batches, between training steps, and built once for all of them."""

import pytest
import torch

from megatron_lite.rehearsal.one_process import initial_model
from megatron_lite.rehearsal.parity import my_samples
from tests.parity import bare_loss, make_batches, make_config, per_token, set_up
from tests.ranks import run_ranks


def _evaluate(config, batches):
    """(loss per token of every evaluated batch, number of schedules built) over two evaluations, training between."""
    run = set_up(config)
    mesh, pipeline = run.mesh, run.pipeline
    built, build = [], pipeline._build_schedule
    pipeline._build_schedule = lambda count: (built.append(count), build(count))[1]
    losses = []

    def evaluate(batch, microbatches):
        samples = microbatches * config.training.micro_batch_size
        part = {key: t[:samples] for key, t in my_samples(batch, config, mesh).items()}
        tokens = int((part["labels"] != -100).sum())
        losses.append(per_token(pipeline.eval_step(part, microbatches), tokens, mesh))

    for _ in range(2):
        pipeline.set_training(False)
        for batch in batches:
            evaluate(batch, 4)
        evaluate(batches[0], 2)
        pipeline.set_training(True)
        pipeline.train_step(my_samples(batches[0], config, mesh), 4, 1.0)
    return losses, built


@pytest.mark.parametrize(
    "layout",
    [
        {"schedule": "1f1b"},
        {"chunks": 2},
        {"chunks": 2, "schedule": "zbv"},
        {"chunks": 2, "schedule": "interleaved-1f1b", "max_microbatches_per_step": 2},
    ],
    ids=["1f1b", "interleaved-1f1b", "zbv", "in passes"],
)
def test_one_schedule_serves_an_evaluation(layout):
    config = make_config(pp=2, **layout)
    batches = make_batches(config.training.global_batch_size)
    for losses, built in run_ranks(_evaluate, 2, config, batches, init=True):
        model = initial_model(config)  # no optimizer step is taken: the weights stay
        with torch.no_grad():
            wanted = [bare_loss(model, batch, config).item() for batch in batches]
            wanted.append(bare_loss(model, {key: t[:2] for key, t in batches[0].items()}, config).item())
        assert losses == pytest.approx(wanted * 2, rel=1e-5)
        # Evaluation, its smaller batch; training; the next evaluation, training kept. In passes all have two.
        in_passes = config.parallel.max_microbatches_per_step == 2
        assert built == ([2] * 3 if in_passes else [4, 2, 4, 4, 2])
