"""Schedules: the order of torch's classes, what they accept, and what theory says about bubble and memory."""

from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from megatron_lite.arithmetic.pipeline_schedule import (
    SCHEDULES,
    Action,
    DeadlockError,
    StageTimes,
    build_schedule,
    check_microbatches,
    peak_in_flight,
    placement_of,
    rank_of_stage,
    schedule_timeline,
    simulate,
)
from megatron_lite.parallel.pipeline import keep_forwards

TORCH_CLASSES = {
    "gpipe": torch_schedules.ScheduleGPipe,
    "1f1b": torch_schedules.Schedule1F1B,
    "interleaved-1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipev": torch_schedules.ScheduleDualPipeV,
}
CASES = [
    (name, pp, chunks)
    for name in TORCH_CLASSES
    for pp in range(2, 9)
    for chunks in range(1, 5)
    if (name in ("gpipe", "1f1b")) == (chunks == 1) or (chunks == 1 and "interleaved" in name)
    if name not in ("zbv", "dualpipev") or chunks == 2
]


class RecordingStage:
    """Stands for a PipelineStage: no tensors, no process group; writes down what the schedule asks it to do."""

    submod = torch.nn.Identity()

    def __init__(self, index, pipeline_size, chunks, has_backward=True):
        self.stage_index, self.group_rank = index, index % pipeline_size
        self.num_stages, self.group_size = pipeline_size * chunks, pipeline_size
        self.is_first, self.is_last = index == 0, index == self.num_stages - 1
        self.has_backward = has_backward
        self.actions = []

    def forward_one_chunk(self, microbatch, *args, **kwargs):
        self.actions.append(Action(self.stage_index, "F", microbatch))
        return torch.zeros(())

    def backward_one_chunk(self, microbatch, *args, **kwargs):
        if self.has_backward:
            self.actions.append(Action(self.stage_index, "B", microbatch))

    def get_fwd_recv_ops(self, microbatch):
        return [] if self.is_first else [_message(self.stage_index - 1, "recv", "F", microbatch)]

    def get_fwd_send_ops(self, microbatch):
        return [] if self.is_last else [_message(self.stage_index + 1, "send", "F", microbatch)]

    def get_bwd_recv_ops(self, microbatch):
        last = self.is_last or not self.has_backward
        return [] if last else [_message(self.stage_index + 1, "recv", "B", microbatch)]

    def get_bwd_send_ops(self, microbatch):
        first = self.is_first or not self.has_backward
        return [] if first else [_message(self.stage_index - 1, "send", "B", microbatch)]

    def perform_reduce_grad(self, factor):
        pass


def _message(peer, way, kind, microbatch):
    """One message as one of its two ranks sees it; `peer` as torch's P2POp calls the other one."""
    return SimpleNamespace(peer=peer, way=way, kind=kind, microbatch=microbatch)


def order_of_torch(name, pp, microbatches, chunks):
    """What torch runs, rank by rank. The single-stage classes are run: their own listing of it is off by one."""
    if name in ("gpipe", "1f1b"):
        return [run_single(name, pp, rank, microbatches)[0] for rank in range(pp)]
    return [_flat(multi_schedule(name, pp, microbatches, chunks).pipeline_order[rank]) for rank in range(pp)]


def run_single(name, pp, rank, microbatches, training=True):
    """(actions, batches of messages) of one rank of a schedule with one stage a rank."""
    stage, batches = RecordingStage(rank, pp, 1, training), []

    def send_and_receive(messages, desc=None):
        batches.extend([list(messages)] if messages else [])
        return []

    schedule = TORCH_CLASSES[name](stage, microbatches, loss_fn=lambda output, target: output)
    schedule._stage_forward_initialized = schedule._stage_backward_initialized = True
    schedule._initialize_stage = lambda *args, **kwargs: None
    schedule._has_backward = training
    empty = [()] * microbatches
    with mock.patch.object(torch_schedules, "_batch_p2p", send_and_receive):
        schedule._step_microbatches(empty, [{}] * microbatches, [None] * microbatches)
    return stage.actions, batches


def multi_schedule(name, pp, microbatches, chunks):
    stages = [RecordingStage(chunk * pp, pp, chunks) for chunk in range(chunks)]
    return TORCH_CLASSES[name](stages, microbatches, loss_fn=lambda output, target: output)


