"""Which checkpoint to load, and which to delete. Folder names, the pointer file, and what does not count. No torch.

SAVE/latest_checkpointed_iteration.txt   "10"
SAVE/iter_0000010/                       complete: it has a manifest and every file in it
SAVE/iter_0000015.tmp/                   being written, or left by a run that was killed
SAVE/iter_0000010.replaced/              the earlier step 10 while a new one takes its place
"""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.manifest import (
    CONFIG,
    MANIFEST,
    TRAIN_STATE,
    IncompleteError,
    Manifest,
    read_manifest,
    why_incomplete,
)
from megatron_lite.checkpoint.storage import Storage, parent_of
from megatron_lite.config.declare import ConfigError
from megatron_lite.config.output import CheckpointConfig
from megatron_lite.files.reading import parse_object

POINTER = "latest_checkpointed_iteration.txt"
ASIDE, REPLACED, WRITING = ".tmp", ".replaced", ".writing"
_STEP = re.compile(r"iter_(\d{7,18})")
StoredConfig = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class StoredCheckpoint:
    """A complete checkpoint: folder `name` of a storage. `notes` are lines for the user about how it was chosen."""

    storage: Storage
    name: str
    iteration: int
    pretrained: bool = False
    notes: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The folder, as a user would name it."""
        return self.storage.full(self.name)

    @property
    def manifest(self) -> Manifest:
        """Every other file's size and hash."""
        return read_manifest(self.storage, self.name)

    @property
    def config(self) -> StoredConfig:
        """Config.to_dict() of the run that saved. Raises ConfigError when it is not what was written."""
        stored = self._object(CONFIG)
        if not all(isinstance(values, dict) for values in stored.values()):
            raise ConfigError(f"{self.path}/{CONFIG} cannot be read: it is no configuration")
        return stored

    @property
    def train_state(self) -> dict[str, Any]:
        """Iteration, consumed samples, schedule, layout. Raises ConfigError as config does."""
        stored = self._object(TRAIN_STATE)
        if stored.get("iteration") != self.iteration:
            raise ConfigError(
                f"{self.path}/{TRAIN_STATE} cannot be read: its iteration is {stored.get('iteration')}, "
                f"wanted {self.iteration}"
            )
        return stored

    def _object(self, file: str) -> dict[str, Any]:
        try:
            return parse_object(self.storage.read(f"{self.name}/{file}"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path}/{file} cannot be read: {error}") from None


def folder_name(iteration: int) -> str:
    """iter_0000010."""
    return f"iter_{iteration:07d}"


def find_checkpoint(
    config: CheckpointConfig, rejected: Mapping[str, str] | None = None
) -> StoredCheckpoint | None:
    """What --load, --ckpt-step, --pretrained-checkpoint and --exit-on-missing-checkpoint ask for; None: start afresh.

    Args:
        rejected: {path: why} of checkpoints that are not to be taken, for example after --verify-integrity.

    Raises:
        ConfigError: a checkpoint asked for is not there, or the folder holds checkpoints and none is complete.
    """
    load, pretrained, checkpoint = config.load, config.pretrained_checkpoint, None
    if load:
        # A first start with --load and --save on the same folder is how runs that restart are written. Any other
        # folder was named because something lies there: a misspelt one is no reason to start from random weights.
        same = config.save is not None and same_folder(config.save, load)
        if not Storage(load).is_folder() and not pretrained and (config.finetune or not same):
            raise ConfigError(
                f"--load {load}: there is no such folder{_file_instead(load)}"
                + (", which --finetune starts from" if config.finetune else " (nor is it --save's)")
            )
        checkpoint = find_in(load, config.ckpt_step, rejected)
        other = None if checkpoint or same else _other_content(Storage(load))
        if other:
            raise ConfigError(
                f"--load {load} holds no checkpoint but {other}; wanted a folder with {POINTER} and iter_* folders, "
                "or an empty one to start from random weights"
            )
    if checkpoint is None and pretrained:
        checkpoint = find_in(pretrained, None, rejected, flag="--pretrained-checkpoint")
        if checkpoint is None:
            other = _other_content(Storage(pretrained))
            what = f" but {other}" if other else ""
            raise ConfigError(f"--pretrained-checkpoint {pretrained}: there is no checkpoint{what}")
        checkpoint = replace(checkpoint, pretrained=True)
    if checkpoint is None and config.exit_on_missing_checkpoint:
        raise ConfigError(
            f"--load {load}: there is no checkpoint, and --exit-on-missing-checkpoint is given"
            if load
            else "--exit-on-missing-checkpoint is given without --load"
        )
    return checkpoint


def same_folder(one: str, other: str) -> bool:
    """Whether two paths or addresses name one folder, by whatever links and spellings."""
    one, other = one.removeprefix("file://"), other.removeprefix("file://")
    if "://" in one or "://" in other:
        return one.rstrip("/") == other.rstrip("/")
    return os.path.realpath(one) == os.path.realpath(other)


def refuse_to_replace(
    config: CheckpointConfig, checkpoint: StoredCheckpoint | None, weights_only: bool
) -> None:
    """A run that does not go on from --save's checkpoints must not write over them.

    Args:
        weights_only: of the checkpoint only the weights are taken, and steps are counted from 0 again.

    Raises:
        ConfigError: unless --overwrite-checkpoints.
    """
    save = config.save
    if not save:
        return
    own = checkpoint is not None and same_folder(checkpoint.storage.root, save)
    storage = Storage(save)
    if storage.size(MANIFEST) is not None:
        raise ConfigError(f"--save {save} is a checkpoint itself, wanted the folder it lies in, or another")
    if (own and not weights_only) or config.overwrite_checkpoints:
        return
    complete, broken = survey(storage)
    leaves = "another --save leaves them alone"
    replaces = "--overwrite-checkpoints replaces those of the same iterations"
    if own and any(complete):  # an imported model is iteration 0, which no save replaces
        raise ConfigError(
            f"--save {save} holds the checkpoints that this run takes only the weights from (the newest of iteration "
            f"{max(complete)}), and it starts at step 0: {leaves}, no --finetune goes on from them, {replaces}"
        )
    if not own and (complete or broken):  # what is not complete here may be another program's
        newest = f"the newest of iteration {max(complete)}" if complete else ", ".join(list(broken)[:3])
        go_on = f"--load {save} goes on from them, " if complete else ""
        raise ConfigError(
            f"--save {save} holds checkpoints of another run ({newest}), which this run does not start from: "
            f"{go_on}{leaves}, {replaces}"
        )


def check_folders(config: CheckpointConfig) -> None:
    """For --check: refuse what a run would refuse of --load and --save, as far as they lie on this machine."""
    sources = [path for path in (config.load, config.pretrained_checkpoint) if path is not None]
    if all("://" not in path and Path(path).exists() for path in sources):
        checkpoint = find_checkpoint(config) if sources else None
        weights_only = config.finetune or (checkpoint is not None and checkpoint.pretrained)
        refuse_to_replace(config, checkpoint, weights_only)


def _file_instead(path: str) -> str:
    if not Path(path).is_file():
        return ""
    whose = ": torch.load reads what --ckpt-convert-format torch writes, no run goes on from it"
    return f", it is a file{whose if path.endswith('.pt') else ''}"


def _other_content(storage: Storage) -> str | None:
    """What a folder holds instead of checkpoints, in words; None but for what a filesystem leaves there."""
    names = [n for n in storage.names() if not n.startswith(".") and n != "lost+found"]
    if "config.json" in names and any(name.endswith((".safetensors", ".bin")) for name in names):
        return "a Hugging Face model (tools/hf_import.py makes a checkpoint of it)"
    if any(re.fullmatch(r"iter_\d+\.pt", name) for name in names):
        return "files of --ckpt-convert-format torch, which torch.load reads and no run goes on from"
    inner = [name for name in names if storage.is_folder(name) and POINTER in storage.names(name)]
    if inner:
        return f"folders that hold checkpoints: {', '.join(inner[:5])}"
    return ", ".join(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "") or None


def find_in(
    path: str, step: int | None = None, rejected: Mapping[str, str] | None = None, flag: str = "--load"
) -> StoredCheckpoint | None:
    """The checkpoint of a folder: the given step, else the pointer's, else the newest complete one.

    path may also be a checkpoint folder itself. None when the folder holds no trace of a checkpoint.

    Raises:
        ConfigError: the step is not there or not complete; or there are checkpoints and none is complete.
    """
    rejected, storage = rejected or {}, Storage(path)
    if storage.size(MANIFEST) is not None:
        return _named_directly(path, step, rejected, flag)
    if step is not None:
        return _of_step(storage, step, rejected, flag)
    pointed, pointer = read_pointer(storage)
    complete, broken = survey(storage, rejected, pointed)
    if not complete:
        if not broken and storage.size(POINTER) is None:
            return None
        reasons = [f"{name}: {why}" for name, why in broken.items()] or [f"{POINTER} is there, no folder is"]
        raise ConfigError(
            f"{flag} {path}: no complete checkpoint ({'; '.join(reasons[:5])}); remove these to start afresh"
        )
    newest = max(complete)
    chosen = pointed if pointed in complete else newest
    notes = [f"{storage.full(name)} does not count: {why}" for name, why in broken.items()]
    if chosen != newest:
        notes.append(
            f"{storage.full(POINTER)} {pointer}; the newer {complete[newest]} is left alone "
            f"(--ckpt-step {newest} takes it)"
        )
    elif pointed != newest:
        notes.append(
            f"{storage.full(POINTER)} {pointer}: taking the newest complete checkpoint, {complete[newest]}"
        )
    return StoredCheckpoint(storage, complete[chosen], chosen, notes=tuple(notes))


def _named_directly(path: str, step: int | None, rejected: Mapping[str, str], flag: str) -> StoredCheckpoint:
    parent, name = parent_of(path)
    storage = Storage(parent)
    reason = _why_not(storage, name, rejected)
    if reason is not None:
        raise ConfigError(f"{flag} {path}: not a complete checkpoint: {reason}")
    iteration = read_manifest(storage, name).iteration
    if step is not None and step != iteration:
        raise ConfigError(f"--ckpt-step {step}: {flag} {path} holds iteration {iteration}")
    return StoredCheckpoint(storage, name, iteration)


def _of_step(storage: Storage, step: int, rejected: Mapping[str, str], flag: str) -> StoredCheckpoint:
    reasons = []
    for name in (folder_name(step), folder_name(step) + REPLACED):
        if storage.is_folder(name):
            reasons.append(_why_not(storage, name, rejected, step))
            if reasons[-1] is None:
                return StoredCheckpoint(storage, name, step)
    there = [str(number) for number, name in _steps(storage)[:10] if _has_manifest(storage, name)]
    raise ConfigError(
        f"--ckpt-step {step}: {flag} {storage.full()} has no complete checkpoint of it"
        f"{f' ({reasons[0]})' if reasons else ''}; there are: {', '.join(there) or 'none'}"
    )


def _why_not(storage: Storage, name: str, rejected: Mapping[str, str], step: int | None = None) -> str | None:
    return rejected.get(storage.full(name)) or why_incomplete(storage, name, step)


def survey(
    storage: Storage, rejected: Mapping[str, str] | None = None, wanted: int | None = None
) -> tuple[dict[int, str], dict[str, str]]:
    """({step: folder name} of complete checkpoints, {folder name: why} of those that do not count).

    Looks from the newest down to the first complete one; when `wanted` is there, down to the first complete one at
    or below it: what lies further back is of no use, and a look at every file of hundreds of folders takes minutes.
    """
    complete, broken = {}, {}
    steps = _steps(storage)
    known = {name for _, name in steps}
    for name in storage.names():
        if name.startswith("iter_") and name not in known and not name.endswith(ASIDE):
            with suppress(IncompleteError):  # a renamed folder is worth a word, anything else is not ours
                broken[name] = f"it holds iteration {read_manifest(storage, name).iteration}: it was renamed"
    for step, name in steps:
        if complete and (wanted not in dict(steps) or min(complete) <= wanted) and step not in complete:
            break
        reason = _why_not(storage, name, rejected or {}, step)
        if reason is None:
            complete.setdefault(step, name)
        elif storage.size(f"{name}/{WRITING}") is None:
            broken[name] = reason
    return complete, broken


def _steps(storage: Storage) -> list[tuple[int, str]]:
    """(step, folder name), newest first; an iter_N before its iter_N.replaced."""
    steps = []
    for name in storage.names():
        match = _STEP.fullmatch(name.removesuffix(REPLACED))
        if match and folder_name(int(match[1])) == match[0]:
            steps.append((int(match[1]), name))
    return sorted(steps, key=lambda item: (-item[0], item[1]))


def _has_manifest(storage: Storage, name: str) -> bool:
    return storage.size(f"{name}/{MANIFEST}") is not None


def read_pointer(storage: Storage) -> tuple[int | None, str]:
    """(the step that the pointer file holds or None, what it "says", "is" or "holds", for people).

    It is a number and nothing else: no path is read from it.
    """
    try:
        text = storage.read(POINTER, limit=64).decode("ascii").strip()
    except FileNotFoundError:
        return None, "is missing"
    except (OSError, UnicodeDecodeError):
        return None, "cannot be read"
    if not re.fullmatch(r"\d{1,18}", text):
        return None, f"holds {text[:30]!r}, not a step"
    return int(text), f"says {int(text)}"


def expired(
    storage: Storage, iteration: int, keep_last: int | None, retain_interval: int | None
) -> list[str]:
    """Folder names that --keep-last and --save-retain-interval let go once `iteration` is saved.

    Only complete checkpoints up to `iteration` count as newer ones; later ones (of a run that was rolled back)
    are neither counted nor deleted. Multiples of the interval stay always, the newest too; so does what is not
    whole: that is not ours to delete.
    """
    if keep_last is None and retain_interval is None:
        return []
    kept, gone = 0, []
    for step, name in _steps(storage):
        if step > iteration:
            continue
        if kept < (keep_last or 1):
            kept += why_incomplete(storage, name, step) is None
        elif not (retain_interval and step % retain_interval == 0) and _has_manifest(storage, name):
            gone.append(name)
    return gone


def delete(storage: Storage, name: str) -> None:
    """Delete a checkpoint folder. It stops to count before its first file goes."""
    if storage.remote:
        storage.remove_file(f"{name}/{MANIFEST}")
    else:
        aside = name.removesuffix(REPLACED) + ASIDE
        storage.rename(name, aside)
        name = aside
    storage.remove_folder(name)


def clear_leftovers(storage: Storage) -> None:
    """Remove what killed runs left: half-written folders, and replaced ones whose successor is complete.

    A replaced one without a successor gets its name back. What cannot be removed stays: it does not count, and
    a save may not fail over it.
    """
    names = storage.names()
    for name in names:
        writing = storage.remote and storage.size(f"{name}/{WRITING}") is not None
        unfinished = writing and not _has_manifest(storage, name)
        if _STEP.fullmatch(name.removesuffix(ASIDE)) and (name.endswith(ASIDE) or unfinished):
            with suppress(OSError):
                storage.remove_folder(name)
    for name in names:
        match = _STEP.fullmatch(name.removesuffix(REPLACED)) if name.endswith(REPLACED) else None
        if match and match[0] not in names:
            storage.rename(name, match[0])  # its successor never came
        elif match and why_incomplete(storage, match[0], int(match[1])) is None:
            with suppress(OSError):
                delete(storage, name)
