"""Batches of one data-parallel rank: a pure function of the dataset and of the samples consumed so far.

A global batch is the next G samples of the order. Microbatch j gives data-parallel rank r the r-th run of
micro_batch_size samples (Megatron's assignment), so the microbatches of a rank are one stream that does not know
where global batches end: it can be read ahead through a batch ramp-up.

Microbatches are made by threads, not processes. What a worker does is copying (numpy and pread release the
interpreter's lock for it), some 20 microseconds a sample: one thread makes tens of millions of tokens a second. A
forked worker would inherit the locks of gloo's and CUDA's threads, a spawned one takes seconds to start, and either
has to send tensors through shared memory and may outlive the run.
"""

import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

import torch

from megatron_lite.config import Config, ConfigError
from megatron_lite.data.order import SampleOrder
from megatron_lite.data.samples import Samples

_AHEAD_PER_WORKER = 2  # microbatches; Megatron's (torch's) prefetch factor
_FIRST_WARNING_S = 30.0
_LEAVE_S = 5.0  # a worker in a healthy read is through by then; one that hangs is left behind
# Of --distributed-timeout-minutes: this rank's own error has to come before its peers' timeout.
_TIMEOUT_SHARE = 0.8

Tensors = dict[str, torch.Tensor]


class LoaderStalledError(RuntimeError):
    """Data did not come in time; names the rank, the sample and the file."""


