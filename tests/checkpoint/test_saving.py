"""Saves that fail, that run in the background, that are cut off at every step of the way."""

import errno
import json
import os
import random
import resource
import signal
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from megatron_lite.checkpoint import find_in, host_copy
from megatron_lite.checkpoint.checkpointer import Checkpointer
from megatron_lite.checkpoint.dcp import _HashedFile
from megatron_lite.checkpoint.host_copy import HostCopy
from megatron_lite.checkpoint.reading import CheckpointReader
from megatron_lite.checkpoint.storage import Storage
from megatron_lite.checkpoint.writing import write_checkpoint
from megatron_lite.config import CheckpointConfig, Config, ConfigError
from tests.checkpoint.folders import is_intact
from tests.ranks import run_ranks

POINTER = "latest_checkpointed_iteration.txt"


def checkpointer(save, group=None, tokenizer_files=(), **flags):
    config = Config(checkpoint=CheckpointConfig(save=str(save), load=str(save), **flags))
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1
    return Checkpointer(config, group, {"dp": world}, {"dp": rank}, tokenizer_files)


def names(save):
    return sorted(path.name for path in Path(save).iterdir())


def test_a_checkpoint_is_a_folder_with_all_that_is_needed(tmp_path):
    tokenizer = tmp_path / "tokenizer.model"
    tokenizer.write_bytes(b"tokens")
    saver = checkpointer(tmp_path / "run", tokenizer_files=[tokenizer])
    assert saver.save(10, {"a": torch.ones(3)}, {"consumed_samples": 40}, {"cpu": torch.get_rng_state()})
    folder = tmp_path / "run" / "iter_0000010"
    assert names(tmp_path / "run") == ["iter_0000010", POINTER]
    assert (tmp_path / "run" / POINTER).read_text() == "10\n"
    assert (folder / "tokenizer" / "tokenizer.model").read_bytes() == b"tokens"
    assert is_intact(folder)
    listed = set(json.loads((folder / "manifest.json").read_text())["files"])
    there = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert listed == there - {"manifest.json"}
    found = saver.find()
    assert saver.read_train_state(found) == {"consumed_samples": 40, "iteration": 10, "layout": {"dp": 1}}
    assert Config.from_dict(found.config).checkpoint.save == str(tmp_path / "run")
    assert torch.equal(saver.load_rank_state(found)["cpu"], torch.get_rng_state())


def test_retention_on_disk_and_a_folder_removed_by_hand(tmp_path):
    saver = checkpointer(tmp_path, keep_last=2, save_retain_interval=20)
    for step in range(5, 45, 5):
        saver.save(step, {"a": torch.ones(1)}, {}, {})
        if step == 25:
            (
                tmp_path / "iter_0000025" / "manifest.json"
            ).unlink()  # no longer whole: not counted, not deleted
    assert names(tmp_path) == [f"iter_{n:07d}" for n in (20, 25, 35, 40)] + [POINTER]


def test_a_save_folder_that_cannot_be_written_is_known_at_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--save .*file/run cannot be written: .*Not a directory"):
        checkpointer(tmp_path / "file" / "run")


def test_the_same_step_again_replaces_the_old_one(tmp_path):
    saver = checkpointer(tmp_path)
    for value in (1.0, 2.0):
        saver.save(5, {"a": torch.full((2,), value)}, {}, {})
    assert names(tmp_path) == ["iter_0000005", POINTER]
    assert CheckpointReader(str(tmp_path)).read("a").tolist() == [2.0, 2.0]


def test_no_room_is_known_before_a_byte_is_written(tmp_path, monkeypatch, capsys):
    saver = checkpointer(tmp_path)
    assert saver.save(5, {"a": torch.ones(1000)}, {}, {})
    monkeypatch.setattr(Storage, "free_bytes", lambda self: 3000)
    assert not saver.save(10, {"a": torch.ones(1000)}, {}, {})
    line = capsys.readouterr().out
    assert line.startswith("warning: checkpoint of iteration 10 was not saved") and line.count("\n") == 1
    assert "4,000 bytes are to be written, 3,000 are free" in line
    assert names(tmp_path) == ["iter_0000005", POINTER]
    with pytest.raises(ConfigError, match="--exit-on-save-failure"):
        checkpointer(tmp_path, exit_on_save_failure=True).save(10, {"a": torch.ones(1000)}, {}, {})


