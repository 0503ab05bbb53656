"""Run a function on several gloo ranks, each a fresh process, under a time limit.

The processes come from a forkserver that has torch imported already, so a rank costs a fork, not an import.
A fresh process per case is on purpose: after one failed operation a gloo group is poisoned.
"""

import multiprocessing
import multiprocessing.connection
import os
import pickle
import secrets
import socket
import tempfile
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "torch.distributed.fsdp", "tests.preload"])


class RankError(AssertionError):
    """A rank raised, died, or the time limit was reached; the message holds the first rank's traceback."""


def free_port() -> int:
    """A TCP port that is free now, and is given to no connection of other tests: those come from 32,768 up."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def _enter(function, rank, world_size, port, init, timeout, env, result_file, args):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **env)
    torch.set_num_threads(1)
    try:
        if init:
            dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
        outcome = ("ok", function(*args))
    except BaseException:  # noqa: BLE001  the traceback is the result
        outcome = ("error", traceback.format_exc())
    temporary = Path(f"{result_file}.part")
    temporary.write_bytes(pickle.dumps(outcome))
    temporary.rename(result_file)
    if outcome[0] == "ok" and dist.is_initialized():
        dist.destroy_process_group()
    # gloo's threads can abort a finished process at interpreter exit; the result is on disk already.
    os._exit(0 if outcome[0] == "ok" else 1)


def run_ranks(function, world_size, *args, timeout=120, init=False, env=None):
    """Run `function(*args)` on `world_size` ranks and return their results, rank by rank.

    Args:
        function: a top-level function of an importable test module.
        init: also start the default gloo process group before the call.
        timeout: seconds for all ranks together; when it runs out every rank is killed.

    Raises:
        RankError: with the traceback of the first rank that failed.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"rank{rank}" for rank in range(world_size)]
        processes = [
            _CONTEXT.Process(
                target=_enter,
                args=(function, rank, world_size, port, init, timeout, env or {}, str(files[rank]), args),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            _wait(processes, files, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [pickle.loads(file.read_bytes())[1] for file in files]


def _wait(processes, files, deadline):
    waiting = dict(enumerate(processes))
    while waiting:
        left = deadline - time.monotonic()
        if left <= 0:
            raise RankError(f"ranks {sorted(waiting)} did not finish within the time limit")
        multiprocessing.connection.wait([p.sentinel for p in waiting.values()], timeout=min(left, 1.0))
        for rank, process in list(waiting.items()):
            if process.exitcode is None:
                continue
            del waiting[rank]
            outcome = pickle.loads(files[rank].read_bytes()) if files[rank].exists() else None
            if outcome is None:
                raise RankError(f"rank {rank} died with exit code {process.exitcode}")
            if outcome[0] == "error":
                raise RankError(f"rank {rank} raised:\n{outcome[1]}")
