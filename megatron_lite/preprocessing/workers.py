"""Worker processes that take items from an iterator and give results back in the order of the items.

What concurrent.futures does not promise and a run of hours needs: a worker that is killed ends the run at once
with a sentence; whatever ends this process ends the workers, a kill -9 too; memory is bounded however fast the
items come.
"""

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, TypeVar

from megatron_lite.files.command_line import RunError

Item, Kept, Result = TypeVar("Item"), TypeVar("Kept"), TypeVar("Result")

AHEAD = 4  # items a worker may be ahead of the oldest one that is not done
# Of items that are being worked on or wait for an earlier one; a large item is let in only below that.
MAX_BYTES, MAX_BYTES_A_WORKER = 1 << 25, 1 << 21


def map_in_order(
    build: Callable[[], Callable[[Item], Result]],
    items: Iterable[Item],
    num_workers: int,
    size: Callable[[Item], int],
    keep: Callable[[Item], Kept] = lambda item: item,
) -> Iterator[tuple[Kept, Result]]:
    """Yield (keep(item), function(item)) in the order of `items`; `build()` in a worker returns the function.

    Args:
        build: picklable; called once in each worker.
        num_workers: processes; 0 = none, everything happens here.
        size: bytes of an item, for the bound of memory.
        keep: what of an item is still wanted here while a worker has it: the worker's copy is the large one.

    Raises:
        RunError: a worker died; any exception that the function raised there.
    """
    if num_workers == 0:
        function = build()
        for item in items:
            yield keep(item), function(item)
            del item  # not to be held while the next one is read
        return
    most = max(MAX_BYTES, MAX_BYTES_A_WORKER * num_workers)
    ahead: deque = deque()  # (kept, size, result to come) of the items given out, in their order
    held, rest = 0, iter(items)
    with _started(build, num_workers) as call:
        while True:
            while len(ahead) < AHEAD * num_workers and held < most and (item := next(rest, _END)) is not _END:
                ahead.append((keep(item), size(item), call([item])))
                held += ahead[-1][1]
                del item
            if not ahead:
                return
            kept, freed, future = ahead.popleft()
            yield kept, future.result()
            del future  # with its result
            held -= freed


_END = object()


def _died(process: Any) -> RunError:
    process.join(5)
    code = process.exitcode
    how = f"ended with {code}"
    if (code or 0) < 0:
        how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
    if code == -9:
        how += "; signal 9 often means that the machine ran out of memory: give fewer --workers"
    return RunError(f"worker process {process.pid} {how}")


@contextmanager
def _started(build: Callable, num_workers: int) -> Iterator[Callable[[list], Future]]:
    """What hands an item to the next idle worker; the item comes in a list, out of which it is taken.

    A thread for each worker waits for it. A worker has one item at a time, so it never happens that both sides wait
    to write into a full pipe.
    """
    # spawn: a fork would copy whatever threads hold locks here, and every worker would hold the others' pipes open,
    # so that none of them would see this process die.
    context = multiprocessing.get_context("spawn")
    processes: dict[Connection, Any] = {}
    idle: SimpleQueue[Connection] = SimpleQueue()

    def call(item: list) -> Any:
        connection = idle.get()
        try:
            connection.send(item.pop())
            result = connection.recv()
        except (EOFError, OSError):
            raise _died(processes[connection]) from None
        finally:
            idle.put(connection)
        if isinstance(result, Exception):
            raise result
        return result

    threads = ThreadPoolExecutor(num_workers)
    try:
        for _ in range(num_workers):
            mine, theirs = context.Pipe()
            processes[mine] = context.Process(target=_work, args=(theirs, build), daemon=True)
            processes[mine].start()
            theirs.close()
            idle.put(mine)
        yield partial(threads.submit, call)
    finally:
        for process in processes.values():
            process.kill()
        for process in processes.values():
            process.join()
        threads.shutdown(cancel_futures=True)  # those that wait see the pipe's end
        for connection in processes:
            connection.close()


def _work(connection: Connection, build: Callable[[], Callable]) -> None:
    """The life of a worker: until the other end of its pipe closes, be it by that process's death."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the first process decides
    try:
        try:
            function = build()
        except Exception as error:
            connection.recv()
            connection.send(error)
            return
        while True:
            item = connection.recv()
            try:
                result = function(item)
            except Exception as error:
                error.add_note(f"in worker process {multiprocessing.current_process().pid}")
                result = error
            connection.send(result)
            del item, result  # not to be held while this process waits for the next one
    except (EOFError, OSError):
        return