def batches_of_torch(name, pp, microbatches, chunks, training):
    """Every rank's sends and receives, in the batches that are given to NCCL, one after the other."""
    if name in ("gpipe", "1f1b"):
        return [run_single(name, pp, rank, microbatches, training)[1] for rank in range(pp)]
    schedule = multi_schedule(name, pp, microbatches, chunks)
    if not training:
        keep_forwards(schedule)
    ranks = []
    for rank in range(pp):
        flat = [
            part
            for action in schedule.pipeline_order_with_comms[rank]
            for part in action.sub_actions or (action,)
        ]
        batches = []
        for action in flat:
            way, _, kind = action.computation_type.name.partition("_")
            if way in ("SEND", "RECV"):
                other = action.stage_index + (1 if (way == "SEND") == (kind == "F") else -1)
                peer = rank_of_stage(other, pp, placement_of(name))
                batches.append([_message(peer, way.lower(), kind, action.microbatch_index)])
        ranks.append(batches)
    return ranks


def exchange(ranks):
    """Play the batches as NCCL does on one communicator: in order, each until all its messages met their other end.

    Returns how many messages were exchanged; raises DeadlockError when none of the waiting ones fit.
    """
    waiting, done = [[list(batch) for batch in batches] for batches in ranks], 0
    moved = True
    while moved:
        moved = False
        for rank, batches in enumerate(waiting):
            for mine in list(batches[0]) if batches else ():
                there = waiting[mine.peer]
                # Between two ranks the first unmatched send meets the first unmatched receive, whatever it is for.
                theirs = next(
                    (m for m in there[0] if m.peer == rank and m.way != mine.way) if there else iter(()), None
                )
                first = next(m for m in batches[0] if m.peer == mine.peer and m.way == mine.way)
                if theirs is None or mine is not first:
                    continue
                assert (mine.kind, mine.microbatch) == (theirs.kind, theirs.microbatch), (rank, mine, theirs)
                batches[0].remove(mine)
                there[0].remove(theirs)
                done, moved = done + 1, True
                for each in (batches, there):
                    if not each[0]:
                        each.pop(0)
                break
    if any(waiting):
        raise DeadlockError(str({rank: batches[0] for rank, batches in enumerate(waiting) if batches}))
    return done


@pytest.mark.parametrize(("name", "pp", "chunks"), CASES)
def test_sends_and_receives_never_wait_for_one_another(name, pp, chunks):
    """The order of messages, in training and evaluation, as strictly as NCCL may take it on one stream."""
    stages, v_shaped = pp * chunks, placement_of(name) != placement_of("1f1b")
    for microbatches in {2 * pp, 2 * pp + 1, 3 * pp}:
        if check_microbatches(name, pp, chunks, microbatches) is not None:
            continue
        between_ranks = microbatches * (stages - 1 - (v_shaped and chunks == 2))
        assert exchange(batches_of_torch(name, pp, microbatches, chunks, True)) == 2 * between_ranks
        assert exchange(batches_of_torch(name, pp, microbatches, chunks, False)) == between_ranks


def test_a_deadlock_of_messages_is_found():
    send, receive = _message(1, "send", "F", 0), _message(1, "recv", "B", 0)
    other = [[_message(0, "send", "B", 0)], [_message(0, "recv", "F", 0)]]
    with pytest.raises(DeadlockError):
        exchange([[[send], [receive]], other])
    assert exchange([[[send, receive]], [[*other[0], *other[1]]]]) == 2


def _flat(order):
    actions = []
    for item in order:
        if item is None:
            continue
        for part in item.sub_actions or (item,):
            kind = part.computation_type.value
            actions.append(Action(part.stage_index, kind, part.microbatch_index, bool(item.sub_actions)))
    return actions


def counts_to_try(pp, chunks):
    return sorted({1, 2, pp - 1, pp, pp + 1, 2 * pp - 1, 2 * pp, 2 * pp + 1, 3 * pp, 4 * pp + 2, 5 * pp})


@pytest.mark.parametrize(("name", "pp", "chunks"), CASES)
def test_same_order_and_same_refusals_as_torch(name, pp, chunks):
    accepted = 0
    for microbatches in counts_to_try(pp, chunks):
        refusal = check_microbatches(name, pp, chunks, microbatches)
        if refusal is not None:
            with pytest.raises((ValueError, AssertionError, RuntimeError)):
                order_of_torch(name, pp, microbatches, chunks)
            continue
        accepted += 1
        assert build_schedule(name, pp, microbatches, chunks) == order_of_torch(
            name, pp, microbatches, chunks
        )
    assert accepted >= 3


