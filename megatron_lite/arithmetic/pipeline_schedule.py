"""Pipeline schedules as data: which action each rank runs, in which order. Imports no torch.

`build_schedule` gives the order of the schedule classes of torch.distributed.pipelining (a test holds them equal), so
timetables, bubbles and peak activations can be computed without a process group: `simulate` runs a schedule with
given durations.

Kinds of action: F forward; B full backward; I gradient of the input only; W gradient of the weights, any time after
its I. The sources: GPipe (arXiv 1811.06965), 1F1B and its interleaved form (2104.04473), zero bubble and ZBV
(2401.10241), DualPipe (2412.19437) cut in half to a V by its authors.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# They run the backward of a layer in two parts: for its input, then for its weights.
SPLIT_BACKWARD_SCHEDULES = ("interleaved-zero-bubble", "zbv", "dualpipev")


V_SCHEDULES = ("zbv", "dualpipev")


class Action(NamedTuple):
    """One computation of one stage on one microbatch.

    `paired` marks the forward and the backward right after it that dualpipev runs as one overlapped pair.
    """

    stage: int
    kind: str
    microbatch: int
    paired: bool = False

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Schedule = list[list[Action]]  # one list of actions per rank, in the order the rank runs them


class DeadlockError(AssertionError):
    """A schedule whose ranks deadlock."""


def placement_of(schedule: str) -> str:
    """How `schedule` places stages on ranks: 'loop' or 'v'."""
    return "v" if schedule in V_SCHEDULES else "loop"


def rank_of_stage(stage: int, pipeline_size: int, placement: str = "loop") -> int:
    """The pipeline rank that owns `stage`."""
    position = stage % pipeline_size
    folded = placement == "v" and (stage // pipeline_size) % 2 == 1
    return pipeline_size - 1 - position if folded else position


def build_schedule(name: str, pipeline_size: int, microbatches: int, chunks_per_rank: int = 1) -> Schedule:
    """The actions of every rank under schedule `name`, one of SCHEDULES.

    The numbers have to be ones the schedule accepts: see `check_microbatches`.
    """
    assert check_microbatches(name, pipeline_size, chunks_per_rank, microbatches) is None
    return [
        SCHEDULES[name](pipeline_size, rank, microbatches, chunks_per_rank) for rank in range(pipeline_size)
    ]


def runnable_schedule(name: str, pipeline_size: int, microbatches: int) -> str:
    """The schedule that a pass of `microbatches` runs when `name` is asked for.

    torch's 1F1B wants as many microbatches as stages. With fewer nothing is left of its steady state: all forwards
    then all backwards, which is GPipe, takes as long and holds no more, and a batch ramp-up may begin small.
    """
    return "gpipe" if name == "1f1b" and microbatches < pipeline_size else name


def check_microbatches(name: str, pipeline_size: int, chunks_per_rank: int, microbatches: int) -> str | None:
    """Why schedule `name` cannot run these numbers, as one sentence naming flags; None when it can."""
    chunks_flag = f"--num-virtual-stages-per-pipeline-rank {chunks_per_rank}"
    if name in ("gpipe", "1f1b") and chunks_per_rank != 1:
        return (
            f"--pipeline-schedule {name} runs one stage per rank, {chunks_flag} wants an interleaved schedule"
        )
    if name in ("zbv", "dualpipev") and chunks_per_rank != 2:
        return f"--pipeline-schedule {name} runs exactly two stages per rank, seen {chunks_flag}"
    if _accepts(name, pipeline_size, chunks_per_rank, microbatches):
        return None
    near = [
        next((n for n in way if _accepts(name, pipeline_size, chunks_per_rank, n)), None)
        for way in (
            range(microbatches - 1, 0, -1),
            range(microbatches + 1, microbatches + 4 * pipeline_size + 2),
        )
    ]
    wanted = " or ".join(str(n) for n in near if n is not None)
    return (
        f"--pipeline-schedule {name} with --pipeline-model-parallel-size {pipeline_size} cannot run {microbatches} "
        f"microbatches (global batch / (micro batch x data-parallel size)), the nearest it can run: {wanted}"
    )


def _accepts(name: str, pipeline_size: int, chunks: int, microbatches: int) -> bool:
    if name == "1f1b":
        return microbatches >= pipeline_size
    if name == "dualpipev":
        return microbatches >= 2 * pipeline_size
    if name.startswith("interleaved"):
        return microbatches >= 1 and microbatches % max(1, microbatches // pipeline_size) == 0
    return microbatches >= 1


def _gpipe(pipeline_size: int, rank: int, microbatches: int, chunks: int) -> list[Action]:
    forwards = [Action(rank, "F", m) for m in range(microbatches)]
    return forwards + [Action(rank, "B", m) for m in range(microbatches)]


def _one_f_one_b(pipeline_size: int, rank: int, microbatches: int, chunks: int) -> list[Action]:
    warmup = min(microbatches, pipeline_size - 1 - rank)
    forwards = [Action(rank, "F", m) for m in range(microbatches)]
    backwards = [Action(rank, "B", m) for m in range(microbatches)]
    return list(_alternate(forwards, backwards, warmup))


def _interleaved(pipeline_size: int, rank: int, microbatches: int, chunks: int) -> list[Action]:
    forwards, backwards = _rounds(pipeline_size, rank, microbatches, chunks, "B")
    warmup = _interleaved_warmup(pipeline_size, rank, microbatches, chunks, hop=2)
    return list(_alternate(forwards, backwards, warmup))


def _interleaved_zero_bubble(pipeline_size: int, rank: int, microbatches: int, chunks: int) -> list[Action]:
    """One forward, one input gradient; rank r runs each weight gradient r input gradients late, filling its wait."""
    forwards, backwards = _rounds(pipeline_size, rank, microbatches, chunks, "I")
    warmup = _interleaved_warmup(pipeline_size, rank, microbatches, chunks, hop=1)
    actions, pending = [], []
    seen = 0
    for action in _alternate(forwards, backwards, warmup):
        actions.append(action)
        if action.kind == "I":
            pending.append(action._replace(kind="W"))
            seen += 1
            if seen > rank:
                actions.append(pending.pop(0))
    return actions + pending


def _interleaved_warmup(pipeline_size: int, rank: int, microbatches: int, chunks: int, hop: int) -> int:
    """Forwards before the first backward: all earlier chunks of a round, and `hop` more per rank to the last one."""
    warmup = (chunks - 1) * _round_length(pipeline_size, microbatches) + hop * (pipeline_size - 1 - rank)
    return min(warmup, microbatches * chunks)


def _round_length(pipeline_size: int, microbatches: int) -> int:
    return microbatches // max(1, microbatches // pipeline_size)


def _rounds(
    pipeline_size: int, rank: int, microbatches: int, chunks: int, backward: str
) -> tuple[list[Action], list[Action]]:
    """A rank's forwards and backwards: in rounds of about `pipeline_size` microbatches, chunk after chunk."""
    length = _round_length(pipeline_size, microbatches)
    forwards, backwards = [], []
    for start in range(0, microbatches, length):
        for chunk in range(chunks):
            ahead, back = chunk * pipeline_size + rank, (chunks - 1 - chunk) * pipeline_size + rank
            forwards += [Action(ahead, "F", m) for m in range(start, start + length)]
            backwards += [Action(back, backward, m) for m in range(start, start + length)]
    return forwards, backwards