class Loader:
    """Hands out the batches of one data-parallel rank, read ahead by --num-workers threads.

    Args:
        dataset: of samples; with `read_once`, batches behind its end are filled with samples without loss, so that
            every rank gets as many batches as the others; else reading starts over.
        config: read are micro_batch_size, num_workers, dataloader_type, seed and distributed_timeout_minutes.
        consumed_samples: position in the order where the first batch begins; on resume the checkpoint's number.
        device: where batches go; on CUDA by way of pinned memory, without waiting. With attention dropout document
            ids stay on the host.
        warn: takes a line when data is late.

    Raises:
        ConfigError: the dataset has no samples.
    """

    def __init__(
        self,
        dataset: Samples,
        config: Config,
        data_parallel_rank: int,
        data_parallel_size: int,
        consumed_samples: int,
        device: torch.device | str = "cpu",
        warn: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    ):
        assert 0 <= data_parallel_rank < data_parallel_size and consumed_samples >= 0
        if not len(dataset):
            raise ConfigError(f"the {dataset.name} set has no samples")
        self.consumed_samples = consumed_samples
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())  # the workers' own is always 0
        # Attention with dropout runs document by document: the model asks the host for their lengths.
        self._on_host = ("document_ids",) if config.model.attention_dropout > 0 else ()
        self._dataset, self._warn = dataset, warn
        self._rank, self._size = data_parallel_rank, data_parallel_size
        self._micro_batch_size = config.training.micro_batch_size
        cyclic = config.data.dataloader_type == "cyclic" and not dataset.read_once
        self._order = SampleOrder(len(dataset), config.training.seed, cyclic, dataset.read_once)
        self._timeout = 60.0 * config.parallel.distributed_timeout_minutes * _TIMEOUT_SHARE
        self._num_workers = config.data.num_workers
        self._ahead = _AHEAD_PER_WORKER * self._num_workers
        self._next = consumed_samples  # position of the microbatch row that is asked of the workers next
        self._asked: deque[_Microbatch] = deque()
        self._read_of_source = [0] * len(dataset.source_names)
        self._work: queue.SimpleQueue[_Microbatch | None] = queue.SimpleQueue()
        # Without read-ahead one thread still does the reading, so that a read that hangs can be named.
        self._threads = [
            threading.Thread(target=_serve, args=(self._work, dataset, self._device), daemon=True)
            for _ in range(max(1, self._num_workers))
        ]
        for thread in self._threads:
            thread.start()
        # Runs at interpreter exit too: a thread that the interpreter ends inside torch's C++ aborts the process.
        self._stop = weakref.finalize(self, _stop, self._work, self._threads)

    def next_batch(self, global_batch_size: int) -> Tensors:
        """My rank's rows of the next `global_batch_size` samples, int64 [M*B, S] each, microbatch after microbatch.

        Keys: tokens, labels (-100 = no loss), with the reset flags position_ids and document_ids.

        Raises:
            ConfigError: global_batch_size does not divide into microbatches; a token id beyond the vocabulary.
            LoaderStalledError: the data did not come before the other ranks would give up.
        """
        step = self._micro_batch_size * self._size
        count, rest = divmod(global_batch_size, step)
        if rest or not count:
            raise ConfigError(
                f"the global batch size is {global_batch_size}, wanted a multiple of --micro-batch-size "
                f"{self._micro_batch_size} x {self._size} data-parallel ranks = {step}"
            )
        assert self._stop.alive, "the loader is closed"
        self._ask(count)
        asked = [self._asked.popleft() for _ in range(count)]
        rows = [self._wait(microbatch) for microbatch in asked]
        self.consumed_samples += global_batch_size
        for microbatch in asked:
            for index in microbatch.indices:
                if index is not None:
                    self._read_of_source[self._dataset.source_of(index)] += 1
        if self._num_workers:
            self._ask(max(self._ahead, count), ahead=True)
        if count == 1:
            return {key: self._placed(key, tensor) for key, tensor in rows[0].items()}
        return {key: torch.cat([self._placed(key, tensors[key]) for tensors in rows]) for key in rows[0]}

    def _placed(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if key in self._on_host else tensor.to(self._device, non_blocking=True)

    def take_source_counts(self) -> tuple[list[str], list[int]]:
        """The sources' names, and how many samples of each this rank got since the last call."""
        counts = self._read_of_source
        self._read_of_source = [0] * len(counts)
        return self._dataset.source_names, counts

    def close(self) -> None:
        """Stop the threads. One that hangs in a read is left behind: it cannot keep the process from ending."""
        self._stop()
        self._asked.clear()

    def _ask(self, count: int, ahead: bool = False) -> None:
        """Have `count` microbatches on their way; ahead of need not those behind the end of a set read once."""
        while len(self._asked) < count:
            if ahead and self._order.read_once and self._next >= self._order.num_samples:
                return
            first = self._next + self._rank * self._micro_batch_size
            indices = [self._order.sample_at(first + row) for row in range(self._micro_batch_size)]
            microbatch = _Microbatch(indices)
            self._next += self._micro_batch_size * self._size
            self._asked.append(microbatch)
            self._work.put(microbatch)

    def _wait(self, microbatch: "_Microbatch") -> Tensors:
        started, warn_at = time.monotonic(), min(_FIRST_WARNING_S, self._timeout / 2)
        line = f"data-parallel rank {self._rank}: no data of the {self._dataset.name} set"
        where = ""
        while not wait([microbatch.tensors], max(0.0, started + warn_at - time.monotonic())).done:
            waited = time.monotonic() - started
            if waited >= self._timeout:
                raise LoaderStalledError(f"{line} for {waited:.0f} s{where}")
            self._warn(f"warning: {line} for {waited:.0f} s: samples {microbatch.indices}{where}")
            # Only the second line says where: finding out reads the index, which may hang as well.
            warn_at, where = min(2 * waited, self._timeout), f", {self._where(microbatch)}"
        return microbatch.tensors.result()

    def _where(self, microbatch: "_Microbatch") -> str:
        if not microbatch.tensors.running():
            return "the workers are busy with samples before these"
        places = [self._dataset.find_token(index) for index in microbatch.indices if index is not None]
        return f"reading {'; '.join(places)}"


@dataclass
class _Microbatch:
    """The samples of one microbatch, and its tensors when a worker has made them."""

    indices: list[int | None]
    tensors: Future[Tensors] = field(default_factory=Future)


def _serve(work: "queue.SimpleQueue[_Microbatch | None]", dataset: Samples, device: torch.device) -> None:
    """A worker: make microbatches until None comes. Knows no loader, so that a dropped loader can be collected."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # a thread starts on device 0, and pinning would make a context there
    while (microbatch := work.get()) is not None:
        microbatch.tensors.set_running_or_notify_cancel()
        try:
            arrays = dataset.batch(microbatch.indices)
            tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
            if device.type == "cuda":
                tensors = {key: tensor.pin_memory() for key, tensor in tensors.items()}
            microbatch.tensors.set_result(tensors)
        except BaseException as error:  # noqa: BLE001  it belongs to the one who waits for the data
            microbatch.tensors.set_exception(error)


def _stop(work: "queue.SimpleQueue[_Microbatch | None]", threads: list[threading.Thread]) -> None:
    """Empty the queue and end the workers."""
    while True:
        try:
            work.get_nowait()
        except queue.Empty:
            break
    for _ in threads:
        work.put(None)
    deadline = time.monotonic() + _LEAVE_S
    for thread in threads:
        if thread is not threading.current_thread():  # garbage may be collected in a worker
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
