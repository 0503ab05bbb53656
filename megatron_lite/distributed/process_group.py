"""Start and stop torch.distributed; choose the device; seed the random generators; leave cleanly."""

import hashlib
import json
import os
import platform
import resource
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_lite.config import Config, ConfigError
from megatron_lite.distributed.environment import Environment, prepare_libraries
from megatron_lite.files.command_line import RunError

# How long a rank that failed second waits, so that torchrun stops it before it talks over the first error.
SECONDARY_ERROR_DELAY_S = 10.0
# Runs a collective check unless an earlier attempt of the same torchrun passed it: one that was refused did not.
OnceARun = Callable[[Callable[[], None]], None]
# Where an NVIDIA driver shows, whether or not it works.
NVIDIA_FILES = tuple(map(Path, ("/dev/nvidia0", "/dev/nvidiactl", "/proc/driver/nvidia")))


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
        signs = [f"this machine has {path}" for path in NVIDIA_FILES if path.exists()]
        built_for = torch.version.cuda and f"CUDA {torch.version.cuda}" or torch.version.hip
        signs += [f"torch {torch.__version__} is built for {built_for or 'the CPU only'}"]
        if parallel.device == "auto" and len(signs) == 1 and built_for is None:
            return torch.device("cpu")
        hidden = environment.cuda_visible_devices
        signs += [f"CUDA_VISIBLE_DEVICES is '{hidden}'"] if hidden is not None else []
        raise ConfigError(
            f"CUDA cannot be used on {socket.gethostname()}: {_why_no_cuda()} ({', '.join(signs)}); wanted a driver "
            "and a torch that fit each other, or --device cpu to train on the CPU"
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
        return str(error).strip().splitlines()[0].split(". ")[0]
    return "torch sees no device"


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
def process_group(config: Config, environment: Environment) -> Iterator[tuple[torch.device, OnceARun]]:
    """torch.distributed for the time of the block: NCCL on GPUs, gloo on CPUs. Without a launcher a world of one.

    Yields the device, and what runs a check that an attempt before this one may have passed.

    Raises:
        ConfigError: on every rank, when one cannot use its device or not all use one type.
    """
    say = partial(print, flush=True) if environment.rank == 0 else lambda line: None
    for line in prepare_libraries(config.training.deterministic_mode):
        say(line)
    _raise_open_file_limit()
    end_with_launcher(environment)
    device, problem = torch.device("cpu"), None
    try:
        device = choose_device(config, environment)
    except ConfigError as error:
        problem = str(error)
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    rank, world_size, store = environment.rank, environment.world_size, dist.HashStore()
    if environment.launched:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    card = {"device": device.type, "problem": problem, "host": socket.gethostname()}
    whole_run = store
    store, cards, restarted = meet(whole_run, rank, world_size, card, timeout)
    # Asked before any rank can have passed it in this attempt. A store that a restart did not keep cannot tell.
    passed = whole_run.check(["passed"]) or (environment.restart_count > 0 and not restarted)

    def once(check: Callable[[], None]) -> None:
        if not passed:
            check()
            whole_run.set("passed", "")

    try:
        _check_devices(cards)
    except ConfigError:
        if rank == 0:  # which may host the store that the others still read the cards from
            time.sleep(1.0)
        raise
    backend, bound = "gloo", None
    if device.type == "cuda":
        # NCCL alone: a mesh's groups inherit all of the world's backends, and each gloo one is a socket a rank.
        backend, bound = "nccl", device
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=bound
    )
    say(describe_device(device, config))
    yield device, once
    # Only the good end: after a failure a collective clean-up would wait for ranks that are gone.
    dist.destroy_process_group()


