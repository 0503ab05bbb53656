"""The suites of one process: they run, give figures, and refuse work that is not the same."""

import math
from dataclasses import replace

import pytest
import torch

from megatron_lite.files.command_line import RunError
from tools.benchmarks import overhead, startup, steps
from tools.benchmarks.baseline_model import QUICK, BareModel, build_optimizer, random_batches, train_step
from tools.benchmarks.comparison import Options, refuse_unlike
from tools.benchmarks.scripts import bare_model, with_initial_weights

OPTIONS = Options(repeats=1, quick=True)


# Three starts of Python and torch: some ten seconds.
STARTUP = pytest.param(startup.run, marks=pytest.mark.slow, id="startup")


@pytest.mark.parametrize(
    "suite",
    [
        pytest.param(steps.step, id="step"),
        pytest.param(lambda options: steps.experts(replace(options, peers=True)), id="experts, and peers"),
        pytest.param(steps.expert_parallel, id="expert-parallel"),
        pytest.param(overhead.run, id="overhead"),
        STARTUP,
    ],
)
def test_a_suite_gives_figures(suite):
    rows = [row for table in suite(OPTIONS) for row in table.rows]
    assert rows and all(math.isfinite(row.value) and row.verdict for row in rows)


def test_a_start_from_other_weights_is_refused(monkeypatch):
    monkeypatch.setattr(startup, "first_step", lambda command: (1.0, 4.85 + 0.01 * ("-m" in command)))
    with pytest.raises(RunError, match="not the same work: the first step's loss of bare"):
        startup.run(OPTIONS)


def test_what_is_unlike():
    refuse_unlike("loss", {"a": 1.0, "b": 1.00005})
    refuse_unlike("digest", {"a": "12", "b": "12"})
    with pytest.raises(RunError, match="not the same work: loss of b is 1.001, of a 1.0"):
        refuse_unlike("loss", {"a": 1.0, "b": 1.001})
    with pytest.raises(RunError, match="not the same work: digest of b is 13, of a 12"):
        refuse_unlike("digest", {"a": "12", "b": "13"})


def test_a_program_without_a_first_step_is_told():
    with pytest.raises(RunError, match="made no step"):
        startup.first_step(["python", "-c", "print('no line')"])


def test_the_bare_loop_adds_up_microbatches():
    """Twice the microbatches of half the size: the same losses."""
    losses = []
    for microbatches in (1, 4):
        model = bare_model(QUICK)
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
        with_initial_weights(model, QUICK)
    tokens = random_batches(QUICK, 2, 1)[0]["tokens"]
    assert torch.equal(last(first(tokens)), whole(tokens))
    assert {*first.state_dict(), *last.state_dict()} == {*whole.state_dict()}
