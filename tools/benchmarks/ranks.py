"""Suites on several ranks: one set of gloo processes hosts every contestant, and they take turns.

All contestants of a comparison live in the same processes, so they see the same machine, the same neighbours and the
same state of its caches. Each rank computes with one thread.
"""

import multiprocessing
import multiprocessing.connection
import os
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from megatron_lite.files.command_line import RunError

# Imported once, before the ranks are forked.
PRELOADED = ("torch", "torch.distributed.fsdp", "torch.distributed.pipelining")


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 600.0) -> list[Any]:
    """Run `function(*args)` on `world_size` fresh processes with a gloo group; their results, rank by rank.

    Args:
        function: a top-level function; it, the arguments and the results are pickled.
        timeout: seconds for all ranks together; then every rank is killed.

    Raises:
        RunError: with the traceback of the first rank that failed, or the ranks that did not come to an end.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))  # no effect where the server runs already
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    processes, answers = [], []
    try:
        for rank in range(world_size):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_enter, args=(function, args, rank, world_size, port, timeout, theirs), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            answers.append(mine)
        return _collect(processes, answers, time.monotonic() + timeout)
    finally:
        for process in processes:
            process.kill()
            process.join()


def timed(turn: Callable[[], object]) -> Callable[[], float]:
    """A turn for `take_turns`: all ranks start together, the seconds end when the last one is done."""

    def run() -> float:
        dist.barrier()
        started = time.perf_counter()
        turn()
        dist.barrier()
        return time.perf_counter() - started

    return run


def _enter(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    port: int,
    timeout: float,
    answer: Connection,
) -> None:
    """The life of one rank: its answer, then waiting until the parent kills it (or has gone itself)."""
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, timeout=timedelta(seconds=timeout))
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
        )
        outcome = (True, function(*args))
    except BaseException:  # noqa: BLE001  the traceback is the answer
        outcome = (False, traceback.format_exc())
    answer.send(outcome)
    multiprocessing.parent_process().join()  # killed by then: a rank that left early would disturb its peers
    os._exit(0)


def _collect(processes: list[BaseProcess], answers: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(answers):
        waiting = {answers[rank]: rank for rank in range(len(answers)) if rank not in results}
        ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RunError(f"ranks {sorted(waiting.values())} did not finish within the time limit")
        for connection in ready:
            rank = waiting[connection]
            try:
                succeeded, results[rank] = connection.recv()
            except EOFError:
                processes[rank].join(1.0)
                raise RunError(f"rank {rank} died with exit code {processes[rank].exitcode}") from None
            if not succeeded:
                raise RunError(f"rank {rank} raised:\n{results[rank]}")
    return [results[rank] for rank in range(len(answers))]