def test_verify_integrity_reads_a_save_back(tmp_path, monkeypatch, capsys):
    """A disk that returns something else than was written: here the hash that was taken is another one."""
    saver = checkpointer(tmp_path, verify_integrity=True)
    assert saver.save(5, {"a": torch.ones(3)}, {}, {})
    entry = _HashedFile.entry
    monkeypatch.setattr(_HashedFile, "entry", lambda self: replace(entry(self), hash="0" * 32))
    assert not saver.save(10, {"a": torch.ones(3)}, {}, {})
    assert "was not saved" in (line := capsys.readouterr().out) and "read back" in line
    assert names(tmp_path) == ["iter_0000005", POINTER]


def test_weights_without_optimizer_state_name_the_way_out(tmp_path):
    saver = checkpointer(tmp_path)
    saver.save(5, {"w": torch.ones(3)}, {}, {})
    asked = {"w": torch.zeros(3), "optimizer.exp_avg.w": torch.zeros(3)}
    with pytest.raises(ConfigError, match="holds no optimizer.exp_avg.w; --no-load-optim starts"):
        saver.load(saver.find(), asked)
    assert asked["w"].tolist() == [0, 0, 0], "nothing is changed when something is missing"


def _disk_fills_on_one_rank(save, async_save):
    mesh = init_device_mesh("cpu", (2,))
    state = {"a": distribute_tensor(torch.arange(200_000.0), mesh, [Shard(0)])}
    saver = checkpointer(save, dist.new_group(backend="gloo"), async_save=async_save)
    outcomes = []
    for step in (5, 10, 15):
        if (
            dist.get_rank() == 1
        ):  # a file limit is the one full disk a test can make: rank 1 alone, in the middle
            limit = 100_000 if step == 10 else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        saver.save(step, state, {}, {})
        saver.close()
        outcomes.append(sorted(p.name for p in Path(save).iterdir()))
        dist.barrier()
    return outcomes


@pytest.mark.parametrize("async_save", [False, True])
def test_a_disk_that_fills_on_one_rank(tmp_path, async_save):
    one, two, three = run_ranks(_disk_fills_on_one_rank, 2, str(tmp_path), async_save, init=True)[0]
    assert one == two == ["iter_0000005", POINTER], "the older checkpoint and the pointer are as they were"
    assert three == ["iter_0000005", "iter_0000015", POINTER], "training went on, and the next save went well"
    assert CheckpointReader(str(tmp_path)).read("a").tolist() == list(range(200_000))


