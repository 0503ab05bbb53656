"""Reading one tensor at a time; files that are not what they say; pickles that would run code."""

import gc
import os
import pickle
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata

from megatron_lite.checkpoint import records
from megatron_lite.checkpoint.checkpointer import Checkpointer
from megatron_lite.checkpoint.metadata import StoredChunk, parse_metadata
from megatron_lite.checkpoint.reading import CheckpointReader
from megatron_lite.checkpoint.shards import LocalShard
from megatron_lite.checkpoint.writing import write_checkpoint
from megatron_lite.config import CheckpointConfig, Config, ConfigError
from tests.ranks import run_ranks

TENSORS = {
    "matrix": torch.arange(7 * 5, dtype=torch.float32).view(7, 5),
    "half": torch.arange(12, dtype=torch.bfloat16).view(3, 4),
    "cube": torch.arange(2 * 3 * 4, dtype=torch.float64).view(2, 3, 4),
    "scalar": torch.tensor(5.0),
    "flags": torch.tensor([True, False]),
    "bytes": torch.arange(200, dtype=torch.uint8),
    "empty": torch.empty(0, 3),
    "turned": torch.arange(6.0).view(2, 3).T,
}


@pytest.fixture
def folder(tmp_path):
    return write_checkpoint(
        str(tmp_path / "run"), 10, TENSORS.items(), {"model": {"num_layers": 2}}, {"x": 1}
    )


def test_everything_comes_back(folder):
    with CheckpointReader(folder) as reader:
        assert reader.config == {"model": {"num_layers": 2}}
        assert reader.train_state == {"x": 1, "iteration": 10}
        assert {n: (t.shape, t.dtype) for n, t in reader.names().items()} == {
            n: (tuple(t.shape), t.dtype) for n, t in TENSORS.items()
        }
        for name, tensor in TENSORS.items():
            assert torch.equal(reader.read(name), tensor), name


def test_torch_reads_what_we_write(folder):
    theirs = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items() if name != "empty"}
    dcp.load(theirs, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(theirs[name], TENSORS[name]) for name in theirs)


def test_we_read_what_torch_writes(folder):
    """torch's own writer puts in checksums, paths and planner data that ours leaves out."""
    theirs = {name: t for name, t in TENSORS.items() if name not in ("empty", "turned")}
    dcp.save(theirs, checkpoint_id=f"{folder}/other", no_dist=True)
    with CheckpointReader(folder) as reader:
        reader._tensors = parse_metadata(Path(folder, "other", ".metadata").read_bytes(), "x")
        reader.stored = replace(reader.stored, name=f"{reader.stored.name}/other")
        for name, tensor in theirs.items():
            assert torch.equal(reader.read(name), tensor), name


@pytest.mark.parametrize("start, stop", [(0, 7), (2, 5), (6, 7), (3, 3), (5, 99), (0, 1)])
def test_rows(folder, start, stop):
    with CheckpointReader(folder) as reader:
        assert torch.equal(reader.read_rows("matrix", start, stop), TENSORS["matrix"][start:stop])


def test_slices_and_other_dtypes_and_strides(folder):
    with CheckpointReader(folder) as reader:
        target = torch.zeros(2, 2, 2, dtype=torch.float32)
        reader.fill({"cube": LocalShard(target, (2, 3, 4), (0, 1, 2))})
        assert torch.equal(target, TENSORS["cube"][:, 1:3, 2:4].float())
        target = torch.zeros(5, 7).T
        reader.fill({"matrix": LocalShard(target, (7, 5), (0, 0))})
        assert torch.equal(target, TENSORS["matrix"])


def test_a_save_folder_stands_for_its_newest_checkpoint(folder, tmp_path):
    assert CheckpointReader(str(tmp_path / "run")).path == folder
    with pytest.raises(ConfigError, match="there is no checkpoint"):
        CheckpointReader(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="holds no tensor nonsense"):
        CheckpointReader(folder).read("nonsense")


def test_many_batches_make_one_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_lite.checkpoint.writing._BATCH_BYTES", 50)
    folder = write_checkpoint(str(tmp_path), 1, iter(TENSORS.items()), {}, {})
    assert len(list(Path(folder).glob("*.distcp"))) > 3
    with CheckpointReader(folder) as reader:
        assert all(torch.equal(reader.read(name), tensor) for name, tensor in TENSORS.items())


