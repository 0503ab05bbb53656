"""The loader: batches as a pure function of consumed samples, whatever ranks, workers and micro batch sizes."""

import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_lite.config import Config, ConfigError, DataConfig, ModelConfig, ParallelConfig, TrainingConfig
from megatron_lite.data.loader import Loader, LoaderStalledError
from megatron_lite.data.order import SampleOrder, permute
from megatron_lite.data.samples import SampleOptions, Samples

LENGTH = 8


class Numbered(Samples):
    """Sample i is the tokens 1000 * i + position: what is read tells which sample it was."""

    def __init__(self, size, **options):
        self.size, self.name, self.slow = size, "numbered", {}
        self.options = SampleOptions(LENGTH, **options)
        self.reads = []

    def __len__(self):
        return self.size

    def read(self, index, out):
        self.reads.append(index)
        if index in self.slow:
            self.slow[index]()
        out[:] = 1000 * index + np.arange(len(out))
        return len(out)

    def find_token(self, index, position=0):
        return f"file {index}: document 0, token {position}"


def config_of(micro=2, workers=2, order=None, timeout=10, seed=1234):
    return Config(
        parallel=ParallelConfig(distributed_timeout_minutes=timeout),
        data=DataConfig(num_workers=workers, dataloader_type=order),
        training=TrainingConfig(micro_batch_size=micro, seed=seed),
    )


