"""Loss on the validation and test sets: token sum over token count, the same number in any layout."""

from collections.abc import Callable, Mapping

import torch

from megatron_lite.arithmetic.vocabulary import IGNORED_LABEL
from megatron_lite.config import Config
from megatron_lite.data.loader import Loader
from megatron_lite.distributed.mesh import ParallelMesh
from megatron_lite.parallel.pipeline import Batch, Pipeline


def count_tokens(batch: Batch, mesh: ParallelMesh) -> torch.Tensor:
    """Unmasked tokens of the global batch, scalar int64 on my device. Ranks of a cp or tp group hold the same batch."""
    count = (batch["labels"] != IGNORED_LABEL).sum()
    return mesh.sum_over(count, "dp_replicate", "dp_shard")


def sum_loss(loss_sum: torch.Tensor, mesh: ParallelMesh) -> torch.Tensor:
    """My ranks' loss sums, added over the ranks that saw other tokens and over the stages (zero but on the last)."""
    return mesh.sum_over(loss_sum, "pp", "dp_replicate", "dp_shard", "cp")


def evaluate(
    pipeline: Pipeline,
    loader: Loader,
    mesh: ParallelMesh,
    num_batches: int,
    global_batch_size: int,
    stop: Callable[[], str | None],
) -> float | None:
    """The mean token loss over num_batches global batches; None when the run was asked to stop on the way.

    Dropout is off and no random number is drawn, so training goes on as if nothing had been.
    """
    samples = pipeline.config.training.micro_batch_size * mesh.data_parallel_size
    totals = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    pipeline.set_training(False)
    try:
        for _ in range(num_batches):
            batch = loader.next_batch(global_batch_size)
            totals[1] += (batch["labels"] != IGNORED_LABEL).sum()
            totals[0] += pipeline.eval_step(batch, global_batch_size // samples)
            if stop() is not None:
                return None
    finally:
        pipeline.set_training(True)
    loss_sum = sum_loss(totals[0].clone(), mesh)
    count = mesh.sum_over(totals[1].clone(), "dp_replicate", "dp_shard")
    return (loss_sum / count.clamp(min=1)).item()


class Evaluator:
    """The evaluation sets of a run, each with a loader that goes on where the last evaluation stopped.

    As in Megatron-LM the k-th validation reads the k-th run of --eval-iters batches; with --full-validation each
    one reads the whole set. What is read depends on the iteration alone, so a resumed run reads the same.
    """

    def __init__(
        self,
        config: Config,
        pipeline: Pipeline,
        mesh: ParallelMesh,
        datasets: Mapping[str, object],
        build_loader: Callable[[object, int], Loader],
        stop: Callable[[], str | None],
    ) -> None:
        """datasets: name -> dataset; build_loader(dataset, consumed_samples) -> Loader; stop: StopWatch.asked."""
        self._pipeline = pipeline
        self._mesh = mesh
        self._datasets = datasets
        self._build_loader = build_loader
        self._stop = stop
        self._full = config.evaluation.full_validation
        self._num_batches = config.evaluation.eval_iters
        self._batch_size = config.evaluation.eval_global_batch_size or config.training.global_batch_size
        self._loaders: dict[str, Loader] = {}
        self.iteration: int | None = None  # of the last validation in this process

    @property
    def has_data(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self._datasets)

    def losses(self, earlier: int) -> dict[str, float] | None:
        """{name: mean token loss} of every set; earlier = evaluations before this one. None: asked to stop."""
        results = {}
        for name, dataset in self._datasets.items():
            loader = self._loader(name, dataset, earlier)
            count = -(-len(dataset) // self._batch_size) if self._full else self._num_batches
            loss = evaluate(self._pipeline, loader, self._mesh, count, self._batch_size, self._stop)
            if self._full:
                self._loaders.pop(name).close()
            if loss is None:
                return None
            results[name] = loss
        return results

    def _loader(self, name: str, dataset: object, earlier: int) -> Loader:
        if name not in self._loaders:
            consumed = 0 if self._full else earlier * self._num_batches * self._batch_size
            self._loaders[name] = self._build_loader(dataset, consumed)
        return self._loaders[name]

    def close(self) -> None:
        """Stop the loaders' workers."""
        for loader in self._loaders.values():
            loader.close()
        self._loaders.clear()
