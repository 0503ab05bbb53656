"""Bytes of one stored tensor piece, straight from the file into memory.

DCP keeps each piece as a small torch.save archive: an uncompressed zip whose `data/0` entry is the piece's raw
elements. They are read where they lie: no pickle is opened, a few rows of a large tensor cost a few rows of
reading, and a whole piece costs one copy.
"""

import io
import math
import sys
import zipfile
from typing import BinaryIO

import torch

from megatron_lite.checkpoint.metadata import StoredChunk

_LOCAL_HEADER = 30
_HEAD_BYTES = 4096  # torch puts the elements at the end of an archive's first few hundred bytes
_ENTRY, _DESCRIPTOR = b"PK\x03\x04", b"PK\x07\x08"
_READ_BYTES = 64 << 20


class RecordError(ValueError):
    """A record that does not hold what the metadata says."""


class _Window(io.RawIOBase):
    """A read-only view on part of a file, for zipfile to look at."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self._start + self._at)
        data = self._file.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data


def likely_start(file: BinaryIO, chunk: StoredChunk) -> int | None:
    """Where the chunk's elements begin by the look of the archive's first bytes; None where that does not show.

    The table of contents stands at an archive's end. A disk that is read from front to back is faster without it,
    and what follows the elements tells afterwards whether this was right: see `follows`.
    """
    file.seek(chunk.start)
    head = file.read(min(_HEAD_BYTES, chunk.length))
    start, same_order = None, False
    position = head.find(_ENTRY)
    while 0 <= position <= len(head) - _LOCAL_HEADER:
        name = position + _LOCAL_HEADER
        length = int.from_bytes(head[position + 26 : position + 28], "little")
        content = name + length + int.from_bytes(head[position + 28 : position + 30], "little")
        if head[name : name + length].endswith(b"/byteorder"):
            same_order = head.startswith(sys.byteorder.encode() + _DESCRIPTOR, content)
        elif head[name : name + length].endswith(b"/data/0"):
            start = chunk.start + content
            break
        position = head.find(_ENTRY, name)
    return start if same_order else None


def follows(file: BinaryIO, position: int, size: int) -> bool:
    """Whether an entry of `size` bytes ends at a position: its checksum and size, twice, stand there."""
    file.seek(position)
    data = file.read(24)
    wide = size.to_bytes(8, "little")
    narrow = size.to_bytes(8, "little")[:4]
    return data[:4] == _DESCRIPTOR and (data[8:24] == wide + wide or data[8:16] == narrow + narrow)


def elements_start(file: BinaryIO, chunk: StoredChunk, dtype: torch.dtype) -> int:
    """Where in the file the chunk's elements begin.

    Raises:
        RecordError: the record is no archive of one tensor of this size.
    """
    try:
        archive = zipfile.ZipFile(_Window(file, chunk.start, chunk.length))
        entries = {info.filename.split("/", 1)[-1]: info for info in archive.infolist()}
        info, order = entries["data/0"], entries.get("byteorder")
    except (zipfile.BadZipFile, KeyError, OSError, ValueError, NotImplementedError) as error:
        raise RecordError(f"{chunk.file} at byte {chunk.start:,} holds no tensor ({error})") from None
    wanted = math.prod(chunk.sizes) * dtype.itemsize
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != wanted:
        raise RecordError(
            f"{chunk.file} at byte {chunk.start:,} holds {info.file_size:,} bytes, wanted {wanted:,}"
        )
    if order is not None:
        file.seek(_entry_start(file, chunk, order))
        if file.read(order.file_size).decode("ascii", "replace") != sys.byteorder:
            raise RecordError(
                f"{chunk.file} was written on a machine of the other byte order than {sys.byteorder}"
            )
    return _entry_start(file, chunk, info)


def _entry_start(file: BinaryIO, chunk: StoredChunk, info: zipfile.ZipInfo) -> int:
    """Where an entry's content begins: behind its header, whose length is known from the header alone."""
    file.seek(chunk.start + info.header_offset)
    header = file.read(_LOCAL_HEADER)
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    start = info.header_offset + _LOCAL_HEADER + names
    if start + info.file_size > chunk.length:
        raise RecordError(f"{chunk.file} at byte {chunk.start:,} ends too early")
    return chunk.start + start


def read_into(target: torch.Tensor, file: BinaryIO, position: int) -> None:
    """Fill a contiguous CPU tensor with bytes from a place in a file, in its own dtype."""
    view = memoryview(target.view(-1).view(torch.uint8).numpy()) if target.numel() else memoryview(b"")
    file.seek(position)
    done = 0
    while done < len(view):
        count = file.readinto(view[done : done + _READ_BYTES])
        if not count:
            raise RecordError(
                f"the file ends at byte {position + done:,}, {len(view) - done:,} more were wanted"
            )
        done += count


def read_box(
    target: torch.Tensor, file: BinaryIO, chunk: StoredChunk, dtype: torch.dtype, begin: tuple[int, ...]
) -> None:
    """Copy the box of `target`'s shape that begins at `begin` inside the chunk.

    The rows that hold the box are read; straight into target where it is contiguous memory of the same dtype and
    the box spans whole rows, else by way of a buffer of bounded size.
    """
    if target.numel() == 0:
        elements_start(file, chunk, dtype)
        return
    size = math.prod(chunk.sizes) * dtype.itemsize
    start = likely_start(file, chunk)
    if start is not None and start + size < chunk.start + chunk.length:
        _read_box_at(target, file, start, chunk, dtype, begin)
        if follows(file, start + size, size):
            return
    _read_box_at(target, file, elements_start(file, chunk, dtype), chunk, dtype, begin)


def _read_box_at(
    target: torch.Tensor,
    file: BinaryIO,
    position: int,
    chunk: StoredChunk,
    dtype: torch.dtype,
    begin: tuple[int, ...],
) -> None:
    if target.dim() == 0:
        target, sizes, begin = target.view(1), (1,), (0,)
    else:
        sizes = chunk.sizes
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