def ids(batch):
    assert batch["tokens"].dtype == batch["labels"].dtype == torch.int64
    return (batch["tokens"][:, 0] // 1000).tolist()


def read(dataset, sizes, rank=0, ranks=1, consumed=0, **config):
    loader = Loader(dataset, config_of(**config), rank, ranks, consumed)
    batches = [ids(loader.next_batch(size)) for size in sizes]
    assert loader.consumed_samples == consumed + sum(sizes)
    loader.close()
    return batches


def test_microbatches_go_to_ranks_as_in_megatron():
    dataset = Numbered(100)
    by_rank = [read(dataset, [12, 12], rank=rank, ranks=3, consumed=24) for rank in range(3)]
    assert by_rank[0] == [[24, 25, 30, 31], [36, 37, 42, 43]]
    assert by_rank[1] == [[26, 27, 32, 33], [38, 39, 44, 45]]
    assert by_rank[2] == [[28, 29, 34, 35], [40, 41, 46, 47]]


@pytest.mark.parametrize("order", ["single", "cyclic"])
@pytest.mark.parametrize(
    "ranks, micro, workers", [(1, 1, 0), (1, 8, 2), (2, 2, 1), (4, 1, 3), (8, 1, 2), (2, 4, 0)]
)
def test_a_step_reads_the_same_samples_in_every_layout(ranks, micro, workers, order):
    sizes = [8, 8, 16, 24, 8, 40]  # a ramp-up, and down again, over the end of the data (epochs of 50)
    dataset = Numbered(50)
    steps = [
        read(dataset, sizes, rank, ranks, micro=micro, workers=workers, order=order) for rank in range(ranks)
    ]
    stream = SampleOrder(50, 1234, cyclic=order == "cyclic")
    position = 0
    for step, size in enumerate(sizes):
        wanted = [stream.sample_at(position + i) for i in range(size)]
        rows = [sample for rank in steps for sample in rank[step]]
        assert all(len(rank[step]) == size // ranks for rank in steps)
        # The global batch, microbatch by microbatch, ranks side by side, is the order itself.
        table = np.array([rank[step] for rank in steps]).reshape(ranks, -1, micro).transpose(1, 0, 2)
        assert table.ravel().tolist() == wanted
        assert sorted(rows) == sorted(wanted)
        position += size


@pytest.mark.parametrize("stops", [[3, 7, 9], [6, 6, 6], [25, 1, 12]])
def test_resume_three_times_with_other_ranks(stops):
    """Mid-epoch, at an epoch's end (after 100 samples), in a later epoch: nothing twice, nothing left out."""
    dataset, sizes = Numbered(100), [4] * 60
    straight = [sorted(batch) for batch in read(dataset, sizes, order="cyclic")]
    resumed, done = [], 0
    for ranks, steps in zip([1, 2, 4, 1], [*stops, 60 - sum(stops)]):
        parts = [
            read(dataset, [4] * steps, r, ranks, consumed=4 * done, micro=4 // ranks, order="cyclic")
            for r in range(ranks)
        ]
        resumed += [sorted(sum((part[i] for part in parts), [])) for i in range(steps)]
        done += steps
    assert resumed == straight


def test_cyclic_shuffles_each_epoch_anew():
    epochs = np.array(sum(read(Numbered(64), [64] * 3, order="cyclic"), [])).reshape(3, 64)
    assert all(sorted(epoch) == list(range(64)) for epoch in epochs.tolist())
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3
    assert read(Numbered(64), [64], order="cyclic", seed=1)[0] != epochs[0].tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65, 1000, 4097])
def test_permute_is_a_permutation(size):
    assert sorted(permute(i, size, 3, 5) for i in range(size)) == list(range(size))


def test_permute_is_even():
    """Where value 0 lands, and the distance of neighbours, over many shuffles: no place is preferred."""
    size, shuffles = 10, 4000
    places = np.bincount([permute(0, size, 1, epoch) for epoch in range(shuffles)], minlength=size)
    steps = np.bincount(
        [(permute(1, size, 1, epoch) - permute(0, size, 1, epoch)) % size for epoch in range(shuffles)],
        minlength=size,
    )
    expected = shuffles / size
    assert ((places - expected) ** 2 / expected).sum() < 30  # chi-square, 9 degrees of freedom: p = 0.0004
    expected = shuffles / (size - 1)
    assert steps[0] == 0
    assert ((steps[1:] - expected) ** 2 / expected).sum() < 30


def test_a_huge_order_costs_nothing():
    started = time.perf_counter()
    order = SampleOrder(2**40 + 1, cyclic=True)
    assert len({order.sample_at(position) for position in range(2**41, 2**41 + 1000)}) == 1000
    assert time.perf_counter() - started < 30  # an order that is written out would take weeks


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_set_read_once_ends_with_masked_samples(ranks):
    dataset = Numbered(10)
    dataset.read_once = True
    steps = -(-10 // 6)
    real, masked = [], 0
    for rank in range(ranks):
        loader = Loader(dataset, config_of(micro=2 if ranks != 2 else 3), rank, ranks, 0)
        for _ in range(steps):
            batch = loader.next_batch(6)
            assert batch["tokens"].shape == (6 // ranks, LENGTH)
            for tokens, labels in zip(batch["tokens"], batch["labels"]):
                if (labels == -100).all():
                    masked += 1
                    assert (tokens == 0).all()
                else:
                    assert (labels != -100).all()
                    real.append(int(tokens[0]) // 1000)
        loader.close()
    assert sorted(real) == list(range(10))
    assert masked == 2


def test_labels_and_reset_arrays_come_along():
    dataset = Numbered(4, eod=2003, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
    loader = Loader(dataset, config_of(micro=4), 0, 1, 0)
    batch = loader.next_batch(4)
    loader.close()
    assert set(batch) == {"tokens", "labels", "position_ids", "document_ids"}
    assert batch["position_ids"].tolist() == [
        [0, 1, 2, 3, 0, 1, 2, 3] if i == 2 else [*range(8)] for i in range(4)
    ]
    assert batch["document_ids"][2].tolist() == [0] * 4 + [1] * 4
    assert batch["labels"][2].tolist() == [2001, 2002, 2003, -100, 2005, 2006, 2007, 2008]


@pytest.mark.parametrize(("dropout", "where"), [(0.1, "cpu"), (0.0, "meta")])
def test_document_ids_stay_on_the_host_where_attention_drops(dropout, where):
    """There the host reads the documents' lengths; the meta device stands for a GPU."""
    config = replace(config_of(micro=2), model=ModelConfig(attention_dropout=dropout))
    loader = Loader(Numbered(4, eod=2003, reset_attention_mask=True), config, 0, 1, 0, "meta")
    batch = loader.next_batch(4)
    loader.close()
    assert (batch["tokens"].device.type, batch["document_ids"].device.type) == ("meta", where)


def test_it_reads_ahead_as_much_as_a_step_and_no_more():
    dataset = Numbered(1000)
    loader = Loader(dataset, config_of(micro=1, workers=2), 0, 1, 0)
    assert dataset.reads == []
    loader.next_batch(32)
    deadline = time.monotonic() + 30
    while len(dataset.reads) < 64 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert sorted(dataset.reads) == list(range(64))
    loader.close()


def test_no_workers_read_nothing_ahead():
    dataset = Numbered(1000)
    loader = Loader(dataset, config_of(micro=1, workers=0), 0, 1, 0)
    loader.next_batch(4)
    time.sleep(0.05)
    assert dataset.reads == [0, 1, 2, 3]
    loader.close()


def test_a_slow_read_does_not_change_the_order():
    dataset = Numbered(100)
    dataset.slow = {0: lambda: time.sleep(0.2), 5: lambda: time.sleep(0.1)}
    assert read(dataset, [8, 8], micro=1, workers=4) == [[*range(8)], [*range(8, 16)]]


def test_a_stalled_loader_is_named(capsys):
    dataset, release, lines = Numbered(100), threading.Event(), []
    dataset.slow = {6: release.wait}
    config = config_of(micro=1)
    config = replace(config, parallel=replace(config.parallel, distributed_timeout_minutes=1 / 60))
    loader = Loader(dataset, config, 2, 4, 0, warn=lines.append)
    started = time.monotonic()
    with pytest.raises(
        LoaderStalledError, match=r"data-parallel rank 2: .*numbered.* for \d+ s, reading file 6"
    ):
        loader.next_batch(8)
    assert time.monotonic() - started < 30
    assert len(lines) == 1
    assert "data-parallel rank 2: no data of the numbered set" in lines[0]
    release.set()
    loader.close()


def test_an_error_in_a_worker_reaches_the_caller():
    dataset = Numbered(100, vocab_size=5005)
    loader = Loader(dataset, config_of(), 0, 1, 0)
    loader.next_batch(4)
    with pytest.raises(
        ConfigError, match="^file 5: document 0, token 5 is token id 5,005, wanted 0 to 5,004"
    ):
        loader.next_batch(4)
    loader.close()


def test_a_batch_that_does_not_divide_is_refused():
    loader = Loader(Numbered(10), config_of(micro=2), 0, 3, 0)
    with pytest.raises(
        ConfigError, match="global batch size is 8, wanted a multiple of --micro-batch-size 2 x 3"
    ):
        loader.next_batch(8)
    loader.close()


def test_threads_end_with_the_loader():
    before = threading.active_count()
    closed, dropped = (Loader(Numbered(1000), config_of(), 0, 1, 0) for _ in range(2))
    closed.next_batch(4)
    dropped.next_batch(4)
    assert threading.active_count() == before + 4
    closed.close()
    del dropped
    deadline = time.monotonic() + 30
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


@pytest.mark.parametrize(
    "busy, left", [("threading.Event().wait", 1), ("lambda: time.sleep(0.1)", 0)], ids=["hanging", "reading"]
)
def test_a_process_ends_although_its_loader_is_busy(busy, left):
    """A worker that can end has ended before the interpreter does (it would abort inside torch now and then)."""
    program = (
        "import atexit, threading, time\n"
        "atexit.register(lambda: print(min(1, threading.active_count() - 1)))\n"  # runs after the loader's own
        "from megatron_lite.data import loader as module\n"
        "from tests.data.test_loader import Loader, Numbered, config_of\n"
        "module._LEAVE_S = 2.0\n"
        "dataset = Numbered(10**6)\n"
        f"dataset.slow = {{i: {busy} for i in range(40, 60)}}\n"
        "loader = Loader(dataset, config_of(micro=2, workers=4), 0, 1, 0)\n"
        "print(loader.next_batch(32)['tokens'].shape)\n"
        "while loader._work.qsize() > 10: time.sleep(0.01)\n"  # all four are at the busy samples
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, timeout=240, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"torch.Size([32, 8])\n{left}\n", "")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_batches_on_a_gpu_equal_those_on_the_cpu():
    """Pinned buffers are used again while copies are on their way: the values tell if they were let go too early."""
    dataset, config = Numbered(10_000), config_of(micro=4, workers=4)
    here, there = (
        Loader(dataset, config, 0, 1, 0, device)
        for device in ("cpu", f"cuda:{torch.cuda.device_count() - 1}")
    )
    batches = [(here.next_batch(64), there.next_batch(64)) for _ in range(100)]
    for cpu, gpu in batches:
        assert gpu["tokens"].device.type == "cuda"
        assert all(torch.equal(cpu[key], gpu[key].cpu()) for key in cpu)
    here.close()
    there.close()
