"""A Megatron pair that grows on disk over hours, survives an interruption, and appears under its name only whole.

The folder PREFIX.partial holds, for each dataset, the tokens and one int32 length per document, and state.json: how
far these files are good and whatever the caller needs to go on. Nothing grows in memory with the input.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron_lite.config.declare import ConfigError
from megatron_lite.data.indexed_dataset import publish_pair, write_index
from megatron_lite.files.command_line import RunError
from megatron_lite.files.reading import read_object
from megatron_lite.files.writing import sync, write_aside

_PIECE = 1 << 20  # entries handled at a time when the index is written


class Journal:
    """Documents appended to several datasets at once, in `PREFIX.partial` until `publish`.

    Args:
        prefix: decides the folder's name.
        names: path prefix of each dataset that is made, without .bin / .idx.
        dtype: of the tokens.
        signature: plain JSON; a journal is only continued by a run with an equal one.
        resume: continue the journal if there is one; otherwise it is started afresh.

    Raises:
        ConfigError: --resume with another signature; another process writes the same prefix.
    """

    def __init__(
        self, prefix: str, names: Sequence[str], dtype: str, signature: dict[str, Any], resume: bool
    ) -> None:
        self.folder = Path(f"{prefix}.partial")
        self.names, self.dtype, self.signature = list(names), np.dtype(dtype).newbyteorder("<"), signature
        self.state: dict[str, Any] | None = None  # the caller's, as last committed
        self.complete = False  # all documents are in and only `publish` is left to do
        self.folder.mkdir(exist_ok=True)
        self._lock = (self.folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ConfigError(f"another process is writing '{self.folder}', wanted one at a time") from None
        stored = self._read_state() if resume else None
        if stored is not None:
            self._check_signature(stored["signature"])
            self.state, self.complete = stored["state"], stored["complete"]
        self._files = [] if self.complete else self._open(stored)

    def _read_state(self) -> dict[str, Any] | None:
        path = self.folder / "state.json"
        if not path.exists():
            return None
        stored = read_object(path, f"'{path}' (remove the folder to start afresh)")
        if missing := sorted({"signature", "state", "sizes", "complete"} - set(stored)):
            raise ConfigError(f"'{path}' has no '{missing[0]}'; remove the folder to start afresh")
        return stored

    def _check_signature(self, stored: dict[str, Any]) -> None:
        for name in sorted({*self.signature, *stored}):
            theirs, ours = stored.get(name), self.signature.get(name)
            if theirs != ours:
                raise ConfigError(
                    f"--resume: '{self.folder}' was made with another {name} ({_short(theirs)}), this run has "
                    f"{_short(ours)}; remove the folder or leave --resume away to start afresh"
                )

    def _open(self, stored: dict[str, Any] | None) -> list[list[BinaryIO]]:
        """Open the .bin and .lengths of each dataset, cut to what the state vouches for."""
        if stored is None:
            for path in self.folder.iterdir():
                if path.name != "lock":
                    path.unlink()
        sizes = stored["sizes"] if stored else [[0, 0]] * len(self.names)
        return [
            [self._open_at(self._path(number, kind), size) for kind, size in zip(("bin", "lengths"), pair)]
            for number, pair in enumerate(sizes)
        ]

    def _open_at(self, path: Path, size: int) -> BinaryIO:
        file = path.open("r+b" if size else "wb", buffering=1 << 20)
        if file.seek(0, os.SEEK_END) < size:
            raise ConfigError(f"'{path}' is shorter than state.json says; remove the folder to start afresh")
        file.truncate(size)
        file.seek(size)
        return file

    def _path(self, number: int, kind: str) -> Path:
        return self.folder / f"{number}.{kind}"

    def append(self, number: int, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Documents for dataset `number`: tokens [sum of lengths], lengths [documents]."""
        bin_file, lengths_file = self._files[number]
        bin_file.write(np.ascontiguousarray(tokens, self.dtype).data)
        lengths_file.write(np.ascontiguousarray(lengths, "<i4").data)

    def commit(self, state: dict[str, Any], complete: bool = False) -> None:
        """Bring all that was appended to the disk and record `state` (plain JSON) as the point to go on from."""
        for file in chain(*self._files):
            sync(file)
        sizes = [[file.tell() for file in pair] for pair in self._files]
        content = {"signature": self.signature, "state": state, "sizes": sizes, "complete": complete}
        write_aside(self.folder / "state.json", content)
        self.state, self.complete = state, complete

    def publish(self, about: Sequence[dict[str, Any]]) -> None:
        """Make the pairs appear under their names, with NAME.json that holds `about` each, and remove the folder.

        Can be repeated after an interruption.
        """
        assert self.complete
        self._close()
        for number, name in enumerate(self.names):
            bin_path, idx_path = self._path(number, "bin"), self._path(number, "idx")
            if bin_path.exists():
                lengths = self._path(number, "lengths")
                write_index(idx_path, self.dtype, partial(_lengths, lengths), partial(_boundaries, lengths))
            publish_pair(name, bin_path, idx_path, about[number])
        self.remove()

    def _close(self) -> None:
        for file in chain(*self._files):
            # Closing flushes, and on a full disk that fails once more; the last commit is what counts.
            with contextlib.suppress(OSError):
                file.close()
        self._files = []

    def release(self) -> None:
        """Let go of the folder; it stays for a run that resumes."""
        self._close()
        self._lock.close()

    def remove(self) -> None:
        """Remove the folder with all that is in it."""
        self.release()
        shutil.rmtree(self.folder, ignore_errors=True)


def disk_error(error: OSError, path: str) -> RunError:
    """The sentence for a write to `path` that failed."""
    reason = "no space left on the disk" if error.errno == errno.ENOSPC else (error.strerror or str(error))
    return RunError(f"'{error.filename or path}' cannot be written: {reason}")


def _pieces(path: Path) -> Iterator[np.ndarray]:
    with path.open("rb") as file:
        while data := file.read(4 * _PIECE):
            yield np.frombuffer(data, "<i4")


def _lengths(path: Path) -> Iterator[np.ndarray]:
    """A document with tokens is one sequence, one without tokens is none."""
    return (piece[piece > 0] for piece in _pieces(path))


def _boundaries(path: Path) -> Iterator[np.ndarray]:
    before = 0
    for piece in _pieces(path):
        ends = np.cumsum(piece > 0, dtype=np.int64) + before
        before = int(ends[-1])
        yield ends


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."
