"""The .bin/.idx pair: strict opening, every dtype, several sequences a document, files past 4 GB, writing aside."""

import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.config import ConfigError
from megatron_lite.data.indexed_dataset import IndexedDataset, best_dtype
from megatron_lite.data.indexed_dataset import write_pair as write_real_pair
from tests.pairs import write_documents

HOSTILE = Path(__file__).parent.parent / "hostile" / "idx"
CODES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}


def index_bytes(code, lengths, pointers, boundaries, magic=b"MMIDIDX\0\0", version=1, counts=None):
    """An .idx written from the format's description, not by the code under test."""
    sequences, documents = counts or (len(lengths), len(boundaries))
    head = magic + struct.pack("<QBQQ", version, code, sequences, documents)
    return (
        head
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(pointers)}q", *pointers)
        + struct.pack(f"<{len(boundaries)}q", *boundaries)
    )


def write_pair(
    prefix, tokens=9, code=4, lengths=(4, 0, 3, 2), pointers=None, boundaries=(0, 2, 3, 4), **head
):
    size = np.dtype(CODES.get(code, "i4")).itemsize
    if pointers is None:
        pointers = [size * sum(lengths[:i]) for i in range(len(lengths))]
    prefix.with_suffix(".bin").write_bytes(np.arange(tokens).astype(CODES.get(code, "i4")).tobytes())
    prefix.with_suffix(".idx").write_bytes(index_bytes(code, lengths, pointers, boundaries, **head))
    return prefix


MESSAGES = {
    "01_bad_magic": ".idx: magic is b'NOTANIDX\\x00', wanted b'MMIDIDX\\x00\\x00'",
    "03_truncated_body": ".idx: file size is 90 bytes, wanted 102 for 3 sequences and 4 document boundaries",
    "04_bin_short": ".bin: file size is 18 bytes, wanted 24 by the lengths in",
    "06_ptr_out_of_range": ".idx: pointer of sequence 2 is 1,000,000, wanted 14",
    "10_doc_index_wrong_end": ".idx: last document boundary is 1, wanted 3",
    "15_wrong_dtype_size": ".idx: pointer of sequence 1 is 8, wanted 16",
    "18_idx_only": ".bin: cannot be opened (No such file or directory), wanted .bin and .idx",
}


@pytest.mark.parametrize("name", MESSAGES)
def test_hostile_pairs_are_refused_in_one_sentence(name):
    with pytest.raises(ConfigError) as caught:
        IndexedDataset(HOSTILE / name)
    assert str(HOSTILE / name) + MESSAGES[name] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_other_pairs_there_open():
    assert {path.stem for path in HOSTILE.glob("*.idx")} - set(MESSAGES) == {"00_good", "12_zero_docs"}
    good = IndexedDataset(HOSTILE / "00_good")
    assert [good.get(i).tolist() for i in range(len(good))] == [[1, 2, 3, 0], [4, 5, 0], [6, 7, 8, 9, 0]]
    empty = IndexedDataset(HOSTILE / "12_zero_docs")
    assert (len(empty), empty.num_documents, empty.num_tokens) == (0, 0, 0)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"version": 2}, "idx: version is 2, wanted 1"),
        ({"code": 9}, "idx: dtype code is 9, wanted one of"),
        ({"counts": (4, 0)}, "idx: file size is"),
        ({"counts": (2**62, 4)}, "idx: file size is"),
        (
            {"lengths": (4, -1, 4, 2), "pointers": (0, 16, 12, 28)},
            "idx: length of sequence 1 is -1, wanted 0 or more",
        ),
        ({"pointers": (4, 20, 20, 32)}, "idx: pointer of sequence 0 is 4, wanted 0"),
        ({"boundaries": (1, 2, 3, 4)}, "idx: first document boundary is 1, wanted 0"),
        ({"boundaries": (0, 3, 2, 4)}, "idx: document boundary 2 is 2, wanted at least 3"),
        ({"boundaries": (0, 2, 3, 5)}, "idx: last document boundary is 5, wanted 4, the number of sequences"),
        ({"lengths": (), "boundaries": ()}, "idx: number of document boundaries is 0, wanted documents + 1"),
        ({"tokens": 10}, "bin: file size is 40 bytes, wanted 36"),
    ],
)
def test_each_field_is_checked(change, message, tmp_path):
    write_pair(tmp_path / "good")
    IndexedDataset(tmp_path / "good")
    with pytest.raises(ConfigError, match=re.escape(message)):
        IndexedDataset(write_pair(tmp_path / "bad", **change))


def test_multimodal_index_is_told_apart(tmp_path):
    path = write_pair(tmp_path / "modes").with_suffix(".idx")
    path.write_bytes(path.read_bytes() + b"\0" * 4)
    with pytest.raises(ConfigError, match="multimodal data is not supported"):
        IndexedDataset(tmp_path / "modes")


