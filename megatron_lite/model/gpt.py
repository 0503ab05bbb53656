"""The GPT model, as chunks: each pipeline stage owns some layers, the first the embedding, the last the head.

Plain PyTorch: no process group anywhere. One process is the case of one chunk that owns everything.

Shapes: B micro batch, S sequence, H hidden, V padded vocabulary, P learned positions.
Parameter names carry global layer numbers, so they are the same in every layout:

    embedding.word_embeddings.weight [V, H]      layers.7.attention.q_proj.weight [N*D, H]
    layers.7.mlp.down_proj.weight [H, F]         final_norm.weight [H]     lm_head.weight [V, H]
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.model.attention import KeyValueCache, SelfAttention
from megatron_lite.model.documents import Documents, Part, documents_by_length, find_documents
from megatron_lite.model.experts import Mixture
from megatron_lite.model.initialization import EMBEDDING_WEIGHT, Shape, initial_rows
from megatron_lite.model.loss import LOSS_CHUNK_TOKENS, chunked_loss_sum, token_loss_sum
from megatron_lite.model.mlp import MLP
from megatron_lite.model.norm import build_norm
from megatron_lite.model.rotary import RotaryEmbedding, Rotation

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ReadTensor = Callable[[str], torch.Tensor]


class GPTEmbedding(nn.Module):
    """Token embedding, learned positions where asked for, dropout."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        learned = config.position_embedding_type == "learned_absolute"
        self.position_embeddings = (
            nn.Embedding(config.max_position_embeddings, config.hidden_size) if learned else None
        )
        self.dropout = config.hidden_dropout

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        """tokens [B, S] -> [B, S, H]; positions 0..S-1 unless position_ids [B, S] is given."""
        hidden = self.word_embeddings(tokens)
        if self.position_embeddings is not None:
            if position_ids is None:
                position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
            hidden = hidden + self.position_embeddings(position_ids)
        return F.dropout(hidden, self.dropout, self.training)


class TransformerLayer(nn.Module):
    """Pre-norm layer: x + attention(norm(x)), then x + mlp(norm(x)); the mlp is a mixture where --moe-layer-freq says.

    Args:
        number: its GLOBAL number.
    """

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__()
        self.input_norm = build_norm(config, config.hidden_size)
        self.attention = SelfAttention(config)
        self.pre_mlp_norm = build_norm(config, config.hidden_size)
        self.mlp = Mixture(config) if config.has_experts(number) else MLP(config)
        self.dropout = config.hidden_dropout

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation | None,
        documents: Documents | None = None,
        cache: KeyValueCache | None = None,
    ) -> torch.Tensor:
        """x [B, S, H] -> [B, S, H]."""
        attended = self.attention(self.input_norm(x), rotation, documents, cache)
        x = x + F.dropout(attended, self.dropout, self.training)
        return x + F.dropout(self.mlp(self.pre_mlp_norm(x)), self.dropout, self.training)


