"""The validation and test sets of a run: which samples each evaluation reads."""

from collections.abc import Callable, Mapping

from megatron_lite.config import Config
from megatron_lite.data.loader import Loader


class Evaluator:
    """The evaluation sets of a run, each with a loader that goes on where the last evaluation stopped.

    As in Megatron-LM the k-th validation reads the k-th run of --eval-iters batches; with --full-validation each
    one reads the whole set. What is read depends on the iteration alone, so a resumed run reads the same.
    """

    def __init__(
        self,
        config: Config,
        datasets: Mapping[str, object],
        build_loader: Callable[[object, int], Loader],
        evaluate: Callable[[Loader, int, int], float | None],
    ) -> None:
        """datasets: name -> dataset; build_loader(dataset, consumed samples); evaluate: Run.evaluate."""
        self._datasets = datasets
        self._build_loader = build_loader
        self._evaluate = evaluate
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
            if name not in self._loaders:
                consumed = 0 if self._full else earlier * self._num_batches * self._batch_size
                self._loaders[name] = self._build_loader(dataset, consumed)
            count = -(-len(dataset) // self._batch_size) if self._full else self._num_batches
            loss = self._evaluate(self._loaders[name], count, self._batch_size)
            if self._full:
                self._loaders.pop(name).close()
            if loss is None:
                return None
            results[name] = loss
        return results

    def close(self) -> None:
        """Stop the loaders' workers."""
        for loader in self._loaders.values():
            loader.close()
        self._loaders.clear()