class Planted:
    """Unpickled, it would make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_planted_metadata_runs_nothing(folder, tmp_path):
    marker = str(tmp_path / "executed")
    data = pickle.dumps(Planted(marker))
    pickle.loads(data)
    Path(marker).rmdir()  # the plant is a good one
    with pytest.raises(ConfigError, match=r"is not a checkpoint's metadata: it asks for posix\.mkdir"):
        parse_metadata(data, "x")
    assert gc.isenabled()  # reading pauses it
    # A print, as the marker of a hostile checkpoint does it, in the oldest protocol.
    with pytest.raises(ConfigError, match=r"it asks for (__builtin__|builtins)\.print"):
        parse_metadata(b"\x80\x02c__builtin__\nprint\nq\x00X\x03\x00\x00\x00boxq\x01\x85q\x02Rq\x03.", "x")
    # Planted and listed in the manifest: the folder is complete, and still nothing runs.
    shutil.copytree(folder, tmp_path / "other")
    (tmp_path / "other" / ".metadata").write_bytes(data)
    with pytest.raises(ConfigError, match=r"\.metadata has"):
        CheckpointReader(str(tmp_path / "other"))
    assert not Path(marker).exists()


@pytest.mark.parametrize(
    "word", ["torch._inductor", "builtins.eval", "torch.hub.load", "torch.Size.__class__"]
)
def test_no_name_outside_the_list_is_looked_up(word):
    module, _, name = word.rpartition(".")
    data = (
        b"\x80\x04\x8c"
        + bytes([len(module)])
        + module.encode()
        + b"\x8c"
        + bytes([len(name)])
        + name.encode()
    )
    with pytest.raises(ConfigError, match="which is no part of a checkpoint"):
        parse_metadata(data + b"\x93.", "x")


def _made_up(size, chunk_size, path="__0_0.distcp", offset=0, length=100):
    tensor = dcp_metadata.TensorStorageMetadata(
        dcp_metadata.TensorProperties(torch.float32),
        torch.Size(size),
        [dcp_metadata.ChunkStorageMetadata(torch.Size([0] * len(size)), torch.Size(chunk_size))],
    )
    index = dcp_metadata.MetadataIndex("a", [0] * len(size))
    info = dcp.filesystem._StorageInfo(path, offset, length)
    return pickle.dumps(dcp_metadata.Metadata({"a": tensor}, storage_data={index: info}))


@pytest.mark.parametrize(
    "values",
    [
        {"size": (4,), "chunk_size": (3,)},
        {"size": (4,), "chunk_size": (5,)},
        {"size": (4,), "chunk_size": (4,), "path": "../../secret"},
        {"size": (4,), "chunk_size": (4,), "path": "/etc/passwd"},
        {"size": (4,), "chunk_size": (4,), "offset": -1},
    ],
)
def test_metadata_that_lies_is_refused(values):
    with pytest.raises(ConfigError, match="is not a checkpoint's metadata"):
        parse_metadata(_made_up(**values), "x")


def test_truncated_and_empty_metadata():
    for data in (b"", b"\x80\x04", _made_up((4,), (4,))[:50], pickle.dumps({"a": 1})):
        with pytest.raises(ConfigError, match="is not a checkpoint's metadata"):
            parse_metadata(data, "x")


def test_a_record_that_is_not_there_is_one_sentence(folder):
    reader = CheckpointReader(folder)
    path = Path(folder, "__0_0.distcp")
    data = bytearray(path.read_bytes())
    start = reader.names()["matrix"].chunks[0].start
    data[start : start + 5000] = bytes(5000)
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"__0_0.distcp at byte [\d,]+ holds no tensor"):
        reader.read("matrix")
    path.write_bytes(data[: start + 10])
    with pytest.raises(ConfigError, match="__0_0.distcp"):
        CheckpointReader(reader.stored).read("matrix")


def _verified(folder):
    config = Config(checkpoint=CheckpointConfig(load=folder, verify_integrity=True))
    found = Checkpointer(config, None, {}, {}).find()
    return found.iteration, found.notes


def test_verify_integrity_finds_one_flipped_bit_and_falls_back(tmp_path):
    for step in (5, 10):
        folder = write_checkpoint(str(tmp_path), step, TENSORS.items(), {}, {})
    path = Path(folder, "__0_0.distcp")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    plain = Config(checkpoint=CheckpointConfig(load=str(tmp_path)))
    assert Checkpointer(plain, None, {}, {}).find().iteration == 10, "sizes alone do not show it"
    for iteration, notes in run_ranks(_verified, 2, str(tmp_path), init=True):
        assert iteration == 5
        assert "iter_0000010 does not count: __0_0.distcp has xxh3_128" in notes[0]


def test_every_record_says_where_its_elements_end(folder):
    reader = CheckpointReader(folder)
    for name, stored in reader.names().items():
        for chunk in stored.chunks if name != "empty" else ():
            with Path(folder, chunk.file).open("rb", buffering=0) as file:
                end = records.elements_start(file, chunk) + (size := stored.nbytes)
                assert records.ends_at(file, end, size), name
                assert not records.ends_at(file, end + 1, size)
                assert not records.ends_at(file, end, size + 1)


@pytest.mark.parametrize("alignment", [64, 4096])
def test_a_tensor_of_another_size_or_byte_order_is_refused(folder, tmp_path, alignment):
    """Records as torch.save makes them, in the place of one of ours."""
    with torch.utils.serialization.config.patch("save.storage_alignment", alignment):
        torch.save(torch.arange(6.0), tmp_path / "good")
        torch.save(torch.arange(5.0), tmp_path / "short")
    data = (tmp_path / "good").read_bytes()
    (tmp_path / "foreign").write_bytes(data.replace(b"little", b"big   "))
    for name, says in (
        ("good", None),
        ("short", "holds no tensor of 24 bytes"),
        ("foreign", "other byte order"),
    ):
        size = (tmp_path / name).stat().st_size
        chunk, target = StoredChunk((0,), (6,), name, 0, size), torch.zeros(6)
        with (tmp_path / name).open("rb") as file:
            with nullcontext() if says is None else pytest.raises(records.RecordError, match=says):
                records.read_slice(target, file, chunk, torch.float32, (0,))
    assert target.tolist() == [0.0] * 6 and sys.byteorder == "little"
