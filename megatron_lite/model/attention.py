"""Causal self-attention with grouped query heads.

Shapes: B micro batch, S sequence, H hidden, N query heads, G key/value heads, D head width.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import sdpa_kernel

from megatron_lite.config.model import ModelConfig
from megatron_lite.model.documents import Documents, bounds, window_of
from megatron_lite.model.kernels import (
    BACKENDS,
    attention_kernel,
    band_mask,
    block_masked_attention,
    flash_attention,
    gpu_generation,
)
from megatron_lite.model.norm import build_norm
from megatron_lite.model.rotary import Rotation


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
        norms = [build_norm(config, width) for width in config.qk_norm_widths]
        self.q_norm, self.k_norm = norms or (None, None)
        self.norm_across_heads = config.qk_layernorm_across_heads
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
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.norm_across_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.unflatten(-1, (-1, self.head_width)) for t in (q, k, v))  # [B, S, N|G, D]
        if self.q_norm is not None and not self.norm_across_heads:
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

    # The GPU that a rehearsal on a CPU follows, as gpu_generation counts. Its tensors are fake, and those of
    # FlexAttention are those of flash attention.
    assumed_generation: int | None = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.dropout = config.attention_dropout
        self.window = window_of(config)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents | None = None
    ) -> torch.Tensor:
        """q [B, N, Q, D], k and v [B, G, K, D] -> [B, N, Q, D]; the Q queries are the last Q of K positions."""
        if documents is None:
            return self._causal(q, k, v)
        part = (q.shape[2], k.shape[2])
        if part in documents.block_masks:
            return block_masked_attention(q, k, v, documents.block_masks[part])
        if documents.by_length and (gpu_generation(q.device) or part[0] == documents.ids.shape[1]):
            return self._by_document(q, k, v, documents)
        ids = documents.ids[:, : part[1]]
        same = ids[:, -part[0] :, None] == ids[:, None]  # [B, Q, K]
        return self._causal(q, k, v, same[:, None])

    def _causal(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Causal attention by the kernel that the device has for it.

        allowed: boolean [B, 1, Q, K], what may be seen besides.
        """
        num_queries, num_keys = q.shape[2], k.shape[2]
        windowed = bounds(self.window, num_keys)
        window = self.window if windowed else None
        dropout = self.dropout if self.training else 0.0
        whole = not windowed and num_queries in (1, num_keys)
        generation = self.assumed_generation or gpu_generation(q.device)
        kernel = attention_kernel(self.config, q.dtype, generation, whole, dropout > 0)
        if kernel == "flex" and self.assumed_generation:
            kernel = "flash"
        if kernel == "flash" and not whole and allowed is None:
            return flash_attention(q, k, v, window, dropout)
        mask = None
        if not whole or allowed is not None:
            mask = band_mask(num_queries, num_keys, window, q.device)
            mask = mask if allowed is None else mask & allowed
        grouped = q.shape[1] != k.shape[1]
        if grouped and (kernel != "flash" or mask is not None):
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
            grouped = False
        arguments = {
            "attn_mask": mask,
            "is_causal": mask is None and num_queries > 1,
            "dropout_p": dropout,
            "enable_gqa": grouped,
        }
        backends = BACKENDS[self.config.attention_backend]
        if backends is None or not q.is_cuda:
            return F.scaled_dot_product_attention(q, k, v, **arguments)
        with sdpa_kernel(backends):
            return F.scaled_dot_product_attention(q, k, v, **arguments)

    @torch.compiler.disable  # new lengths with every batch would mean a new graph with every batch
    def _by_document(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents
    ) -> torch.Tensor:
        """Each document is its own small causal attention, of those of its positions that are queries: no mask."""
        first, rows = k.shape[2] - q.shape[2], []
        for row, lengths in enumerate(documents.lengths):
            outs, start = [], 0
            for length in lengths:
                begin, end = max(start, first), min(start + length, k.shape[2])
                if begin < end:
                    queries = q[row : row + 1, :, begin - first : end - first]
                    outs.append(self._causal(queries, *(t[row : row + 1, :, start:end] for t in (k, v))))
                start += length
            rows.append(torch.cat(outs, dim=2))
        return torch.cat(rows)
