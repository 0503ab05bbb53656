"""Index arrays on disk: built once, mapped by every process that needs them.

An entry is one file: 8 bytes magic, uint64 length of a JSON header, the header, then the arrays at multiples of
64 bytes. It is written aside and renamed, and its header knows the size of the whole, so that a file under its
final name is complete. The name is a hash of all that decides the arrays but the lengths of the sequences,
which take a pass over the index to hash; that hash stands inside and is compared, unless the user trusts the cache.
"""

import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lite.files.writing import opened_aside

_MAGIC = b"MLITEIX1"
_HEAD = struct.Struct("<8sQ")
_ALIGNMENT = 64
_LARGEST_HEADER = 1 << 24

Arrays = dict[str, np.ndarray]


class IndexEntry:
    """The arrays of one dataset, and a few plain facts about them (`about`). Mapped on first use when from a file."""

    def __init__(
        self,
        about: Mapping[str, Any],
        arrays: Arrays | None = None,
        path: Path | None = None,
        note: str | None = None,
    ):
        """note: a line for the user about where the arrays could not be stored."""
        assert (arrays is None) != (path is None)
        self.about = dict(about)
        self.path = path
        self.note = note
        self._built = arrays

    @cached_property
    def arrays(self) -> Arrays:
        """{name: array}, read-only maps when from a file."""
        return self._built if self.path is None else _map(self.path)


class IndexCache:
    """A folder of entries, with a private folder of this machine to fall back on when it cannot be written to.

    Args:
        folder: where entries are looked for and written; None = in the machine's own folder only.
        trusted: take an entry without comparing the hash of the lengths (--dataloader-fast-cache-load).
    """

    def __init__(self, folder: str | os.PathLike | None, trusted: bool = False):
        self.folder = Path(folder) if folder is not None else None
        self.trusted = trusted

    def get(
        self,
        description: Mapping[str, Any],
        content_hash: Callable[[], str],
        build: Callable[[], tuple[dict[str, Any], Arrays]],
        store: bool,
    ) -> IndexEntry:
        """The entry of `description` (plain JSON types): from a folder, or built.

        Args:
            content_hash: hash of the data that the arrays are made of; in the result it is about["content"].
            build: makes (about, arrays).
            store: write what was built, for the processes that come later.
        """
        name = entry_name(description)
        content = None if self.trusted else content_hash()
        for folder in (self.folder, _machine_folder()):
            header = _read_header(folder / name) if folder is not None else None
            if header is not None and content in (None, header["about"]["content"]):
                return IndexEntry(header["about"], path=folder / name)
        about, arrays = build()
        about["content"] = content_hash() if content is None else content
        if not store:
            return IndexEntry(about, arrays)
        problems = []
        for folder in (lambda: self.folder, lambda: _machine_folder(create=True)):
            if (place := folder()) is None:
                continue
            problem = _store(place / name, about, arrays)
            if problem is None:
                note = f"{problems[0]}; it lies in {place} of this machine" if problems else None
                return IndexEntry(about, path=place / name, note=note)
            problems.append(f"the index cannot be stored in {place} ({problem})")
        size = sum(array.nbytes for array in arrays.values())
        why = "; ".join(problems) or "there is no folder to store the index in"
        note = f"{why}: every process holds its own, {size / 2**20:,.1f} MiB; --data-cache-path names a place"
        return IndexEntry(about, arrays, note=note)


def entry_name(description: Mapping[str, Any]) -> str:
    """The file name that stands for a description."""
    text = json.dumps(description, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32] + ".index"


def _machine_folder(create: bool = False) -> Path | None:
    """A folder in the machine's temporary place that only this user can write to; None if there is none."""
    folder = Path(tempfile.gettempdir()) / f"megatron_lite_index_{os.getuid()}"
    try:
        if create:
            folder.mkdir(mode=0o700, exist_ok=True)
        state = folder.lstat()
    except OSError:
        return None
    private = state.st_uid == os.getuid() and not state.st_mode & 0o022 and not folder.is_symlink()
    return folder if private else None


def _store(path: Path, about: dict[str, Any], arrays: Arrays) -> str | None:
    """Write an entry; why the folder cannot be written to (read-only, full, no permission), or None."""
    try:
        with opened_aside(path) as file:
            file.write(_header(about, arrays))
            for array in arrays.values():
                file.write(b"\0" * (-file.tell() % _ALIGNMENT))
                file.write(np.ascontiguousarray(array).data)
        return None
    except OSError as error:
        return error.strerror or str(error)


def _header(about: dict[str, Any], arrays: Arrays) -> bytes:
    """Magic, length and JSON; padded so that the numbers in it, which move its end, cannot move the arrays."""
    room = 1024 + len(json.dumps(about)) + 128 * len(arrays)
    position = _aligned(_HEAD.size + room)
    places = {}
    for name, array in arrays.items():
        places[name] = [array.dtype.str, list(array.shape), position]
        end = position + array.nbytes
        position = _aligned(end)
    text = json.dumps({"about": about, "arrays": places, "size": end}).encode()
    return _HEAD.pack(_MAGIC, room) + text.ljust(room)


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT


def _read_header(path: Path) -> dict[str, Any] | None:
    """None for a file that is absent, not an entry, or not whole."""
    try:
        with path.open("rb") as file:
            magic, length = _HEAD.unpack(file.read(_HEAD.size))
            if magic != _MAGIC or length > _LARGEST_HEADER:
                return None
            header = json.loads(file.read(length))
            return header if os.fstat(file.fileno()).st_size == header["size"] else None
    except (OSError, struct.error, ValueError, KeyError):
        return None


def _map(path: Path) -> Arrays:
    header = _read_header(path)
    if header is None:
        raise OSError(f"{path}: the index was removed or damaged while the run was starting; start again")
    raw = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    arrays = {}
    for name, (dtype, shape, offset) in header["arrays"].items():
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        arrays[name] = raw[offset : offset + size].view(dtype).reshape(shape)
    return arrays