def _alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> Iterator[Action]:
    """`warmup` forwards, then forward and backward by turns, then the backwards that are left."""
    yield from forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - warmup :]


class _Counting:
    """Actions of one rank of a V, each kind of each of its two stages counting its own microbatches."""

    def __init__(self, pipeline_size: int, rank: int):
        self.stages = (rank, 2 * pipeline_size - 1 - rank)
        self.actions: list[Action] = []
        self.waiting: list[Action] = []  # weight gradients whose input gradient is done, oldest first
        self.done = {(chunk, kind): 0 for chunk in (0, 1) for kind in "FIW"}

    def add(self, *codes: str, times: int = 1, paired: bool = False) -> None:
        """Add e.g. 'F0', 'I1', 'B0' (counts as I and W) or 'W' (the oldest weight gradient waiting, if any)."""
        for code in codes * max(0, times):
            if code == "W":
                self.actions += self.waiting[:1]
                del self.waiting[:1]
                continue
            kind, chunk = code[0], int(code[1])
            key = (chunk, "I" if kind == "B" else kind)
            action = Action(self.stages[chunk], kind, self.done[key], paired)
            self.actions.append(action)
            self.done[key] += 1
            if kind == "B":
                self.done[chunk, "W"] += 1
            if kind == "I":
                self.waiting.append(action._replace(kind="W"))


