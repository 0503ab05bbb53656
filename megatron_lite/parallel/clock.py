"""When a rank's pipeline actions run, by its own clock.

Two marks an action: on a CPU the time of day, on a GPU an event in the stream that the action's kernels are in, read
when the host has waited for the device anyway. A step costs next to nothing, so the clock is always on.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_lite.distributed.collectives import gathered

Mark = Any  # seconds on a CPU, torch.cuda.Event on a GPU


class Span(NamedTuple):
    """One action of this rank: kind F, B, I or W as in schedule.py, R the reduction of a stage's gradients.

    start and end: seconds from the start of the step's pipeline.
    """

    kind: str
    stage: int
    microbatch: int
    start: float
    end: float


class ActionClock:
    """The spans of a step, and sums of them for the idle share.

    `keeping`: the ranks of the pipeline pass a barrier before a step, so that their zeros are the same moment
    (but for what a barrier takes to let go), and `take_spans` has the steps since the last call.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup) -> None:
        self.keeping = False
        self._device = device
        self._group = group
        self._begun: Mark | None = None
        self._ended: Mark | None = None
        self._marks: list[tuple[str, int, int, Mark, Mark]] = []
        self._aligned = False
        self._kept: list[list[Span]] = []
        self._busy = self._seconds = 0.0

    def begin(self) -> None:
        """A training step's pipeline starts."""
        self._read()
        self._aligned = self.keeping
        if self._aligned:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            dist.barrier(self._group)
        self._marks.clear()
        self._begun, self._ended = self._mark(), None

    def end(self) -> None:
        """Its last action of this rank was started (on a CPU: has run)."""
        self._ended = self._mark()

    def run(
        self,
        kind: str,
        stage: int,
        microbatch: int,
        computation: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call computation(*args, **kwargs); between `begin` and `end` note when it ran."""
        if self._begun is None or self._ended is not None:
            return computation(*args, **kwargs)
        start = self._mark()
        result = computation(*args, **kwargs)
        self._marks.append((kind, stage, microbatch, start, self._mark()))
        return result

    def take_sums(self) -> tuple[float, float]:
        """(seconds in actions, seconds from begin to end) of all steps since the last call."""
        self._read()
        sums, self._busy, self._seconds = (self._busy, self._seconds), 0.0, 0.0
        return sums

    def idle_shares(self) -> dict[str, float]:
        """The share of the pipeline's time in which a rank waits, since the last call; collective over all ranks.

        pipeline-idle-share: mean over the ranks, pipeline-idle-share-max: of the rank that waits most. A rank is busy
        in its actions (the all-gathers of their weights included) and in the reduction of its gradients; the pipeline's
        time is that of the rank that is longest in it.
        """
        mine = torch.tensor(self.take_sums(), device=self._device)
        busy, seconds = gathered(mine).unbind(1)
        shares = 1 - busy / seconds.max()
        mean, most = torch.stack([shares.mean(), shares.max()]).tolist()
        return {"pipeline-idle-share": mean, "pipeline-idle-share-max": most}

    def take_spans(self) -> list[list[Span]]:
        """The spans, step by step, of the steps that began with `keeping` since the last call."""
        self._read()
        kept, self._kept = self._kept, []
        return kept

    def _mark(self) -> Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _read(self) -> None:
        """Turn the marks of a step that is over into spans; on a GPU this waits for its last mark."""
        if self._begun is None or self._ended is None:
            return
        spans = [
            Span(kind, stage, microbatch, self._since_begun(start), self._since_begun(end))
            for kind, stage, microbatch, start, end in self._marks
        ]
        self._busy += sum(span.end - span.start for span in spans)
        self._seconds += self._since_begun(self._ended)
        if self._aligned:
            self._kept.append(spans)
        self._begun = self._ended = None

    def _since_begun(self, mark: Mark) -> float:
        if self._device.type != "cuda":
            return mark - self._begun
        mark.synchronize()
        return self._begun.elapsed_time(mark) / 1000
