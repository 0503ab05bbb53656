"""Our side of a comparison on ranks: the package's own Run, fed by hand."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import torch

from megatron_lite.config import Config
from megatron_lite.distributed.mesh import build_mesh
from megatron_lite.parallel.pipeline import Batch
from megatron_lite.training.metrics import StepResult
from megatron_lite.training.run import Run, build_run


class PreparedBatches:
    """Stands in for the Loader: gives this rank's prepared batches, round and round."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = cycle(batches)

    def next_batch(self, global_batch_size: int) -> Batch:
        """The next batch."""
        return next(self._batches)


@dataclass
class PreparedRun:
    """A run whose batches lie ready."""

    run: Run
    loader: PreparedBatches

    def step(self) -> StepResult:
        """The program's whole step, but for reading data."""
        return self.run.step(self.loader)


def build_prepared(
    config: Config,
    batches: Sequence[Batch],
    device: torch.device = torch.device("cpu"),  # noqa: B008  a constant
) -> PreparedRun:
    """batches: tokens and labels [M*B, S] of this data-parallel rank, on the device."""
    return PreparedRun(build_run(config, build_mesh(config, device)), PreparedBatches(batches))