def _memory_and_state(save):
    """20 background saves while training changes the state and talks over its own group."""
    mesh = init_device_mesh("cpu", (2,))
    local = torch.zeros(2_000_000)  # 8 MB a rank
    state = {"a": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)}
    saver = checkpointer(save, dist.new_group(backend="gloo"), async_save=True, keep_last=3)
    resident = []
    for step in range(1, 21):
        local.fill_(step)
        saver.save(step, state, {}, {})
        local.fill_(-1)  # training goes on at once
        while saver._thread is not None:
            dist.all_reduce(torch.ones(10))
            done = torch.tensor([float(saver._thread.is_alive())])
            dist.all_reduce(done, op=dist.ReduceOp.MAX)
            if not done.item():
                saver.poll()
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    return resident


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads resident memory from /proc")
def test_background_saves_keep_their_step_and_flat_memory(tmp_path):
    for resident in run_ranks(_memory_and_state, 2, str(tmp_path), init=True):
        assert max(resident[5:]) - resident[4] < 4_000_000, [r // 1000 for r in resident]
    for step in (18, 19, 20):
        values = CheckpointReader(str(tmp_path / f"iter_{step:07d}")).read("a")
        assert values.shape == (4_000_000,) and (values == step).all(), "the state of its step"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("overlap", [False, True])
def test_a_background_save_from_a_gpu_keeps_its_step(tmp_path, overlap):
    weight = torch.zeros(50_000_000, device="cuda")
    saver, optimizer = checkpointer(tmp_path, async_save=True), torch.optim.SGD([weight], lr=1.0)
    if overlap:
        saver.overlap_copy_with(optimizer)
    for step in range(1, 4):
        weight.fill_(step)
        saver.save(step, {"weight": weight}, {}, {})
        optimizer.step()
        weight.fill_(-1)
        saver.close()
        target = torch.zeros_like(weight)
        saver.load(saver.find(), {"weight": target})
        assert (target == step).all()


def test_the_copy_may_overlap_with_the_next_step_but_not_with_the_update(tmp_path, monkeypatch):
    weight = torch.nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    saver = checkpointer(tmp_path, async_save=True)
    saver.overlap_copy_with(optimizer)
    copy, started, release = HostCopy.copy, threading.Event(), threading.Event()

    def slow_copy(self, shards, ready):
        started.set()
        assert release.wait(30), "save has to return before the copy is made"
        return copy(self, shards, ready)

    monkeypatch.setattr(HostCopy, "copy", slow_copy)
    for step in range(1, 4):
        started.clear()
        release.clear()
        assert saver.save(step, {"weight": weight.data}, {}, {})
        assert started.wait(30)
        threading.Timer(0.2, release.set).start()
        weight.grad = torch.ones(1000)
        optimizer.step()  # waits for the copy
        saver.close()
        assert CheckpointReader(str(tmp_path / f"iter_{step:07d}")).read("weight").unique().tolist() == [
            1.0 - step
        ]


def test_a_copy_that_finds_no_memory_is_a_failed_save(tmp_path, monkeypatch, capsys):
    saver = checkpointer(tmp_path, async_save=True)

    def no_memory(*args, **kwargs):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("megatron_lite.checkpoint.host_copy.mmap.mmap", no_memory)
    saver.save(5, {"a": torch.ones(3)}, {}, {})
    saver.close()
    line = capsys.readouterr().out
    assert "no host memory for a copy of the state (12 bytes)" in line and "Cannot allocate" in line
    assert names(tmp_path) == []


class FakeCuda:
    """Stands for torch.cuda where there is no GPU: CPU tensors pass for GPU 3's, and every call is kept."""

    def __init__(self, monkeypatch, error=None):
        self.calls, self.pinned, self.error = [], {}, error
        named = {
            "Stream": self,
            "stream": nullcontext(),
            "current_stream": self,
            "cudart": self,
            "set_device": None,
        }
        for name, result in named.items():
            monkeypatch.setattr(torch.cuda, name, self._kept(name, result))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "check_error", self.check)
        monkeypatch.setattr(host_copy, "device_of", lambda shards: torch.device("cuda", 3))

    def _kept(self, name, result):
        def call(*args):
            self.calls.append((threading.current_thread().name, name, *args))
            return result

        return call

    def check(self, code):
        if code:
            raise RuntimeError("CUDA error: out of memory")

    def cudaHostRegister(self, start, size, flags):  # noqa: N802  CUDA's name
        self.pinned |= {} if self.error else {start: size}
        return self.error

    def cudaHostUnregister(self, start):  # noqa: N802
        del self.pinned[start]

    def record_event(self):
        return self

    def wait_event(self, event):
        assert event is self

    def synchronize(self):
        pass