def accepted_cases():
    """(name, pp, microbatches, chunks) that the schedule accepts."""

    def chunks_of(name):
        return {"gpipe": st.just(1), "1f1b": st.just(1), "zbv": st.just(2), "dualpipev": st.just(2)}.get(
            name, st.integers(1, 4)
        )

    return (
        st.sampled_from(sorted(SCHEDULES))
        .flatmap(
            lambda name: st.tuples(st.just(name), st.integers(1, 8), st.integers(1, 40), chunks_of(name))
        )
        .filter(lambda case: check_microbatches(case[0], case[1], case[3], case[2]) is None)
    )


seconds = st.floats(0.1, 10.0)


@settings(max_examples=200)
@given(accepted_cases(), st.data())
def test_every_schedule_runs_to_its_end_and_computes_everything_once(case, data):
    name, pp, microbatches, chunks = case
    stages = pp * chunks
    draw = data.draw(st.lists(seconds, min_size=3 * stages, max_size=3 * stages))
    times = StageTimes(*(tuple(draw[part * stages : (part + 1) * stages]) for part in range(3)))
    schedule = build_schedule(name, pp, microbatches, chunks)
    timeline = simulate(schedule, times, placement_of(name), p2p_seconds=0.5)

    seen = Counter()
    for rank, events in enumerate(timeline.events):
        assert [event.action for event in events] == schedule[rank]
        for event in events:
            assert rank_of_stage(event.action.stage, pp, placement_of(name)) == rank
            seen[event.action[:3]] += 1
    for stage in range(stages):
        for microbatch in range(microbatches):
            once = [seen[stage, kind, microbatch] for kind in "FBIW"]
            assert once in ([1, 1, 0, 0], [1, 0, 1, 1])
    assert sum(seen.values()) == sum(len(rank) for rank in schedule)
    _assert_dependencies(timeline, stages, times, p2p=0.5)


def _assert_dependencies(timeline, stages, times, p2p):
    """Independent of `simulate`: compare start and end times pairwise."""
    start, end, rank_of = {}, {}, {}
    for rank, events in enumerate(timeline.events):
        for event in events:
            kind = event.action.kind.replace("B", "I")
            key = (event.action.stage, kind, event.action.microbatch)
            start[key], end[key], rank_of[event.action.stage] = event.start, event.end, rank
            assert event.end - event.start == pytest.approx(times(event.action))
        for before, after in zip(events, events[1:], strict=False):
            assert after.start >= before.end
    for (stage, kind, microbatch), begun in start.items():
        if kind == "F" and stage > 0:
            hop = p2p * (rank_of[stage - 1] != rank_of[stage])
            assert begun >= end[stage - 1, "F", microbatch] + hop
        if kind == "I":
            assert begun >= end[stage, "F", microbatch]
            if stage < stages - 1:
                hop = p2p * (rank_of[stage + 1] != rank_of[stage])
                assert begun >= end[stage + 1, "I", microbatch] + hop
        if kind == "W":
            assert begun >= end[stage, "I", microbatch]


@settings(max_examples=100)
@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 8), st.integers(1, 40), seconds, seconds)
def test_bubble_of_gpipe_and_1f1b(name, pp, microbatches, forward, backward):
    if check_microbatches(name, pp, 1, microbatches):
        return
    timeline = schedule_timeline(name, pp, microbatches, 1, StageTimes.equal(pp, forward, backward))
    expected = (pp - 1) / (microbatches + pp - 1)
    assert timeline.bubble_fraction == pytest.approx(expected)
    assert all(timeline.bubble(rank) == pytest.approx(expected) for rank in range(pp))


@settings(max_examples=100)
@given(st.integers(1, 8), st.integers(1, 5), st.integers(2, 4), seconds, seconds)
def test_bubble_of_interleaved(pp, rounds, chunks, forward, backward):
    microbatches = rounds * pp
    times = StageTimes.equal(pp * chunks, forward, backward)
    timeline = schedule_timeline("interleaved-1f1b", pp, microbatches, chunks, times)
    assert timeline.bubble_fraction == pytest.approx((pp - 1) / (chunks * microbatches + pp - 1))


