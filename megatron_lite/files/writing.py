"""Files that are whole or not there: written aside, brought to the disk, renamed."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


def aside_of(path: Path) -> Path:
    """The temporary name beside `path`; of this process, for nodes share filesystems and process numbers."""
    return path.with_name(f"{path.name}.tmp-{os.uname().nodename}-{os.getpid()}")


def sync(file: IO) -> None:
    """Bring a file's bytes to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: str | os.PathLike) -> None:
    """Bring a folder's names (new files, renames) to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def opened_aside(path: Path, mode: str = "wb", **options: Any) -> Iterator[IO]:
    """A temporary file to write; it takes the name `path` when the block ends well and is removed when it does not.

    Its folder is made. `options` are those of open(). Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = aside_of(path)
    try:
        with aside.open(mode, **options) as file:
            yield file
            sync(file)
        aside.rename(path)
        sync_folder(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def write_aside(path: Path, content: bytes | str | Any) -> None:
    """Write bytes, text or (anything else) JSON to `path` by `opened_aside`. Raises OSError."""
    if not isinstance(content, bytes | str):
        content = json.dumps(content, indent=1, sort_keys=True) + "\n"
    with opened_aside(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
