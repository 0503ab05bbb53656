"""The torch_dist format of megatron-core: DCP files in which the layers of a model are one tensor [L, ...]."""

from pathlib import Path

import torch

from megatron_lite.checkpoint.metadata import StoredTensor, parse_metadata
from megatron_lite.checkpoint.records import RecordError, read_slice
from megatron_lite.config import ConfigError

LAYERS = "decoder.layers."
METADATA = ".metadata"


class TorchDistCheckpoint:
    """One iter_N folder. Names are those of a whole model: `decoder.layers.3.mlp.linear_fc2.weight`."""

    def __init__(self, path: Path) -> None:
        """Read the metadata.

        Raises:
            ConfigError: when it is damaged.
        """
        self.path = path
        file = path / METADATA
        self._tensors = parse_metadata(file.read_bytes(), str(file), skip_objects=True)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The tensor's shape, None when there is no such tensor."""
        found = self._find(name)
        if found is None:
            return None
        stored, layer = found
        return stored.shape if layer is None else stored.shape[1:]

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor; only its layer is read.

        Raises:
            ConfigError: when it is not there or damaged.
        """
        found = self._find(name)
        if found is None:
            raise ConfigError(f"{self.path} holds no {name}")
        stored, layer = found
        first = 0 if layer is None else layer
        count = stored.shape[0] if layer is None else 1
        target = torch.empty((count, *stored.shape[1:]), dtype=stored.dtype)
        for chunk in stored.chunks:
            start = max(chunk.offsets[0], first)
            stop = min(chunk.offsets[0] + chunk.sizes[0], first + count)
            if start >= stop:
                continue
            rest = tuple(slice(o, o + s) for o, s in zip(chunk.offsets[1:], chunk.sizes[1:]))
            box = target[(slice(start - first, stop - first), *rest)]
            begin = (start - chunk.offsets[0], *(0 for _ in rest))
            try:
                with (self.path / chunk.file).open("rb") as file:
                    read_slice(box, file, chunk, stored.dtype, begin)
            except (OSError, RecordError) as error:
                raise ConfigError(f"{self.path}/{chunk.file}: {name} cannot be read: {error}") from None
        return target if layer is None else target[0]

    def _find(self, name: str) -> tuple[StoredTensor, int | None] | None:
        """The stored tensor and, where the layers are stacked, the layer's number in it."""
        if name in self._tensors:
            return self._tensors[name], None
        if not name.startswith(LAYERS):
            return None
        number, rest = name.removeprefix(LAYERS).split(".", 1)
        stacked = self._tensors.get(LAYERS + rest)
        if stacked is None or not int(number) < stacked.shape[0]:
            return None
        return stacked, int(number)
