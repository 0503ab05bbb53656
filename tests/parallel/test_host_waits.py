"""The host never waits for the device inside a step: the meta device stands for a GPU, whose tensors have no values."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_lite.distributed.mesh import build_mesh
from megatron_lite.model.gpt import GPTChunk
from megatron_lite.parallel.context import apply_context_parallel, my_part_of_sequence
from megatron_lite.parallel.fsdp import compute_dtype
from megatron_lite.rehearsal.dry_run import fake_world
from tests.model.gpu_on_cpu import forced
from tests.parity import SEQ_LENGTH, make_config

CASES = itertools.product(
    ("rope", "rope, given", "learned, given"), (1, 2), (False, True), (None, 5), (0.0, 0.1)
)


class NoWait(TorchDispatchMode):
    """Fails where CUDA would wait: at a copy between host and device, and where the host reads a value."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        assert function is not torch.ops.aten._local_scalar_dense.default
        assert function is not torch.ops.aten.nonzero.default
        if "copy" in str(function) and not (kwargs or {}).get("non_blocking"):
            tensors = [t for t in tree_leaves((args, out)) if isinstance(t, torch.Tensor)]
            assert len({t.device for t in tensors}) == 1, f"{function} between {[t.device for t in tensors]}"
        return out


def batch(given, documents, dropout):
    shape = (2, SEQ_LENGTH)
    out = {key: torch.zeros(shape, dtype=torch.int64, device="meta") for key in ("tokens", "labels")}
    if given:
        out["position_ids"] = torch.zeros(shape, dtype=torch.int64, device="meta")
    if documents:  # the loader leaves them on the host where attention drops
        ids = torch.arange(SEQ_LENGTH).div(5, rounding_mode="floor").expand(shape)
        out["document_ids"] = ids if dropout else ids.to("meta", non_blocking=True)
    return out


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_second_step_waits_nowhere(case, monkeypatch):
    positions, cp, documents, window, dropout = case
    kind = "rope" if "rope" in positions else "learned_absolute"
    model = {"position_embedding_type": kind, "attention_dropout": dropout, "hidden_dropout": dropout}
    model |= {"window_size": None if window is None else (window, 0), "num_layers": 2}
    config = make_config(cp=cp, model=model, precision="bf16")
    # Block masks are compiled code; what they are is tests/model/test_documents.py's.
    monkeypatch.setattr("megatron_lite.model.documents.block_mask", lambda *arguments: None)
    monkeypatch.setattr("megatron_lite.model.attention.block_masked_attention", lambda q, k, v, mask: q + 0)
    with fake_world(0, cp), forced(monkeypatch):
        mesh = build_mesh(config, torch.device("cpu"))
        with torch.device("meta"):
            chunk = GPTChunk(config.model, range(2)).to(compute_dtype(config.precision))
        if cp > 1:
            apply_context_parallel(chunk, mesh)

        def step():
            inputs = my_part_of_sequence(batch("given" in positions, documents, dropout), mesh)
            if documents:
                inputs["document_ids"] = chunk.host_documents(inputs["document_ids"])
            chunk(inputs.pop("tokens"), **inputs).backward()

        step()
        with NoWait():
            step()
