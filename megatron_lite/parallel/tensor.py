"""Tensor and sequence parallelism (Shoeybi et al. 2019; Korthikanti et al. 2022) by DTensor plans.

Column-split linears make some of the heads or feed-forward channels on each rank, row-split ones add the parts up.
The embedding, the head and the loss are split by vocabulary. With --sequence-parallel the hidden state between
them holds 1/tp of the positions: the all-reduce becomes a reduce-scatter and an all-gather of the same volume,
and norms, dropout and what the pipeline sends shrink by tp.

Every parameter becomes a DTensor on the tp axis, replicated ones too: optimizers want one mesh for all. Only those of
a mixture of experts stay as they are: to it, tensor ranks are data-parallel ranks (parallel/experts.py).
"""

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import distribute_module as distribute
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from megatron_lite.config.declare import ConfigError
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.parallel.vocabulary import vocabulary_parallel_loss_sum

# The modules of a block by how their weights are split.
COLUMN = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROW = ("attention.o_proj", "mlp.down_proj")
NORMS = ("input_norm", "pre_mlp_norm")
HEAD_NORMS = ("attention.q_norm", "attention.k_norm")  # over [B, S, N, D]: each rank has its own heads


class ReplicatedWeights(ParallelStyle):
    """A module whose weights lie whole on every rank; its input and output have the given layout.

    Where the input is a shard, a rank's gradient of the weights is a part of the sum (Partial), which FSDP adds
    up over tp when it reduces.
    """

    def __init__(self, layout: Placement, given: Placement | None = None) -> None:
        super().__init__()
        self.layout = layout
        self.given = given or layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute(module, device_mesh, input_fn=self._prepare_input, output_fn=self._prepare_output)

    def _prepare_input(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        whole = DTensor.from_local(inputs[0], mesh, [self.given], run_check=False)
        return (whole.redistribute(placements=[self.layout]), *inputs[1:])

    def _prepare_output(self, module: nn.Module, output: DTensor, mesh: DeviceMesh) -> torch.Tensor:
        return output.to_local()


class PerRankRandomState(nn.Module):
    """Runs attention under a generator state of this rank's own: the ranks have other heads, and would drop alike.

    The seed comes from the generator that the tensor ranks share, which goes on as if nothing had been drawn
    inside. A recomputed forward starts from the same shared state and so drops the same.
    """

    def __init__(self, core: nn.Module, rank: int) -> None:
        super().__init__()
        self.core = core
        self.rank = rank

    def forward(self, q: torch.Tensor, *inputs: Any) -> torch.Tensor:
        """As the core's forward."""
        if not (self.training and self.core.dropout):
            return self.core(q, *inputs)
        return self._run(q, *inputs)

    @torch.compiler.disable  # dynamo traces no generator state: one break here, where there would be a graph a layer
    def _run(self, q: torch.Tensor, *inputs: Any) -> torch.Tensor:
        seed = int(torch.randint(1 << 62, ())) + self.rank
        devices = [q.device] if q.is_cuda else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            return self.core(q, *inputs)


def apply_tensor_parallel(chunk: nn.Module, mesh: DeviceMesh, parallel: ParallelConfig) -> None:
    """Split a chunk's weights over the tp axis, in place.

    Args:
        chunk: on meta; has `.embedding`, `.layers`, `.final_norm`, `.lm_head`, `.tied`, `.sequence_shards`.
        mesh: the 1-D mesh of the tp axis.

    Raises:
        ConfigError: the padded vocabulary does not divide by tp.
    """
    hidden = Shard(1) if parallel.sequence_parallel else Replicate()
    chunk.sequence_shards = mesh.size() if parallel.sequence_parallel else 1
    for layer in chunk.layers.values():
        parallelize_module(layer, mesh, _block_plan(layer, hidden))
        if not parallel.sequence_parallel:
            layer.attention.core = PerRankRandomState(layer.attention.core, mesh.get_local_rank())
    if chunk.embedding is not None:
        _split_embedding(chunk.embedding, mesh, hidden)
    if chunk.lm_head is not None:
        parallelize_module(chunk.final_norm, mesh, ReplicatedWeights(hidden))
        shared = (
            chunk.embedding.word_embeddings.weight if chunk.tied and chunk.embedding is not None else None
        )
        _split_head(chunk.lm_head, mesh, hidden, shared)


def _block_plan(layer: nn.Module, hidden: Placement) -> dict[str, ParallelStyle]:
    """The styles of the modules that this block has."""
    whole = Replicate()
    plan: dict[str, ParallelStyle] = {
        # One gathering for all linears of the module: backward adds their gradients up before it communicates.
        "attention": PrepareModuleInput(
            input_layouts=(hidden, None, None, None), desired_input_layouts=(whole, None, None, None)
        ),
    }
    if not hasattr(layer.mlp, "router"):  # a mixture works on this rank's positions, its weights unsplit
        plan["mlp"] = PrepareModuleInput(input_layouts=(hidden,), desired_input_layouts=(whole,))
    plan |= {name: ColwiseParallel() for name in COLUMN}
    plan |= {name: RowwiseParallel(output_layouts=hidden) for name in ROW}
    plan |= {name: ReplicatedWeights(hidden) for name in NORMS}
    plan |= {name: ReplicatedWeights(Shard(2)) for name in HEAD_NORMS}
    present = {name for name, _ in layer.named_modules()}
    return {name: style for name, style in plan.items() if name in present}


def _split_embedding(embedding: nn.Module, mesh: DeviceMesh, hidden: Placement) -> None:
    rows = embedding.word_embeddings.num_embeddings
    if rows % mesh.size():
        raise ConfigError(
            f"--make-vocab-size-divisible-by: the padded vocabulary {rows:,} does not divide by "
            f"--tensor-model-parallel-size {mesh.size()}"
        )
    words = embedding.word_embeddings
    words.weight = _rows_of_rank(words.weight, mesh)
    first, count = mesh.get_local_rank() * (rows // mesh.size()), rows // mesh.size()

    def look_up(tokens: torch.Tensor) -> torch.Tensor:
        """tokens [B, S] -> [B, S, H], or my positions of it: each rank gives its own rows, the sum is the embedding.

        DTensor's own embedding makes the gradient of all V rows on every rank; this one of V/tp.
        """
        index = tokens - first
        others = (index < 0) | (index >= count)
        found = F.embedding(index.masked_fill(others, 0), words.weight.to_local())
        part = DTensor.from_local(
            found.masked_fill(others[..., None], 0.0), mesh, [Partial()], run_check=False
        )
        # A copy: FSDP warns at a module that returns a view, and DTensor's local part is one.
        return part.redistribute(placements=[hidden]).to_local().clone()

    words.forward = look_up
    if embedding.position_embeddings is not None:
        parallelize_module(embedding.position_embeddings, mesh, ReplicatedWeights(hidden, Replicate()))


def _split_head(head: nn.Module, mesh: DeviceMesh, hidden: Placement, shared: nn.Parameter | None) -> None:
    """Split the head by vocabulary: it makes [T, V/tp] logits, and the loss from all ranks' parts."""
    if shared is None:
        shared = _rows_of_rank(head.weight, mesh)
    head.weight = shared
    vocab_size = head.vocab_size

    def gather(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        whole = DTensor.from_local(inputs[0], mesh, [hidden], run_check=False)
        whole = whole.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return (whole, *inputs[1:])

    def project(rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, head.weight.to_local())

    def gather_logits(module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        if output.dim() == 0:
            return output
        return DTensor.from_local(output, mesh, [Shard(output.dim() - 1)], run_check=False).full_tensor()

    head.register_forward_pre_hook(gather)
    head.register_forward_hook(gather_logits)
    head.project = project
    head.loss_sum = functools.partial(_head_loss, group=mesh.get_group(), vocab_size=vocab_size)


def _rows_of_rank(weight: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """A weight [V, H] on meta as a parameter of which each rank of the mesh has V/tp rows."""
    rows = weight.shape[0] // mesh.size()
    local = torch.empty(rows, *weight.shape[1:], dtype=weight.dtype, device=weight.device)
    return nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))


def _head_loss(
    logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup, vocab_size: int
) -> torch.Tensor:
    first = dist.get_rank(group) * logits.shape[-1]
    return vocabulary_parallel_loss_sum(logits, labels, first, vocab_size, group)
