"""The drawn timetable, by hand for a small one."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lite.arguments.parse import parse_arguments
from megatron_lite.arithmetic.partition import plan_from_config
from megatron_lite.arithmetic.pipeline_layout import parse_layout
from megatron_lite.arithmetic.pipeline_schedule import (
    StageTimes,
    build_schedule,
    placement_of,
    schedule_timeline,
    simulate,
)
from megatron_lite.config import ConfigError
from megatron_lite.distributed.environment import Environment
from megatron_lite.planning.trace import trace_of, write_trace
from tests.parity import make_config
from tools.show_schedule import Comparison, describe_schedule, describe_trace, main, simulated, stage_times

ROOT = Path(__file__).resolve().parents[2]
FLAGS = shlex.split("""
    --check --world-size 4 --num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64
    --micro-batch-size 1 --global-batch-size 8 --train-iters 5 --lr 1e-3 --tokenizer-type NullTokenizer
    --vocab-size 61 --mock-data --pipeline-model-parallel-size 4
""")


def text_of(*sizes):
    return describe_schedule(sizes, simulated(sizes))


def test_1f1b_by_hand():
    lines = text_of("1f1b", 2, 2, 1).splitlines()
    assert lines[1:3] == ["rank 0  a0 a1 .. .. A0 A0 .. A1 A1", "rank 1  .. a0 A0 A0 a1 A1 A1 .. .."]
    assert lines[3].startswith("idle 33.3%;") and lines[3].endswith("2, 1")


def test_split_backwards_and_chunks_have_their_signs():
    text = text_of("zbv", 2, 4, 2)
    assert all(sign in text for sign in ("a0", "b0", "A3", "B3", "w3"))


def test_what_cannot_run_is_refused():
    with pytest.raises(ConfigError, match="--pipeline-schedule 1f1b"):
        simulated(("1f1b", 4, 2, 1))


def test_the_command():
    command = [sys.executable, "tools/show_schedule.py", *FLAGS, "--pipeline-schedule", "gpipe"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "gpipe: 4 ranks x 1 chunks, 8 microbatches" in done.stdout
    assert "idle 27.3%" in done.stdout


def test_given_times_are_played_and_drawn(tmp_path, capsys):
    picture = tmp_path / "p.svg"
    main([*FLAGS, "--times", "1/2", "1/2", "1/2", "2/4", "--output", str(picture)])
    half = tuple(value / 2 for value in (2.0, 2.0, 2.0, 4.0))
    timeline = schedule_timeline("1f1b", 4, 8, 1, StageTimes((1.0, 1.0, 1.0, 2.0), half, half))
    idle = f"idle {timeline.bubble_fraction:.1%}"
    assert idle in capsys.readouterr().out
    assert idle in picture.read_text()
    assert "units of --times" in picture.read_text()


def test_one_time_stands_for_all_stages():
    assert stage_times(["1/2"], 3) == StageTimes.equal(3)
    assert stage_times(["1/2/3"], 2) == StageTimes((1.0, 1.0), (2.0, 2.0), (3.0, 3.0))


def test_fewer_microbatches_than_ranks_run_as_the_engine_runs_them(capsys):
    main([*FLAGS, "--microbatches", "2"])
    assert "gpipe: 4 ranks x 1 chunks, 2 microbatches" in capsys.readouterr().out


def test_passes_of_fewer_microbatches_are_what_is_drawn(capsys):
    main([*FLAGS, "--max-microbatches-per-step", "5"])
    assert "1f1b: 4 ranks x 1 chunks, 4 microbatches" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([*FLAGS, "--times", "1/2", "1/2"], "--times has 2 entries, wanted one for each of 4 stages"),
        ([*FLAGS, "--times", "1"], "--times '1' wants forward/backward"),
        ([*FLAGS, "--times", "1/0"], "--times '1/0' wants"),
        ([*FLAGS, "--times", "1/nan"], "--times '1/nan' wants"),
        ([*FLAGS, "--output", "x.gif"], "--output x.gif has to end in .svg or .png"),
        (["--from-trace", "x.json", "--num-layers", "8"], "--from-trace knows the run's flags"),
        (["--from-trace", "nothing.json"], "nothing.json cannot be read"),
        (
            [*FLAGS, "--pipeline-schedule", "dualpipev", "--microbatches", "7"],
            "--pipeline-schedule dualpipev",
        ),
    ],
)
def test_wrong_input_is_one_sentence(flags, words):
    with pytest.raises(ConfigError, match=words):
        main(flags)


def trace_with_a_heavy_head(schedule="1f1b", chunks=1, layers="Ett|tt|tt|ttL", head=4.0, slower=1.1):
    """A trace of the simulator's: seconds 0.01 a layer, the head as `head` layers, all of it `slower` by that."""
    config = make_config(
        pp=4 // chunks,
        chunks=chunks,
        microbatches=8,
        schedule=schedule,
        pipeline_model_parallel_layout=layers,
    )
    counts = [len(plan.layers) for plan in plan_from_config(config)]
    work = tuple(0.01 * (n + head * (stage == 3)) for stage, n in enumerate(counts))
    timeline = simulate(
        build_schedule(schedule, 4 // chunks, 8, chunks), StageTimes(work, work, work), placement_of(schedule)
    )
    rows = [
        [
            (
                5,
                [
                    (*(e.action.kind, e.action.stage, e.action.microbatch), slower * e.start, slower * e.end)
                    for e in rank
                ],
            )
        ]
        for rank in timeline.events
    ]
    return trace_of(config, "cpu", rows), timeline


def test_a_trace_names_the_slowest_stage_and_proposes_a_flag_that_is_faster():
    trace, timeline = trace_with_a_heavy_head()
    text = describe_trace(Comparison(trace))
    assert f"measured, step 5                        {1100 * timeline.seconds:10.2f} ms" in text
    assert "slowest: stage 3 on rank 3 (layers 6-7, head), 2.00 times the mean stage" in text
    assert "a mean layer 33.00 ms a microbatch, embedding 0.00 ms, head 132.00 ms" in text
    flag = next(line for line in text.splitlines() if "--pipeline-model-parallel-layout" in line)
    config = parse_arguments([*FLAGS, *shlex.split(flag)], Environment())
    counts = parse_layout(config.parallel.pipeline_model_parallel_layout)
    work = tuple(0.01 * (n + 4 * (stage == 3)) for stage, n in enumerate(counts))
    after = schedule_timeline("1f1b", 4, 8, 1, StageTimes(work, work, work))
    assert f"is predicted to take {1 - after.seconds / timeline.seconds:.1%} less" in text
    assert after.seconds < 0.75 * timeline.seconds


def test_the_ideal_has_the_same_work_in_equal_stages():
    for schedule, chunks in (("1f1b", 1), ("interleaved-1f1b", 2), ("zbv", 2)):
        found = Comparison(trace_with_a_heavy_head(schedule, chunks)[0])
        size = 4 // chunks
        work = [sum(timeline.busy(rank) for rank in range(size)) for _, timeline in found.rows()]
        assert work[0] == pytest.approx(work[1]) == pytest.approx(work[2])
        assert found.ideal.seconds < found.simulated.seconds == pytest.approx(found.one.timeline.seconds)
        assert found.ideal.bubble_fraction == pytest.approx(
            schedule_timeline(schedule, size, 8, chunks, StageTimes.equal(4, 1.0, 2.0)).bubble_fraction
        )


def test_a_trace_is_drawn_beside_the_ideal(tmp_path, capsys):
    trace, _ = trace_with_a_heavy_head()
    write_trace(tmp_path / "t.json", trace)
    main(["--from-trace", str(tmp_path / "t.json"), "--output", str(tmp_path / "t.svg")])
    picture = (tmp_path / "t.svg").read_text()
    for words in (
        "measured, step 5",
        "simulated with the measured stage times",
        "ideal: the same work",
        "slowest: stage 3",
    ):
        assert words in picture
    assert "written:" in capsys.readouterr().out
