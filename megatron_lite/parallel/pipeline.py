"""The pipeline engine: torch.distributed.pipelining's stages and schedules around my model chunks.

pp = 1 is the case of one stage in the same code. A batch is the data-parallel rank's own part of the global
batch, [M*B, S] for M microbatches of B samples; every pipeline rank is given the same one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from megatron_lite.arithmetic.batch_size import pass_size
from megatron_lite.arithmetic.partition import StagePlan
from megatron_lite.arithmetic.pipeline_schedule import runnable_schedule
from megatron_lite.arithmetic.sharding import splits_backward
from megatron_lite.config import Config
from megatron_lite.config.data import IGNORED_LABEL
from megatron_lite.distributed.mesh import ParallelMesh
from megatron_lite.distributed.torch_private import stage_backward
from megatron_lite.parallel.clock import ActionClock
from megatron_lite.parallel.context import my_part_of_sequence
from megatron_lite.parallel.fsdp import compute_dtype, prepare_backward
from megatron_lite.parallel.tied import TiedWeights

# --pipeline-schedule -> torch's class; one stage per rank takes the first kind, several the second.
SCHEDULE_CLASSES: dict[str, type[PipelineScheduleSingle | PipelineScheduleMulti]] = {
    "gpipe": torch_schedules.ScheduleGPipe,
    "1f1b": torch_schedules.Schedule1F1B,
    "interleaved-1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipev": torch_schedules.ScheduleDualPipeV,
}

# The names of torch's actions that a forward-only pass needs.
FORWARD_ACTIONS = ("FORWARD", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")

Batch = dict[str, torch.Tensor]


@dataclass
class ScaledLoss:
    """The loss function of the last stage: the token-loss sum of a microbatch times a factor set per step.

    The factor is 1 / (unmasked tokens of the whole global batch), times the loss scale under fp16. Gradients
    are then summed everywhere and averaged nowhere.
    """

    factor: float = 1.0
    sums: list[torch.Tensor] = field(default_factory=list)

    def __call__(self, loss_sum: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Scalar loss sum -> scaled scalar; keeps the unscaled sum for the log."""
        self.sums.append(loss_sum.detach())
        return loss_sum * self.factor

    def take_sum(self, device: torch.device) -> torch.Tensor:
        """The sum over the microbatches since the last call, scalar fp32; zero on ranks without the last stage."""
        total = torch.stack(self.sums).sum() if self.sums else torch.zeros((), device=device)
        self.sums.clear()
        return total


class Stage(PipelineStage):
    """torch's stage with a clock, FSDP's own way of freeing and reducing, and buffers made when they are needed.

    torch's stage keeps a chunk's weights all-gathered and adds its gradients up whole until its last backward; here
    arithmetic/sharding.py decides. It makes a buffer for every microbatch's input and output gradient when it starts
    and holds them for good: a batch that ramps up would run out of memory hours later. Here a buffer is made when its
    receive is posted and dropped when its action has run, so as many are there as are in flight. On torch 2.11 its
    first message to a neighbour skips one on the same rank (the V's tip).
    """

    clock: ActionClock
    config: Config

    def forward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> Any:
        """F."""
        run = super().forward_one_chunk
        result = self.clock.run("F", self.stage_index, microbatch, run, microbatch, *args, **kwargs)
        self._drop(self.args_recv_info, microbatch)  # what backward needs of it is kept by the stage
        return result

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """The chunk's forward; lengths of documents are found before it, for FSDP would move ids to the device."""
        if kwargs.get("document_ids") is not None:
            kwargs["document_ids"] = self.submod.host_documents(kwargs["document_ids"])
        return super().forward_maybe_with_nosync(*args, **kwargs)

    def backward_one_chunk(
        self, microbatch: int, loss: Any = None, full_backward: bool = True, **kwargs: Any
    ) -> None:
        """B, or I when the weights' gradient comes later."""
        run, kind = super().backward_one_chunk, "B" if full_backward else "I"
        self.clock.run(kind, self.stage_index, microbatch, run, microbatch, loss, full_backward, **kwargs)
        self._drop(self.grad_recv_info, microbatch)

    def backward_weight_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        """W."""
        run = super().backward_weight_one_chunk
        self.clock.run("W", self.stage_index, microbatch, run, microbatch, *args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[torch.Tensor | None, ...], list[dict[str, Any]] | None]:
        """The backward of one microbatch; a split one is torch's: FSDP's hooks would fire before its gradients come."""
        if splits_backward(self.config):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        prepare_backward(self.submod, self.config, last_backward)
        parts = (bwd_kwargs[key] for key in ("stage_output", "output_grads", "input_values"))
        return stage_backward(*parts), None

    def perform_reduce_grad(self, factor: int) -> None:
        """R: once a stage and pass where the backward is split; else the last backward has done it."""
        if splits_backward(self.config):
            self.clock.run("R", self.stage_index, -1, super().perform_reduce_grad, factor)
        elif factor != 1:
            self.scale_grads(factor)

    def get_fwd_recv_ops(self, microbatch: int) -> list[dist.P2POp]:
        """Receive a microbatch's input, into memory made now."""
        self._make(self.args_recv_info, microbatch)
        return super().get_fwd_recv_ops(microbatch)

    def get_bwd_recv_ops(self, microbatch: int) -> list[dist.P2POp]:
        """Receive the gradient of a microbatch's output, into memory made now."""
        if self.has_backward and not self.is_last:
            self._make(self.grad_recv_info, microbatch)
        return super().get_bwd_recv_ops(microbatch)

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_memory():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_memory():
            return super()._prepare_backward_infra(*args, **kwargs)

    @contextmanager
    def _without_memory(self) -> Iterator[None]:
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def _make(self, infos: dict[int, tuple[Any, ...]], microbatch: int) -> None:
        for info in infos[microbatch]:
            buffer = getattr(info, "buffer", None)
            if buffer is not None and buffer.device.type == "meta":
                made = torch.empty(buffer.shape, dtype=buffer.dtype, device=self.device)
                info.buffer = made.requires_grad_(buffer.requires_grad)

    def _drop(self, infos: dict[int, tuple[Any, ...]], microbatch: int) -> None:
        for info in infos.get(microbatch, ()):
            buffer = getattr(info, "buffer", None)
            if buffer is not None and buffer.device.type != "meta":
                info.buffer = torch.empty_like(buffer, device="meta").requires_grad_(buffer.requires_grad)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        operations = super()._get_init_p2p_neighbors_ops()
        return [operation for operation in operations if operation.group_peer != self.group_rank]


