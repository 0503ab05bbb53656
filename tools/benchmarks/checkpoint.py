"""Checkpoints against the disk: a plain write and a plain read of the same bytes in the same folder."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_lite.checkpoint.checkpointer import Checkpointer
from megatron_lite.config import CheckpointConfig, Config, ParallelConfig
from tools.benchmarks.comparison import Options, Table, cost, fastest, refuse_unlike, speed, take_turns
from tools.benchmarks.ranks import run_ranks, timed

TENSORS = 16  # a rank; as many names as a small model has
BLOCKED, COPY = "blocked by a background save", "copy for a background save"


def run(options: Options) -> list[Table]:
    """Save, background save and load against plain writes and reads of the same bytes; one rank and two."""
    megabytes = 4 if options.quick else 1536  # weights and AdamW's state of 0.13B parameters, fp32
    tables = []
    for ranks in (2,) if options.quick else (1, 2):
        # In the working folder, not in the machine's temporary place, which may be memory.
        with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="benchmark-checkpoint-") as folder:
            seconds = run_ranks(contests, ranks, folder, megabytes << 20, options.repeats)[0]
        rows = [
            speed("save", seconds, "plain write", at_least=0.8, note="synced, hashed, renamed"),
            cost(BLOCKED, seconds, "save", at_most=0.05, note="within a step"),
            cost(COPY, seconds, "save", note="blocks where no step is long enough"),
            speed("load", seconds, "plain read", at_least=0.8, note="files in the page cache"),
            speed("load, cold", seconds, "plain read, cold", at_least=0.8, note="page cache emptied of them"),
        ]
        facts = [
            f"Fastest, s: {fastest(seconds)}. Blocked: the call to save and the optimizer's wait for the copy, in a "
            "step that computes on the same core for as long as a synchronous save takes."
        ]
        tables.append(Table(f"checkpoint: {megabytes} MiB, {ranks} rank{'s'[: ranks - 1]}", rows, facts))
    return tables


def contests(folder: str, total_bytes: int, repeats: int) -> dict[str, list[float]]:
    """On every rank: the seconds of all turns."""
    state = State(Path(folder), total_bytes // dist.get_world_size())
    writes = {"save": state.save, "plain write": state.write_plain}
    seconds = take_turns({name: partial(state.write_turn, write) for name, write in writes.items()}, repeats)
    background, step = Background(state), max(0.2, min(seconds["save"]))
    lengths = {BLOCKED: step, COPY: 0.0}
    seconds |= take_turns({name: partial(background.turn, s) for name, s in lengths.items()}, repeats)
    state.save()
    state.write_plain()
    for suffix, prepare in (("", lambda: None), (", cold", state.evict)):
        reads = {f"load{suffix}": state.load, f"plain read{suffix}": state.read_plain}
        turns = {name: partial(state.read_turn, read, prepare) for name, read in reads.items()}
        seconds |= take_turns(turns, repeats)
    return seconds


class State:
    """One rank's tensors, where they are saved by ours and where by a plain write, and memory to load them into."""

    def __init__(self, folder: Path, size: int) -> None:
        rank, generator = dist.get_rank(), torch.Generator().manual_seed(dist.get_rank())
        self.tensors = {
            f"rank{rank}.tensor{i}": torch.randn(size // TENSORS // 4, generator=generator)
            for i in range(TENSORS)
        }
        self.targets = {name: torch.zeros_like(tensor) for name, tensor in self.tensors.items()}
        self.plain, self.ours = folder / f"plain{rank}", folder / "ours"
        self.checkpointer = self.open(async_save=False)
        self.iteration = 0

    def open(self, async_save: bool) -> Checkpointer:
        where = CheckpointConfig(save=str(self.ours), load=str(self.ours), async_save=async_save)
        config = Config(checkpoint=where, parallel=ParallelConfig(world_size=dist.get_world_size()))
        layout = {"pp": dist.get_world_size()}
        return Checkpointer(config, dist.group.WORLD, layout, {"pp": dist.get_rank()})

    def write_turn(self, write: Callable[[], None]) -> float:
        """Seconds of a write to a folder that is empty and a disk that rests."""
        dist.barrier()
        self.plain.unlink(missing_ok=True)
        if dist.get_rank() == 0:
            for path in self.ours.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()
        return timed(write)()

    def read_turn(self, read: Callable[[], None], prepare: Callable[[], None]) -> float:
        """Seconds of a read; what was read has to be the state."""
        for target in self.targets.values():
            target.zero_()
        prepare()
        seconds = timed(read)()
        refuse_unlike("what was read", {"wanted": True, read.__name__: self.holds(self.targets)})
        return seconds

    def holds(self, tensors: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(tensors[name], kept) for name, kept in self.tensors.items())

    def save(self, checkpointer: Checkpointer | None = None) -> None:
        self.iteration += 1
        checkpointer = checkpointer or self.checkpointer
        assert checkpointer.save(self.iteration, self.tensors, {"consumed_samples": 0}, {})

    def load(self) -> None:
        self.checkpointer.load(self.checkpointer.find(), self.targets)

    def write_plain(self) -> None:  # one file a rank, synced
        with self.plain.open("wb") as file:
            for tensor in self.tensors.values():
                file.write(memoryview(tensor.numpy()))
            file.flush()
            os.fsync(file.fileno())

    def read_plain(self) -> None:
        with self.plain.open("rb") as file:
            for target in self.targets.values():
                file.readinto(target.numpy())

    def evict(self) -> None:  # all files from the page cache
        for path in [*self.plain.parent.glob("plain*"), *self.ours.rglob("*")]:
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Background:
    """Saves with --async-save inside of steps: a computation, then an update that changes what is being saved."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.checkpointer = state.open(async_save=True)
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
        self.checkpointer.overlap_copy_with(self.optimizer)
        self.left = torch.randn(256, 256)

    def turn(self, step_seconds: float) -> float:
        """Save, compute so long, update; the seconds for which nothing was computed.

        Afterwards what was saved has to be the state from before the update.
        """
        state = self.state
        state.write_turn(lambda: None)
        started = time.perf_counter()
        state.save(self.checkpointer)
        returned = time.perf_counter()
        while time.perf_counter() < returned + step_seconds:
            self.left @ self.left
        computed = time.perf_counter()
        self.optimizer.step()  # waits for the copy
        waited = time.perf_counter()
        for tensor in state.tensors.values():
            tensor.add_(1)
        self.checkpointer.close()
        state.load()
        as_saved = state.holds({name: target + 1 for name, target in state.targets.items()})
        refuse_unlike("what a background save wrote", {"wanted": True, "the state of its step": as_saved})
        longest = torch.tensor([(returned - started) + (waited - computed)], dtype=torch.float64)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        return longest.item()
