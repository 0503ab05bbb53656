"""Worker processes that take items from an iterator and give results back in the order of the items.

What concurrent.futures does not promise and a run of hours needs: a worker that is killed ends the run at once
with a sentence; whatever ends this process ends the workers, a kill -9 too; memory is bounded however fast the
items come.
"""

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
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
    with _started(build, num_workers) as processes:
        yield from _in_order(processes, iter(items), size, keep)


def _in_order(
    processes: dict[Connection, Any],
    items: Iterator[Item],
    size: Callable[[Item], int],
    keep: Callable[[Item], Kept],
) -> Iterator[tuple[Kept, Result]]:
    """Hand an item to whoever is idle.

    A worker has one item at a time, so it never happens that both sides wait to write into a full pipe.
    """
    idle, working = list(processes), {}
    waiting: dict[int, tuple[int, Kept, Result]] = {}  # done, but maybe one before them is not
    given = yielded = held = 0
    most = max(MAX_BYTES, MAX_BYTES_A_WORKER * len(processes))
    exhausted = False
    while True:
        while idle and not exhausted and given - yielded < AHEAD * len(processes) and held < most:
            item = next(items, _END)
            if item is _END:
                exhausted = True
                break
            connection = idle.pop()
            _send(connection, processes[connection], item)
            working[connection] = (given, size(item), keep(item))
            given, held = given + 1, held + size(item)
            del item
        if exhausted and not working and not waiting:
            return
        for connection in wait(working, 0 if yielded in waiting else None) if working else ():
            number, *about = working.pop(connection)
            waiting[number] = (*about, _receive(connection, processes[connection]))
            idle.append(connection)
        if yielded in waiting:
            freed, kept, result = waiting.pop(yielded)
            yielded, held = yielded + 1, held - freed
            yield kept, result
            del result


_END = object()


def _send(connection: Connection, process: Any, item: Any) -> None:
    try:
        connection.send(item)
    except OSError:
        raise _died(process) from None


def _receive(connection: Connection, process: Any) -> Any:
    try:
        result = connection.recv()
    except (EOFError, OSError):
        raise _died(process) from None
    if isinstance(result, Exception):
        raise result
    return result


def _died(process: Any) -> RunError:
    process.join(5)
    code = process.exitcode
    how = (
        f"was killed by signal {-code} ({signal.Signals(-code).name})"
        if (code or 0) < 0
        else f"ended with {code}"
    )
    hint = (
        "; signal 9 often means that the machine ran out of memory: give fewer --workers"
        if code == -9
        else ""
    )
    return RunError(f"worker process {process.pid} {how}{hint}")


@contextlib.contextmanager
def _started(build: Callable, num_workers: int) -> Iterator[dict[Connection, Any]]:
    # spawn: a fork would copy whatever threads hold locks here, and every worker would hold the others' pipes open,
    # so that none of them would see this process die.
    context = multiprocessing.get_context("spawn")
    processes = {}
    try:
        for _ in range(num_workers):
            mine, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, build), daemon=True)
            process.start()
            theirs.close()
            processes[mine] = process
        yield processes
    finally:
        for connection, process in processes.items():
            connection.close()
            process.kill()
        for process in processes.values():
            process.join()


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
