"""Where checkpoint folders lie: a filesystem that all ranks share, or any store that fsspec knows. No torch here."""

import os
import shutil
from pathlib import Path
from typing import BinaryIO

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from megatron_lite.config.declare import ConfigError
from megatron_lite.files.writing import sync_folder, write_aside

_WRITE_BUFFER = 1 << 20


class Storage:
    """A folder, or a URL such as s3://bucket/run. Paths are relative to it and use "/".

    remote: a store behind fsspec. There an upload is atomic and kept once it is finished, and a folder cannot be
    renamed at once; on a filesystem a file is written aside and synced, and a folder can be renamed.
    """

    def __init__(self, root: str) -> None:
        """Raises ConfigError when fsspec does not know the URL's protocol or its package is not installed."""
        self.remote = "://" in root and not root.startswith("file://")
        self.root = root.rstrip("/") if self.remote else str(Path(root.removeprefix("file://")))
        try:
            fs, base = (
                url_to_fs(self.root) if self.remote else (LocalFileSystem(), Path(self.root).absolute())
            )
        except (ValueError, ImportError) as error:
            raise ConfigError(f"{root}: fsspec cannot open it: {error}") from error
        self._fs, self._base = fs, str(base).rstrip("/")

    def _at(self, path: str) -> str:
        return f"{self._base}/{path}".rstrip("/")

    def full(self, path: str = "") -> str:
        """The path as a user would name it."""
        return f"{self.root}/{path}" if path else self.root

    def names(self, path: str = "") -> list[str]:
        """Sorted names in a folder; none when it does not exist."""
        self._fs.invalidate_cache()  # other processes write there
        try:
            return sorted(p.rstrip("/").rsplit("/", 1)[-1] for p in self._fs.ls(self._at(path), detail=False))
        except FileNotFoundError:
            return []

    def is_folder(self, path: str = "") -> bool:
        """Whether path is a folder."""
        return bool(self._fs.isdir(self._at(path)))

    def size(self, path: str) -> int | None:
        """Bytes of a regular file, None when there is none."""
        try:
            info = self._fs.info(self._at(path))
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return None
        return info["size"] if info["type"] == "file" else None

    def open(self, path: str, mode: str) -> BinaryIO:
        """Open for "rb" (locally unbuffered: the reader asks for large ranges) or "wb"."""
        if self.remote:
            return self._fs.open(self._at(path), mode)
        return Path(self._at(path)).open(mode, buffering=0 if mode == "rb" else _WRITE_BUFFER)

    def read(self, path: str, limit: int = -1) -> bytes:
        """The first limit bytes of a file, or all of it."""
        with self.open(path, "rb") as file:
            return file.read(limit)

    def write(self, path: str, data: bytes) -> None:
        """Write a file: it is whole or not there."""
        if self.remote:
            self._fs.pipe_file(self._at(path), data)
        else:
            write_aside(Path(self._at(path)), data)

    def make_folder(self, path: str = "") -> None:
        """Make a folder and its parents (where the store has folders); one that is there is fine."""
        self._fs.makedirs(self._at(path), exist_ok=True)

    def rename(self, old: str, new: str) -> None:
        """Rename a file or, locally, a folder."""
        rename = self._fs.mv if self.remote else os.rename
        rename(self._at(old), self._at(new))

    def remove_file(self, path: str) -> None:
        """Remove a file; one that is not there is fine."""
        if self._fs.exists(self._at(path)):
            self._fs.rm_file(self._at(path))

    def remove_folder(self, path: str) -> None:
        """Remove a folder and all in it; or what a user put under its name."""
        self._fs.rm(self._at(path), recursive=True)

    def sync_folder(self, path: str = "") -> None:
        """Bring the folder's names (new files, renames) to the disk."""
        if not self.remote:
            sync_folder(self._at(path))

    def free_bytes(self) -> int | None:
        """Free bytes of the filesystem; None where that is not known."""
        return None if self.remote else shutil.disk_usage(self._base).free


def parent_of(path: str) -> tuple[str, str]:
    """A folder name or URL as (parent, last name)."""
    if "://" not in path:
        path = str(Path(path).absolute())
    parent, _, name = path.rstrip("/").rpartition("/")
    return parent, name
