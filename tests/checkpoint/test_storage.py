"""Checkpoints in stores behind fsspec: in memory, and on two ranks through fsspec's view of the local disk."""

import fsspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from megatron_lite.checkpoint import find_in
from megatron_lite.checkpoint.checkpointer import Checkpointer
from megatron_lite.checkpoint.reading import CheckpointReader
from megatron_lite.checkpoint.storage import Storage
from megatron_lite.config import CheckpointConfig, Config, ConfigError
from tests.ranks import run_ranks

STORE = "memory://bucket/run"


@pytest.fixture
def store():
    memory = fsspec.filesystem("memory")
    yield memory
    if memory.exists("/bucket"):
        memory.rm("/bucket", recursive=True)


def checkpointer(save, **flags):
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    config = Config(checkpoint=CheckpointConfig(save=save, load=save, **flags))
    return Checkpointer(config, None, {"dp": world}, {"dp": rank})


def test_a_store_from_first_save_to_retention(store):
    saver = checkpointer(STORE, keep_last=2, verify_integrity=True)
    assert saver.find() is None
    for step in (5, 10, 15, 15):
        assert saver.save(
            step, {"a": torch.full((3,), float(step))}, {"x": step}, {"cpu": torch.get_rng_state()}
        )
    top = sorted({path.split("/")[3] for path in store.find("/bucket/run")})
    assert top == ["iter_0000010", "iter_0000015", "latest_checkpointed_iteration.txt"]
    found = saver.find()
    assert (found.path, found.notes) == (f"{STORE}/iter_0000015", ())
    target = torch.zeros(3)
    saver.load(found, {"a": target})
    assert target.tolist() == [15.0] * 3
    assert saver.read_train_state(found)["x"] == 15
    assert CheckpointReader(f"{STORE}/iter_0000010").read("a").tolist() == [10.0] * 3


def _cut_off_at_the_manifest(original, leave):
    def write(self, path, data):
        if path.endswith("manifest.json"):
            raise leave
        original(self, path, data)

    return write


class Killed(BaseException):
    """What no clean-up runs for."""


def test_a_first_save_cut_off_in_a_store_does_not_block_the_next_start(store, monkeypatch):
    saver = checkpointer(STORE)
    with monkeypatch.context() as patch:
        patch.setattr(Storage, "write", _cut_off_at_the_manifest(Storage.write, Killed()))
        with pytest.raises(Killed):
            saver.save(5, {"a": torch.ones(3)}, {}, {})
    assert store.exists("/bucket/run/iter_0000005/.metadata") and find_in(STORE) is None
    saver.save(10, {"a": torch.ones(3)}, {}, {})
    assert not store.exists("/bucket/run/iter_0000005")
    assert find_in(STORE).iteration == 10


def test_a_save_that_fails_in_a_store_leaves_nothing(store, monkeypatch):
    saver = checkpointer(STORE)
    monkeypatch.setattr(Storage, "write", _cut_off_at_the_manifest(Storage.write, OSError(5, "gone")))
    assert not saver.save(5, {"a": torch.ones(3)}, {}, {})
    assert store.find("/bucket/run") == []


def test_an_unknown_store_is_one_sentence():
    with pytest.raises(ConfigError, match="nonsense://bucket: fsspec cannot open it: Protocol not known"):
        Storage("nonsense://bucket")


def _two_ranks(save):
    mesh = init_device_mesh("cpu", (2,))
    local = torch.full((2, 3), float(dist.get_rank()))
    saver = checkpointer(save)
    saver.save(5, {"a": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)}, {}, {})
    return saver.find().path


def test_two_ranks_write_to_one_store(tmp_path):
    url = f"local://{tmp_path}/run"
    assert Storage(url).remote
    assert run_ranks(_two_ranks, 2, url, init=True) == [f"{url}/iter_0000005"] * 2
    assert CheckpointReader(url).read("a")[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0]
