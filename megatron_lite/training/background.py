"""A tracker in a thread of its own: training hands records over and never waits for it, whatever its package does."""

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol

Record = dict[str, Any]
QUEUE_LIMIT = 1000  # records that wait for a tracker; more are dropped
CLOSE_TIMEOUT_S = 30.0  # for all trackers together, at the end of the run


class Sink(Protocol):
    """One place for records. One that is not in the background has a `name`."""

    def track(self, record: Record, step: int) -> None:
        """Keep one record."""
        ...

    def close(self, exit_code: int) -> None:
        """Flush and let go; the run ends with this exit code."""
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
        self._waiting: SimpleQueue[tuple[Record, int] | int] = SimpleQueue()
        # Each is written by one side only: the first three by training, the others by the thread.
        self._given, self._dropping, self._abandoned = 0, False, False
        self._kept, self._failed = 0, False
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def track(self, record: Record, step: int) -> None:
        """Queue a record; drop it when the queue is full. Never blocks."""
        self._given += 1
        if self._failed:
            return
        if self._waiting.qsize() < QUEUE_LIMIT:
            self._waiting.put((dict(record), step))
        elif not self._dropping:
            self._dropping = True
            self._say(
                f"warning: {self.name} does not keep up, {QUEUE_LIMIT:,} records wait for it: "
                f"from iteration {step} on records are dropped"
            )

    def begin_close(self, exit_code: int) -> None:
        """Let the thread end once the queue is empty."""
        self._waiting.put(exit_code)

    def wait_closed(self, deadline: float) -> None:
        """Wait for the thread until `deadline` (time.monotonic()), then leave it behind; report what was lost."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        late = self._abandoned = self._thread.is_alive()
        lost, failed = self._given - self._kept, self._failed
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
        self._say(f"warning: {self.name} {why}: {lost:,} of {self._given:,} records were dropped")

    def _run(self) -> None:
        doing = "cannot be used, the run goes on without it"
        try:
            sink = self._build()
            doing = "failed and is left out from here on"
            while isinstance(entry := self._waiting.get(), tuple):
                sink.track(*entry)
                self._kept += 1
            sink.close(entry)
        except BaseException as error:  # noqa: BLE001  a tracker must never stop a run, SystemExit neither
            self._failed = True
            if not self._abandoned:  # else this is why the run went on without it
                self._say(f"warning: {self.name} {doing}: {str(error) or type(error).__name__}")
