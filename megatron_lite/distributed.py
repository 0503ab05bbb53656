"""Start and stop torch.distributed; choose the device; seed the random generators; leave cleanly."""

import hashlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_lite.config import Config, ConfigError
from megatron_lite.environment import Environment

# How long a rank that failed second waits, so that torchrun stops it before it talks over the first error.
SECONDARY_ERROR_DELAY_S = 10.0


def choose_device(config: Config, environment: Environment) -> torch.device:
    """The CUDA device of this local rank, or the CPU when there is none or --cpu asks for it."""
    if config.parallel.cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    if environment.local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"torchrun --nproc-per-node: local rank {environment.local_rank} has no GPU of its own, "
            f"this machine has {torch.cuda.device_count()}; start that many processes, or add --cpu"
        )
    return torch.device("cuda", environment.local_rank)


@contextmanager
def process_group(config: Config, environment: Environment) -> Iterator[torch.device]:
    """torch.distributed for the time of the block: NCCL on GPUs (gloo beside it for the host), gloo on CPUs.

    Without torchrun's environment it is a world of one.
    """
    device = choose_device(config, environment)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    if environment.launched:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    yield device
    # Only the good end: after a failure a collective clean-up would wait for ranks that are gone.
    dist.destroy_process_group()


def seed_everything(
    config: Config,
    pipeline_rank: int,
    data_parallel_rank: int,
    context_rank: int = 0,
    tensor_rank: int = 0,
) -> None:
    """Seed torch's generators for dropout: equal on the ranks that hold the same activations, else different.

    Tensor ranks hold the same hidden state, so they draw the same numbers, unless --sequence-parallel cuts it;
    what they hold different heads of, attention dropout, is parallel/tensor.py's. Initial weights do not depend
    on it: model/initialization.py seeds each parameter by its name.
    """
    tensor_rank = tensor_rank if config.parallel.sequence_parallel else 0
    place = (config.training.seed, pipeline_rank, data_parallel_rank, context_rank, tensor_rank)
    digest = hashlib.blake2b(repr(place).encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)
    if config.training.deterministic_mode:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def from_first_rank(value: str | None) -> str | None:
    """Rank 0's value, on every rank (collective)."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def run_and_exit(main: Callable[[], int], environment: Environment) -> None:
    """Run main and end the process with its exit code; never returns.

    The exit skips the interpreter's teardown: gloo's threads can abort a finished process there, and a
    finished job must not report failure. A ConfigError is one sentence and exit code 2; any other exception
    is a traceback, exit code 1. Errors that only say that a peer is gone are held back for a while, so that
    the first rank's own error is what is seen.
    """
    try:
        code = main()
    except ConfigError as error:
        if environment.rank != 0:
            time.sleep(SECONDARY_ERROR_DELAY_S)
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    except BaseException as error:  # noqa: BLE001  every failure must end this process, or its peers hang
        if _says_a_peer_is_gone(error):
            time.sleep(SECONDARY_ERROR_DELAY_S)
        print(f"[rank {environment.rank}] {traceback.format_exc()}", file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _says_a_peer_is_gone(error: BaseException) -> bool:
    """Whether the error, or one that it was raised from (the pipeline wraps what a stage raises), is a lost peer."""
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")
    seen: BaseException | None = error
    while seen is not None:
        lost = isinstance(seen, RuntimeError) and any(sign in str(seen) for sign in signs)
        if lost or isinstance(seen, dist.DistError):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
