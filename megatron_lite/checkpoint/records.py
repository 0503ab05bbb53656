"""Bytes of one stored tensor chunk, straight from the file into memory.

DCP keeps each chunk as a small torch.save archive: an uncompressed zip whose `data/0` entry is the chunk's raw
elements. They are read where they lie: no pickle is opened, a few rows of a large tensor cost a few rows of
reading, and a whole chunk costs one copy.
"""

import math
import sys
from collections.abc import Callable
from typing import BinaryIO

import torch

from megatron_lite.checkpoint.metadata import StoredChunk, StoredTensor
from megatron_lite.checkpoint.shards import LocalShard

_LOCAL_HEADER = 30
# The elements are the archive's fifth entry; each begins at a multiple of 64 bytes, or of 4096.
_HEAD_BYTES = 32 << 10
_ENTRY, _DESCRIPTOR = b"PK\x03\x04", b"PK\x07\x08"
_READ_BYTES = 64 << 20


class RecordError(ValueError):
    """A record that does not hold what the metadata says."""


def elements_start(file: BinaryIO, chunk: StoredChunk) -> int:
    """Where in the file the chunk's elements begin, by the entries in front of them.

    The table of contents stands at an archive's end, and a disk that is read from front to back is faster without it:
    what torch writes behind the elements tells whether they were of the right size, see `ends_at`.

    Raises:
        RecordError: the record is no archive of one tensor.
    """
    file.seek(chunk.start)
    head = file.read(min(_HEAD_BYTES, chunk.length))
    position = head.find(_ENTRY)
    while 0 <= position <= len(head) - _LOCAL_HEADER:
        name = position + _LOCAL_HEADER
        length = int.from_bytes(head[position + 26 : position + 28], "little")
        content = name + length + int.from_bytes(head[position + 28 : position + 30], "little")
        entry = head[name : name + length]
        if entry.endswith(b"/byteorder") and not head.startswith(
            sys.byteorder.encode() + _DESCRIPTOR, content
        ):
            raise RecordError(f"{chunk.file} was written in the other byte order than {sys.byteorder}")
        if entry.endswith(b"/data/0"):
            return chunk.start + content
        position = head.find(_ENTRY, name)
    raise RecordError(f"{chunk.file} at byte {chunk.start:,} holds no tensor")


def ends_at(file: BinaryIO, position: int, size: int) -> bool:
    """Whether an entry of `size` bytes ends at a position: its checksum and its size, twice, stand there."""
    file.seek(position)
    data, wide = file.read(24), size.to_bytes(8, "little")
    return data[:4] == _DESCRIPTOR and (data[8:24] == wide * 2 or data[8:16] == wide[:4] * 2)


def read_into(target: torch.Tensor, file: BinaryIO, position: int) -> None:
    """Fill a contiguous CPU tensor with bytes from a place in a file, in its own dtype."""
    view = memoryview(target.view(-1).view(torch.uint8).numpy()) if target.numel() else memoryview(b"")
    file.seek(position)
    done = 0
    while done < len(view):
        count = file.readinto(view[done : done + _READ_BYTES])
        if not count:
            raise RecordError(f"the file ends at byte {position + done:,}, wanted {len(view) - done:,} more")
        done += count


def fill_shard(shard: LocalShard, stored: StoredTensor, opened: Callable[[str], BinaryIO]) -> None:
    """Read a shard from the stored chunks that overlap; `opened`: name -> file. Raises RecordError, OSError."""
    for chunk in stored.chunks:
        inside, begin = [], []
        for c_start, c_size, start, size in zip(
            chunk.offsets, chunk.sizes, shard.offsets, shard.sizes, strict=True
        ):
            first, last = max(c_start, start), min(c_start + c_size, start + size)
            inside.append(slice(first - start, max(first, last) - start))
            begin.append(first - c_start)
        if all(part.start < part.stop for part in inside):
            read_slice(shard.local[tuple(inside)], opened(chunk.file), chunk, stored.dtype, tuple(begin))


def read_slice(
    target: torch.Tensor, file: BinaryIO, chunk: StoredChunk, dtype: torch.dtype, begin: tuple[int, ...]
) -> None:
    """Copy the slice of `target`'s shape that begins at `begin` inside the chunk.

    The rows that hold the slice are read; straight into target where it is contiguous memory of the same dtype and
    the slice spans whole rows, else by way of a buffer of bounded size.

    Raises:
        RecordError: the record does not hold the chunk.
    """
    position, size = elements_start(file, chunk), math.prod(chunk.sizes) * dtype.itemsize
    if target.numel() == 0:  # an entry of no bytes has nothing behind it
        return
    _read_rows(target, file, position, chunk.sizes, dtype, begin)
    if not ends_at(file, position + size, size):
        raise RecordError(f"{chunk.file} at byte {chunk.start:,} holds no tensor of {size:,} bytes")


def _read_rows(
    target: torch.Tensor,
    file: BinaryIO,
    position: int,
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    begin: tuple[int, ...],
) -> None:
    if target.dim() == 0:
        target, sizes, begin = target.view(1), (1,), (0,)
    row_bytes = math.prod(sizes[1:]) * dtype.itemsize
    whole_rows = tuple(target.shape[1:]) == tuple(sizes[1:])
    if whole_rows and target.is_contiguous() and target.dtype == dtype and target.device.type == "cpu":
        read_into(target, file, position + begin[0] * row_bytes)
        return
    rows = max(1, _READ_BYTES // row_bytes)
    inner = tuple(slice(b, b + n) for b, n in zip(begin[1:], target.shape[1:]))
    for row in range(0, target.shape[0], rows):
        part = target[row : row + rows]
        buffer = torch.empty((part.shape[0], *sizes[1:]), dtype=dtype)
        read_into(buffer, file, position + (begin[0] + row) * row_bytes)
        part.copy_(buffer[(slice(None), *inner)])
