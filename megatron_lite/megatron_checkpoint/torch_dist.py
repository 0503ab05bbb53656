"""The torch_dist format of megatron-core: DCP files in which the layers of a model are one tensor [L, ...]."""

from pathlib import Path

import torch

from megatron_lite.checkpoint.folder import StoredCheckpoint
from megatron_lite.checkpoint.reading import CheckpointReader
from megatron_lite.checkpoint.storage import Storage
from megatron_lite.config.declare import ConfigError

LAYERS = "decoder.layers."


class TorchDistCheckpoint:
    """One iter_N folder. Names are those of a whole model: `decoder.layers.3.mlp.linear_fc2.weight`."""

    def __init__(self, path: Path) -> None:
        """Read the metadata.

        Raises:
            ConfigError: when it is damaged.
        """
        self.path = path
        stored = StoredCheckpoint(Storage(str(path.parent)), path.name, iteration=0)
        self._reader = CheckpointReader(stored, skip_objects=True)
        self._shapes = {name: tensor.shape for name, tensor in self._reader.names().items()}

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The tensor's shape, None when there is no such tensor."""
        stored, layer = self._place(name)
        shape = self._shapes.get(stored)
        if shape is None or layer is None:
            return shape
        return shape[1:] if layer < shape[0] else None

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor [*shape]; only its layer is read.

        Raises:
            ConfigError: when it is not there or damaged.
        """
        if self.shape(name) is None:
            raise ConfigError(f"{self.path} holds no {name}")
        stored, layer = self._place(name)
        if layer is None:
            return self._reader.read(name)
        return self._reader.read_rows(stored, layer, layer + 1)[0]

    def _place(self, name: str) -> tuple[str, int | None]:
        """The stored tensor's name and, where the layers are stacked, the layer's number in it."""
        if name in self._shapes or not name.startswith(LAYERS):
            return name, None
        number, rest = name.removeprefix(LAYERS).split(".", 1)
        return LAYERS + rest, int(number)
