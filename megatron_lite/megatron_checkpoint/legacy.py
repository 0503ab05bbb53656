"""Megatron's older format: one pickle a rank, mp_rank_TT or mp_rank_TT_PPP, merged here into whole tensors.

Nothing in a file runs: the unpickler knows tensors and plain containers; any other class in it (the run's flags,
enums) becomes an empty object that nobody looks at.
"""

import pickle
import re
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from megatron_lite.config.declare import ConfigError

RANK_FOLDER = re.compile(r"mp_rank_(\d\d)(?:_(\d\d\d))?")
FILE_NAMES = ("model_optim_rng.pt", "model_rng.pt")
LAYERS = "decoder.layers."
# Which dim of a matrix the tensor ranks share; what is not listed every rank has whole.
ROWS = ("embedding.word_embeddings.weight", "output_layer.weight")
ROWS += tuple(f"linear_{name}.{kind}" for name in ("qkv", "fc1") for kind in ("weight", "bias"))
COLUMNS = ("linear_proj.weight", "linear_fc2.weight")


class LegacyCheckpoint:
    """One iter_N folder. Names are those of a whole model."""

    def __init__(self, path: Path, gated: bool) -> None:
        """Read all ranks' files, memory-mapped.

        Args:
            gated: fc1 holds gate and up, on every rank one after the other.

        Raises:
            ConfigError: for a file that is missing, damaged, or of a kind that is not known.
        """
        self.path, self._gated = path, gated
        self._parts: dict[str, list[torch.Tensor]] = {}
        ranks = _rank_files(path)
        width = max(tensor for tensor, _ in ranks) + 1
        first_layer = 0
        for stage in sorted({pipeline for _, pipeline in ranks}):
            missing = [t for t in range(width) if (t, stage) not in ranks]
            if missing:
                raise ConfigError(f"{path} lacks the file of tensor rank {missing[0]}, pipeline rank {stage}")
            models = [_read_model(ranks[t, stage]) for t in range(width)]
            layers = set()  # counted from 0 on each stage
            for name in models[0]:
                tensors = [model.get(name) for model in models]
                if name.startswith(LAYERS):
                    layer, rest = name.removeprefix(LAYERS).split(".", 1)
                    layers.add(layer)
                    name = f"{LAYERS}{first_layer + int(layer)}.{rest}"
                if all(isinstance(tensor, torch.Tensor) for tensor in tensors):
                    self._parts.setdefault(
                        name, tensors
                    )  # a tied embedding: on the first stage and on the last
            first_layer += len(layers)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The whole tensor's shape, None when there is no such tensor."""
        return tuple(self.read(name).shape) if name in self._parts else None

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor [*shape], the tensor ranks' shards joined.

        Raises:
            ConfigError: when it is not there.
        """
        parts = self._parts.get(name)
        if parts is None:
            raise ConfigError(f"{self.path} holds no {name}")
        if len(parts) == 1 or not name.endswith(ROWS + COLUMNS):
            return parts[0]
        if name.endswith(COLUMNS):
            return torch.cat(parts, dim=1)
        if self._gated and "linear_fc1" in name:
            halves = [part.chunk(2) for part in parts]
            return torch.cat([half[0] for half in halves] + [half[1] for half in halves])
        return torch.cat(parts)


def _rank_files(path: Path) -> dict[tuple[int, int], Path]:
    """{(tensor rank, pipeline rank): file} of every rank."""
    ranks = {}
    for folder in path.iterdir():
        match = RANK_FOLDER.fullmatch(folder.name)
        if match is None:
            continue
        files = [folder / name for name in FILE_NAMES if (folder / name).is_file()]
        if not files:
            raise ConfigError(f"{folder} holds no {' or '.join(FILE_NAMES)}")
        ranks[int(match[1]), int(match[2] or 0)] = files[0]
    return ranks


def _read_model(file: Path) -> dict[str, Any]:
    try:
        content = torch.load(
            file, map_location="cpu", pickle_module=INERT_PICKLE, mmap=True, weights_only=False
        )
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{file} cannot be read: {reason}") from None
    if isinstance(content, dict) and "model0" in content:
        raise ConfigError(
            f"{file} holds interleaved chunks (model0, model1 ...), wanted one model a pipeline rank"
        )
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise ConfigError(f"{file} holds no 'model', wanted a checkpoint of megatron-core's GPT model")
    return content["model"]


class _Unknown:
    """Stands for an object of a class that is not needed; keeps nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "_Unknown":
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class _InertUnpickler(pickle.Unpickler):
    """Builds tensors and containers; every other name it is asked for is _Unknown."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_parameter"):
            return getattr(torch._utils, name)
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return getattr(torch.storage if module == "torch.storage" else torch, name)
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        return _Unknown


INERT_PICKLE = types.SimpleNamespace(
    __name__="inert_pickle",
    Unpickler=_InertUnpickler,
    load=lambda file, **options: _InertUnpickler(file).load(),
)
