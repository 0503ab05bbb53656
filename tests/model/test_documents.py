"""Attention inside documents: every path equals softmax over a dense mask written out by hand."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from megatron_lite.config import ModelConfig
from megatron_lite.model import attention, documents
from megatron_lite.model.attention import DotProductAttention
from megatron_lite.model.documents import Documents

BATCH, HEADS, GROUPS, SEQ_LENGTH, WIDTH = 2, 4, 2, 256, 16
LENGTHS = ([100, 1, 27, 128], [3, 253])


def inputs():
    generator = torch.Generator().manual_seed(1)
    shapes = [(BATCH, heads, SEQ_LENGTH, WIDTH) for heads in (HEADS, GROUPS, GROUPS)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    ids = torch.stack([torch.repeat_interleave(torch.tensor(row)) for row in LENGTHS])
    return [t.requires_grad_() for t in tensors], ids


def by_hand(q, k, v, ids, window, num_queries=SEQ_LENGTH):
    place = torch.arange(SEQ_LENGTH)
    allowed = (place[:, None] >= place) & (ids[:, :, None] == ids[:, None])
    if window is not None:
        allowed &= place[:, None] - place <= window
    k, v = (t.repeat_interleave(HEADS // GROUPS, dim=1) for t in (k, v))
    scores = (q @ k.transpose(2, 3) / WIDTH**0.5).masked_fill(~allowed[:, None], -torch.inf)
    return (scores.softmax(dim=-1) @ v)[:, :, -num_queries:]


def config(window):
    return ModelConfig(window_size=None if window is None else (window, 0), attention_dropout=0.0)


def outputs_and_gradients(out, tensors):
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad((out * weight).sum(), tensors)]


@pytest.mark.parametrize("window", [None, 40])
def test_equals_a_dense_mask(window):
    tensors, ids = inputs()
    wanted = outputs_and_gradients(by_hand(*tensors, ids, window), tensors)
    seen = Documents(ids, config(window))
    assert seen.lengths == [list(row) for row in LENGTHS]
    found = outputs_and_gradients(DotProductAttention(config(window))(*tensors, seen), tensors)
    for value, right in zip(found, wanted):
        torch.testing.assert_close(value, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", [None, 40])
@torch.no_grad()
def test_the_block_mask_of_a_gpu(window, monkeypatch):
    """FlexAttention not compiled, and forward only: the CPU's kernel has no backward."""
    tensors, ids = inputs()
    tensors = [tensor.detach() for tensor in tensors]
    seen = Documents(ids, config(window))
    seen.block_mask = documents.build_block_mask(create_block_mask, ids, window)
    monkeypatch.setattr(attention, "_compiled_flex_attention", lambda: flex_attention)
    out = DotProductAttention(config(window))(*tensors, seen)
    torch.testing.assert_close(out, by_hand(*tensors, ids, window), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("window", [None, 40])
def test_the_last_queries_of_a_part(window):
    tensors, ids = inputs()
    q, k, v = tensors
    seen = Documents(ids, config(window)).first(SEQ_LENGTH)
    out = DotProductAttention(config(window))(q[:, :, -64:], k, v, seen)
    torch.testing.assert_close(out, by_hand(q, k, v, ids, window, 64), rtol=1e-9, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("case", ["documents", "documents, window", "last queries"])
def test_a_gpu_equals_the_cpu(case):
    tensors, ids = inputs()
    window = 40 if "window" in case else None
    results = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        there = [t.detach().to(device, dtype).requires_grad_() for t in tensors]
        core = DotProductAttention(config(window))
        if case == "last queries":
            out = core(there[0][:, :, -64:], *there[1:])
        else:
            out = core(*there, Documents(ids.to(device), config(window)))
        results.append([t.float().cpu() for t in outputs_and_gradients(out, there)])
    for cpu, gpu in zip(*results):
        torch.testing.assert_close(gpu, cpu, rtol=0.05, atol=0.05)
