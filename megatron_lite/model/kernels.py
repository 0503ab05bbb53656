"""Attention kernels: which one a device runs, and the call of each that scaled_dot_product_attention does not make.

Shapes: B micro batch, N query heads, G key/value heads, Q queries, K keys (the queries are the last Q of K positions),
D head width.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from megatron_lite.config.model import ModelConfig

# --attention-backend in Megatron's words -> what scaled_dot_product_attention may choose from.
BACKENDS = {
    "auto": None,
    "flash": [SDPBackend.FLASH_ATTENTION],
    "fused": [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION],
    "unfused": [SDPBackend.MATH],
    "local": [SDPBackend.MATH],
}

# The first generation of GPUs (the major number of their compute capability) that flash attention runs on.
AMPERE = 8


@torch.compiler.assume_constant_result
def gpu_generation(device: torch.device) -> int:
    """The major number of a CUDA device's compute capability; 0 for any other device."""
    return torch.cuda.get_device_properties(device).major if device.type == "cuda" else 0


def attention_kernel(
    config: ModelConfig, dtype: torch.dtype, generation: int, whole: bool, dropout: bool
) -> str:
    """The kernel of core attention: "cpu", or on a GPU one of `gpu_attention_kernel`'s.

    Args:
        whole: all positions are queries, and see all positions before them: neither cp nor window.
        dropout: attention weights are dropped now.
    """
    if not generation:
        return "cpu"
    half = generation >= AMPERE and dtype in (torch.bfloat16, torch.float16)
    return config.gpu_attention_kernel(half, whole, dropout)


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, dropout: float
) -> torch.Tensor:
    """Causal flash attention without a mask: q [B, N, Q, D], k and v [B, G, K, D] -> [B, N, Q, D].

    The kernel aligns the causal triangle to the last query and key, bounds it by a window and takes grouped heads;
    scaled_dot_product_attention offers none of the first two.
    """
    width = q.shape[-1]
    if width % 8:
        q, k, v = (F.pad(t, (0, 8 - width % 8)) for t in (q, k, v))
    out = torch.ops.aten._flash_attention_forward(
        *(t.transpose(1, 2) for t in (q, k, v)),
        None,
        None,
        q.shape[2],
        k.shape[2],
        dropout,
        True,
        False,
        scale=width**-0.5,
        window_size_left=window,
        window_size_right=0,
    )[0]  # [B, Q, N, D]
    return out.transpose(1, 2)[..., :width]


def block_mask(
    ids: torch.Tensor | None, window: int | None, num_queries: int, num_keys: int, device: torch.device
) -> BlockMask:
    """The blocks that FlexAttention computes: causal, inside documents ids [B, S], inside the window.

    The queries are the last num_queries of the first num_keys positions.
    """
    offset = num_keys - num_queries

    def allowed(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        seen = i + offset >= j
        if ids is not None:
            seen = seen & (ids[b, i + offset] == ids[b, j])
        return seen if window is None else seen & (i + offset - j <= window)

    batch = None if ids is None else ids.shape[0]
    # Compiled: as it is it would hold the dense mask for a moment.
    return compiled(create_block_mask)(allowed, batch, None, num_queries, num_keys, device=device)


def block_masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask
) -> torch.Tensor:
    """FlexAttention: q [B, N, Q, D], k and v [B, G, K, D] -> [B, N, Q, D].

    It is a kernel template: without compilation it falls back to a dense computation.
    """
    flex = flex_attention if torch.compiler.is_compiling() else compiled(flex_attention)
    return flex(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled, at its first use: importing the compiler costs seconds that most runs need not pay."""
    return torch.compile(function, dynamic=False)


def band_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Boolean [Q, K], True where query (one of the last Q positions) may see the key."""
    query = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    key = torch.arange(num_keys, device=device)[None]
    allowed = key <= query
    return allowed if window is None else allowed & (query - key <= window)