def test_a_background_save_from_a_gpu_pins_the_state_once_and_touches_no_other_gpu(tmp_path, monkeypatch):
    cuda, saver = FakeCuda(monkeypatch), checkpointer(tmp_path, async_save=True, keep_last=1)
    state = {
        f"w{n}": torch.full((3, 7 + n), float(n)) for n in range(20)
    }  # torch would pin 1.5 times as much
    state |= {
        "flag": torch.ones(5, dtype=torch.bool),
        "half": torch.ones(3).bfloat16(),
        "none": torch.ones(0, 4),
    }
    state |= {"steps": torch.tensor([4]), "scalar": torch.tensor(2.0), "double": torch.ones(3).double()}
    regions = set()
    for step in range(1, 21):
        assert saver.save(step, state, {}, {})
        saver.close()
        regions |= set(cuda.pinned.items())
    in_thread = [call[1:] for call in cuda.calls if call[0] == "checkpoint"]
    assert in_thread[0] == ("set_device", torch.device("cuda", 3))
    assert {name for name, *_ in in_thread} == {"set_device", "Stream", "stream", "cudart"}, "DCP's none"
    ((_, size),) = regions  # one region for all saves
    assert size == sum(tensor.nbytes for tensor in state.values())
    reader = CheckpointReader(str(tmp_path))
    assert all(torch.equal(reader.read(name), tensor) for name, tensor in state.items())
    saver.save(21, {"other": torch.ones(1000)}, {}, {})
    saver.close()
    assert list(cuda.pinned.values()) == [4000], "the former region is given back"
    assert CheckpointReader(str(tmp_path)).read("other").sum() == 1000


def test_a_host_that_cannot_pin_is_a_failed_save(tmp_path, monkeypatch, capsys):
    FakeCuda(monkeypatch, error=2)
    saver = checkpointer(tmp_path, async_save=True)
    saver.save(5, {"a": torch.ones(3)}, {}, {})
    saver.close()
    assert (
        "no host memory for a copy of the state (12 bytes): CUDA error: out of memory"
        in capsys.readouterr().out
    )


def test_a_tokenizer_file_that_is_not_there_is_known_at_start(tmp_path):
    with pytest.raises(ConfigError, match="absent.model: No such file"):
        checkpointer(tmp_path, tokenizer_files=[tmp_path / "absent.model"])


OPERATIONS = ("open", "write", "make_folder", "rename", "remove_file", "remove_folder", "sync_folder")


