"""Core attention, by every kernel: equal to softmax over a dense mask by hand; a GPU's without the mask."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lite.config import ModelConfig
from megatron_lite.model.attention import DotProductAttention
from megatron_lite.model.documents import documents_by_length, find_documents
from megatron_lite.parallel.context import attention_parts
from tests.model.gpu_on_cpu import band, by_hand, forced

BATCH, HEADS, GROUPS, SEQ_LENGTH, WIDTH = 2, 4, 2, 256, 16
LENGTHS = ([100, 1, 27, 128], [3, 253])
WHOLE = ((SEQ_LENGTH, SEQ_LENGTH),)


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    shapes = [(BATCH, heads, SEQ_LENGTH, WIDTH) for heads in (HEADS, GROUPS, GROUPS)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    ids = torch.stack([torch.repeat_interleave(torch.tensor(row)) for row in LENGTHS])
    return [t.requires_grad_() for t in tensors], ids


def right(tensors, ids, window, part=WHOLE[0]):
    """The attention of a part (queries, keys) by hand; ids None: no documents."""
    queries, keys = part
    q, k, v = tensors[0][:, :, keys - queries : keys], *(t[:, :, :keys] for t in tensors[1:])
    allowed = band(queries, keys, window, 0)
    if ids is not None:
        ids = ids[:, :keys]
        allowed = allowed & (ids[:, -queries:, None] == ids[:, None])[:, None]
    return by_hand(q, k, v, allowed)


def run(core, tensors, documents, part):
    queries, keys = part
    q, k, v = tensors[0][:, :, keys - queries : keys], *(t[:, :, :keys] for t in tensors[1:])
    return core(q, k, v, documents)


def config(window=None, dropout=0.0, backend="auto"):
    return ModelConfig(
        window_size=None if window is None else (window, 0),
        attention_dropout=dropout,
        attention_backend=backend,
        kv_channels=WIDTH,
    )


def outputs_and_gradients(out, tensors):
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad((out * weight).sum(), tensors)]


def assert_same(out, wanted, tensors, tolerance):
    pairs = zip(*(outputs_and_gradients(one, tensors) for one in (out, wanted)))
    for value, expected in pairs:
        torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("part", [*WHOLE, *attention_parts(SEQ_LENGTH // 2, 2, 0)], ids=str)
def test_the_cpu_equals_a_dense_mask(window, part):
    tensors, ids = inputs()
    seen = find_documents(ids, config(window), (part,), tensors[0])
    assert seen.lengths == [list(row) for row in LENGTHS]
    core = DotProductAttention(config(window))
    assert_same(run(core, tensors, seen, part), right(tensors, ids, window, part), tensors, 1e-9)
    assert_same(run(core, tensors, None, part), right(tensors, None, window, part), tensors, 1e-9)


class NoDenseMask(TorchDispatchMode):
    """Fails at a mask, at scores [Q, K] and at grouped keys that are repeated for all heads."""

    def __init__(self, part):
        super().__init__()
        self.part, self.repeated = part, (BATCH, HEADS, part[1], WIDTH)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                assert tensor.dtype != torch.bool and tensor.shape[-2:] != self.part
                assert tensor.shape != self.repeated or self.part[0] == self.part[1]
        return out


CP = [part for rank in (0, 1) for part in attention_parts(SEQ_LENGTH // 2, 2, rank)]


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("parts", [WHOLE, CP], ids=["whole", "cp"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("backend", ["auto", "flash", "fused"])
def test_a_gpu_runs_flash_attention_without_a_mask(window, parts, dropout, backend, monkeypatch):
    """bf16: windows and context parallelism, with dropout or without (its reference here drops nothing)."""
    tensors, _ = inputs(torch.bfloat16)
    core = DotProductAttention(config(window, dropout, backend))
    with forced(monkeypatch) as calls:
        for part in parts:
            whole = window is None and part[0] == part[1]
            assert find_documents(None, core.config, (part,), tensors[0]) is None
            if whole and dropout:
                continue  # torch's own kernel, which drops
            with NoDenseMask(part):
                out = run(core, tensors, None, part)
            assert calls == ([] if whole else [("flash", *part, window, dropout)])
            calls.clear()
            assert_same(out, right(tensors, None, window, part), tensors, 2e-2)


@pytest.mark.parametrize(("width", "keys"), [(12, 64), (8, 100)])
def test_flash_attention_of_any_head_width(width, keys, monkeypatch):
    q, k, v = (torch.randn(1, 2, keys, width, dtype=torch.float16) for _ in range(3))
    with forced(monkeypatch):
        out = DotProductAttention(config(5))(q[:, :, -10:], k, v)
    torch.testing.assert_close(out, by_hand(q[:, :, -10:], k, v, band(10, keys, 5, 0)), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("parts", [WHOLE, CP], ids=["whole", "cp"])
@pytest.mark.parametrize("documents", [True, False])
@torch.no_grad()
def test_a_gpu_runs_flex_attention_for_documents_and_fp32(window, parts, documents, monkeypatch):
    """Block masks with the queries' offset; not compiled, and forward only: the CPU's kernel has no backward."""
    tensors, ids = inputs(torch.float32)
    tensors = [t.detach() for t in tensors]
    ids = ids if documents else None
    core = DotProductAttention(config(window))
    with forced(monkeypatch) as calls:
        seen = find_documents(ids, core.config, tuple(parts), tensors[0])
        if seen is None:
            assert parts is WHOLE and window is None and not documents
            return
        for part in parts:
            out = run(core, tensors, seen, part)
            assert calls.pop() == ("flex", *part, None, 0.0) and not calls
            torch.testing.assert_close(out, right(tensors, ids, window, part), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("parts", [WHOLE, CP], ids=["whole", "cp"])
def test_a_gpu_runs_document_by_document_with_dropout(window, parts, monkeypatch):
    """The lengths come from the host; a part takes of each document the positions that are its queries."""
    tensors, ids = inputs(torch.bfloat16)
    core = DotProductAttention(config(window, dropout=0.1)).eval()
    with forced(monkeypatch):
        for part in parts:
            with NoDenseMask(part):
                out = run(core, tensors, documents_by_length(ids, core.config), part)
            assert_same(out, right(tensors, ids, window, part), tensors, 2e-2)


def test_old_gpus_and_unfused_attention_have_no_flash(monkeypatch):
    tensors, _ = inputs(torch.float16)
    for generation, backend in ((7, "auto"), (9, "unfused")):
        with forced(monkeypatch, generation) as calls:
            core = DotProductAttention(config(40, 0.1, backend)).eval()
            out = run(core, tensors, None, WHOLE[0])
            assert not calls
            torch.testing.assert_close(out, right(tensors, None, 40), rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize("parts", [WHOLE, CP], ids=["whole", "cp"])
def test_a_gpu_equals_by_hand(window, dtype, documents, parts):
    tensors, ids = inputs(dtype)
    ids = ids if documents else None
    there = [t.detach().cuda().requires_grad_() for t in tensors]
    core = DotProductAttention(config(window))
    seen = find_documents(None if ids is None else ids.cuda(), core.config, tuple(parts), there[0])
    for part in parts:
        found = outputs_and_gradients(run(core, there, seen, part), there)
        wanted = outputs_and_gradients(right(tensors, ids, window, part), tensors)
        for gpu, cpu in zip(found, wanted):
            torch.testing.assert_close(gpu.cpu(), cpu, rtol=0.05, atol=0.05)
