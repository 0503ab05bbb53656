"""What a checkpoint's tensors are and where their bytes lie, read from DCP's `.metadata` without trusting it.

`.metadata` is a pickle. The unpickler here knows a short list of data classes and builds nothing else, so a
planted file can run no code; what comes out is checked before it is used.
"""

import gc
import io
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner

from megatron_lite.config.declare import ConfigError

Ints = tuple[int, ...]
_CLASSES = (
    metadata.Metadata,
    metadata.TensorStorageMetadata,
    metadata.BytesStorageMetadata,
    metadata.TensorProperties,
    metadata.ChunkStorageMetadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
    # Megatron-core keeps its plans in the file; nobody reads them.
    planner.SavePlan,
    planner.WriteItem,
    planner.WriteItemType,
    planner.TensorWriteData,
)
_ALLOWED: dict[tuple[str, str], Any] = {(c.__module__, c.__qualname__): c for c in _CLASSES} | {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): lambda name: torch.strided,
    ("pathlib", "PosixPath"): lambda *parts: "/".join(parts),
}


@dataclass(frozen=True)
class StoredChunk:
    """A slice of a tensor and the record that holds it: bytes [start, start + length) of a file."""

    offsets: Ints
    sizes: Ints
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint. Its chunks cover it once."""

    shape: Ints
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no part of a checkpoint")
        return _ALLOWED[module, name]


def parse_metadata(data: bytes, path: str, skip_objects: bool = False) -> dict[str, StoredTensor]:
    """{name: tensor} of a `.metadata` file.

    Args:
        skip_objects: leave out entries that are no tensors (Megatron-core has some), instead of refusing them.

    Raises:
        ConfigError: it is not a checkpoint's metadata; nothing in it has run.
    """
    collects = gc.isenabled()
    # A thousand ranks' chunks are millions of objects, none of them garbage: looking at them over and over would take
    # two thirds of the time.
    gc.disable()
    try:
        stored = _Unpickler(io.BytesIO(data)).load()
        return {
            str(name): _tensor(name, kept, stored.storage_data)
            for name, kept in stored.state_dict_metadata.items()
            if not (skip_objects and isinstance(kept, metadata.BytesStorageMetadata))
        }
    except Exception as error:  # noqa: BLE001  a hostile pickle can raise anything
        raise ConfigError(f"{path} is not a checkpoint's metadata: {error}") from None
    finally:
        if collects:
            gc.enable()


def _tensor(name: str, kept: Any, records: dict[Any, Any]) -> StoredTensor:
    if not isinstance(kept, metadata.TensorStorageMetadata):
        raise ValueError(f"{name} is no tensor")
    shape = _ints(kept.size)
    chunks = []
    for chunk in kept.chunks:
        offsets, sizes = _ints(chunk.offsets), _ints(chunk.sizes)
        inside = all(o + s <= n for o, s, n in zip(offsets, sizes, shape, strict=True))
        record = records[metadata.MetadataIndex(name, offsets)]
        file, start, length = str(record.relative_path), int(record.offset), int(record.length)
        if not inside or "/" in file or start < 0 or length < 0 or record.transform_descriptors:
            raise ValueError(f"{name} has a slice {offsets} + {sizes} in {file!r}, wanted one inside {shape}")
        chunks.append(StoredChunk(offsets, sizes, file, start, length))
    if sum(math.prod(c.sizes) for c in chunks) != math.prod(shape):
        raise ValueError(f"the chunks of {name} do not make the whole")
    if not isinstance(kept.properties.dtype, torch.dtype):
        raise ValueError(f"{name} has no dtype")
    return StoredTensor(shape, kept.properties.dtype, tuple(chunks))


def _ints(values: Any) -> Ints:
    numbers = tuple(values)
    if not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"{numbers!r} are not sizes")
    return numbers