class Pipeline:
    """Forward and backward over my chunks, in the order that the schedule says."""

    def __init__(
        self, config: Config, plans: list[StagePlan], chunks: list[nn.Module], mesh: ParallelMesh
    ) -> None:
        self.config = config
        self.mesh = mesh
        self.chunks = chunks
        self.plans = [plan for plan in plans if plan.rank == mesh.rank("pp")]
        self.num_stages = len(plans)
        self.has_first = any(plan.stage == 0 for plan in self.plans)
        self.has_last = any(plan.stage == self.num_stages - 1 for plan in self.plans)
        self.scaled_loss = ScaledLoss()
        self.clock = ActionClock(mesh.device, mesh.group("pp"))
        self.tied = TiedWeights(chunks, mesh, plans[0].rank, plans[-1].rank)
        self._train_schedule: tuple[int, Any] | None = None
        self._eval_schedule: tuple[int, Any] | None = None

    def train_step(
        self, batch: Batch, num_microbatches: int, loss_factor: float, loss_scale: float = 1.0
    ) -> torch.Tensor:
        """Forward and backward over a batch; gradients are added to the parameters' .grad.

        Args:
            batch: tokens and labels [M*B, S], optionally position_ids and document_ids.
            num_microbatches: M.
            loss_factor: 1 / the number of unmasked tokens in the global batch (times the fp16 loss scale).
            loss_scale: the fp16 loss scale, for the routers' losses, which are means over microbatches.

        Returns:
            The sum of token losses of this rank's batch, scalar fp32; zero where the last stage is not mine.
        """
        self.scaled_loss.factor = loss_factor
        for mixture in (m for chunk in self.chunks for m in chunk.mixtures.values()):
            mixture.router.loss_factor = loss_scale / (num_microbatches * self.mesh.data_parallel_size)
        self.tied.begin()
        self.clock.begin()
        for count, part in self._passes(batch, num_microbatches):
            self._run(self._schedule(count).step, part)
        self.clock.end()
        self.tied.sum_gradients()
        return self.scaled_loss.take_sum(self.mesh.device)

    @torch.no_grad()
    def eval_step(self, batch: Batch, num_microbatches: int) -> torch.Tensor:
        """The sum of token losses of this rank's batch, scalar fp32, without gradients; zero where not mine."""
        self.scaled_loss.factor = 1.0
        for count, part in self._passes(batch, num_microbatches):
            self._run(self._forward_schedule(count).eval, part)
        return self.scaled_loss.take_sum(self.mesh.device)

    def count_tokens(self, batch: Batch) -> torch.Tensor:
        """Unmasked tokens of the global batch, int64 scalar on my device; cp and tp ranks hold the same batch."""
        count = (batch["labels"] != IGNORED_LABEL).sum()
        return self.mesh.sum_over(count, "dp_replicate", "dp_shard")

    def sum_loss(self, loss_sum: torch.Tensor) -> torch.Tensor:
        """Loss sums of any shape, added over the ranks that saw other tokens and over the stages, in place."""
        return self.mesh.sum_over(loss_sum, "pp", "dp_replicate", "dp_shard", "cp")

    def _passes(self, batch: Batch, num_microbatches: int) -> Iterator[tuple[int, Batch]]:
        """(microbatches, their samples) of each pass that --max-microbatches-per-step makes of a batch."""
        samples = batch["tokens"].shape[0] // num_microbatches
        count = pass_size(num_microbatches, self.config.parallel.max_microbatches_per_step)
        for first in range(0, num_microbatches, count):
            yield count, {key: t[first * samples : (first + count) * samples] for key, t in batch.items()}

    def set_training(self, training: bool) -> None:
        """Dropout on or off in every chunk; with training on, what evaluation held is let go."""
        for chunk in self.chunks:
            chunk.train(training)
        if training:
            self._eval_schedule = None

    def _run(self, step: Callable[..., Any], batch: Batch) -> None:
        """The call that torch 2.11 to 2.13 share: the whole batch, which the schedule cuts along dim 0."""
        batch = my_part_of_sequence(batch, self.mesh)
        tokens = (batch["tokens"],) if self.has_first else ()
        inputs = {key: tensor for key, tensor in batch.items() if key != "tokens"}
        target = batch["labels"] if self.has_last else None
        step(*tokens, target=target, return_outputs=False, **inputs)

    def _schedule(self, num_microbatches: int) -> Any:
        """The schedule for this many microbatches; the last one is kept, for it holds the receive buffers."""
        if self._train_schedule is None or self._train_schedule[0] != num_microbatches:
            self._train_schedule = None
            self._train_schedule = (num_microbatches, self._build_schedule(num_microbatches))
        return self._train_schedule[1]

    def _forward_schedule(self, num_microbatches: int) -> Any:
        """The same for evaluation, kept as long as the evaluation goes on."""
        if self._eval_schedule is None or self._eval_schedule[0] != num_microbatches:
            self._eval_schedule = None
            schedule = self._build_schedule(num_microbatches)
            if isinstance(schedule, PipelineScheduleMulti):
                keep_forwards(schedule)
            self._eval_schedule = (num_microbatches, schedule)
        return self._eval_schedule[1]

    def _build_schedule(self, num_microbatches: int) -> Any:
        asked, size = self.config.parallel.pipeline_schedule, self.mesh.size("pp")
        kind = SCHEDULE_CLASSES[runnable_schedule(asked, size, num_microbatches)]
        stages = [self._stage(chunk, plan) for chunk, plan in zip(self.chunks, self.plans)]
        mine = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
        return kind(mine, num_microbatches, loss_fn=self.scaled_loss, scale_grads=False)

    def _stage(self, chunk: nn.Module, plan: StagePlan) -> Stage:
        """A stage with static shapes: without them torch runs a forward and backward to find them out."""
        config, mesh = self.config, self.mesh
        batch_size, seq_length = config.training.micro_batch_size, config.data.seq_length // mesh.size("cp")
        hidden_length = seq_length // mesh.size("tp") if config.parallel.sequence_parallel else seq_length
        hidden = torch.empty(
            batch_size,
            hidden_length,
            config.model.hidden_size,
            dtype=compute_dtype(config.precision),
            device="meta",
            requires_grad=True,  # torch makes a buffer for an output's gradient only then
        )
        tokens = torch.empty(batch_size, seq_length, dtype=torch.int64, device="meta")
        loss = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
        stage = Stage(
            chunk,
            plan.stage,
            self.num_stages,
            mesh.device,
            input_args=tokens if plan.stage == 0 else hidden,
            output_args=loss if plan.stage == self.num_stages - 1 else hidden,
            group=mesh.group("pp"),
        )
        stage.clock, stage.config = self.clock, config
        return stage


