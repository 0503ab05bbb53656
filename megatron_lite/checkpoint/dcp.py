"""Tensors into a folder in the format of torch.distributed.checkpoint (DCP), every file hashed as it is written."""

import errno
import math
import os
import pickle
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.utils.serialization
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from megatron_lite.checkpoint.manifest import METADATA, FileEntry, entry_of, new_digest
from megatron_lite.checkpoint.shards import LocalShard
from megatron_lite.checkpoint.storage import Storage

_THREADED_BYTES = 1 << 20
_SYNC_BYTES = 32 << 20


def save_shards(
    storage: Storage, folder: str, shards: dict[str, LocalShard], group: dist.ProcessGroup | None
) -> dict[str, FileEntry]:
    """Write the shards of all ranks of the group (None: this process alone); returns the files this rank wrote.

    Shards that several ranks hold are written by one of them.

    Raises:
        CheckpointException: on every rank, when any rank failed.
    """
    writer = _Writer(storage, folder, from_gpu=any(shard.local.is_cuda for shard in shards.values()))
    planner = _Planner(storage.free_bytes())
    # The manifest holds a hash of every file; zip's own checksum would be computed on top, at a third of its speed.
    with torch.utils.serialization.config.patch("save.compute_crc32", False):
        dcp.save(shards, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    return writer.entries


def save_batches(
    storage: Storage, folder: str, batches: Iterable[dict[str, LocalShard]]
) -> dict[str, FileEntry]:
    """The same in one process for tensors that need not fit in memory together: a file per batch."""
    writer, whole, results = _Writer(storage, folder), Metadata({}), []
    for number, batch in enumerate(batches):
        planner = _Planner(storage.free_bytes())
        planner.set_up_planner(batch, is_coordinator=True)
        plans, metadata = planner.create_global_plan([planner.create_local_plan()])
        plan = writer.prepare_global_plan(plans * (number + 1))[number]  # gives the file its number
        results.append(writer.write_data(planner.finish_plan(plan), planner).value())
        repeated = metadata.state_dict_metadata.keys() & whole.state_dict_metadata.keys()
        assert not repeated, f"written twice: {sorted(repeated)}"
        whole.state_dict_metadata.update(metadata.state_dict_metadata)
    writer.finish(whole, results)
    return writer.entries


class _Planner(DefaultSavePlanner):
    """DCP's planner, given each tensor's slice on this rank directly, and how much room there is."""

    def __init__(self, free_bytes: int | None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._free_bytes = free_bytes

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(name, shard) for name, shard in self.state_dict.items()])
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        all_plans = [replace(plan, items=[i for i in plan.items if _is_needed(i)]) for plan in all_plans]
        plans, metadata = super().create_global_plan(all_plans)
        stored, wanted = metadata.state_dict_metadata, 0
        for item in (item for plan in all_plans for item in plan.items):
            kept, data = stored[item.index.fqn], item.tensor_data
            same = (kept.size, kept.properties.dtype) == (data.size, data.properties.dtype)
            assert same, f"two ranks call different tensors {item.index.fqn}"
        for name, kept in stored.items():
            held = sum(math.prod(chunk.sizes) for chunk in kept.chunks)
            assert held == math.prod(kept.size), (
                f"the ranks hold {held:,} elements of {name} {list(kept.size)}"
            )
            wanted += held * kept.properties.dtype.itemsize
        if self._free_bytes is not None and wanted > self._free_bytes:
            raise OSError(errno.ENOSPC, f"{wanted:,} bytes are to be written, {self._free_bytes:,} are free")
        return plans, metadata

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].local.contiguous()


def _write_item(name: str, shard: LocalShard) -> WriteItem:
    offsets = torch.Size(shard.offsets)
    return WriteItem(
        index=MetadataIndex(name, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(shard.sizes)),
            properties=TensorProperties(dtype=shard.local.dtype),
            size=torch.Size(shard.shape),
        ),
    )


def _is_needed(item: WriteItem) -> bool:
    """An empty shard is left out, unless the whole tensor is empty."""
    return math.prod(item.tensor_data.chunk.sizes) > 0 or math.prod(item.tensor_data.size) == 0


class _Writer(dcp.FileSystemWriter):
    """DCP's file writer on a folder of a Storage. `entries` are the files written, by name in their folder.

    from_gpu: copy tensors to the host while others are written. With CUDA on the machine DCP would do so for host
    tensors too: a context on GPU 0 from each rank's background thread, and from runs on the CPU.
    """

    def __init__(self, storage: Storage, folder: str, from_gpu: bool = False) -> None:
        ahead = {} if from_gpu else {"per_thread_copy_ahead": 0}
        super().__init__(folder, sync_files=False, **ahead)  # _HashedFile brings the bytes to the disk itself
        self._storage, self.path = storage, folder
        self.fs = self  # write_data asks a filesystem for the next two methods only
        self.entries: dict[str, FileEntry] = {}

    def concat_path(self, path: str, suffix: str) -> str:
        return f"{path}/{suffix}"

    @contextmanager
    def create_stream(self, path: str, mode: str) -> Iterator["_HashedFile"]:
        assert mode == "wb"
        stream = _HashedFile(self._storage, path)
        try:
            yield stream
        except Exception:
            # torch's archive writer turns an OSError of the file (disk full) into a complaint about positions.
            raise stream.error or sys.exception() from None
        finally:
            stream.close()
        self.entries[path.rsplit("/", 1)[-1]] = stream.entry()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # the folder is there, and empty

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
        metadata.storage_meta = StorageMeta(save_id=self.save_id)  # no path: folders are moved
        data = pickle.dumps(metadata)
        self._storage.write(f"{self.path}/{METADATA}", data)
        self.entries[METADATA] = entry_of(data)


class _HashedFile:
    """A file being written whose hash is known when it is closed.

    Writing, hashing and bringing bytes to the disk run side by side, so that together they take as long as the
    slowest of them.
    """

    def __init__(self, storage: Storage, path: str) -> None:
        self._file = storage.open(path, "wb")
        self._local = not storage.remote
        self._digest = new_digest()
        self._hasher, self._syncer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._syncs: list[Future[None]] = []
        self._size = self._unsynced = 0
        self.error: OSError | None = None

    def write(self, data: memoryview | bytes) -> int:
        """All of data."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _SYNC_BYTES):
            self._write_block(view[start : start + _SYNC_BYTES])
        return len(view)

    def _write_block(self, block: memoryview) -> None:
        threaded = len(block) >= _THREADED_BYTES
        hashed = self._hasher.submit(self._digest.update, block) if threaded else self._digest.update(block)
        try:
            self._file.write(block)
        except OSError as error:
            self.error = error
            raise
        finally:
            if threaded:
                hashed.result()  # the caller may reuse its memory once write returns
        self._size += len(block)
        self._unsynced += len(block)
        if self._local and self._unsynced >= _SYNC_BYTES:
            self._file.flush()
            self._syncs.append(self._syncer.submit(os.fdatasync, self._file.fileno()))
            self._unsynced = 0

    def tell(self) -> int:
        """Bytes written."""
        return self._size

    def flush(self) -> None:
        """To the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Bring everything to the disk. The second call does nothing."""
        if self._file.closed:
            return
        self._hasher.shutdown()
        self._syncer.shutdown()
        try:
            for written in self._syncs:
                written.result()  # the kernel reports a lost page once: to the sync that met it
            self._file.flush()
            if self._local:
                os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def entry(self) -> FileEntry:
        """Size and hash of what was written."""
        return FileEntry(self._size, self._digest.hexdigest())
