"""Tied weights on two stages: bit-equal copies after training, over accumulated passes and through a checkpoint."""

from dataclasses import replace

import pytest
import torch

from megatron_lite.config import CheckpointConfig
from megatron_lite.distributed.tensors import local_part
from megatron_lite.rehearsal.one_process import run_one_process
from megatron_lite.rehearsal.parity import my_samples
from megatron_lite.training.consistency import ReplicaError, check_tied_copies
from megatron_lite.training.named_tensors import checkpoint_tensors, tied_copies
from tests.parity import assert_equals_one_process, full, make_batches, make_config, set_up
from tests.ranks import run_ranks

NAME = "embedding.word_embeddings.weight"


def _copies_and_gradient(config, batch):
    """Two train_step calls before the optimizer's step, as an outer accumulation would make."""
    run = set_up(config)
    chunks, pipeline, optimizer = run.chunks, run.pipeline, run.optimizer
    tokens = int((batch["labels"] != -100).sum())
    mine = my_samples(batch, config, run.mesh)
    half = mine["tokens"].shape[0] // 2
    for part in (slice(0, half), slice(half, None)):
        pipeline.train_step({key: t[part] for key, t in mine.items()}, 4, 1 / tokens)
    gradients = [full(p.grad) for c in chunks for name, p in c.named_global_parameters() if name == NAME]
    optimizer.step()
    return gradients, [full(p) for c in chunks for name, p in c.named_global_parameters() if name == NAME]


def test_copies_stay_equal_over_accumulated_passes():
    config = make_config(pp=2, dp=2, microbatches=8, model={"untie_embeddings_and_output_weights": False})
    config = replace(config, optimizer=replace(config.optimizer, clip_grad=0.0))
    batch = make_batches(config.training.global_batch_size, 1)[0]
    results = run_ranks(_copies_and_gradient, 4, config, batch, init=True)
    gradients = [g for gradients, _ in results for g in gradients]
    weights = [w for _, weights in results for w in weights]
    assert len(weights) == 4  # each of two dp ranks gathers the copy of each of two stages
    assert all(torch.equal(weights[0], other) for other in weights)
    assert all(torch.equal(gradients[0], other) for other in gradients)
    one = run_one_process(config, [batch, batch], torch.device("cpu"))
    summed = replace(one, gradients=one.gradients | {NAME: gradients[0]})
    assert_equals_one_process([summed], config, [batch])


SCHEDULES = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved-1f1b": 2,
    "interleaved-zero-bubble": 2,
    "zbv": 2,
    "dualpipev": 2,
}
TIED = {"untie_embeddings_and_output_weights": False, "num_layers": 4}


class _Run:
    """A tied model on two pipeline ranks: steps, a checkpoint, all bits of it."""

    def __init__(self, config):
        run = set_up(config)
        self.config, self.mesh = config, run.mesh
        self.chunks, self.pipeline, self.optimizer = run.chunks, run.pipeline, run.optimizer
        self.checkpointer = run.checkpointer()

    def steps(self, batches):
        for batch in batches:
            self.optimizer.zero_grad()
            self.pipeline.train_step(
                my_samples(batch, self.config, self.mesh), 4, 1 / batch["labels"].numel()
            )
            self.optimizer.step()

    def state(self):
        sides = (f(self.chunks, self.optimizer) for f in (checkpoint_tensors, tied_copies))
        return [{name: full(tensor) for name, tensor in side.items()} for side in sides]

    def save(self):
        check_tied_copies(self.chunks, self.optimizer, self.mesh, 2)
        self.checkpointer.save(2, checkpoint_tensors(self.chunks, self.optimizer), {}, {})

    def load(self):
        found = self.checkpointer.find()
        for tensors in (checkpoint_tensors, tied_copies):
            self.checkpointer.load(found, tensors(self.chunks, self.optimizer))


def _straight_and_resumed(folder):
    """Per schedule: the states (own, copies) after four steps, and after two, a checkpoint and two more."""
    outcomes = {}
    for schedule, chunks in SCHEDULES.items():
        config = make_config(pp=2, chunks=chunks, schedule=schedule, model=TIED)
        place = CheckpointConfig(save=f"{folder}/{schedule}", load=f"{folder}/{schedule}")
        config = replace(config, checkpoint=place)
        batches = make_batches(config.training.global_batch_size, 4)
        straight, resumed = _Run(config), _Run(config)
        straight.steps(batches[:2])
        straight.save()
        straight.steps(batches[2:])
        resumed.load()
        resumed.steps(batches[2:])
        outcomes[schedule] = (straight.state(), resumed.state())
    return outcomes


def test_a_resume_goes_on_to_the_bit_in_every_schedule(tmp_path):
    ranks = run_ranks(_straight_and_resumed, 2, str(tmp_path), init=True)
    for schedule in SCHEDULES:
        own, copies = {}, {}
        for straight, resumed in (rank[schedule] for rank in ranks):
            for before, after in zip(straight, resumed, strict=True):
                assert before.keys() == after.keys()
                assert all(torch.equal(before[name], after[name]) for name in before), schedule
            own, copies = own | straight[0], copies | straight[1]
        assert set(copies) == {n for n in own if n.endswith(NAME)} and len(copies) == 4, schedule
        assert all(torch.equal(copies[name], own[name]) for name in copies), schedule


def _drift(what):
    schedule = "zbv" if what == "zbv" else "interleaved-1f1b"
    config = make_config(pp=2, chunks=2, dp=2 if what == "weight" else 1, schedule=schedule, model=TIED)
    run = _Run(config)
    run.steps(make_batches(config.training.global_batch_size, 1))
    check_tied_copies(run.chunks, run.optimizer, run.mesh, 1)
    copies = tied_copies(run.chunks, run.optimizer)
    if copies and run.mesh.rank("dp_shard") == 0:  # one of the pipelines, all have to stop
        tensor = local_part(copies[NAME if what == "weight" else f"optimizer.exp_avg.{NAME}"])
        tensor[[3, 5]] = tensor[[5, 3]].clone()  # the same values in other places
    with pytest.raises(ReplicaError, match="after iteration 1 the embedding's weight and its tied copy"):
        check_tied_copies(run.chunks, run.optimizer, run.mesh, 1)
    return True


@pytest.mark.parametrize("what", ["weight", "average", "zbv"])
def test_copies_that_drift_apart_stop_the_save(what):
    ranks = 4 if what == "weight" else 2
    assert run_ranks(_drift, ranks, what, init=True) == [True] * ranks
