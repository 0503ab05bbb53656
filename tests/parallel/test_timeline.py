"""The recorded timeline of real runs of the engine, its file, and the idle share that comes of the same clock."""

import json
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_lite.arithmetic.partition import plan_from_config
from megatron_lite.arithmetic.pipeline_schedule import (
    SPLIT_BACKWARD_SCHEDULES,
    build_schedule,
    runnable_schedule,
    schedule_timeline,
)
from megatron_lite.config import ConfigError
from megatron_lite.parallel.clock import ActionClock
from megatron_lite.planning.trace import FORMAT, Trace, measured_times, read_trace, trace_of, write_trace
from tests.parity import make_batches, make_config, set_up
from tests.ranks import run_ranks

# schedule, chunks a rank, microbatches, --max-microbatches-per-step
RUNS = [
    ("gpipe", 1, 4, 2),
    ("1f1b", 1, 4, None),
    ("1f1b", 1, 1, None),
    ("interleaved-1f1b", 2, 4, None),
    ("interleaved-zero-bubble", 2, 4, None),
    ("zbv", 2, 4, None),
    ("dualpipev", 2, 6, None),
]


def _config(schedule, chunks, microbatches, limit):
    return make_config(
        pp=2, chunks=chunks, microbatches=microbatches, schedule=schedule, max_microbatches_per_step=limit
    )


def _record(runs):
    """Spans of the second and third step of each run; the first one and an evaluation are not kept."""
    found = []
    for run in runs:
        config = _config(*run)
        pipeline = set_up(config).pipeline
        batch = make_batches(run[2], 1)[0]
        pipeline.train_step(batch, run[2], 0.1)
        assert pipeline.clock.take_spans() == []
        pipeline.clock.keeping = True
        for _ in range(2):
            pipeline.train_step(batch, run[2], 0.1)
            with torch.no_grad():
                pipeline.eval_step(batch, run[2])
        found.append([(step, spans) for step, spans in enumerate(pipeline.clock.take_spans(), 2)])
    return found


@pytest.fixture(scope="module")
def recorded():
    """run -> for each rank the recorded steps."""
    ranks = run_ranks(_record, 2, RUNS, init=True)
    return dict(zip(RUNS, zip(*ranks)))


@pytest.mark.parametrize("run", RUNS, ids=lambda run: "-".join(map(str, run)))
def test_what_ran_is_what_the_schedule_says(recorded, run):
    """Every pass of the engine runs the simulator's actions in its order, one after another; then R of each stage."""
    schedule, chunks, microbatches, limit = run
    trace = trace_of(_config(*run), "cpu", recorded[run])
    count = limit or microbatches
    assert [one.iteration for one in trace.passes] == [
        step for step in (2, 3) for _ in range(microbatches // count)
    ]
    plan = build_schedule(runnable_schedule(schedule, 2, count), 2, count, chunks)
    for one in trace.passes:
        assert one.microbatches == count
        for rank, events in enumerate(one.timeline.events):
            actions = [event.action for event in events if event.action.kind != "R"]
            assert [action[:3] for action in actions] == [action[:3] for action in plan[rank]]
            reduced = sorted(event.action.stage for event in events if event.action.kind == "R")
            # Gradients are reduced behind the last backward, but where the weights' come in an action of their own.
            split = schedule in SPLIT_BACKWARD_SCHEDULES
            assert reduced == (sorted({action.stage for action in actions}) if split else [])
            assert events[0].start > 0
            assert all(event.end > event.start for event in events)
            assert all(a.end <= b.start for a, b in zip(events, events[1:]))


@pytest.mark.slow  # how long the ranks of a busy machine take to leave a barrier
def test_messages_take_time_on_the_ranks_common_clock(recorded):
    """A stage starts a microbatch after the stage before it ended it: the ranks' zeros are the same moment.

    One machine's ranks leave a barrier at about the same time.
    """
    trace = trace_of(_config(*RUNS[1]), "cpu", recorded[RUNS[1]])
    for one in trace.passes:
        events = {event.action[:3]: event for rank in one.timeline.events for event in rank}
        for microbatch in range(4):
            assert events[1, "F", microbatch].start > events[0, "F", microbatch].end - 0.05
            assert events[0, "B", microbatch].start > events[1, "B", microbatch].end - 0.05


def test_the_file_gives_back_what_was_written(recorded, tmp_path):
    run = RUNS[0]
    trace = trace_of(_config(*run), "cpu", recorded[run])
    write_trace(tmp_path / "new" / "t.json", trace)
    read = read_trace(tmp_path / "new" / "t.json")
    assert (read.config, read.device, read.plans) == (
        trace.config,
        "cpu",
        tuple(plan_from_config(trace.config)),
    )
    assert len(read.passes) == len(trace.passes) == 4
    for mine, theirs in zip(trace.passes, read.passes):
        assert (mine.iteration, mine.microbatches) == (theirs.iteration, theirs.microbatches)
        for before, after in zip(mine.timeline.events, theirs.timeline.events):
            assert [event.action for event in before] == [event.action for event in after]
            assert [event.start for event in before] == pytest.approx(
                [event.start for event in after], abs=1e-6
            )
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["t.json"]


def _played(schedule="1f1b", size=2, microbatches=4, chunks=1, scale=1.0):
    """A trace without any run: the simulator's own times, in tenths of a second."""
    config = make_config(pp=size, chunks=chunks, microbatches=microbatches, schedule=schedule)
    timeline = schedule_timeline(schedule, size, microbatches, chunks)
    rows = [
        [
            (
                3,
                [
                    (e.action.kind, e.action.stage, e.action.microbatch, e.start * scale, e.end * scale)
                    for e in rank
                ],
            )
        ]
        for rank in timeline.events
    ]
    return trace_of(config, "cpu", rows)


def test_times_are_medians_over_microbatches_and_passes():
    first, second = _played(scale=1.0).passes, _played(scale=3.0).passes
    third = _played(scale=100.0).passes
    trace = Trace(
        make_config(pp=2), "cpu", tuple(plan_from_config(make_config(pp=2))), first + second + third
    )
    assert measured_times(trace).seconds == {("F", 0): 3, ("B", 0): 6, ("F", 1): 3, ("B", 1): 6}
    assert trace.typical is second[0]
    assert measured_times(trace).of_stage(1) == 9


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: "no json", "is not JSON as wanted"),
        (lambda t: t | {"format": "another"}, f"wanted JSON whose format is '{FORMAT}'"),
        (lambda t: t | {"passes": []}, "is a damaged file of --timeline .*no passes"),
        (lambda t: t | {"config": {"model": 3}}, "is a damaged file"),
        (lambda t: t | {"passes": [{"iteration": 1, "ranks": [[["F", 0, 0, 0, 1]]]}]}, "1 ranks"),
        (
            lambda t: t | {"passes": [{"iteration": 1, "ranks": [[["F", 1, 0, 0, 1]], []]}]},
            "rank 0 runs F of stage 1",
        ),
        (
            lambda t: t | {"passes": [{"iteration": 1, "ranks": [[["F", 0, 0, 2, 1]], []]}]},
            "from 2 to 1 seconds",
        ),
        (lambda t: t | {"passes": [{"iteration": 1, "ranks": [[["X", 0, 0, 0, 1]], []]}]}, "runs X"),
        (lambda t: t | {"passes": [{"iteration": 1, "ranks": [[["F", 0, 0, 0]], []]}]}, "is a damaged file"),
        (lambda t: t | {"passes": [{"iteration": 1, "ranks": [[], []]}]}, "is a damaged file"),
        (lambda t: {"format": FORMAT}, "is a damaged file"),
        (lambda t: [1], "is not JSON as wanted"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path, change, words):
    path = tmp_path / "t.json"
    write_trace(path, _played())
    changed = change(json.loads(path.read_text()))
    path.write_text(changed if isinstance(changed, str) else json.dumps(changed))
    with pytest.raises(ConfigError, match=words):
        read_trace(path)
    with pytest.raises(ConfigError, match="none.json cannot be read"):
        read_trace(tmp_path / "none.json")


