"""Which of their tensors is which of ours, and how its rows lie.

Shapes: H hidden, N query heads, D head width, F feed-forward width, v true and V padded vocabulary.

A family's table names the tensors. For the rest ours and theirs are the same but for: their vocabulary has no padding;
our norms may be stored as w - 1 (--apply-layernorm-1p) and our rotated channels as neighbours
(--rotary-interleaved), theirs never.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_lite.config.declare import ConfigError
from megatron_lite.config.model import ModelConfig
from megatron_lite.hugging_face.family import Family
from megatron_lite.model.initialization import EMBEDDING_WEIGHT, Shape

HEAD_WEIGHT = "lm_head.weight"
VOCABULARY_TENSORS = (EMBEDDING_WEIGHT, HEAD_WEIGHT)


@dataclass(frozen=True)
class TensorMap:
    """One of their tensors.

    Attributes:
        theirs: its name.
        ours: our names of its parts, whose rows lie one after the other.
        transposed: they store [in, out].
        expert: which of our stacked experts it is, None where our whole tensors lie in it.
        rows: see Weight.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False
    expert: int | None = None
    rows: int = 0


def tensor_maps(
    family: Family, model: ModelConfig, known: Collection[str], fused: bool = False
) -> list[TensorMap]:
    """Every tensor of the model with these names of ours, in the order of the layers; a tied head has none.

    fused: for files in which all experts of a layer are one tensor.
    """
    maps = []
    for of_layer, group in itertools.groupby(family.names(fused), lambda weight: "{layer}" in weight.theirs):
        rows = list(group)
        for layer in range(model.num_layers if of_layer else 1):
            for row, kind in itertools.product(rows, ("weight", "bias")):
                ours = tuple(name.format(layer=layer, kind=kind) for name in row.our_names)
                if ours[0] not in known or (kind == "bias" and "{kind}" not in row.theirs):
                    continue
                for expert in range(model.num_experts) if "{expert}" in row.theirs else (None,):
                    theirs = row.theirs.format(layer=layer, kind=kind, expert=expert)
                    transposed = row.transposed and kind == "weight"
                    maps.append(TensorMap(theirs, ours, transposed, expert, row.rows))
    covered = [name for entry in maps if not entry.expert for name in entry.ours]
    assert sorted(covered) == sorted(known), set(covered) ^ set(known)
    return maps


def their_shape(entry: TensorMap, shapes: Mapping[str, Shape], model: ModelConfig) -> Shape:
    """The shape of their tensor."""
    parts = [_part_shape(entry, name, shapes, model) for name in entry.ours]
    shape, rows = list(parts[0]), entry.rows
    shape[rows] = sum(part[rows] for part in parts)
    return tuple(shape[::-1] if entry.transposed else shape)


def to_theirs(entry: TensorMap, parts: Sequence[torch.Tensor], model: ModelConfig) -> torch.Tensor:
    """Their tensor, contiguous, from our parts [rows, ...], whose rows it joins."""
    if entry.expert is not None:
        parts = [part[entry.expert] for part in parts]
    tensor = torch.cat(
        [_to_their_rows(name, part, model) for name, part in zip(entry.ours, parts)], entry.rows
    )
    return (tensor.t() if entry.transposed else tensor).contiguous()


def to_ours(
    entry: TensorMap, tensor: torch.Tensor, shapes: Mapping[str, Shape], model: ModelConfig
) -> list[tuple[str, torch.Tensor]]:
    """[(global name, our tensor [rows, ...])] from theirs, of an expert its own; padding rows of a vocabulary are zero.

    Raises:
        ConfigError: for a tensor of another shape than config.json says.
    """
    wanted = their_shape(entry, shapes, model)
    if tuple(tensor.shape) != wanted:
        raise ConfigError(
            f"{entry.theirs} has shape {list(tensor.shape)}, by config.json it is {list(wanted)}"
        )
    rows = tensor.t() if entry.transposed else tensor
    sizes = [_part_shape(entry, name, shapes, model)[entry.rows] for name in entry.ours]
    return [
        (name, (_pad(part, shapes[name][0]) if name in VOCABULARY_TENSORS else part).contiguous())
        for name, part in zip(entry.ours, rows.split(sizes, entry.rows))
    ]


def _part_shape(entry: TensorMap, name: str, shapes: Mapping[str, Shape], model: ModelConfig) -> Shape:
    """What of this tensor of ours lies in theirs."""
    shape = shapes[name] if entry.expert is None else shapes[name][1:]
    return (model.vocab_size, *shape[1:]) if name in VOCABULARY_TENSORS else shape


def _pad(part: torch.Tensor, rows: int) -> torch.Tensor:
    """part [r, ...] -> [rows, ...], zeros below."""
    if part.shape[0] == rows:
        return part
    return torch.cat((part, part.new_zeros(rows - part.shape[0], *part.shape[1:])))


def _to_their_rows(name: str, part: torch.Tensor, model: ModelConfig) -> torch.Tensor:
    module, kind = name.split(".")[-2:]
    if name in VOCABULARY_TENSORS:
        return part[: model.vocab_size]
    if model.rotary_interleaved and module in ("q_proj", "k_proj", "q_norm", "k_norm"):
        part = _halves_from_neighbours(part, model.kv_channels)
    if model.apply_layernorm_1p and kind == "weight" and module.endswith("norm"):
        part = part + 1
    return part


def _halves_from_neighbours(part: torch.Tensor, head_width: int) -> torch.Tensor:
    """Rows [heads * D, ...] rotated as neighbours (0, 1), (2, 3) ... put so that halves (0, D/2), ... rotate.

    Query and key change together, so their products stay as they are. The whole head has to be rotated.
    """
    heads = part.unflatten(0, (-1, head_width))
    return torch.cat((heads[:, 0::2], heads[:, 1::2]), dim=1).flatten(0, 1)