def _raise_open_file_limit() -> None:
    """A rank of a large world holds a socket to many others, and a blend many files: soft limits are often 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def end_with_launcher(environment: Environment, interval_s: float = 0.5) -> None:
    """End this rank when torchrun is gone: without it nobody stops the ranks, and they would save over a successor."""
    if environment.launcher_pid is None:
        return

    def watch() -> None:
        while os.getppid() == environment.launcher_pid:
            time.sleep(interval_s)
        os.write(2, f"[rank {environment.rank}] torchrun is gone: this rank ends without saving\n".encode())
        os._exit(1)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


def meet(
    store: dist.Store, rank: int, world_size: int, card: dict[str, Any], timeout: timedelta
) -> tuple[dist.Store, list[dict[str, Any]], bool]:
    """Exchange one card a rank through the store, before any process group.

    torchrun keeps its store over restarts, and what an attempt that failed left there holds the next one up in
    init_process_group. TORCHELASTIC_RESTART_COUNT tells attempts apart on one node only: nodes that restart because
    another failed do not count. So rank 0 publishes the cards it sees, each with a token drawn for this attempt, and
    is done once everyone has confirmed the newest list; cards of the dead are never confirmed.

    Returns:
        A part of the store that no other attempt uses, every rank's card, and whether there was an attempt before.

    Raises:
        DistError: not all ranks came in time; it names them.
    """
    card = card | {"token": secrets.token_hex(8)}
    store.set(f"card/{rank}", json.dumps(card))
    attempts = store.add("attempts", 1) if rank == 0 else None
    others, text = range(1, world_size), ""
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        if rank == 0:
            missing = [other for other in others if not store.check([f"card/{other}"])]
            if not missing:
                cards = [card, *(json.loads(store.get(f"card/{other}")) for other in others)]
                text = json.dumps({"cards": cards, "attempts": attempts})
                store.set("cards", text)
        elif store.check(["cards"]):
            text = store.get("cards").decode()
        seen = json.loads(text) if text else {"cards": []}
        if card in seen["cards"]:
            attempt = hashlib.sha256(text.encode()).hexdigest()
            store.set(f"{attempt}/{rank}", "")
            if rank == 0:
                missing = [other for other in others if not store.check([f"{attempt}/{other}"])]
                if not missing:
                    store.set(f"{attempt}/complete", "")
            if store.check([f"{attempt}/complete"]):
                return dist.PrefixStore(attempt, store), seen["cards"], seen["attempts"] > 1
        time.sleep(0.02 if world_size < 64 else 0.2)
    absent = f"ranks {_spans(missing)}" if rank == 0 else "rank 0, or a rank that it waits for,"
    raise dist.DistError(
        f"{absent} of {world_size} did not start within {timeout} (--distributed-timeout-minutes)"
    )


def _check_devices(cards: list[dict[str, Any]]) -> None:
    """Raise ConfigError when a rank cannot use its device, or not all use one type."""
    for rank, card in enumerate(cards):
        if card["problem"] is not None:
            raise ConfigError(f"rank {rank}: {card['problem']}" if len(cards) > 1 else card["problem"])
    places: dict[tuple[str, str], list[int]] = {}
    for rank, card in enumerate(cards):
        places.setdefault((card["device"], card["host"]), []).append(rank)
    if len({device for device, _ in places}) > 1:
        named = "; ".join(f"{device} on {host}: ranks {_spans(r)}" for (device, host), r in places.items())
        raise ConfigError(
            f"the ranks compute on different devices ({named}), wanted one type: --device sets it"
        )


def _spans(ranks: Iterable[int]) -> str:
    """'0-7, 9' for sorted ranks."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def seed_everything(config: Config, data_parallel_rank: int, ranks: Mapping[str, int]) -> None:
    """Seed torch's generators for dropout: equal on the ranks that hold the same activations, else different.

    ranks: mesh axis -> this rank's position. Tensor ranks hold the same hidden state, so they draw the same numbers,
    unless --sequence-parallel cuts it; what they hold different heads of, attention dropout, is parallel/tensor.py's.
    Initial weights do not depend on it: model/initialization.py seeds each parameter by its name.
    """
    tensor_rank = ranks["tp"] if config.parallel.sequence_parallel else 0
    place = (config.training.seed, ranks["pp"], data_parallel_rank, ranks["cp"], tensor_rank)
    digest = hashlib.blake2b(repr(place).encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)
    if config.training.deterministic_mode:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def run_and_exit(main: Callable[[], int], environment: Environment) -> None:
    """Run main and end the process with its exit code; never returns.

    The exit skips the interpreter's teardown: gloo's threads can abort a finished process there, and a
    finished job must not report failure. A ConfigError is one sentence and exit code 2, a RunError one and exit
    code 1; any other exception is a traceback, exit code 1. Errors that only say that a peer is gone are held
    back for a while, so that the first rank's own error is what is seen.
    """
    try:
        code = main()
    except (ConfigError, RunError) as error:
        if environment.rank != 0:
            time.sleep(SECONDARY_ERROR_DELAY_S)
        print(f"error: {error}", file=sys.stderr)
        code = 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        code = 130
    except BaseException as error:  # noqa: BLE001  every failure must end this process, or its peers hang
        if _says_a_peer_is_gone(error):
            time.sleep(SECONDARY_ERROR_DELAY_S)
        print(f"[rank {environment.rank}] {traceback.format_exc()}", file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads on
            stream.flush()
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
