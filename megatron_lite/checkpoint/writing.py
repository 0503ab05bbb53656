"""One new checkpoint folder: written aside, complete before it has its name. And a whole one in one process."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from megatron_lite.checkpoint.agreement import sentence
from megatron_lite.checkpoint.dcp import save_batches
from megatron_lite.checkpoint.folder import (
    ASIDE,
    POINTER,
    REPLACED,
    WRITING,
    clear_leftovers,
    delete,
    folder_name,
)
from megatron_lite.checkpoint.manifest import (
    CONFIG,
    MANIFEST,
    TOKENIZER,
    TRAIN_STATE,
    FileEntry,
    Manifest,
    entry_of,
    why_incomplete,
)
from megatron_lite.checkpoint.shards import LocalShard, shard_of
from megatron_lite.checkpoint.storage import Storage
from megatron_lite.config.declare import ConfigError

_BATCH_BYTES = 1 << 30
_VISIBILITY_WAITS_S = (1, 2, 5)


class NewFolder:
    """A checkpoint folder from its first byte to the moment it counts.

    On a filesystem it is written as iter_N.tmp and renamed. An object store cannot rename a folder: there it is
    written in place, and its manifest, the last file, makes it count.
    """

    def __init__(self, storage: Storage, iteration: int) -> None:
        self.storage, self.iteration = storage, iteration
        self.final = folder_name(iteration)
        self.name = self.final if storage.remote else self.final + ASIDE
        self._done = False

    def begin(self) -> None:
        """Clear what killed runs left, and make the folder."""
        clear_leftovers(self.storage)
        if self.storage.remote and self.storage.is_folder(self.final):
            delete(self.storage, self.final)
        self.storage.make_folder(self.name)
        if self.storage.remote:
            self.storage.write(f"{self.final}/{WRITING}", b"")

    def commit(self, entries: Mapping[str, FileEntry], files: Mapping[str, bytes]) -> None:
        """Add the small files and the manifest, give the folder its name, point at it.

        entries: the files that are there already.
        """
        if any("/" in name for name in files):
            self.storage.make_folder(f"{self.name}/{TOKENIZER}")
        for name, data in files.items():
            self.storage.write(f"{self.name}/{name}", data)
        small = {name: entry_of(data) for name, data in files.items()}
        manifest = Manifest(self.iteration, {**entries, **small})
        self.storage.write(f"{self.name}/{MANIFEST}", manifest.to_bytes())
        self._check_visible()
        if self.storage.remote:
            self.storage.remove_file(f"{self.final}/{WRITING}")
        else:
            self._take_name()
        self._done = True
        self.storage.write(POINTER, f"{self.iteration}\n".encode())
        clear_leftovers(self.storage)

    def _check_visible(self) -> None:
        """What other ranks wrote has to be seen from here; a network filesystem may take a moment."""
        for wait in (*_VISIBILITY_WAITS_S, None):
            reason = why_incomplete(self.storage, self.name, self.iteration)
            if reason is None:
                return
            if wait is not None:
                time.sleep(wait)
        raise ConfigError(f"{reason}, seen from rank 0: --save has to lie where all ranks see the same files")

    def _take_name(self) -> None:
        """iter_N.tmp becomes iter_N. An iter_N that is there waits as iter_N.replaced, which counts till then."""
        if self.storage.is_folder(self.final):
            if self.storage.is_folder(self.final + REPLACED):
                self.storage.remove_folder(self.final)  # it is not whole, or begin() had removed the other
            else:
                self.storage.rename(self.final, self.final + REPLACED)
        self.storage.sync_folder(self.name)
        self.storage.rename(self.name, self.final)
        self.storage.sync_folder()

    def discard(self) -> None:
        """Remove what was written, as far as that goes."""
        with suppress(OSError):
            if self.storage.is_folder(self.name) and not self._done:
                self.storage.remove_folder(self.name)


def read_files(paths: Iterable[Path]) -> dict[str, bytes]:
    """{name in the checkpoint: content} of tokenizer files."""
    return {f"{TOKENIZER}/{path.name}": path.read_bytes() for path in map(Path, paths)}


def state_files(
    config: Mapping[str, Any], train_state: Mapping[str, Any], tokenizer_files: Mapping[str, bytes]
) -> dict[str, bytes]:
    """{name: content} of a checkpoint's small files."""
    files = {CONFIG: config, TRAIN_STATE: train_state}
    return {name: json.dumps(value, indent=1).encode() for name, value in files.items()} | {**tokenizer_files}


def write_checkpoint(
    save_dir: str,
    iteration: int,
    tensors: Iterable[tuple[str, torch.Tensor]],
    config: Mapping[str, Any],
    train_state: Mapping[str, Any],
    tokenizer_files: Iterable[Path] = (),
) -> str:
    """Write a checkpoint in one process, holding about 1 GiB of tensors at a time; returns the folder's path.

    Args:
        tensors: (global name, tensor), taken one by one.
        config: Config.to_dict(); train_state: TrainState.to_dict() and its schedule.

    Raises:
        ConfigError: it cannot be written; what was there before is as it was.
    """
    storage = Storage(save_dir)
    new = NewFolder(storage, iteration)
    files = state_files(config, dict(train_state) | {"iteration": iteration}, read_files(tokenizer_files))
    try:
        storage.make_folder()
        new.begin()
        new.commit(save_batches(storage, new.name, _batches(tensors)), files)
    except OSError as error:
        raise ConfigError(f"{save_dir} cannot be written: {sentence(error)}") from None
    finally:
        new.discard()
    return storage.full(new.final)


def _batches(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, LocalShard]]:
    batch, size = {}, 0
    for name, tensor in tensors:
        batch[name] = shard_of(tensor)
        size += tensor.numel() * tensor.element_size()
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = {}, 0
    yield batch
