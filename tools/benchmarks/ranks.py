"""Suites on ranks: one set of gloo processes hosts every contestant, and they take turns.

All contestants of a comparison live in the same processes, so they see the same machine, the same neighbours and the
same state of its caches. Each rank computes with one thread where nothing else is said.
"""

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_lite.files.command_line import RunError

# Imported once, before the ranks are forked.
PRELOADED = ("torch", "torch.distributed.fsdp", "torch.distributed.pipelining")


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, threads: int = 1, timeout: float = 600.0
) -> list[Any]:
    """Run `function(*args)` on `world_size` fresh processes with a gloo group; their results, rank by rank.

    Args:
        function: a top-level function; it, the arguments and the results are pickled.
        threads: of each rank.
        timeout: seconds for all ranks together; then every rank is killed.

    Raises:
        RunError: with the traceback of the first rank that failed, or that not all came to an end.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    pool = ProcessPoolExecutor(world_size, context)
    with tempfile.TemporaryDirectory() as folder:
        group = (f"file://{folder}/store", world_size, threads, timeout)
        # A rank begins by waiting for all others, so that no process is two of them.
        ranks = [pool.submit(_run, *group, rank, function, args) for rank in range(world_size)]
        try:
            ended, late = wait(ranks, timeout, FIRST_EXCEPTION)
        finally:  # without the teardown, in which gloo's threads can abort
            for process in list(pool._processes.values()):
                process.kill()
            pool.shutdown()
    for rank, result in enumerate(ranks):
        if result in ended and (error := result.exception()) is not None:
            raise RunError(f"rank {rank} raised:\n{''.join(traceback.format_exception(error))}")
    if late:
        raise RunError(f"not all of {world_size} ranks finished within the time limit")
    return [result.result() for result in ranks]


def _run(
    store: str, size: int, threads: int, timeout: float, rank: int, function: Callable, args: tuple
) -> Any:
    torch.set_num_threads(threads)
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=limit)
    return function(*args)


def timed(turn: Callable[[], object]) -> Callable[[], float]:
    """A turn for `take_turns`: all ranks start together, the seconds end when the last one is done."""

    def run() -> float:
        dist.barrier()
        started = time.perf_counter()
        turn()
        dist.barrier()
        return time.perf_counter() - started

    return run