def test_an_empty_index_and_wrong_names(tmp_path):
    write_pair(tmp_path / "a")
    with pytest.raises(ConfigError, match="give the path without .bin or .idx"):
        IndexedDataset(tmp_path / "a.bin")
    (tmp_path / "a.idx").write_bytes(b"")
    with pytest.raises(ConfigError, match="a.idx: file size is 0 bytes, wanted at least 34"):
        IndexedDataset(tmp_path / "a")
    (tmp_path / "folder.idx").mkdir()
    (tmp_path / "folder.bin").touch()
    with pytest.raises(ConfigError, match="folder.idx: cannot be opened"):
        IndexedDataset(tmp_path / "folder")


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("code", CODES)
def test_every_dtype_and_several_sequences_a_document(code, mmap, tmp_path):
    dataset = IndexedDataset(write_pair(tmp_path / "set", code=code), mmap=mmap)
    assert dataset.dtype == np.dtype(CODES[code])
    assert [dataset.get(i).tolist() for i in range(4)] == [[0, 1, 2, 3], [], [4, 5, 6], [7, 8]]
    assert dataset.get(2, offset=1).tolist() == [5, 6]
    assert dataset.get(2, 1, 1).tolist() == [5]
    assert [dataset.document_of(i) for i in range(4)] == [0, 0, 1, 2]
    assert (dataset.num_documents, dataset.num_tokens) == (3, 9)
    for out_of_range in [(0, 5), (0, 0, 5), (0, -1)]:
        with pytest.raises(IndexError):
            dataset.get(*out_of_range)


@pytest.mark.parametrize("mmap", [True, False])
def test_gather_joins_sequences(mmap, tmp_path):
    dataset = IndexedDataset(write_pair(tmp_path / "set"), mmap=mmap)
    out = np.full(6, -7, dtype=np.int64)
    assert dataset.gather(np.array([3, 1, 0]), 1, out) == 5
    assert out.tolist() == [8, 0, 1, 2, 3, -7]
    assert dataset.gather(np.array([0, 2]), 2, out[:4]) == 4
    assert out.tolist() == [2, 3, 4, 5, 3, -7]


def test_a_file_cut_under_a_reader_is_said(tmp_path):
    dataset = IndexedDataset(write_pair(tmp_path / "set"), mmap=False)
    os.truncate(tmp_path / "set.bin", 20)
    with pytest.raises(ConfigError, match=r"set.bin: sequence 2 \(document 1\) cannot be read"):
        dataset.get(2)


@pytest.mark.parametrize("mmap", [True, False])
def test_positions_past_4_gigabytes(mmap, tmp_path):
    """More than 2^31 tokens and 2^32 bytes, in a file that is mostly hole."""
    length = 2**30 + 3
    lengths = [length, length, length, 5]
    pointers = [2 * length * i for i in range(4)]
    (tmp_path / "big.idx").write_bytes(index_bytes(8, lengths, pointers, [0, 1, 2, 3, 4]))
    with (tmp_path / "big.bin").open("wb") as file:
        file.seek(pointers[2] + 2 * 7)
        file.write(np.array([40_001, 40_002], "<u2").tobytes())
        file.seek(pointers[3])
        file.write(np.arange(65_530, 65_535).astype("<u2").tobytes())
    dataset = IndexedDataset(tmp_path / "big", mmap=mmap)
    assert dataset.num_tokens == 3 * length + 5 > 2**31
    assert dataset.get(2, 6, 4).tolist() == [0, 40_001, 40_002, 0]
    assert dataset.get(3).tolist() == [*range(65_530, 65_535)]
    out = np.empty(8, dtype=np.int64)
    assert dataset.gather(np.array([2, 3]), length - 3, out) == 8
    assert out.tolist() == [0, 0, 0, *range(65_530, 65_535)]


def test_trusted_opening_still_sees_a_missing_piece(tmp_path):
    write_pair(tmp_path / "set")
    assert IndexedDataset(tmp_path / "set", trusted=True).num_tokens == 9
    write_pair(tmp_path / "inside", boundaries=(0, 3, 2, 4))
    IndexedDataset(tmp_path / "inside", trusted=True)  # what another process has checked
    for change in ({"tokens": 8}, {"boundaries": (0, 2, 3, 5)}, {"counts": (5, 4)}):
        with pytest.raises(ConfigError):
            IndexedDataset(write_pair(tmp_path / "cut", **change), trusted=True)


@pytest.mark.parametrize("dtype", ["uint16", "int32", "uint8"])
def test_what_is_written_is_the_format(dtype, tmp_path):
    documents = [[[0, 1, 2, 3], []], [[4, 5, 6]], [[7, 8]]]
    write_documents(tmp_path / "set", documents, dtype, nested=True)
    size = np.dtype(dtype).itemsize
    code = {"uint16": 8, "int32": 4, "uint8": 1}[dtype]
    wanted = index_bytes(code, (4, 0, 3, 2), (0, 4 * size, 4 * size, 7 * size), (0, 2, 3, 4))
    assert (tmp_path / "set.idx").read_bytes() == wanted
    assert (tmp_path / "set.bin").read_bytes() == np.arange(9).astype(dtype).tobytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set.bin", "set.idx"]


def test_a_writer_that_fails_leaves_nothing_behind(tmp_path):
    def tokens():
        yield b"1234"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_real_pair(str(tmp_path / "set"), np.dtype("int32"), tokens(), lambda: [], lambda: [])
    assert list(tmp_path.iterdir()) == []


def test_a_killed_writer_leaves_nothing_under_the_final_name(tmp_path):
    program = (
        "import os, sys; import numpy as np; from megatron_lite.data.indexed_dataset import write_pair\n"
        "write_pair(sys.argv[1], np.dtype('int32'), [b'1234'], lambda: [], lambda: os._exit(9))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "set"], cwd=root, timeout=60)
    assert done.returncode == 9
    assert all(".tmp-" in path.name for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    "size, dtype", [(65_535, "uint16"), (65_536, "uint16"), (65_537, "int32"), (None, "int32")]
)
def test_best_dtype(size, dtype):
    assert np.dtype(best_dtype(size)).name == dtype