def _zbv(pipeline_size: int, rank: int, microbatches: int, chunks: int) -> list[Action]:
    """Planned for at least 2 pp - 1 microbatches, which fill the V; those above the real number are left out."""
    last = max(2 * pipeline_size - 1, microbatches)
    plan = _Counting(pipeline_size, rank)
    behind = pipeline_size - rank
    plan.add("F0", times=2 * behind - 1)
    plan.add("F1", "F0", times=rank)
    plan.add("F1", "I1", "W1", times=behind)
    while plan.done[1, "F"] < plan.done[0, "F"] or plan.done[0, "F"] < last:
        if plan.done[0, "F"] < last:
            plan.add("F0")
        plan.add("I0", "W0", "F1", "I1", "W1")
    plan.add("I0", "I1", times=rank)
    plan.add("I0", "W0", times=behind)
    plan.add("W1", times=plan.done[1, "I"] - plan.done[1, "W"])
    plan.add("W0", times=plan.done[0, "I"] - plan.done[0, "W"])
    return [action for action in plan.actions if action.microbatch < microbatches]


def _dualpipev(pipeline_size: int, rank: int, microbatches: int, chunks: int) -> list[Action]:
    """Microbatches go down and up the V at once, so that a forward of one chunk meets a backward of the other."""
    plan = _Counting(pipeline_size, rank)
    behind = pipeline_size - rank - 1
    plan.add("F0", times=2 * behind)
    plan.add("F0", "F1", times=rank + 1)
    plan.add("I1", "W", "F1", times=behind)
    for turn in range(microbatches - 2 * pipeline_size + rank + 1):
        # The first turn of the last rank, at the tip of the V, is not overlapped: that makes its bubble smaller.
        plan.add("F0", "B1", paired=not (turn == 0 and behind == 0))
        plan.add("F1", "B0", paired=True)
    for _ in range(behind):
        plan.add("B1")
        plan.add("F1", "B0", paired=True)
    # The second half of what is left splits its backward, to have weight gradients for the idle end.
    for turn in range(2 * (rank + 1)):
        plan.add(f"{'I' if turn > rank else 'B'}{1 - turn % 2}")
    plan.add("W", "I0", times=behind)
    plan.add("W", times=rank + 1)
    return plan.actions


