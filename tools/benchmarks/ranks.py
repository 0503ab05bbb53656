"""Suites on ranks: one set of gloo processes hosts every contestant, and they take turns.

All contestants of a comparison live in the same processes, so they see the same machine, the same neighbours and the
same state of its caches. Each rank computes with one thread where nothing else is said.
"""

import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes

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
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOADED))
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        arguments = (function, args, world_size, folder, threads, timeout)
        ranks = start_processes(
            _enter, arguments, world_size, join=False, daemon=True, start_method="forkserver"
        )
        try:
            while not ranks.join(timeout=1.0):
                if time.monotonic() > deadline:
                    raise RunError(f"not all of {world_size} ranks finished within the time limit")
        except ProcessRaisedException as error:
            raise RunError(f"rank {error.error_index} raised:\n{error.msg}") from None
        except ProcessExitedException as error:
            raise RunError(f"rank {error.error_index} died with exit code {error.exit_code}") from None
        finally:
            for process in ranks.processes:
                process.kill()
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(world_size)]


def _enter(
    rank: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    world_size: int,
    folder: str,
    threads: int,
    timeout: float,
) -> None:
    """The life of one rank; its result is a file. Leaves without the teardown, in which gloo's threads can abort."""
    torch.set_num_threads(threads)
    store = f"file://{folder}/store"
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=limit)
    Path(folder, str(rank)).write_bytes(pickle.dumps(function(*args)))
    dist.barrier()  # a rank that left early would disturb its peers
    os._exit(0)


def timed(turn: Callable[[], object]) -> Callable[[], float]:
    """A turn for `take_turns`: all ranks start together, the seconds end when the last one is done."""

    def run() -> float:
        dist.barrier()
        started = time.perf_counter()
        turn()
        dist.barrier()
        return time.perf_counter() - started

    return run
