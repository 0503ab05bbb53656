"""Save and load the state of a run, on all ranks: whole or not at all, in the background if asked, in any layout.

A save writes aside, syncs, hashes, renames, and moves the pointer last. Nothing outside the folder being written
changes before it is complete, so a kill at any moment leaves the checkpoint before it as it was.
"""

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_lite.checkpoint.agreement import Ranks, sentence
from megatron_lite.checkpoint.compare import check_resumable
from megatron_lite.checkpoint.dcp import save_shards
from megatron_lite.checkpoint.folder import (
    StoredCheckpoint,
    delete,
    expired,
    find_checkpoint,
    refuse_to_replace,
)
from megatron_lite.checkpoint.host_copy import HostCopy, mark
from megatron_lite.checkpoint.manifest import TOKENIZER, FileEntry, Manifest, entry_of, why_corrupt
from megatron_lite.checkpoint.reading import OPTIMIZER_PREFIX, RANDOM_PREFIX, CheckpointReader
from megatron_lite.checkpoint.shards import LocalShard, shard_of
from megatron_lite.checkpoint.storage import Storage
from megatron_lite.checkpoint.writing import NewFolder, read_files, state_files
from megatron_lite.config import Config, ConfigError

_LISTED = 8
# Tensors with a row for each token, their optimizer state included.
VOCABULARY_ROWS = ("embedding.word_embeddings.weight", "lm_head.weight")


