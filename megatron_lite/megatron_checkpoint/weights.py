"""Megatron-core's names and rows -> ours.

Shapes: G groups, N query heads, D head width, H hidden, F feed-forward width, E experts.

    linear_qkv [G * (N/G + 2) * D, H]   group by group: its N/G query heads, its key head, its value head
    linear_fc1 [2F, H] with --swiglu    gate, then up
    norms                               inside linear_qkv and linear_fc1 (Transformer Engine), or beside them
    experts.experts.linear_fc1 [E, 2F, H]       all experts of a layer; or experts.experts.N.linear_fc1 [2F, H], whose
                                                halves may be tensors of their own, weight_w and weight_v
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from megatron_lite.checkpoint.manifest import METADATA
from megatron_lite.config.declare import ConfigError
from megatron_lite.config.model import ModelConfig
from megatron_lite.megatron_checkpoint.legacy import RANK_FOLDER, LegacyCheckpoint
from megatron_lite.megatron_checkpoint.torch_dist import TorchDistCheckpoint
from megatron_lite.model.gpt import stored_shapes

POINTER = "latest_checkpointed_iteration.txt"
PLAIN = {
    "embedding.word_embeddings.weight": "embedding.word_embeddings.weight",
    "embedding.position_embeddings.weight": "embedding.position_embeddings.weight",
    "final_norm.weight": "decoder.final_layernorm.weight",
    "final_norm.bias": "decoder.final_layernorm.bias",
    "lm_head.weight": "output_layer.weight",
}
OF_LAYER = {
    "attention.o_proj": ("self_attention.linear_proj",),
    "attention.q_norm": ("self_attention.q_layernorm",),
    "attention.k_norm": ("self_attention.k_layernorm",),
    "mlp.down_proj": ("mlp.linear_fc2",),
    "mlp.router": ("mlp.router",),
    "mlp.shared_expert.down_proj": ("mlp.shared_experts.linear_fc2",),
    # Beside the matrix, or inside Transformer Engine's fused module.
    "input_norm": ("input_layernorm", "self_attention.linear_qkv.layer_norm"),
    "pre_mlp_norm": ("pre_mlp_layernorm", "mlp.linear_fc1.layer_norm"),
}
Part = Callable[[torch.Tensor, ModelConfig], torch.Tensor]


class Source(Protocol):
    """A checkpoint that gives whole tensors by Megatron-core's names."""

    path: Path

    def shape(self, name: str) -> tuple[int, ...] | None:
        """None when there is no such tensor."""

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor."""


def open_megatron(path: Path, step: int | None, gated: bool) -> Source:
    """The checkpoint that a --load folder of Megatron's, or one of its iter_N, holds.

    Raises:
        ConfigError: when there is none of a known format.
    """
    if not path.is_dir():
        raise ConfigError(f"--megatron-checkpoint '{path}' is not a folder")
    folder = path if step is None and not (path / POINTER).exists() else _chosen(path, step)
    if (folder / METADATA).is_file():
        return TorchDistCheckpoint(folder)
    if any(RANK_FOLDER.fullmatch(entry.name) for entry in folder.iterdir()):
        return LegacyCheckpoint(folder, gated)
    raise ConfigError(
        f"{folder} holds neither {METADATA} (torch_dist) nor mp_rank_* folders, wanted one of them"
    )


def _chosen(path: Path, step: int | None) -> Path:
    text = str(step)
    if step is None:
        text = (path / POINTER).read_text(encoding="utf-8", errors="replace").strip()
    if text != "release" and not text.isdigit():
        raise ConfigError(f"{path / POINTER} holds '{text[:40]}', wanted a number")
    folder = path / (text if text == "release" else f"iter_{int(text):07d}")
    if not folder.is_dir():
        raise ConfigError(f"{folder} does not exist")
    return folder


def with_stored_vocabulary(model: ModelConfig, source: Source) -> ModelConfig:
    """The flags with the vocabulary's padded size taken from the checkpoint, its true size from --vocab-size.

    Raises:
        ConfigError: when the checkpoint has no embedding, or fewer rows than --vocab-size.
    """
    shape = source.shape("embedding.word_embeddings.weight")
    if shape is None:
        raise ConfigError(
            f"{source.path} holds no embedding.word_embeddings.weight: no GPT model of megatron-core"
        )
    true_size = model.vocab_size or shape[0]
    if true_size > shape[0]:
        raise ConfigError(f"--vocab-size is {true_size:,}, the checkpoint's embedding has {shape[0]:,} rows")
    return replace(model, vocab_size=true_size, padded_vocab_size=shape[0])


def our_tensors(source: Source, model: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """(global name, tensor in fp32) of the whole model.

    Raises:
        ConfigError: for a tensor that is missing or whose shape is not what the flags say.
    """
    for name, shape in stored_shapes(model).items():
        tensor = _read(name, source, model)
        seen = list(tensor.shape)
        if seen != list(shape):
            raise ConfigError(
                f"{source.path}: {name} comes out as {seen}, by the flags of the model it is {list(shape)}"
            )
        yield name, tensor.float().contiguous()


def _read(name: str, source: Source, model: ModelConfig) -> torch.Tensor:
    if name in PLAIN:
        return source.read(PLAIN[name])
    _, layer, rest = name.split(".", 2)
    module, kind = rest.rsplit(".", 1)
    at = f"decoder.layers.{layer}."
    if module in OF_LAYER:
        candidates = [
            at + there + ("_" if there.endswith("layer_norm") else ".") + kind for there in OF_LAYER[module]
        ]
        return source.read(next((c for c in candidates if source.shape(c) is not None), candidates[0]))
    if module == "mlp.shared_expert_gate":
        return source.read(f"{at}mlp.shared_experts.gate_weight")
    inside, part = module.rsplit(".", 1)
    if inside == "mlp.experts":
        return _experts(source, f"{at}mlp.experts.experts.", part, kind, model)
    whole = source.read(f"{at}{FUSED[inside]}.{kind}")
    return PARTS[part](whole, model)


def _experts(source: Source, at: str, part: str, kind: str, model: ModelConfig) -> torch.Tensor:
    """gate_proj, up_proj or down_proj of all experts of a layer, [E, out, in]."""
    linear, inputs = (
        ("linear_fc2" if part == "down_proj" else "linear_fc1"),
        model.expert_activation.num_inputs,
    )
    whole = source.shape(f"{at}{linear}.{kind}") is not None or source.shape(f"{at}0.{linear}.{kind}") is None
    names = (
        [f"{at}{linear}.{kind}"] if whole else [f"{at}{n}.{linear}.{kind}" for n in range(model.num_experts)]
    )
    half = {"gate_proj": f"{at}0.{linear}.{kind}_w", "up_proj": f"{at}0.{linear}.{kind}_v"}.get(part)
    if half and source.shape(half) is not None:
        return torch.stack(
            [source.read(half.replace(f"{at}0.", f"{at}{n}.")) for n in range(model.num_experts)]
        )
    tensors = [source.read(name) for name in names]
    tensor = tensors[0] if whole else torch.stack(tensors)
    if part == "down_proj":
        return tensor
    return tensor.chunk(inputs, dim=1)[0 if part == "gate_proj" else -1]


def _heads(fused: torch.Tensor, model: ModelConfig, wanted: slice) -> torch.Tensor:
    """Of fused [G * (N/G + 2) * D, ...] some heads of each group [heads * D, ...]."""
    heads = fused.unflatten(0, (model.num_query_groups, -1, model.kv_channels))  # [G, N/G + 2, D, ...]
    return heads[:, wanted].flatten(0, 2)


FUSED = {
    "attention": "self_attention.linear_qkv",
    "mlp": "mlp.linear_fc1",
    "mlp.shared_expert": "mlp.shared_experts.linear_fc1",
}
PARTS: dict[str, Part] = {
    "q_proj": lambda fused, model: _heads(fused, model, slice(None, -2)),
    "k_proj": lambda fused, model: _heads(fused, model, slice(-2, -1)),
    "v_proj": lambda fused, model: _heads(fused, model, slice(-1, None)),
    "gate_proj": lambda fused, model: fused.chunk(2)[0],
    "up_proj": lambda fused, model: fused.chunk(model.mlp_activation.num_inputs)[-1],
}
