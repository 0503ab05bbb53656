"""Read a checkpoint tensor by tensor, in one process or as one rank's share. Nothing that is read can run code."""

from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, TypeVar

import torch

from megatron_lite.checkpoint.compare import read_stored_config
from megatron_lite.checkpoint.folder import Found, find_in
from megatron_lite.checkpoint.manifest import METADATA, TRAIN_STATE, parse_object
from megatron_lite.checkpoint.metadata import StoredChunk, StoredTensor, parse_metadata
from megatron_lite.checkpoint.pieces import Piece
from megatron_lite.checkpoint.records import RecordError, read_box
from megatron_lite.checkpoint.storage import parent_of, storage_for
from megatron_lite.config import ConfigError

RANDOM_PREFIX = "random_state."
OPTIMIZER_PREFIX = "optimizer."
_OPEN_FILES = 64
Result = TypeVar("Result")


class CheckpointReader:
    """One complete checkpoint folder; a save folder stands for the checkpoint that --load would take from it.

    Args:
        folder: SAVE/iter_0000010, or SAVE.

    Raises:
        ConfigError: there is no complete checkpoint, or its metadata cannot be read.
    """

    def __init__(self, folder: str | Found) -> None:
        found = folder if isinstance(folder, Found) else find_in(str(folder))
        if found is None:
            raise ConfigError(f"--load {folder}: there is no checkpoint")
        self.found = found
        self.path = found.path
        parent, self._name = parent_of(found.path)
        self._storage = storage_for(parent)
        self._tensors = parse_metadata(self._bytes(METADATA), f"{self.path}/{METADATA}")
        self._files: dict[str, BinaryIO] = {}

    @property
    def config(self) -> dict[str, dict[str, Any]]:
        """The run's Config.to_dict()."""
        return read_stored_config(self.found)

    @property
    def train_state(self) -> dict[str, Any]:
        """Iteration, consumed samples, schedule, layout."""
        try:
            state = parse_object(self._bytes(TRAIN_STATE))
            if state.get("iteration") != self.found.iteration:
                raise ValueError(f"its iteration is {state.get('iteration')}, wanted {self.found.iteration}")
        except ValueError as error:
            raise ConfigError(f"{self.path}/{TRAIN_STATE} cannot be read: {error}") from None
        return state

    def names(self) -> dict[str, StoredTensor]:
        """{name: shape, dtype and pieces} of every tensor: weights, `optimizer.*`, `random_state.*`."""
        return dict(self._tensors)

    def weight_names(self) -> list[str]:
        """Sorted names of the model's weights."""
        return sorted(n for n in self._tensors if not n.startswith((OPTIMIZER_PREFIX, RANDOM_PREFIX)))

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, in its stored dtype, on the CPU.

        Raises:
            ConfigError: there is no such tensor, or its bytes cannot be read.
        """
        stored = self._stored(name)
        target = torch.empty(stored.shape, dtype=stored.dtype)
        self.fill(name, Piece(target, stored.shape, (0,) * len(stored.shape)))
        return target

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of a tensor; only they are read. Raises ConfigError as read does."""
        stored = self._stored(name)
        rows = range(stored.shape[0])[start:stop]
        target = torch.empty((len(rows), *stored.shape[1:]), dtype=stored.dtype)
        offsets = (rows.start, *(0 for _ in stored.shape[1:]))
        self.fill(name, Piece(target, stored.shape, offsets))
        return target

    def fill(self, name: str, piece: Piece) -> None:
        """Read the box that a piece stands for into its memory. Dtypes are converted; callers compare them first.

        Raises:
            ConfigError: as read.
        """
        stored = self._stored(name)
        for chunk in stored.chunks:
            overlap = _overlap(chunk, piece)
            if overlap is None:
                continue
            inside, begin = overlap
            file = self._file(chunk.file)
            self._checked(read_box, piece.local[inside], file, chunk, stored.dtype, begin)

    def fill_all(self, pieces: Mapping[str, Piece]) -> None:
        """Fill many, in the order in which they lie in the files, so that the disk is read from front to back.

        Raises:
            ConfigError: as read.
        """
        for name in sorted(pieces, key=self._place):
            self.fill(name, pieces[name])

    def _place(self, name: str) -> tuple[str, int]:
        chunks = self._stored(name).chunks
        return (chunks[0].file, chunks[0].start) if chunks else ("", 0)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stored(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            raise ConfigError(f"{self.path} holds no tensor {name}")
        return self._tensors[name]

    def _bytes(self, name: str) -> bytes:
        return self._checked(self._storage.read, f"{self._name}/{name}")

    def _file(self, name: str) -> BinaryIO:
        if name not in self._files:
            if len(self._files) >= _OPEN_FILES:
                self._files.pop(next(iter(self._files))).close()
            self._files[name] = self._checked(self._storage.open, f"{self._name}/{name}", "rb")
        return self._files[name]

    def _checked(self, function: Callable[..., Result], *args: Any) -> Result:
        try:
            return function(*args)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read: {error.strerror or error}") from None
        except RecordError as error:
            raise ConfigError(f"{self.path}: {error}") from None


def _overlap(chunk: StoredChunk, piece: Piece) -> tuple[tuple[slice, ...], tuple[int, ...]] | None:
    """(where in the piece, where the same box begins in the chunk), None when they do not meet."""
    inside, begin = [], []
    for c_start, c_size, p_start, p_size in zip(
        chunk.offsets, chunk.sizes, piece.offsets, piece.sizes, strict=True
    ):
        start, stop = max(c_start, p_start), min(c_start + c_size, p_start + p_size)
        if start >= stop:
            return None
        inside.append(slice(start - p_start, stop - p_start))
        begin.append(start - c_start)
    return tuple(inside), tuple(begin)