def keep_forwards(schedule: PipelineScheduleMulti) -> None:
    """Leave only the forward actions, and what they send, receive and gather, in a schedule.

    torch's eval() walks through the training order with backwards that do nothing; under the V placement even
    that fails, for a stage looks for the gradient that its neighbour on the same rank never made.
    """
    for rank, actions in schedule.pipeline_order_with_comms.items():
        flat = [part for action in actions for part in (action.sub_actions or (action,))]
        schedule.pipeline_order_with_comms[rank] = _forwards(flat)


def _forwards(actions: list[Any]) -> list[Any]:
    """The forward actions of one rank; a gathering that served backwards only is left out, its freeing too."""
    kept: list[Any] = []
    gathered_at: dict[int, int] = {}  # stage -> position of its UNSHARD in kept, until a forward uses it
    for action in actions:
        kind, stage = action.computation_type.name, action.stage_index
        if kind not in FORWARD_ACTIONS:
            continue
        if kind == "RESHARD" and stage in gathered_at:
            position = gathered_at.pop(stage)
            kept.pop(position)
            gathered_at = {s: p - (p > position) for s, p in gathered_at.items()}
            continue
        if kind == "UNSHARD":
            gathered_at[stage] = len(kept)
        elif kind == "FORWARD":
            gathered_at.pop(stage, None)
        kept.append(action)
    return kept
