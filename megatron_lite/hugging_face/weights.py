"""Which of their tensors is which of ours, and how its rows lie.

Shapes: H hidden, N query heads, D head width, F feed-forward width, v true and V padded vocabulary.

Ours and theirs are the same but for: their vocabulary has no padding; GPT-2 stores its matrices transposed
(Conv1D, [in, out]) with query, key and value side by side; our norms may be stored as w - 1
(--apply-layernorm-1p) and our rotated channels as neighbours (--rotary-interleaved), theirs never.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_lite.config import ConfigError, ModelConfig
from megatron_lite.hugging_face.families import GPT2
from megatron_lite.model.gpt import EMBEDDING_WEIGHT, GPTChunk

HEAD_WEIGHT = "lm_head.weight"
VOCABULARY_TENSORS = (EMBEDDING_WEIGHT, HEAD_WEIGHT)
Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorMap:
    """One of their tensors.

    Attributes:
        theirs: its name.
        ours: our names of its parts, whose rows lie one after the other.
        transposed: they store [in, out].
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False


def our_shapes(model: ModelConfig) -> dict[str, Shape]:
    """{global name: shape} of the whole model."""
    with torch.device("meta"):
        chunk = GPTChunk(model, range(model.num_layers))
    return {name: tuple(parameter.shape) for name, parameter in chunk.named_global_parameters()}


def tensor_maps(architecture: str, model: ModelConfig) -> list[TensorMap]:
    """Every tensor of the model, in the order of the layers; a tied head has none."""
    known = our_shapes(model)
    maps = _gpt2_maps(model) if architecture == GPT2 else _rotary_maps(model)
    present = [entry for entry in maps if entry.ours[0] in known]
    covered = [name for entry in present for name in entry.ours]
    assert sorted(covered) == sorted(known), set(covered) ^ set(known)
    return present


def _rotary_maps(model: ModelConfig) -> list[TensorMap]:
    maps = [TensorMap("model.embed_tokens.weight", (EMBEDDING_WEIGHT,))]
    names = {
        "input_layernorm": "input_norm",
        "self_attn.q_proj": "attention.q_proj",
        "self_attn.k_proj": "attention.k_proj",
        "self_attn.v_proj": "attention.v_proj",
        "self_attn.o_proj": "attention.o_proj",
        "self_attn.q_norm": "attention.q_norm",
        "self_attn.k_norm": "attention.k_norm",
        "post_attention_layernorm": "pre_mlp_norm",
        "mlp.gate_proj": "mlp.gate_proj",
        "mlp.up_proj": "mlp.up_proj",
        "mlp.down_proj": "mlp.down_proj",
    }
    maps += [
        TensorMap(f"model.layers.{layer}.{theirs}.{kind}", (f"layers.{layer}.{ours}.{kind}",))
        for layer in range(model.num_layers)
        for theirs, ours in names.items()
        for kind in ("weight", "bias")
    ]
    return [
        *maps,
        TensorMap("model.norm.weight", ("final_norm.weight",)),
        TensorMap(HEAD_WEIGHT, (HEAD_WEIGHT,)),
    ]


def _gpt2_maps(model: ModelConfig) -> list[TensorMap]:
    maps = [
        TensorMap("transformer.wte.weight", (EMBEDDING_WEIGHT,)),
        TensorMap("transformer.wpe.weight", ("embedding.position_embeddings.weight",)),
    ]
    names = {
        "ln_1": ("input_norm",),
        "attn.c_attn": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        "attn.c_proj": ("attention.o_proj",),
        "ln_2": ("pre_mlp_norm",),
        "mlp.c_fc": ("mlp.up_proj",),
        "mlp.c_proj": ("mlp.down_proj",),
    }
    maps += [
        TensorMap(
            f"transformer.h.{layer}.{theirs}.{kind}",
            tuple(f"layers.{layer}.{name}.{kind}" for name in ours),
            transposed=kind == "weight" and not theirs.startswith("ln_"),
        )
        for layer in range(model.num_layers)
        for theirs, ours in names.items()
        for kind in ("weight", "bias")
    ]
    maps += [TensorMap(f"transformer.ln_f.{kind}", (f"final_norm.{kind}",)) for kind in ("weight", "bias")]
    return [*maps, TensorMap(HEAD_WEIGHT, (HEAD_WEIGHT,))]


def their_shape(entry: TensorMap, shapes: Mapping[str, Shape], model: ModelConfig) -> Shape:
    """The shape of their tensor."""
    parts = [_unpadded_shape(name, shapes[name], model) for name in entry.ours]
    shape = (sum(part[0] for part in parts), *parts[0][1:])
    return shape[::-1] if entry.transposed else shape


def to_theirs(entry: TensorMap, parts: Sequence[torch.Tensor], model: ModelConfig) -> torch.Tensor:
    """Their tensor, contiguous, from our parts."""
    parts = [_to_their_rows(name, part, model) for name, part in zip(entry.ours, parts)]
    tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
    return (tensor.t() if entry.transposed else tensor).contiguous()


def to_ours(
    entry: TensorMap, tensor: torch.Tensor, shapes: Mapping[str, Shape], model: ModelConfig
) -> list[tuple[str, torch.Tensor]]:
    """[(global name, our tensor)] from theirs; rows that pad the vocabulary are zero.

    Raises:
        ConfigError: for a tensor of another shape than config.json says.
    """
    wanted = their_shape(entry, shapes, model)
    if tuple(tensor.shape) != wanted:
        raise ConfigError(
            f"{entry.theirs} has shape {list(tensor.shape)}, by config.json it is {list(wanted)}"
        )
    rows = tensor.t() if entry.transposed else tensor
    parts = rows.split([_unpadded_shape(name, shapes[name], model)[0] for name in entry.ours])
    return [(name, _pad(part, shapes[name][0]).contiguous()) for name, part in zip(entry.ours, parts)]


def _unpadded_shape(name: str, shape: Shape, model: ModelConfig) -> Shape:
    return (model.vocab_size, *shape[1:]) if name in VOCABULARY_TENSORS else shape


def _pad(part: torch.Tensor, rows: int) -> torch.Tensor:
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