class LMHead(nn.Module):
    """Projection to the vocabulary; with labels it returns the loss and never gives the logits away.

    `loss_sum` is an attribute so that tensor parallelism can put a vocabulary-parallel loss in from outside.
    """

    def __init__(self, config: ModelConfig, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        if weight is None:
            weight = nn.Parameter(torch.empty(config.padded_vocab_size, config.hidden_size))
        self.weight = weight
        self.vocab_size = config.vocab_size
        self.chunk_tokens = LOSS_CHUNK_TOKENS if config.cross_entropy_loss_fusion else None

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [B, S, H] -> logits [B, S, V], or with labels [B, S] the sum of token losses, scalar fp32."""
        if labels is None:
            return self.project(hidden)
        rows, row_labels = hidden.flatten(0, 1), labels.flatten()  # [B*S, H], [B*S]
        if self.chunk_tokens and self.chunk_tokens < rows.shape[0]:
            return chunked_loss_sum(rows, row_labels, self.project, self.loss_sum, self.chunk_tokens)
        return self.loss_sum(self.project(rows), row_labels)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [..., H] -> logits [..., V]."""
        return F.linear(hidden, self.weight)

    def loss_sum(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """logits [T, V], labels [T] -> scalar fp32."""
        return token_loss_sum(logits, labels, self.vocab_size)


class GPTChunk(nn.Module):
    """The part of the model that one pipeline stage owns.

    Args:
        config: with vocab_size and padded_vocab_size known.
        layers: the GLOBAL numbers of the layers owned here.
        has_embedding, has_lm_head: whether this is the first, the last stage.
    """

    def __init__(
        self, config: ModelConfig, layers: Sequence[int], has_embedding: bool = True, has_lm_head: bool = True
    ) -> None:
        super().__init__()
        self.config = config
        tied = not config.untie_embeddings_and_output_weights
        self.embedding = GPTEmbedding(config) if has_embedding else None
        self.layers = nn.ModuleDict({str(number): TransformerLayer(config, number) for number in layers})
        self.final_norm = build_norm(config, config.hidden_size) if has_lm_head else None
        self.lm_head = None
        if has_lm_head:
            shared = self.embedding.word_embeddings.weight if tied and has_embedding else None
            self.lm_head = LMHead(config, shared)
        self.tied = tied
        # Set from outside: with sequence parallelism the hidden state holds 1 / this of the positions.
        self.sequence_shards = 1
        # Set from outside: with context parallelism (queries, keys) of each call of core attention, from the number
        # of positions here.
        self.attention_parts: Callable[[int], tuple[Part, ...]] = lambda length: ((length, length),)
        self._no_documents: tuple[Any, Documents | None] | None = None
        self.rotary = RotaryEmbedding(config) if config.position_embedding_type == "rope" else None

    def forward(
        self,
        x: torch.Tensor,
        *,
        labels: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | Documents | None = None,
        caches: dict[str, KeyValueCache] | None = None,
    ) -> torch.Tensor:
        """Run this stage.

        Args:
            x: tokens [B, S] on the first stage, hidden [B, S, H] on the others.
            labels: [B, S], -100 where masked; used by the last stage only.
            position_ids: [B, S]; by default 0..S-1, or behind the cached positions.
            document_ids: [B, S]; attention stays inside equal ids. Or what `host_documents` gives.
            caches: a KeyValueCache per layer number; x then holds the positions after the cached ones.

        Returns:
            hidden [B, S, H]; on the last stage logits [B, S, V], or with labels the sum of the token losses (scalar).
        """
        if caches and position_ids is None:
            past = next(iter(caches.values())).seq_length
            position_ids = torch.arange(past, past + x.shape[1], device=x.device)[None]
        if self.embedding is not None:
            x = self.embedding(x, position_ids)
        rotation = None
        if self.rotary is not None:
            rotation = self.rotary(x.shape[1] * self.sequence_shards, x.device, position_ids)
        documents = None if caches else self._documents(x, document_ids)
        x = self.run_layers(x, rotation, documents, caches)
        if self.lm_head is None:
            return x
        return self.lm_head(self.final_norm(x), labels)

    def run_layers(
        self,
        x: torch.Tensor,
        rotation: Rotation | None,
        documents: Documents | None,
        caches: dict[str, KeyValueCache] | None,
    ) -> torch.Tensor:
        """x [B, S, H] -> [B, S, H]. Looked up on the object, so that recomputation can put groups of layers in."""
        for number, layer in self.layers.items():
            x = layer(x, rotation, documents, caches[number] if caches else None)
        return x

    def _documents(self, x: torch.Tensor, ids: torch.Tensor | Documents | None) -> Documents | None:
        if isinstance(ids, Documents):
            return ids
        parts = self.attention_parts(x.shape[1] * self.sequence_shards)
        if ids is not None:
            return find_documents(ids, self.config, parts, x)
        key = (parts, x.device, x.dtype)
        if self._no_documents is None or self._no_documents[0] != key:
            self._no_documents = (key, find_documents(None, self.config, parts, x))
        return self._no_documents[1]

    def host_documents(self, ids: torch.Tensor) -> torch.Tensor | Documents:
        """What forward takes as document_ids for ids [B, S]: where it wants their lengths, found on the host."""
        return documents_by_length(ids, self.config)

    def named_global_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name in the whole model, parameter). A tied head on its own stage goes by the embedding's name."""
        for name, parameter in self.named_parameters():
            tied_copy = name == "lm_head.weight" and self.tied
            yield (EMBEDDING_WEIGHT if tied_copy else name), parameter

    def named_global_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name in the whole model, buffer) of what a checkpoint holds besides parameters; fp32, all start at 0."""
        return self.named_buffers()

    @property
    def mixtures(self) -> dict[int, Mixture]:
        """{global layer number: its mixture of experts}, of the layers that have one."""
        return {
            int(number): layer.mlp for number, layer in self.layers.items() if isinstance(layer.mlp, Mixture)
        }

    def initial_rows(self, name: str, shape: tuple[int, ...], rows: torch.Tensor, seed: int) -> torch.Tensor:
        """Initial values [R, ...] of rows [R] of the parameter with this global name and full shape."""
        return initial_rows(name, shape, rows, self.config, seed)

    @property
    def has_tied_copy(self) -> bool:
        """Whether this chunk holds a second copy of the embedding's weight as its head."""
        return self.tied and self.lm_head is not None and self.embedding is None


def load_chunk(
    model: ModelConfig,
    layers: Sequence[int],
    read: ReadTensor,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    **parts: bool,
) -> GPTChunk:
    """A chunk with the stored weights, ready to be run, not to be trained.

    Args:
        layers: GLOBAL numbers of its layers.
        read: gives a parameter by its global name.
        parts: has_embedding, has_lm_head of GPTChunk.
    """
    with torch.device("meta"):
        chunk = GPTChunk(model, layers, **parts)
    for parameter in chunk.parameters():  # not the buffers, whose format is their own
        parameter.data = parameter.data.to(dtype)
    chunk.to_empty(device=device)
    for name, tensor in (*chunk.named_global_parameters(), *chunk.named_global_buffers()):
        tensor.data.copy_(read(name))
    return chunk.eval().requires_grad_(False)


def parameter_shapes(model: ModelConfig) -> dict[str, Shape]:
    """{global name: shape} of the whole model."""
    with torch.device("meta"):
        chunk = GPTChunk(model, range(model.num_layers))
    return {name: tuple(parameter.shape) for name, parameter in chunk.named_global_parameters()}


def stored_shapes(model: ModelConfig) -> dict[str, Shape]:
    """{global name: shape} of what a checkpoint holds of the whole model: parameters, and buffers behind them."""
    with torch.device("meta"):
        chunk = GPTChunk(model, range(model.num_layers))
    return parameter_shapes(model) | {n: tuple(buffer.shape) for n, buffer in chunk.named_global_buffers()}