@pytest.mark.parametrize("pp", range(2, 9))
def test_zero_bubble_schedules_idle_less(pp):
    """ZBV with F = I = W: only the fill of the pipeline idles, (pp-1) forwards in 6 m + pp - 1 of them."""
    microbatches = 4 * pp
    times = StageTimes.equal(2 * pp, forward=1.0, backward=2.0)
    plain = schedule_timeline("1f1b", pp, microbatches, 1, StageTimes.equal(pp, 2.0, 4.0)).bubble_fraction
    interleaved = schedule_timeline("interleaved-1f1b", pp, microbatches, 2, times).bubble_fraction
    zero = {
        n: schedule_timeline(n, pp, microbatches, 2, times)
        for n in ("interleaved-zero-bubble", "zbv", "dualpipev")
    }
    assert zero["zbv"].bubble_fraction == pytest.approx((pp - 1) / (6 * microbatches + pp - 1))
    assert zero["zbv"].bubble_fraction < interleaved < plain
    assert zero["interleaved-zero-bubble"].bubble_fraction < interleaved
    assert zero["dualpipev"].bubble_fraction < plain


@given(st.integers(1, 8), st.integers(1, 40))
def test_peak_in_flight_of_gpipe_and_1f1b(pp, microbatches):
    for rank, actions in enumerate(build_schedule("gpipe", pp, microbatches)):
        assert peak_in_flight(actions) == microbatches, rank
    if microbatches >= pp:
        for rank, actions in enumerate(build_schedule("1f1b", pp, microbatches)):
            assert peak_in_flight(actions) == pp - rank


def test_peak_in_flight_by_hand():
    actions = [Action(0, "F", 0), Action(2, "F", 0), Action(2, "I", 0), Action(0, "F", 1), Action(2, "W", 0)]
    actions += [Action(0, "B", 0), Action(0, "B", 1)]
    assert peak_in_flight(actions) == 3
    assert peak_in_flight(actions, weights=[10, 0, 1]) == 21


def test_timeline_by_hand():
    """Two ranks, two microbatches, F 1 s, B 2 s, the last stage twice as slow, 0.5 s to send."""
    times = StageTimes((1.0, 2.0), (1.0, 2.0), (1.0, 2.0))
    timeline = simulate(build_schedule("1f1b", 2, 2), times, p2p_seconds=0.5)
    spans = [[(str(event.action), event.start, event.end) for event in rank] for rank in timeline.events]
    assert spans[0] == [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 8, 10), ("0B1", 14, 16)]
    assert spans[1] == [("1F0", 1.5, 3.5), ("1B0", 3.5, 7.5), ("1F1", 7.5, 9.5), ("1B1", 9.5, 13.5)]
    assert timeline.seconds == 16
    assert timeline.bubble(0) == pytest.approx(1 - 6 / 16)
    assert timeline.bubble(1) == pytest.approx(1 - 12 / 16)
    assert timeline.bubble_fraction == pytest.approx(1 - 18 / 32)


def test_a_deadlock_is_found():
    schedule = build_schedule("1f1b", 2, 2)
    schedule[0] = [schedule[0][0], schedule[0][3], schedule[0][1], schedule[0][2]]  # B1 before F1
    with pytest.raises(DeadlockError, match="rank 0 waits to run 0B1; rank 1 waits to run 1F1"):
        simulate(schedule, StageTimes.equal(2))


def test_refusals_name_flags_and_numbers():
    assert "--pipeline-schedule 1f1b" in check_microbatches("1f1b", 4, 1, 3)
    assert check_microbatches("1f1b", 4, 1, 3).endswith(
        "cannot run 3 microbatches (global batch / (micro batch x "
        "data-parallel size)), the nearest it can run: 4"
    )
    assert check_microbatches("interleaved-1f1b", 4, 2, 9).endswith("the nearest it can run: 8 or 10")
    assert check_microbatches("dualpipev", 4, 2, 7).endswith("8")
    assert "--num-virtual-stages-per-pipeline-rank 3" in check_microbatches("zbv", 4, 3, 8)
    assert "--num-virtual-stages-per-pipeline-rank 2" in check_microbatches("gpipe", 4, 2, 8)
