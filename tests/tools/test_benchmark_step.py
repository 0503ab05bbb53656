"""The suites of one process: they run, give figures, and refuse work that is not the same."""

import math

import pytest
import torch

from megatron_lite.files.command_line import RunError
from tools.benchmarks import overhead, startup, step
from tools.benchmarks.baseline_model import QUICK, BareModel, build_optimizer, random_batches, train_step
from tools.benchmarks.comparison import Options
from tools.benchmarks.our_run import load_initial_weights, run_config
from tools.benchmarks.peers import llama_name

OPTIONS = Options(repeats=1, quick=True)


# Three starts of Python and torch: some ten seconds.
STARTUP = pytest.param(startup, marks=pytest.mark.slow, id="startup")


@pytest.mark.parametrize(
    "suite", [pytest.param(step, id="step"), pytest.param(overhead, id="overhead"), STARTUP]
)
def test_a_suite_gives_figures(suite):
    threads = torch.get_num_threads()
    tables = suite.run(OPTIONS)
    assert torch.get_num_threads() == threads
    rows = [row for table in tables for row in table.rows]
    assert rows and all(math.isfinite(row.value) and row.verdict for row in rows)


def test_a_step_with_another_learning_rate_is_refused(monkeypatch):
    def faster(model):
        optimizer = build_optimizer(model)
        for group in optimizer.param_groups:
            group["lr"] *= 2
        return optimizer

    monkeypatch.setattr(step, "build_optimizer", faster)
    with pytest.raises(RunError, match="not the same work: the loss after 4 steps of ours"):
        step.run(OPTIONS)


def test_a_start_from_other_weights_is_refused(monkeypatch):
    losses = {startup.FIRST_STEP: 4.85, startup.BARE_STEP: 4.86}
    monkeypatch.setattr(startup, "first_step", lambda command, line: (1.0, losses[line]))
    with pytest.raises(RunError, match="not the same work: the first step's loss of bare"):
        startup.run(OPTIONS)


def test_a_whole_run_on_other_data_is_refused(monkeypatch):
    others = random_batches(QUICK, QUICK.micro_batch, 20)
    monkeypatch.setattr(overhead, "batches_of", lambda config, dataset, count: others)
    with pytest.raises(RunError, match="not the same work: the loss after 10 steps"):
        overhead.run(OPTIONS)


def test_a_program_without_a_first_step_is_told():
    with pytest.raises(RunError, match="made no step"):
        startup.first_step(["python", "-c", "print('no line')"], startup.BARE_STEP)


def test_the_bare_loop_adds_up_microbatches():
    """Twice the microbatches of half the size: the same losses."""
    losses = []
    for microbatches in (1, 4):
        model = BareModel(QUICK)
        load_initial_weights(model, run_config(QUICK))
        optimizer = build_optimizer(model)
        batches = random_batches(QUICK, 4, 3)
        losses.append([train_step(model, optimizer, batch, microbatches) for batch in batches])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0][0] == pytest.approx(math.log(QUICK.vocabulary), abs=0.1)


def test_stages_of_the_bare_model_make_the_whole():
    whole, first, last = (
        BareModel(QUICK),
        BareModel(QUICK, [0], last=False),
        BareModel(QUICK, [1], first=False),
    )
    for model in (whole, first, last):
        load_initial_weights(model, run_config(QUICK))
    tokens = random_batches(QUICK, 2, 1)[0]["tokens"]
    assert torch.equal(last(first(tokens)), whole(tokens))
    assert {*first.state_dict(), *last.state_dict()} == {*whole.state_dict()}


def test_names_at_transformers():
    assert llama_name("layers.3.pre_mlp_norm.weight") == "model.layers.3.post_attention_layernorm.weight"
    assert llama_name("embedding.word_embeddings.weight") == "model.embed_tokens.weight"
    assert llama_name("lm_head.weight") == "lm_head.weight"
