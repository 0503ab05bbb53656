"""A tracker in a thread of its own: training hands records over and never waits for it, whatever its package does."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

Record = dict[str, Any]
QUEUE_LIMIT = 1000  # records that wait for a tracker; more are dropped
CLOSE_TIMEOUT_S = 30.0  # for all trackers together, at the end of the run


class Sink(Protocol):
    """One place for records."""

    name: str

    def track(self, record: Record, step: int) -> None:
        """Keep one record."""
        ...

    def close(self) -> None:
        """Flush and let go."""
        ...


class BackgroundSink:
    """A sink that is built, fed and closed by its own daemon thread, through a bounded queue.

    A sink that raises is reported at once and left out from then on; records that it did not take because it had
    failed, did not keep up or did not end are counted and reported at the end.
    """

    def __init__(
        self,
        name: str,
        build: Callable[[], Sink],
        say: Callable[[str], None],
        abandon: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the thread.

        Args:
            build: makes the sink, in the thread.
            say: takes lines for the log, from any thread.
            abandon: called when the sink did not close in time, to end what it leaves behind.
        """
        self.name = name
        self._build, self._say, self._abandon = build, say, abandon
        self._waiting: deque[tuple[Record, int]] = deque()
        self._changed = threading.Condition()
        self._closing = self._failed = self._abandoned = False
        self._given = self._dropped = self._kept = 0
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def track(self, record: Record, step: int) -> None:
        """Queue a record; drop it when the queue is full. Never blocks."""
        with self._changed:
            self._given += 1
            if self._failed:
                return
            full = len(self._waiting) >= QUEUE_LIMIT
            if not full:
                self._waiting.append((dict(record), step))
                self._changed.notify()
            self._dropped += full
            first = full and self._dropped == 1
        if first:
            self._say(
                f"warning: {self.name} does not keep up, {QUEUE_LIMIT:,} records wait for it: "
                f"from iteration {step} on records are dropped"
            )

    def begin_close(self) -> None:
        """Let the thread end once the queue is empty."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def wait_closed(self, deadline: float) -> None:
        """Wait for the thread until `deadline` (time.monotonic()), then leave it behind; report what was lost."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        late = self._thread.is_alive()
        with self._changed:
            self._abandoned = late
            lost, given, failed = self._given - self._kept, self._given, self._failed
        if late:
            self._abandon()
        if not (late or lost) or (failed and not self._kept):  # why it took nothing was said when it failed
            return
        if failed:
            why = "failed"
        elif late:
            why = f"did not finish within {CLOSE_TIMEOUT_S:g} s and is left behind; of what it took some may be unsent"
        else:
            why = "did not keep up"
        self._say(f"warning: {self.name} {why}: {lost:,} of {given:,} records were dropped")

    def _run(self) -> None:
        doing = "cannot be used, the run goes on without it"
        try:
            sink = self._build()
            doing = "failed and is left out from here on"
            while (entry := self._next()) is not None:
                sink.track(*entry)
                with self._changed:
                    self._kept += 1
            sink.close()
        except BaseException as error:  # noqa: BLE001  a tracker must never stop a run, SystemExit neither
            with self._changed:
                self._failed = True
                self._waiting.clear()
                abandoned = self._abandoned  # why the run went on without it
            if not abandoned:
                self._say(f"warning: {self.name} {doing}: {str(error) or type(error).__name__}")

    def _next(self) -> tuple[Record, int] | None:
        """The next record; None when there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return self._waiting.popleft() if self._waiting else None
