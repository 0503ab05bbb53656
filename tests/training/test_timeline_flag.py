"""--timeline and the idle share in whole runs of pretrain_gpt.py."""

import contextlib
import io

import pytest

from megatron_lite.arguments.parse import parse_arguments
from megatron_lite.arithmetic.pipeline_layout import write_layout
from megatron_lite.arithmetic.pipeline_schedule import build_schedule
from megatron_lite.config import ConfigError
from megatron_lite.distributed.environment import Environment
from megatron_lite.planning.trace import read_trace
from tests.ranks import run_ranks
from tests.runs import flags, metrics, pretrain_here, train, write_data
from tools.show_schedule import Comparison

PIPELINE = "--pipeline-model-parallel-size 2 --train-iters 5 --log-interval 2"


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


def test_a_run_records_its_steps_and_tells_its_idle_share(prefix, tmp_path):
    """Two of two pipelines' ranks write: the first data-parallel rank's; the idle share is that of all four."""
    file, records = tmp_path / "deep" / "t.json", tmp_path / "m.jsonl"
    argv = flags(
        prefix,
        PIPELINE,
        "--num-virtual-stages-per-pipeline-rank 2",
        f"--timeline {file} --timeline-step-start 1 --timeline-step-end 3 --metrics-file {records}",
    )
    assert train(4, argv) == [0, 0, 0, 0]
    trace = read_trace(file)
    assert [one.iteration for one in trace.passes] == [2, 3]
    plan = build_schedule("interleaved-1f1b", 2, 4, 2)
    for one in trace.passes:
        for events, actions in zip(one.timeline.events, plan, strict=True):
            assert [event.action for event in events if event.action.kind != "R"] == actions
    assert trace.config.model.padded_vocab_size == 64
    told = {r["iteration"]: r for r in metrics(records) if "pipeline-idle-share" in r}
    assert list(told) == [2, 4, 5]
    for record in told.values():
        assert 0 < record["pipeline-idle-share"] <= record["pipeline-idle-share-max"] < 1


def _output(argv):
    """What this rank prints."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        assert pretrain_here(argv) == 0
    return told.getvalue()


def test_a_run_that_ends_too_early_says_so_and_one_that_ends_within_writes_what_it_has(prefix, tmp_path):
    late, cut = tmp_path / "late.json", tmp_path / "cut.json"
    told, nothing = run_ranks(
        _output, 2, flags(prefix, PIPELINE, f"--timeline {late} --timeline-step-start 5")
    )
    assert f"warning: --timeline {late} is not written: no step ran after the first 5" in told
    assert "timeline" not in nothing and not late.exists()
    told, _ = run_ranks(_output, 2, flags(prefix, PIPELINE, f"--timeline {cut} --timeline-step-start 3"))
    assert [one.iteration for one in read_trace(cut).passes] == [4, 5]
    assert f"timeline of 2 steps in {cut}" in told


def test_a_file_that_cannot_be_written_does_not_stop_the_run(prefix, tmp_path):
    (tmp_path / "file").write_text("")
    where = tmp_path / "file" / "t.json"
    options = f"--timeline {where} --timeline-step-start 0 --timeline-step-end 1 --train-iters 4"
    told = run_ranks(_output, 1, flags(prefix, options))[0]
    assert f"warning: --timeline {where} cannot be written" in told
    assert "iteration        4/" in told
    assert "pipeline idle" not in told  # one stage has none


def test_an_empty_window_is_refused():
    with pytest.raises(ConfigError, match="--timeline-step-start 4 has to be below --timeline-step-end 4"):
        parse_arguments(
            flags("", "--mock-data --timeline t.json --timeline-step-start 4 --timeline-step-end 4"),
            Environment(),
        )


@pytest.mark.slow  # it measures time: right on a quiet machine, not where other work runs beside it
def test_the_proposed_split_of_a_heavy_head_is_faster(tmp_path):
    """A vocabulary far too large for half of the layers beside it: the gain is about what was predicted.

    The fastest of three runs of each split, in turns: one run alone measures what else the machine does.
    """
    model = """
        --mock-data --num-layers 8 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --seq-length 64
        --max-position-embeddings 64 --vocab-size 31999 --global-batch-size 8 --train-iters 12
        --pipeline-model-parallel-size 2 --reshard-after-forward never --eval-iters 0
    """

    def comparison(layout, name):
        window = f"--timeline {tmp_path / name} --timeline-step-start 3 --timeline-step-end 12"
        assert train(2, flags("", model, window, "--pipeline-model-parallel-layout", layout)) == [0, 0]
        return Comparison(read_trace(tmp_path / name))

    before = comparison("Et*4|t*4L", "before.json")
    proposal = before.proposal()
    assert proposal.after[0] > 4 and proposal.gain > 0.05
    seconds = {"before": [before.one.timeline.seconds], "after": []}
    for turn in range(3):
        for name, layout in (("after", write_layout(proposal.after)), ("before", "Et*4|t*4L")):
            seconds[name].append(comparison(layout, f"{name}{turn}.json").one.timeline.seconds)
    gain = 1 - min(seconds["after"]) / min(seconds["before"])
    assert gain > proposal.gain / 2, seconds