def _shares(sums):
    clock = ActionClock(torch.device("cpu"), None)
    clock.take_sums = lambda: sums[dist.get_rank()]
    return clock.idle_shares()


def test_idle_share_by_hand():
    """Two ranks, the longer pipeline takes 10 s: 4 s and 8 s of actions are 60% and 20% idle."""
    for shares in run_ranks(_shares, 2, [(4.0, 10.0), (8.0, 9.0)], init=True):
        assert shares == pytest.approx({"pipeline-idle-share": 0.4, "pipeline-idle-share-max": 0.6})


def test_the_clock_counts_only_actions_between_begin_and_end():
    clock = ActionClock(torch.device("cpu"), None)
    clock.run("F", 0, 0, time.sleep, 0.001)  # an evaluation before any step
    assert clock.take_sums() == (0.0, 0.0)
    for _ in range(2):
        clock.begin()
        clock.run("F", 0, 0, time.sleep, 0.01)
        time.sleep(0.01)
        clock.end()
        clock.run("F", 0, 0, time.sleep, 0.05)
    busy, seconds = clock.take_sums()
    assert busy >= 0.02
    assert seconds >= busy + 0.02
    assert clock.take_sums() == (0.0, 0.0)
    assert clock.take_spans() == []
    clock.begin()
    with pytest.raises(ZeroDivisionError):
        clock.run("F", 0, 0, lambda: 1 / 0)
    clock.begin()  # the step that failed leaves nothing behind
    clock.end()
    assert clock.take_sums()[0] == 0.0


def test_passes_with_fewer_microbatches_are_not_the_typical_one():
    small, large = _played(microbatches=2), _played(microbatches=4)
    assert replace(large, passes=small.passes + large.passes).typical.microbatches == 4


class FakeEvent:
    """torch.cuda.Event of a device whose clock runs a millisecond further at each record."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        FakeEvent.now += 1.0
        self.at, self.waited = FakeEvent.now, False

    def synchronize(self):
        self.waited = True

    def elapsed_time(self, other):
        assert other.waited
        return other.at - self.at  # milliseconds


def test_on_a_gpu_the_marks_are_events_read_after_the_step(monkeypatch):
    """What a GPU would be asked; no GPU was there to ask."""
    waits = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waits.append("device"))
    monkeypatch.setattr(dist, "barrier", lambda group: waits.append("barrier"))
    clock = ActionClock(torch.device("cuda", 0), None)
    clock.begin()
    clock.run("F", 0, 0, lambda: None)
    clock.end()
    assert waits == []
    clock.keeping = True
    clock.begin()  # reads the step before, which is not kept
    assert waits == ["device", "barrier"]
    clock.run("F", 1, 2, lambda: None)
    clock.run("B", 1, 2, lambda: None)
    clock.end()
    assert clock.take_spans() == [[("F", 1, 2, 0.001, 0.002), ("B", 1, 2, 0.003, 0.004)]]
    assert clock.take_sums() == pytest.approx((0.003, 0.003 + 0.005))
