"""Where checkpoint folders lie: a filesystem all ranks share, or any store that fsspec knows. No torch here.

Paths are relative to the storage's root and use "/". Only what a checkpoint needs is here; the two classes
differ in one thing that matters: a local folder can be renamed at once, a remote one cannot.
"""

import shutil
from pathlib import Path
from typing import BinaryIO

from fsspec.core import url_to_fs

from megatron_lite.config import ConfigError
from megatron_lite.files.writing import sync_folder, write_aside

_WRITE_BUFFER = 1 << 20


class LocalStorage:
    """A folder of a local or shared filesystem."""

    remote = False

    def __init__(self, root: str):
        self.root = root

    def _at(self, path: str) -> Path:
        return Path(self.root) / path

    def full(self, path: str = "") -> str:
        """The path as a user would name it."""
        return str(self._at(path))

    def names(self, path: str = "") -> list[str]:
        """Sorted names in a folder; none when it does not exist."""
        try:
            return sorted(entry.name for entry in self._at(path).iterdir())
        except FileNotFoundError:
            return []

    def is_folder(self, path: str = "") -> bool:
        """Whether path is a folder."""
        return self._at(path).is_dir()

    def size(self, path: str) -> int | None:
        """Bytes of a regular file, None when there is none."""
        try:
            return self._at(path).stat().st_size if self._at(path).is_file() else None
        except OSError:
            return None

    def open(self, path: str, mode: str) -> BinaryIO:
        """Open for "rb" (unbuffered: the reader asks for large pieces) or "wb"."""
        return self._at(path).open(mode, buffering=0 if mode == "rb" else _WRITE_BUFFER)

    def read(self, path: str, limit: int = -1) -> bytes:
        """The first limit bytes of a file, or all of it."""
        with self._at(path).open("rb") as file:
            return file.read(limit)

    def write(self, path: str, data: bytes) -> None:
        """Write a file aside, bring it to the disk and give it its name: it is whole or not there."""
        write_aside(self._at(path), data)

    def make_folder(self, path: str = "") -> None:
        """Make a folder and its parents; one that is there is fine."""
        self._at(path).mkdir(parents=True, exist_ok=True)

    def rename(self, old: str, new: str) -> None:
        """Rename a file or a folder."""
        self._at(old).rename(self._at(new))

    def remove_file(self, path: str) -> None:
        """Remove a file; one that is not there is fine."""
        self._at(path).unlink(missing_ok=True)

    def remove_folder(self, path: str) -> None:
        """Remove a folder and all in it; or what a user put under its name."""
        if self._at(path).is_dir() and not self._at(path).is_symlink():
            shutil.rmtree(self._at(path))
        else:
            self._at(path).unlink()

    def sync_folder(self, path: str = "") -> None:
        """Bring the folder's names (new files, renames) to the disk."""
        sync_folder(self._at(path))

    def free_bytes(self) -> int | None:
        """Free bytes of the filesystem that holds the root or its nearest existing parent."""
        existing = next(
            p for p in (Path(self.root).absolute(), *Path(self.root).absolute().parents) if p.exists()
        )
        return shutil.disk_usage(existing).free


class RemoteStorage:
    """A folder of an object store or another filesystem behind fsspec. A single file's upload is atomic."""

    remote = True

    def __init__(self, root: str):
        self.root = root.rstrip("/")
        try:
            self.fs, self._base = url_to_fs(self.root)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"{root}: fsspec cannot open it: {error}") from error

    def _at(self, path: str) -> str:
        return f"{self._base.rstrip('/')}/{path}".rstrip("/")

    def full(self, path: str = "") -> str:
        """The URL as a user would name it."""
        return f"{self.root}/{path}".rstrip("/")

    def names(self, path: str = "") -> list[str]:
        """Sorted names in a folder; none when it does not exist."""
        self.fs.invalidate_cache()  # other processes write there
        try:
            return sorted(p.rstrip("/").rsplit("/", 1)[-1] for p in self.fs.ls(self._at(path), detail=False))
        except FileNotFoundError:
            return []

    def is_folder(self, path: str = "") -> bool:
        """Whether path is a folder."""
        return bool(self.fs.isdir(self._at(path)))

    def size(self, path: str) -> int | None:
        """Bytes of a file, None when there is none."""
        try:
            info = self.fs.info(self._at(path))
        except FileNotFoundError:
            return None
        return info["size"] if info["type"] == "file" else None

    def open(self, path: str, mode: str) -> BinaryIO:
        """Open for "rb" or "wb"."""
        return self.fs.open(self._at(path), mode)

    def read(self, path: str, limit: int = -1) -> bytes:
        """The first limit bytes of a file, or all of it."""
        with self.fs.open(self._at(path), "rb") as file:
            return file.read(limit)

    def write(self, path: str, data: bytes) -> None:
        """Write a file; stores show it whole or not at all."""
        with self.fs.open(self._at(path), "wb") as file:
            file.write(data)

    def make_folder(self, path: str = "") -> None:
        """Make a folder where the store has folders."""
        self.fs.makedirs(self._at(path), exist_ok=True)

    def rename(self, old: str, new: str) -> None:
        """Rename a file (a copy and a removal in most stores)."""
        self.fs.mv(self._at(old), self._at(new))

    def remove_file(self, path: str) -> None:
        """Remove a file; one that is not there is fine."""
        if self.fs.exists(self._at(path)):
            self.fs.rm_file(self._at(path))

    def remove_folder(self, path: str) -> None:
        """Remove a folder and all in it."""
        self.fs.rm(self._at(path), recursive=True)

    def sync_folder(self, path: str = "") -> None:
        """Nothing to do: a finished upload is kept."""

    def free_bytes(self) -> int | None:
        """Not known."""
        return None


Storage = LocalStorage | RemoteStorage


def storage_for(path: str) -> Storage:
    """The storage behind a folder name or a URL such as s3://bucket/run.

    Raises:
        ConfigError: when fsspec does not know the URL's protocol or its package is not installed.
    """
    if "://" in path and not path.startswith("file://"):
        return RemoteStorage(path)
    return LocalStorage(path.removeprefix("file://"))


def parent_of(path: str) -> tuple[str, str]:
    """A folder name or URL as (parent, last name)."""
    trimmed = path.rstrip("/")
    if "://" in path:
        parent, _, name = trimmed.rpartition("/")
        return parent, name
    return str(Path(trimmed).absolute().parent), Path(trimmed).absolute().name
