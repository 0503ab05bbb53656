"""Read a checkpoint tensor by tensor, in one process or as one rank's share. Nothing that is read can run code."""

from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, TypeVar

import torch

from megatron_lite.checkpoint.folder import StoredCheckpoint, StoredConfig, find_in
from megatron_lite.checkpoint.manifest import METADATA
from megatron_lite.checkpoint.metadata import StoredTensor, parse_metadata
from megatron_lite.checkpoint.records import RecordError, fill_shard
from megatron_lite.checkpoint.shards import LocalShard
from megatron_lite.config.declare import ConfigError

RANDOM_PREFIX = "random_state."
OPTIMIZER_PREFIX = "optimizer."
_OPEN_FILES = 64
Result = TypeVar("Result")


class CheckpointReader:
    """One complete checkpoint folder; a save folder stands for the checkpoint that --load would take from it.

    Attributes:
        stored: the checkpoint; path, config, train_state: its.
    """

    def __init__(self, checkpoint: str | StoredCheckpoint, skip_objects: bool = False) -> None:
        """Open SAVE/iter_0000010, or SAVE; skip_objects as parse_metadata. Raises ConfigError when none is complete."""
        stored = checkpoint if isinstance(checkpoint, StoredCheckpoint) else find_in(checkpoint)
        if stored is None:
            raise ConfigError(f"--load {checkpoint}: there is no checkpoint")
        self.stored = stored
        self.path = stored.path
        data = self._checked(stored.storage.read, f"{stored.name}/{METADATA}")
        self._tensors = parse_metadata(data, f"{self.path}/{METADATA}", skip_objects)
        self._files: dict[str, BinaryIO] = {}

    @property
    def config(self) -> StoredConfig:
        """The run's Config.to_dict()."""
        return self.stored.config

    @property
    def train_state(self) -> dict[str, Any]:
        """Iteration, consumed samples, schedule, layout."""
        return self.stored.train_state

    def names(self) -> dict[str, StoredTensor]:
        """{name: shape, dtype and chunks} of every tensor: weights, `optimizer.*`, `random_state.*`."""
        return dict(self._tensors)

    def weight_names(self) -> list[str]:
        """Sorted names of the model's weights."""
        return sorted(n for n in self._tensors if not n.startswith((OPTIMIZER_PREFIX, RANDOM_PREFIX)))

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, in its stored dtype, on the CPU. Raises ConfigError when it cannot be read."""
        stored = self._stored(name)
        target = torch.empty(stored.shape, dtype=stored.dtype)
        self.fill({name: LocalShard(target, stored.shape, (0,) * target.dim())})
        return target

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of a tensor; only they are read. Raises ConfigError as read does."""
        stored = self._stored(name)
        rows = range(stored.shape[0])[start:stop]
        target = torch.empty((len(rows), *stored.shape[1:]), dtype=stored.dtype)
        self.fill({name: LocalShard(target, stored.shape, (rows.start, *(0 for _ in stored.shape[1:])))})
        return target

    def fill(self, shards: Mapping[str, LocalShard]) -> None:
        """Read shards into their memory, in the order of the files, so that the disk is read from front to back.

        Dtypes are converted; callers compare them first. Raises ConfigError as read does.
        """
        for name in sorted(shards, key=self._place):
            self._checked(fill_shard, shards[name], self._stored(name), self._file)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _place(self, name: str) -> tuple[str, int]:
        chunks = self._stored(name).chunks
        return (chunks[0].file, chunks[0].start) if chunks else ("", 0)

    def _stored(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            raise ConfigError(f"{self.path} holds no tensor {name}")
        return self._tensors[name]

    def _file(self, name: str) -> BinaryIO:
        if name not in self._files:
            if len(self._files) >= _OPEN_FILES:
                self._files.pop(next(iter(self._files))).close()
            self._files[name] = self.stored.storage.open(f"{self.stored.name}/{name}", "rb")
        return self._files[name]

    def _checked(self, function: Callable[..., Result], *args: Any) -> Result:
        try:
            return function(*args)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read: {error.strerror or error}") from None
        except RecordError as error:
            raise ConfigError(f"{self.path}: {error}") from None
