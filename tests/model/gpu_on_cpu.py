"""The GPU's branches of attention on a CPU: the same choices and calls, the kernels written out by hand."""

import contextlib

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from megatron_lite.model import attention, documents, kernels


def by_hand(q, k, v, allowed, scale=None):
    """softmax over a dense mask, in float64: q [B, N, Q, D], k and v [B, G, K, D], allowed [..., Q, K]."""
    dtype, scale = q.dtype, scale or q.shape[-1] ** -0.5
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = (q @ k.transpose(2, 3) * scale).masked_fill(~allowed, -torch.inf)
    return (scores.softmax(dim=-1) @ v).to(dtype)


def band(num_queries, num_keys, left, right):
    """Keys from `left` before to `right` behind the query, which is one of the last positions; None: no bound."""
    distance = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if left is not None and left >= 0:
        allowed &= distance <= left
    return allowed if right is None or right < 0 else allowed & (distance >= -right)


def _flash(q, k, v, causal, scale, left, right):
    """As Dao's kernel documents it: aligned to the last query and key, grouped heads, [B, Q, N, D]."""
    allowed = band(q.shape[1], k.shape[1], left, 0 if causal else right)
    return by_hand(*(t.transpose(1, 2) for t in (q, k, v)), allowed, scale).transpose(1, 2)


def _flash_gradients(gradient, q, k, v, causal, scale, left, right):
    """Of q, k and v, all [B, Q or K, N or G, D]; written out, for autograd is off inside a kernel."""
    allowed = band(q.shape[1], k.shape[1], left, 0 if causal else right)
    dtype, groups = q.dtype, k.shape[2]
    gradient, q, k, v = (t.transpose(1, 2).double() for t in (gradient, q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // groups, dim=1) for t in (k, v))
    weights = (q @ k.transpose(2, 3) * scale).masked_fill(~allowed, -torch.inf).softmax(dim=-1)
    of_weights = gradient @ v.transpose(2, 3)
    of_scores = weights * (of_weights - (weights * of_weights).sum(dim=-1, keepdim=True)) * scale
    of_keys, of_values = of_scores.transpose(2, 3) @ q, weights.transpose(2, 3) @ gradient
    of_keys, of_values = (t.unflatten(1, (groups, -1)).sum(dim=2) for t in (of_keys, of_values))
    return tuple(t.transpose(1, 2).to(dtype) for t in (of_scores @ k, of_keys, of_values))


@contextlib.contextmanager
def forced(monkeypatch, generation=9):
    """Inside, every device counts as a GPU; yields the calls: [(kernel, queries, keys, window or None, dropout)]."""
    calls = []

    def forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale, **window):
        left, right = window.get("window_size_left"), window.get("window_size_right")
        assert cu_q is None and cu_k is None and (max_q, max_k) == (q.shape[1], k.shape[1]) and not debug
        calls.append(("flash", max_q, max_k, left, dropout))
        out = _flash(q, k, v, causal, scale, left, right)
        state = torch.zeros(2, dtype=torch.uint64)
        return (
            out,
            torch.zeros(q.shape[0], q.shape[2], q.shape[1]),
            state,
            state.new_empty(()),
            q.new_empty(0),
        )

    def backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, seed, unused, **options):
        bounds = (options["scale"], options.get("window_size_left"), options.get("window_size_right"))
        return _flash_gradients(grad, q, k, v, causal, *bounds)

    def flex(q, k, v, block_mask, enable_gqa):
        calls.append(("flex", *block_mask.seq_lengths, None, 0.0))
        return flex_attention(q, k, v, block_mask=block_mask, enable_gqa=enable_gqa)

    for module in (attention, documents):
        monkeypatch.setattr(module, "gpu_generation", lambda device: generation)
    uncompiled = {create_block_mask: create_block_mask, flex_attention: flex}
    monkeypatch.setattr(kernels, "compiled", uncompiled.__getitem__)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        yield calls
