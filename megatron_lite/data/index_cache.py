"""Index arrays on disk: built once, mapped by every process that needs them.

An entry is one file: arrays in numpy's own .npy form, one behind the other at multiples of 64 bytes; the first holds
JSON with facts and the names of the others. It is written aside and renamed, so that a file under its final name is
complete. The name is a hash of all that decides the arrays but the lengths of the sequences, which take a pass over
the index to hash; that hash stands inside and is compared, unless the user trusts the cache.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lite.files.writing import opened_aside

_ALIGNMENT = 64

Arrays = dict[str, np.ndarray]


@dataclass
class IndexEntry:
    """The arrays of one dataset, and a few plain facts about them (`about`). Mapped on first use when from a file."""

    about: dict[str, Any]
    _built: Arrays | None  # None when they are in the file `path`
    path: Path | None = None
    note: str | None = None  # a line for the user about where they are stored

    @cached_property
    def arrays(self) -> Arrays:
        """{name: array}, read-only maps when from a file."""
        if self._built is not None:
            return self._built
        stored = _read(self.path)
        if stored is None:
            raise OSError(f"{self.path}: the index was removed or damaged during the start; start again")
        return stored[1]


class IndexCache:
    """A folder of entries, with a private folder of this machine to fall back on when it cannot be written to.

    Args:
        folder: where entries are looked for and written; None = in the machine's own folder only.
        trusted: take an entry without comparing the hash of the lengths (--dataloader-fast-cache-load).
    """

    def __init__(self, folder: str | os.PathLike | None, trusted: bool = False):
        self.folder = Path(folder) if folder is not None else None
        self.trusted = trusted

    def _places(self, create: bool = False) -> Iterator[Path | None]:
        yield self.folder
        yield _machine_folder(create)

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
        text = json.dumps(description, sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:32] + ".index"
        content = None if self.trusted else content_hash()
        for place in filter(None, self._places()):
            stored = _read(place / name)
            if stored is not None and content in (None, stored[0]["content"]):
                return IndexEntry(stored[0], None, place / name)
        about, arrays = build()
        about["content"] = content_hash() if content is None else content
        if not store:
            return IndexEntry(about, arrays)
        problems = []
        for place in filter(None, self._places(create=True)):
            try:
                _store(place / name, about, arrays)
            except OSError as error:
                problems.append(f"the index cannot be stored in {place} ({error.strerror or error})")
                continue
            note = f"{problems[0]}; it lies in {place} of this machine" if problems else None
            return IndexEntry(about, None, place / name, note)
        size = sum(array.nbytes for array in arrays.values())
        why = "; ".join(problems) or "there is no folder to store the index in"
        note = f"{why}: every process holds its own, {size / 2**20:,.1f} MiB; --data-cache-path names a place"
        return IndexEntry(about, arrays, note=note)


def _machine_folder(create: bool) -> Path | None:
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


def _store(path: Path, about: dict[str, Any], arrays: Arrays) -> None:
    head = json.dumps({"about": about, "names": list(arrays)}).encode()
    with opened_aside(path) as file:
        for array in (np.frombuffer(head, np.uint8), *arrays.values()):
            file.write(b"\0" * (-file.tell() % _ALIGNMENT))
            np.save(file, array)


def _read(path: Path) -> tuple[dict[str, Any], Arrays] | None:
    """Facts and mapped arrays of an entry; None for a file that is absent, not an entry, or not whole."""
    try:
        with path.open("rb") as file:
            head = json.loads(np.load(file).tobytes())
            arrays = {}
            for name in head["names"]:
                file.seek(-file.tell() % _ALIGNMENT, os.SEEK_CUR)
                np.lib.format.read_magic(file)
                shape, _, dtype = np.lib.format.read_array_header_1_0(file)
                # A plain array over the map: it is faster than np.memmap to slice.
                start = file.tell()
                arrays[name] = np.asarray(np.memmap(file, dtype, "r", start, shape))
                file.seek(start + arrays[name].nbytes)
        return head["about"], arrays
    except (OSError, ValueError, TypeError, KeyError, EOFError):
        return None
