"""Checkpoints against the disk: a plain write and a plain read of the same bytes in the same folder."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_lite.checkpoint.checkpointer import Checkpointer
from megatron_lite.checkpoint.manifest import HASH, new_digest
from megatron_lite.config import CheckpointConfig, Config, ParallelConfig
from tools.benchmarks.comparison import Options, Table, cost, refuse_different, speed, take_turns
from tools.benchmarks.ranks import run_ranks, timed

TENSORS = 16  # a rank; as many names as a small model has

Seconds = dict[str, list[float]]


def run(options: Options) -> list[Table]:
    """Save, background save and load against plain writes and reads of the same bytes; one rank and two."""
    megabytes = 4 if options.quick else 1536  # weights and AdamW's state of 0.13B parameters, fp32
    ranks = (2,) if options.quick else (1, 2)
    return [one_table(number, megabytes, options.repeats) for number in ranks]


def one_table(ranks: int, megabytes: int, repeats: int) -> Table:
    """All contests of so many ranks, which share `megabytes` of state."""
    # In the working folder, not in the machine's temporary place, which may be memory.
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="benchmark-checkpoint-") as folder:
        seconds, facts = run_ranks(contests, ranks, folder, megabytes << 20, repeats)[0]
    rows = [
        speed("save", seconds, "plain write", at_least=0.8, note="synced, hashed, renamed"),
        speed("save", seconds, "write, then hash", note="plain write, then the manifest's hash"),
        cost("blocked by a background save", seconds, "save", at_most=0.05, note="within a step"),
        cost("copy for a background save", seconds, "save", note="blocks where no step is long enough"),
        speed("load", seconds, "plain read", at_least=0.8, note="files in the page cache"),
        speed(
            "load, cold", seconds, "plain read, cold", at_least=0.8, note="page cache emptied of the files"
        ),
    ]
    best = ", ".join(f"{name} {min(times):.3f}" for name, times in seconds.items())
    title = f"checkpoint: {megabytes} MiB, {ranks} rank{'s' if ranks > 1 else ''}"
    return Table(title, rows, [f"Fastest, s: {best}.", *facts])


def contests(folder: str, total_bytes: int, repeats: int) -> tuple[Seconds, list[str]]:
    """On every rank: all turns; the first rank's result is the one that counts."""
    state = State(Path(folder), total_bytes // dist.get_world_size())
    background = Background(state)
    seconds = take_turns({"save": state.turn(state.save)} | state.plain_writes(), repeats)
    seconds |= take_turns(background.turns(max(0.2, min(seconds["save"]))), repeats)
    state.save()
    state.write_plain()
    warm = {"load": state.turn(state.load), "plain read": state.turn(state.read_plain)}
    cold = {
        "load, cold": state.turn(state.load, state.evict),
        "plain read, cold": state.turn(state.read_plain, state.evict),
    }
    seconds |= take_turns(warm, repeats) | take_turns(cold, repeats)
    return seconds, [state.hash_fact(), *background.facts()]


class State:
    """One rank's tensors, where they are saved by ours and where by a plain write, and memory to load them into."""

    def __init__(self, folder: Path, size: int) -> None:
        rank = dist.get_rank()
        generator = torch.Generator().manual_seed(rank)
        self.tensors = {
            f"rank{rank}.tensor{i}": torch.randn(size // TENSORS // 4, generator=generator)
            for i in range(TENSORS)
        }
        self.targets = {name: torch.zeros_like(tensor) for name, tensor in self.tensors.items()}
        self.plain, self.ours = folder / f"plain{rank}", folder / "ours"
        self.checkpointer = self.open(async_save=False)
        self.iteration = 0

    def open(self, async_save: bool) -> Checkpointer:
        """A checkpointer on our folder."""
        where = CheckpointConfig(save=str(self.ours), load=str(self.ours), async_save=async_save)
        config = Config(checkpoint=where, parallel=ParallelConfig(world_size=dist.get_world_size()))
        layout = {"pp": dist.get_world_size()}
        return Checkpointer(config, dist.group.WORLD, layout, {"pp": dist.get_rank()})

    def turn(
        self, action: Callable[[], object], prepare: Callable[[], object] | None = None
    ) -> Callable[[], float]:
        """A turn for take_turns that counts `action` only; what was read into `targets` has to be the state."""
        reads = action in (self.load, self.read_plain)

        def run() -> float:
            if reads:
                for target in self.targets.values():
                    target.zero_()
            else:
                self.clear()
            if prepare is not None:
                prepare()
            taken = timed(action)()
            if reads:
                same = all(torch.equal(self.targets[name], kept) for name, kept in self.tensors.items())
                refuse_different("what was read", {"wanted": True, action.__name__: same})
            return taken

        return run

    def clear(self) -> None:
        """Take away what was written, and let the disk come to rest."""
        dist.barrier()
        self.plain.unlink(missing_ok=True)
        if dist.get_rank() == 0:
            for path in self.ours.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()
        dist.barrier()

    def save(self) -> None:
        """Ours, synchronous."""
        self.iteration += 1
        assert self.checkpointer.save(self.iteration, self.tensors, {"consumed_samples": 0}, {})

    def load(self) -> None:
        """Ours: find the newest checkpoint, fill the targets."""
        found = self.checkpointer.find()
        self.checkpointer.load(found, self.targets)

    def write_plain(self) -> None:
        """The same bytes into one file a rank, synced."""
        with self.plain.open("wb") as file:
            for tensor in self.tensors.values():
                file.write(memoryview(tensor.numpy()))
            file.flush()
            os.fsync(file.fileno())

    def hash(self) -> str:
        """The manifest's hash of the same bytes."""
        digest = new_digest()
        for tensor in self.tensors.values():
            digest.update(memoryview(tensor.numpy()))
        return digest.hexdigest()

    def write_and_hash(self) -> None:
        """One after the other."""
        self.write_plain()
        self.hash()

    def plain_writes(self) -> dict[str, Callable[[], float]]:
        """Turns of the baselines of a save."""
        return {
            "plain write": self.turn(self.write_plain),
            "write, then hash": self.turn(self.write_and_hash),
        }

    def read_plain(self) -> None:
        """The plain file into the targets."""
        with self.plain.open("rb", buffering=0) as file:
            for target in self.targets.values():
                view = memoryview(target.numpy()).cast("B")
                while view:
                    view = view[file.readinto(view) :]

    def evict(self) -> None:
        """Take all files out of the page cache."""
        for path in [*self.plain.parent.glob("plain*"), *self.ours.rglob("*")]:
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def hash_fact(self) -> str:
        """What hashing alone costs."""
        started = time.perf_counter()
        self.hash()
        seconds = time.perf_counter() - started
        size = sum(tensor.nbytes for tensor in self.tensors.values())
        return (
            f"{HASH} of a rank's bytes alone: {seconds:.3f} s, {size / seconds / 1e9:.2f} GB/s on one core."
        )


class Background:
    """Saves with --async-save inside of steps: a computation, then an update that changes what is being saved."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.checkpointer = state.open(async_save=True)
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
        self.checkpointer.overlap_copy_with(self.optimizer)
        self.resident: list[int] = [_resident_bytes()]
        self.left = torch.randn(256, 256)

    def turns(self, step_seconds: float) -> dict[str, Callable[[], float]]:
        """A save with a step of so long after it, and one with none: the seconds for which nothing was computed."""
        return {
            "blocked by a background save": lambda: self.turn(step_seconds),
            "copy for a background save": lambda: self.turn(0.0),
        }

    def turn(self, step_seconds: float) -> float:
        """Save, compute, update; then what was saved has to be the state from before the update."""
        state = self.state
        state.clear()
        dist.barrier()
        state.iteration += 1
        started = time.perf_counter()
        assert self.checkpointer.save(state.iteration, state.tensors, {"consumed_samples": 0}, {})
        returned = time.perf_counter()
        while time.perf_counter() < returned + step_seconds:
            self.left @ self.left
        computed = time.perf_counter()
        self.optimizer.step()  # waits for the copy
        waited = time.perf_counter()
        for tensor in state.tensors.values():
            tensor.add_(1)
        self.checkpointer.close()
        self.resident.append(_resident_bytes())
        found = state.checkpointer.find()
        state.checkpointer.load(found, state.targets)
        as_saved = all(torch.equal(target + 1, state.tensors[name]) for name, target in state.targets.items())
        refuse_different("what a background save wrote", {"wanted": True, "the state of its step": as_saved})
        longest = torch.tensor([(returned - started) + (waited - computed)], dtype=torch.float64)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        return float(longest)

    def facts(self) -> list[str]:
        """What the copy costs in memory."""
        size = sum(tensor.nbytes for tensor in self.state.tensors.values()) / 2**20
        first, last = ((value - self.resident[0]) / 2**20 for value in (self.resident[1], self.resident[-1]))
        return [
            f"A background save keeps a copy of the state: {size:.0f} MiB a rank; resident memory grew by "
            f"{first:.0f} MiB with the first, by {last:.0f} MiB in all with {len(self.resident) - 1}.",
            "Blocked: the call to save and the optimizer's wait for the copy, in a step that computes on the same "
            "core for as long as a synchronous save takes.",
        ]


def _resident_bytes() -> int:
    """Of this process, now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
