"""Write safetensors files tensor by tensor: at no time is more than one tensor in memory.

The format (https://github.com/huggingface/safetensors#format): 8 bytes little-endian N, N bytes of JSON
{name: {dtype, shape, data_offsets}}, then the bytes of the tensors. Shapes are known before the first tensor is
read, so the header can be written first.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch

from megatron_lite.config.declare import ConfigError
from megatron_lite.files.writing import sync
from megatron_lite.model.initialization import Shape

FORMAT_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
INDEX_NAME = "model.safetensors.index.json"


def parse_size(text: str, flag: str) -> int:
    """Bytes of "5GB", "500MiB" or "1000".

    Raises:
        ConfigError: naming the flag.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in UNITS or float(match[1]) == 0:
        raise ConfigError(f"{flag} is '{text}', wanted a size such as 5GB, 500MB or 2GiB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def plan_shards(
    shapes: Mapping[str, Shape], dtype: torch.dtype, max_bytes: int, kept: Collection[str] = ()
) -> list[list[str]]:
    """Names per file, in order; a file holds at most max_bytes, or one tensor that is larger than that."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * (4 if name in kept else dtype.itemsize)
        if shards[-1] and used + size > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def write_shards(
    folder: Path,
    shapes: Mapping[str, Shape],
    dtype: torch.dtype,
    max_bytes: int,
    read: Callable[[str], torch.Tensor],
    kept: Collection[str] = (),
) -> int:
    """Write all tensors into model*.safetensors, with an index if they are several files.

    Args:
        shapes: {name: shape} in the order of writing.
        dtype: what every tensor is written as.
        read: gives a tensor by name.
        kept: names that are written as fp32 whatever dtype is.

    Returns:
        The bytes of all tensors.
    """
    shards = plan_shards(shapes, dtype, max_bytes, kept)
    count = len(shards)
    places: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        write_safetensors(folder / file, {name: shapes[name] for name in names}, dtype, read, kept)
        places |= dict.fromkeys(names, file)
    elements = sum(math.prod(shape) for shape in shapes.values())
    wide = sum(math.prod(shapes[name]) for name in kept)
    total = (elements - wide) * dtype.itemsize + 4 * wide
    if count > 1:
        index = {"metadata": {"total_parameters": elements, "total_size": total}, "weight_map": places}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return total


def write_safetensors(
    path: Path,
    shapes: Mapping[str, Shape],
    dtype: torch.dtype,
    read: Callable[[str], torch.Tensor],
    kept: Collection[str] = (),
) -> None:
    """Write one file and bring it to the disk."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        own = torch.float32 if name in kept else dtype
        end = offset + math.prod(shape) * own.itemsize
        header[name] = {"dtype": FORMAT_NAMES[own], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers map the data: it begins at a multiple of 8
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            tensor = read(name).to(torch.float32 if name in kept else dtype).contiguous()
            assert tuple(tensor.shape) == tuple(shape), (name, tensor.shape, shape)
            file.write(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
        sync(file)