class Checkpointer:
    """Saves to --save, loads what --load, --ckpt-step or --pretrained-checkpoint name; all ranks call every method.

    Args:
        group: a gloo group of all ranks that nothing else uses (a background save talks over it); None: the
            default group, or this process alone.
        layout: mesh axis -> size; coordinates: mesh axis -> this rank's position.
        tokenizer_files: copied into every checkpoint.

    Raises:
        ConfigError: --save cannot be written.
    """

    def __init__(
        self,
        config: Config,
        group: dist.ProcessGroup | None,
        layout: Mapping[str, int],
        coordinates: Mapping[str, int],
        tokenizer_files: Iterable[Path] = (),
    ) -> None:
        self._config = config
        self._ranks = Ranks(group)
        self._layout = dict(layout)
        self._me = ".".join(f"{axis}{position}" for axis, position in coordinates.items())
        self._host_copy = HostCopy()
        self._copied = threading.Event()
        self._overlap_copy = False
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        # Of the newest save that did not fail, one that is being written included; `close` is sure.
        self.saved_iteration: int | None = None
        self._saved_before: int | None = None
        if config.checkpoint.save:
            self._storage = Storage(config.checkpoint.save)
            self._check_save_folder()
        files = tuple(tokenizer_files)
        self._tokenizer_files = self._ranks.rank0_only(lambda: read_files(files))

    def overlap_copy_with(self, optimizer: torch.optim.Optimizer) -> None:
        """Let a background save take its copy while the next step computes: this optimizer waits for it.

        Nothing but the optimizer's step may change what was given to save.
        """

        def wait(*_: object) -> None:
            self._copied.wait()

        optimizer.register_step_pre_hook(wait)
        self._copied.set()
        self._overlap_copy = True

    def save(
        self,
        iteration: int,
        tensors: Mapping[str, torch.Tensor],
        train_state: Mapping[str, Any],
        rank_state: Mapping[str, torch.Tensor],
    ) -> bool:
        """Save, or with --async-save copy the state to memory and write it in the background.

        tensors: global name -> weight or optimizer state, plain or DTensor. rank_state: this rank's generators.
        An earlier save still being written is waited for.

        Returns:
            whether it is saved (or being written). A failed save is one warning, and training goes on.

        Raises:
            ConfigError: the save, or the one before it, failed and --exit-on-save-failure is given.
        """
        self.close()
        shards = {name: shard_of(tensor) for name, tensor in tensors.items()}
        shards |= {f"{RANDOM_PREFIX}{self._me}.{key}": shard_of(value) for key, value in rank_state.items()}
        state = dict(train_state) | {"iteration": iteration, "layout": self._layout}
        files = state_files(self._config.to_dict(), state, self._tokenizer_files)
        self._saved_before, self.saved_iteration = self.saved_iteration, iteration
        if not self._config.checkpoint.async_save:
            self._write(iteration, lambda: shards, files)
            return self._report()
        self._copied.clear()
        ready = mark(shards.values())
        arguments = (iteration, lambda: self._copy(shards, ready), files)
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()
        if not self._overlap_copy:
            self._copied.wait()
        return True

    def poll(self) -> None:
        """Tell how a background save ended, once it did. Cheap: call it every step. Raises as save does."""
        if self._thread is not None and not self._thread.is_alive():
            self.close()

    def close(self) -> None:
        """Wait for a background save. Raises as save does."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._report()

    def find(self) -> StoredCheckpoint | None:
        """The checkpoint to load, the same on all ranks; None: there is none, start afresh.

        With --verify-integrity every file is hashed, spread over the ranks, and a checkpoint that fails does not
        count.

        Raises:
            ConfigError: as find_checkpoint.
        """
        config, rejected = self._config.checkpoint, {}
        while True:
            checkpoint = self._ranks.rank0_only(lambda: find_checkpoint(config, rejected))
            verify = checkpoint is not None and config.verify_integrity
            problem = self._corruption(checkpoint) if verify else None
            if problem is None:
                break
            rejected[checkpoint.path] = problem
        if checkpoint is not None and self._ranks.rank == 0:
            for note in checkpoint.notes:
                print(f"warning: {note}", flush=True)
        return checkpoint

    def refuse_to_replace(self, checkpoint: StoredCheckpoint | None, weights_only: bool) -> None:
        """Raise ConfigError when --save holds other checkpoints than those that this run goes on from."""
        self._ranks.rank0_only(lambda: refuse_to_replace(self._config.checkpoint, checkpoint, weights_only))

    def read_train_state(self, checkpoint: StoredCheckpoint) -> dict[str, Any]:
        """What was given to save as train_state, and "layout"."""
        return self._ranks.rank0_only(lambda: checkpoint.train_state)

    def allowed_differences(self, checkpoint: StoredCheckpoint, weights_only: bool) -> list[str]:
        """Lines about what differs from the run that saved, and may. Raises ConfigError as check_resumable."""

        def compare() -> list[str]:
            same = self.has_same_tokenizer(checkpoint)
            return check_resumable(self._config, checkpoint.config, checkpoint.path, weights_only, same)

        return self._ranks.rank0_only(compare)

    def has_same_tokenizer(self, checkpoint: StoredCheckpoint) -> bool | None:
        """Whether the checkpoint's tokenizer files hold what this run's do, by any names; None: one has none."""
        manifest = checkpoint.manifest
        kept = {entry.hash for path, entry in manifest.files.items() if _decides_ids(path)}
        files = [data for path, data in self._tokenizer_files.items() if _decides_ids(path)]
        ours = {entry_of(data, manifest.algorithm).hash for data in files}
        return kept == ours if kept and ours else None

    def load(self, checkpoint: StoredCheckpoint, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill tensors, in place, from a checkpoint of any layout. Names that are not asked for are left.

        A wider dtype than the stored one is filled exactly, with a line that says so.

        Raises:
            ConfigError: names are missing, shapes differ, or values would be rounded; all are listed, and nothing
                is changed. Or the files cannot be read.
        """
        with self._ranks.all_ranks(lambda: CheckpointReader(checkpoint)) as reader:
            self._check_tensors(reader, tensors)
            shards = {name: shard_of(tensor) for name, tensor in tensors.items()}
            self._ranks.all_ranks(lambda: reader.fill(shards))

    def load_rank_state(self, checkpoint: StoredCheckpoint) -> dict[str, torch.Tensor] | None:
        """This rank's rank_state: None when the layout differs, empty when the checkpoint keeps none."""
        if self.read_train_state(checkpoint).get("layout") != self._layout:
            return None
        prefix = f"{RANDOM_PREFIX}{self._me}."

        def read() -> dict[str, torch.Tensor]:
            with CheckpointReader(checkpoint) as reader:
                names = [name for name in reader.names() if name.startswith(prefix)]
                return {name.removeprefix(prefix): reader.read(name) for name in names}

        return self._ranks.all_ranks(read)

    def _check_save_folder(self) -> None:
        """It can be written, and every rank sees what rank 0 writes."""
        save = self._config.checkpoint.save
        probe = self._ranks.rank0_only(lambda: f".written_by_{os.getpid()}")

        def write() -> None:
            try:
                self._storage.make_folder()
                self._storage.write(probe, b"")
            except OSError as error:
                raise ConfigError(f"--save {save} cannot be written: {sentence(error)}") from None

        self._ranks.rank0_only(write)
        seen = self._ranks.gather(self._storage.size(probe) is not None)
        self._ranks.rank0_only(lambda: self._storage.remove_file(probe))
        if not all(seen):
            raise ConfigError(
                f"--save {save}: rank {seen.index(False)} does not see what rank 0 writes there; "
                "it has to lie on a filesystem that all ranks share"
            )

    def _copy(self, shards: dict[str, LocalShard], ready: torch.cuda.Event | None) -> dict[str, LocalShard]:
        try:
            return self._host_copy.copy(shards, ready)
        finally:
            self._copied.set()

    def _write(
        self, iteration: int, take_shards: Callable[[], dict[str, LocalShard]], files: dict[str, bytes]
    ) -> None:
        """Write a checkpoint; every rank ends with the same self._failure."""
        self._failure = None
        new = NewFolder(self._storage, iteration)
        try:
            shards = self._ranks.all_ranks(take_shards)
            self._ranks.rank0_only(new.begin)
            written = save_shards(self._storage, new.name, shards, self._ranks.group)
            if self._config.checkpoint.verify_integrity:  # each rank reads back what it wrote
                damage = why_corrupt(self._storage, new.name, Manifest(iteration, written), written)
                for problem in self._ranks.gather(damage):
                    if problem is not None:
                        raise ConfigError(f"read back, {problem}")
            entries = {name: entry for part in self._ranks.gather(written) for name, entry in part.items()}
            self._ranks.rank0_only(lambda: self._commit(new, entries, files))
        except (Exception, CheckpointException) as error:
            self._failure = sentence(error)
            if self._ranks.rank == 0:
                new.discard()

    def _commit(self, new: NewFolder, entries: dict[str, FileEntry], files: dict[str, bytes]) -> None:
        new.commit(entries, files)
        config = self._config.checkpoint
        for name in expired(self._storage, new.iteration, config.keep_last, config.save_retain_interval):
            try:
                delete(self._storage, name)
            except OSError as error:  # removed by hand, or not ours to remove: the new checkpoint is good
                print(f"warning: {self._storage.full(name)} was not deleted: {sentence(error)}", flush=True)

    def _report(self) -> bool:
        if self._failure is None:
            return True
        iteration, self.saved_iteration = self.saved_iteration, self._saved_before
        text = f"checkpoint of iteration {iteration} was not saved in {self._storage.full()}: {self._failure}"
        if self._config.checkpoint.exit_on_save_failure:
            raise ConfigError(f"{text} (--exit-on-save-failure)")
        if self._ranks.rank == 0:
            print(f"warning: {text}; the run goes on without it", flush=True)
        return False

    def _corruption(self, checkpoint: StoredCheckpoint) -> str | None:
        """What is wrong with a file of a checkpoint, by its hash; each rank hashes its share of the files."""
        manifest = checkpoint.manifest
        names = sorted(manifest.files, key=lambda n: -manifest.files[n].size)
        mine = names[self._ranks.rank :: self._ranks.size]
        problem = why_corrupt(checkpoint.storage, checkpoint.name, manifest, mine)
        return next((why for why in self._ranks.gather(problem) if why is not None), None)

    def _differ_in_padding(self, name: str, stored: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
        """Rows behind the vocabulary mean nothing, and how many there are follows from the tensor ranks.

        Those that only one side has stay as they are.
        """
        size = self._config.model.vocab_size
        rows = name.endswith(VOCABULARY_ROWS) and stored[1:] == tuple(wanted[1:])
        return rows and size is not None and min(stored[0], wanted[0]) >= size

    def _check_tensors(self, reader: CheckpointReader, tensors: Mapping[str, torch.Tensor]) -> None:
        stored = reader.names()
        missing, wrong, wider = set(), set(), set()
        for name, tensor in tensors.items():
            if name not in stored:
                missing.add(name)
                continue
            shape, dtype = stored[name].shape, stored[name].dtype
            if shape != tuple(tensor.shape) and not self._differ_in_padding(name, shape, tensor.shape):
                wrong.add(f"{name} is {list(shape)}, wanted {list(tensor.shape)}")
            elif dtype != tensor.dtype:
                text = f"{name} is {dtype}, wanted {tensor.dtype}".replace("torch.", "")
                (wider if torch.promote_types(dtype, tensor.dtype) == tensor.dtype else wrong).add(text)
        every = zip(*self._ranks.gather((missing, wrong, wider)), strict=True)
        missing, wrong, wider = (sorted(set().union(*sets)) for sets in every)
        if missing:
            optimizer_only = all(name.startswith(OPTIMIZER_PREFIX) for name in missing)
            way = "; --no-load-optim starts the optimizer's state anew" if optimizer_only else ""
            raise ConfigError(f"{reader.path} holds no {_list(missing)}{way}")
        if wrong:
            raise ConfigError(f"{reader.path} does not fit: {_list(wrong)}")
        if wider and self._ranks.rank == 0:
            print(f"note: {reader.path}: {_list(wider)}; filled exactly", flush=True)


def _decides_ids(path: str) -> bool:
    """Whether a file of a checkpoint is one of the tokenizer's, but for what only chats need."""
    return path.startswith(f"{TOKENIZER}/") and not path.endswith(".jinja")


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED:,} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