SCHEDULES: dict[str, Callable[[int, int, int, int], list[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved-1f1b": _interleaved,
    "interleaved-zero-bubble": _interleaved_zero_bubble,
    "zbv": _zbv,
    "dualpipev": _dualpipev,
}


class Event(NamedTuple):
    """An action and when it ran, in seconds from the start of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When every action of every rank ran: `events[rank]` in the rank's order."""

    events: tuple[tuple[Event, ...], ...]

    @property
    def start(self) -> float:
        return min(rank[0].start for rank in self.events if rank)

    @property
    def end(self) -> float:
        return max(rank[-1].end for rank in self.events if rank)

    @property
    def seconds(self) -> float:
        """From the first action's start to the last action's end, over all ranks."""
        return self.end - self.start

    def busy(self, rank: int) -> float:
        """Seconds in which the rank computes."""
        return sum(event.end - event.start for event in self.events[rank])

    def bubble(self, rank: int) -> float:
        """The idle share of one rank's time, 0 to 1."""
        return 1.0 - self.busy(rank) / self.seconds

    @property
    def bubble_fraction(self) -> float:
        """The idle share of all ranks' time, 0 to 1."""
        return sum(self.bubble(rank) for rank in range(len(self.events))) / len(self.events)


@dataclass(frozen=True)
class StageTimes:
    """Seconds of forward, input gradient and weight gradient of each stage; a full backward takes both."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]

    @staticmethod
    def equal(stages: int, forward: float = 1.0, backward: float = 2.0) -> "StageTimes":
        """The same for each of `stages` stages, half of the backward for either gradient."""
        half = (backward / 2,) * stages
        return StageTimes((forward,) * stages, half, half)

    def __call__(self, action: Action) -> float:
        """Seconds of one action."""
        if action.kind == "F":
            return self.forward[action.stage]
        seconds = 0.0
        if action.kind in "BI":
            seconds += self.backward_input[action.stage]
        if action.kind in "BW":
            seconds += self.backward_weight[action.stage]
        return seconds


def simulate(
    schedule: Schedule, seconds: Callable[[Action], float], placement: str = "loop", p2p_seconds: float = 0.0
) -> Timeline:
    """Simulate a schedule: each rank runs its actions in order, each as soon as what it needs is there.

    F of stage s needs F of stage s-1, B and I need the B or I of stage s+1 (of their own F on the last stage), W its
    own I. What comes from another rank arrives `p2p_seconds` after it was computed; sending costs the sender nothing.

    Raises:
        DeadlockError: the order cannot be run.
    """
    pipeline_size = len(schedule)
    stages = 1 + max(action.stage for rank in schedule for action in rank)
    finished: dict[tuple[str, int, int], float] = {}
    events: list[list[Event]] = [[] for _ in schedule]
    moving = True
    while moving:
        moving = False
        for rank, actions in enumerate(schedule):
            while len(events[rank]) < len(actions):
                action = actions[len(events[rank])]
                need = _needs(action, stages)
                if need is not None and need not in finished:
                    break
                ready = events[rank][-1].end if events[rank] else 0.0
                if need is not None:
                    away = rank_of_stage(need[1], pipeline_size, placement) != rank
                    ready = max(ready, finished[need] + away * p2p_seconds)
                event = Event(action, ready, ready + seconds(action))
                events[rank].append(event)
                finished[action.kind.replace("B", "I"), action.stage, action.microbatch] = event.end
                moving = True
    stuck = [
        (rank, actions[len(events[rank])])
        for rank, actions in enumerate(schedule)
        if len(actions) > len(events[rank])
    ]
    if stuck:
        raise DeadlockError("; ".join(f"rank {rank} waits to run {action}" for rank, action in stuck))
    return Timeline(tuple(tuple(rank) for rank in events))


def _needs(action: Action, stages: int) -> tuple[str, int, int] | None:
    """(kind, stage, microbatch) of the action that this one needs, where a full backward counts as I."""
    if action.kind == "F":
        return ("F", action.stage - 1, action.microbatch) if action.stage else None
    if action.kind == "W":
        return ("I", action.stage, action.microbatch)
    if action.stage == stages - 1:
        return ("F", action.stage, action.microbatch)
    return ("I", action.stage + 1, action.microbatch)


def peak_in_flight(actions: Sequence[Action], weights: Sequence[float] | None = None) -> float:
    """The most activations one rank holds at once, counted in microbatches of a stage.

    An activation lives from its forward to the end of its backward, or of its weight gradient where that comes
    later. `weights[stage]` weighs the stages, e.g. by bytes; without it each counts 1.
    """
    live = peak = 0.0
    for action in actions:
        weight = weights[action.stage] if weights else 1
        if action.kind == "F":
            live += weight
        peak = max(peak, live)
        if action.kind in "BW":
            live -= weight
    return peak


def schedule_timeline(
    name: str,
    pipeline_size: int,
    microbatches: int,
    chunks_per_rank: int = 1,
    seconds: Callable[[Action], float] | None = None,
    p2p_seconds: float = 0.0,
) -> Timeline:
    """`build_schedule` and `simulate` in one; without `seconds` every stage is equal, backward twice the forward."""
    schedule = build_schedule(name, pipeline_size, microbatches, chunks_per_rank)
    times = seconds or StageTimes.equal(pipeline_size * chunks_per_rank)
    return simulate(schedule, times, placement_of(name), p2p_seconds)
