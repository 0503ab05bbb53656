"""Start and stop torch.distributed; choose the device; seed the random generators; leave cleanly."""

import hashlib
import os
import platform
import resource
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from megatron_lite.config import Config, ConfigError
from megatron_lite.environment import Environment, prepare_libraries

# How long a rank that failed second waits, so that torchrun stops it before it talks over the first error.
SECONDARY_ERROR_DELAY_S = 10.0
# The index of a corpus of trillions of tokens takes an hour.
INDEX_TIMEOUT = timedelta(hours=24)


def choose_device(config: Config, environment: Environment) -> torch.device:
    """The CUDA device of this local rank, or the CPU where --device or --cpu asks for it or CUDA was never meant.

    Raises:
        ConfigError: CUDA cannot be used although devices or a CUDA build of torch are there: training on the CPU
            without a word would take a hundred times as long; or a local rank has no device of its own.
    """
    parallel = config.parallel
    if parallel.cpu or parallel.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        devices = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
        if parallel.device == "auto" and not devices and torch.version.cuda is None:
            return torch.device("cpu")
        raise ConfigError(
            f"CUDA cannot be used on {socket.gethostname()} ({len(devices)} NVIDIA devices, torch {torch.__version__} "
            f"is built for CUDA {torch.version.cuda}): {_why_no_cuda()}; wanted a driver and a torch that fit each "
            "other, or --device cpu to train on the CPU"
        )
    if environment.local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"torchrun --nproc-per-node: local rank {environment.local_rank} has no GPU of its own, "
            f"this machine has {torch.cuda.device_count()}; start that many processes, or add --device cpu"
        )
    return torch.device("cuda", environment.local_rank)


def _why_no_cuda() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().splitlines()[0]
    return "torch.cuda.is_available() is false"


def describe_device(device: torch.device, config: Config) -> str:
    """One line: what the run computes on, and with."""
    precision = config.precision
    dtype = "bf16" if precision.bf16 else "fp16" if precision.fp16 else "fp32"
    name, driver = platform.processor() or platform.machine(), ""
    if device.type == "cuda":
        name, driver = torch.cuda.get_device_name(device), f", CUDA {torch.version.cuda}"
        with suppress(OSError, IndexError):
            version = Path("/proc/driver/nvidia/version").read_text().split("Module")[1].split()[0]
            driver += f", driver {version}"
    backend = "NCCL (gloo for hosts)" if device.type == "cuda" else "gloo"
    return f"device: {device.type} ({name}), {backend}, {dtype}, torch {torch.__version__}{driver}"


@contextmanager
def process_group(config: Config, environment: Environment) -> Iterator[torch.device]:
    """torch.distributed for the time of the block: NCCL on GPUs (gloo beside it for the host), gloo on CPUs.

    Without torchrun's environment it is a world of one.
    """
    for line in prepare_libraries(config.training.deterministic_mode):
        print_once(line, environment)
    _raise_open_file_limit()
    end_with_launcher(environment)
    device = choose_device(config, environment)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    rank, world_size, store = environment.rank, environment.world_size, dist.HashStore()
    if environment.launched:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
        prefix = join_attempt(store, rank, world_size, f"{device.type} {socket.gethostname()}", timeout)
        store = dist.PrefixStore(prefix, store)
    bound = device if device.type == "cuda" else None
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=bound
    )
    print_once(describe_device(device, config), environment)
    yield device
    # Only the good end: after a failure a collective clean-up would wait for ranks that are gone.
    dist.destroy_process_group()


def print_once(line: str, environment: Environment) -> None:
    """Print on the first rank."""
    if environment.rank == 0:
        print(line, flush=True)


def _raise_open_file_limit() -> None:
    """A rank of a large world holds a socket to many others, and a blend many files: soft limits are often 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def end_with_launcher(environment: Environment, interval_s: float = 0.5) -> None:
    """End this rank when torchrun is gone: without it nobody stops the ranks, and they would save over a successor."""
    if environment.run_id is None:
        return
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(interval_s)
        os.write(2, f"[rank {environment.rank}] torchrun is gone: this rank ends without saving\n".encode())
        os._exit(1)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


def join_attempt(store: dist.Store, rank: int, world_size: int, what: str, timeout: timedelta) -> str:
    """A key prefix that all ranks of this attempt share and no earlier attempt had.

    torchrun keeps its store over restarts, and what an attempt that failed left there holds the next one up in
    init_process_group. TORCHELASTIC_RESTART_COUNT tells attempts apart on one node only: nodes that restart because
    another failed do not count. So rank 0 reads everyone's greeting, publishes which it has seen, and is done once
    everyone answered to the newest list; greetings of the dead are never answered.

    Args:
        what: "<device type> <host>" of this rank; all have to compute on one type of device.

    Raises:
        ConfigError: on every rank, when some ranks compute on another type of device than rank 0.
    """
    greeting = f"{secrets.token_hex(8)} {what}"
    store.set(f"greeting/{rank}", greeting)
    store.set(f"answer/{rank}", "")
    if rank == 0:
        store.set("decided", "")
    greetings, seen, answers = (
        [f"{kind}/{n}" for n in range(world_size)] for kind in ("greeting", "seen", "answer")
    )
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        if rank == 0:
            everyone = store.multi_get(greetings)
            attempt = hashlib.sha256(b"\n".join(everyone)).hexdigest()
            store.multi_set(seen, everyone)
            store.set("attempt", attempt)
        if store.get(f"seen/{rank}").decode() == greeting:
            store.set(f"answer/{rank}", store.get("attempt"))
        if rank == 0 and set(store.multi_get(answers)) == {attempt.encode()}:
            store.set("decided", f"{attempt} {_mixed_devices(everyone)}")
        decided, _, problem = store.get("decided").decode().partition(" ")
        if decided and decided == store.get(f"answer/{rank}").decode():
            if problem:
                raise ConfigError(problem)
            return decided
        time.sleep(0.02 if world_size < 64 else 0.2)
    raise dist.DistError(f"{world_size} ranks did not come together within {timeout}")


def _mixed_devices(greetings: list[bytes]) -> str:
    """One sentence when ranks compute on several types of device; empty when on one."""
    kinds = [greeting.decode().split(" ", 2)[1:] for greeting in greetings]
    others = [(rank, kind, host) for rank, (kind, host) in enumerate(kinds) if kind != kinds[0][0]]
    if not others:
        return ""
    named = ", ".join(f"rank {rank} on {host}: {kind}" for rank, kind, host in others[:4])
    return (
        f"{len(others)} of {len(kinds)} ranks compute on another device than rank 0's {kinds[0][0]} ({named}), wanted "
        "one type: mend these hosts or leave them out"
    )


def patient_barrier(config: Config) -> None:
    """Wait for all ranks longer than a collective may take: one of each node may be building a large index."""
    _set_pg_timeout(INDEX_TIMEOUT)
    dist.barrier()
    _set_pg_timeout(timedelta(minutes=config.parallel.distributed_timeout_minutes))


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
