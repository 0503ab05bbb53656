"""Causal self-attention with grouped query heads.

Shapes: B micro batch, S sequence, H hidden, N query heads, G key/value heads, D head width.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import flex_attention

from megatron_lite.config import ModelConfig
from megatron_lite.model.documents import Documents, window_of
from megatron_lite.model.norm import build_norm
from megatron_lite.model.rotary import Rotation

# --attention-backend in Megatron's words -> what scaled_dot_product_attention may choose from.
BACKENDS = {
    "auto": None,
    "flash": [SDPBackend.FLASH_ATTENTION],
    "fused": [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION],
    "unfused": [SDPBackend.MATH],
    "local": [SDPBackend.MATH],
}

CoreAttention = Callable[..., torch.Tensor]


class SelfAttention(nn.Module):
    """Projections, optional query/key norm, rotation, core attention, output projection.

    `core` is an attribute so that context parallelism can put its own in from outside.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_width = config.kv_channels
        query_width = config.num_attention_heads * config.kv_channels
        key_width = config.num_query_groups * config.kv_channels
        bias = not config.disable_bias_linear
        qkv_bias = bias or config.add_qkv_bias
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_width, bias=qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_width, bias=qkv_bias)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=bias)
        self.q_norm = build_norm(config, config.kv_channels) if config.qk_layernorm else None
        self.k_norm = build_norm(config, config.kv_channels) if config.qk_layernorm else None
        self.core = DotProductAttention(config)

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation | None,
        documents: Documents | None = None,
        cache: "KeyValueCache | None" = None,
    ) -> torch.Tensor:
        """x [B, S, H] -> [B, S, H]; attention stays inside documents.

        With tensor parallelism the head counts here are this rank's own: they follow from the widths.
        """
        q = self.q_proj(x).unflatten(-1, (-1, self.head_width))  # [B, S, N, D]
        k = self.k_proj(x).unflatten(-1, (-1, self.head_width))  # [B, S, G, D]
        v = self.v_proj(x).unflatten(-1, (-1, self.head_width))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = rotation.apply(q), rotation.apply(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, N|G, S, D]
        if cache is not None:
            k, v = cache.extend(k, v)
        out = self.core(q, k, v, documents)  # [B, N, S, D]
        return self.o_proj(out.transpose(1, 2).flatten(-2))  # [B, S, N*D] -> [B, S, H]


class KeyValueCache:
    """Keys and values [B, G, S, D] of the positions seen so far, for one layer while generating."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def extend(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [B, G, new, D] and return all of them."""
        if self.keys is not None:
            k, v = torch.cat((self.keys, k), dim=2), torch.cat((self.values, v), dim=2)
        self.keys, self.values = k, v
        return k, v

    @property
    def seq_length(self) -> int:
        """Positions held."""
        return 0 if self.keys is None else self.keys.shape[2]


class DotProductAttention(nn.Module):
    """softmax(q k^T / sqrt(D)) v, causal, with a sliding window and document masks where asked for."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dropout = config.attention_dropout
        self.window = window_of(config)
        self.backends = BACKENDS[config.attention_backend]

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents | None = None
    ) -> torch.Tensor:
        """q [B, N, Q, D], k and v [B, G, S, D] -> [B, N, Q, D]; the Q queries are the last Q of S positions."""
        if documents is None:
            return self._causal(q, k, v)
        if documents.block_mask is not None:
            grouped = q.shape[1] != k.shape[1]
            flex = _compiled_flex_attention()
            return flex(q, k, v, block_mask=documents.block_mask, enable_gqa=grouped)
        if documents.lengths:
            return self._by_document(q, k, v, documents)
        ids = documents.ids
        same = ids[:, -q.shape[2] :, None] == ids[:, None]  # [B, Q, S]
        return self._causal(q, k, v, same[:, None])

    def _causal(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Causal attention by SDPA; a mask is made only for a window, fewer queries than keys, or `allowed`.

        allowed: boolean [B, 1, Q, S], what may be seen besides.
        """
        num_queries, num_keys = q.shape[2], k.shape[2]
        windowed = self.window is not None and self.window < num_keys - 1
        behind = num_queries != num_keys and num_queries > 1
        mask = None
        if behind and q.is_cuda and self.backends is None and not windowed and allowed is None:
            mask = causal_lower_right(num_queries, num_keys)  # flash attention knows this one without a mask
        elif windowed or allowed is not None or behind:
            mask = band_mask(num_queries, num_keys, self.window if windowed else None, q.device)
            mask = mask if allowed is None else mask & allowed
        if q.shape[1] != k.shape[1]:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        arguments = {
            "attn_mask": mask,
            "is_causal": mask is None and num_queries > 1,
            "dropout_p": self.dropout if self.training else 0.0,
        }
        if self.backends is None or not q.is_cuda:
            return F.scaled_dot_product_attention(q, k, v, **arguments)
        with sdpa_kernel(self.backends):
            return F.scaled_dot_product_attention(q, k, v, **arguments)

    @torch.compiler.disable  # new lengths with every batch would mean a new graph with every batch
    def _by_document(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents
    ) -> torch.Tensor:
        """Each document is its own small causal attention: no mask."""
        rows = []
        for row, lengths in enumerate(documents.lengths):
            parts = [t[row : row + 1].split(lengths, dim=2) for t in (q, k, v)]
            rows.append(torch.cat([self._causal(*part) for part in zip(*parts)], dim=2))
        return torch.cat(rows)


@functools.cache
def _compiled_flex_attention() -> CoreAttention:
    """FlexAttention is a kernel template: without compilation it falls back to a dense S x S computation.

    Made at its first use: importing the compiler costs seconds that a run without document masks need not pay.
    """
    return torch.compile(flex_attention, dynamic=False)


def band_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Boolean [Q, S], True where query (one of the last Q positions) may see the key."""
    query = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    key = torch.arange(num_keys, device=device)[None]
    allowed = key <= query
    return allowed if window is None else allowed & (query - key <= window)