def _die_at(number):
    """From the number-th change of the disk on, this process is no more. Folders go halfway."""
    count = 0

    def wrap(name, original):
        def operation(self, *args):
            nonlocal count
            if name == "open" and args[1] == "rb":
                return original(self, *args)
            count += 1
            if count == number:
                if name == "remove_folder":
                    for path in sorted(Path(self.full(args[0])).iterdir())[:2]:
                        path.unlink()
                if name == "write":
                    Path(self.full(args[0] + ".tmp-1")).write_bytes(args[1][: len(args[1]) // 2])
                os._exit(17)
            return original(self, *args)

        return operation

    for name in OPERATIONS:
        setattr(Storage, name, wrap(name, getattr(Storage, name)))


def _every_death(save, step, keep_last):
    """Kill a save of `step` at each change it makes, over a folder that holds 5 and 10."""
    deaths = []
    for number in range(1, 100):
        folder = f"{save}/{number}"
        saver = checkpointer(folder, keep_last=keep_last)
        for earlier in (5, 10):
            saver.save(earlier, {"a": torch.full((3,), float(earlier))}, {}, {})
        child = os.fork()
        if child == 0:
            saver = checkpointer(folder, keep_last=keep_last)
            _die_at(number)
            saver.save(step, {"a": torch.full((3,), 99.0)}, {}, {})
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            return deaths
        assert code == 17
        found = find_in(folder)
        value = CheckpointReader(found).read("a").tolist()[0]
        assert is_intact(found.path)
        assert (found.iteration, value) in ((10, 10.0), (step, 99.0)), (number, found)
        deaths.append(value)
        saver = checkpointer(folder, keep_last=keep_last)
        assert saver.save(15, {"a": torch.full((3,), 15.0)}, {}, {})
        left = {p.name for p in Path(folder).iterdir()}
        assert find_in(folder).iteration == 15
        expected = {"iter_0000010", "iter_0000015", "iter_0000005"} if keep_last is None else {"iter_0000015"}
        assert {n for n in left if n.startswith("iter_")} == expected, (number, left)
    raise AssertionError("the save makes more changes than are looked at")


@pytest.mark.parametrize("step, keep_last", [(15, 1), (10, None)], ids=["new", "again"])
def test_a_save_killed_at_each_of_its_steps(tmp_path, step, keep_last):
    (deaths,) = run_ranks(_every_death, 1, str(tmp_path), step, keep_last)
    assert len(deaths) >= 12
    assert deaths == sorted(deaths), "once the new checkpoint is there, it stays"
    assert {deaths[0], deaths[-1]} == {10.0, 99.0}


LAST_STEP = 60


def _train(save, seed):
    """A run of 60 steps that saves every third, in the background, and kills one rank at a random moment."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    generator = random.Random(seed)
    victim, delay = generator.randrange(2), generator.uniform(0.0, 0.5)
    saver = checkpointer(save, dist.new_group(backend="gloo"), async_save=seed % 2 == 0, keep_last=2)
    local = torch.zeros(500_000)
    state = {"a": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)}
    found, step = saver.find(), 0
    if found is not None:
        saver.load(found, state)
        step = saver.read_train_state(found)["step"]
    if seed >= 0 and victim == rank:
        threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    while step < LAST_STEP:
        step += 1
        local.mul_(0.999).add_(step * (rank + 1))
        dist.all_reduce(torch.ones(1))
        saver.poll()
        if step % 3 == 0:
            saver.save(step, state, {"step": step}, {})
        time.sleep(0.005)
    saver.close()
    return step


def _expected():
    pieces = [torch.zeros(500_000), torch.zeros(500_000)]
    for step in range(1, LAST_STEP + 1):
        for rank, piece in enumerate(pieces):
            piece.mul_(0.999).add_(step * (rank + 1))
    return torch.cat(pieces)


def _kill_until_finished(save, kills):
    cut_off = 0
    for seed in range(kills):
        try:
            run_ranks(_train, 2, str(save), seed, init=True, timeout=60)
        except AssertionError as error:
            assert "died with exit code -9" in str(error) or "closed by peer" in str(error), error
        found = find_in(str(save)) if save.exists() else None
        if found is not None:
            assert is_intact(found.path)
            cut_off += any(path.name.endswith(".tmp") for path in save.iterdir())
    run_ranks(_train, 2, str(save), -1, init=True)
    assert torch.equal(CheckpointReader(str(save)).read("a"), _expected()), (
        "bit-equal to a run without a kill"
    )
    return cut_off


def test_random_kills_lose_nothing(tmp_path):
    _kill_until_finished(tmp_path / "run", 5)


@pytest.mark.slow
def test_many_random_kills_lose_nothing(tmp_path):
    cut_off = sum(_kill_until_finished(tmp_path / f"run{number}", 10) for number in range(4))
    assert cut_off >= 3, f"only {cut_off} of 40 kills fell into a save: make the delays shorter"


def test_a_failed_import_leaves_what_was_there(tmp_path):
    write_checkpoint(str(tmp_path), 5, [("a", torch.ones(2))], {}, {})

    def tensors():
        yield "a", torch.zeros(2)
        raise OSError("the source went away")

    with pytest.raises(ConfigError, match="cannot be written: .*the source went away"):
        write_checkpoint(str(tmp_path), 10, tensors(), {}, {})
    assert names(tmp_path) == ["iter_0000005", POINTER]


def test_a_tokenizer_is_known_again_by_its_content(tmp_path):
    first, moved, other = (tmp_path / folder for folder in ("first", "moved", "other"))
    for folder, content in ((first, b"a"), (moved, b"a"), (other, b"b")):
        folder.mkdir()
        (folder / "tokenizer.json").write_bytes(content)
        (folder / "chat_template.jinja").write_bytes(folder.name.encode())
    (moved / "tokenizer.json").rename(moved / "renamed.json")
    saver = checkpointer(tmp_path / "run", tokenizer_files=sorted(first.iterdir()))
    saver.save(1, {"a": torch.ones(2)}, {}, {})
    found = saver.find()
    for folder, same in ((first, True), (moved, True), (other, False)):
        assert (
            checkpointer(tmp_path, tokenizer_files=sorted(folder.iterdir())).has_same_tokenizer(found) is same
        )
    assert checkpointer(tmp_path).has_same_tokenizer(found) is None
