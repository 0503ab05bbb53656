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
from typing import NamedTuple

from megatron_lite.checkpoint.manifest import MANIFEST, IncompleteError, read_manifest, why_incomplete
from megatron_lite.checkpoint.storage import Storage, parent_of, storage_for
from megatron_lite.config import CheckpointConfig, ConfigError

POINTER = "latest_checkpointed_iteration.txt"
ASIDE, REPLACED, WRITING = ".tmp", ".replaced", ".writing"
_STEP = re.compile(r"iter_(\d{7,18})")
_POINTER_LIMIT = 64


@dataclass(frozen=True)
class Found:
    """A complete checkpoint. `notes` are lines for the user about how it was chosen."""

    path: str
    iteration: int
    pretrained: bool = False
    notes: tuple[str, ...] = ()


class _Pointer(NamedTuple):
    step: int | None
    problem: str | None


def folder_name(iteration: int) -> str:
    """iter_0000010."""
    return f"iter_{iteration:07d}"


def find_checkpoint(config: CheckpointConfig, rejected: Mapping[str, str] | None = None) -> Found | None:
    """What --load, --ckpt-step, --pretrained-checkpoint and --exit-on-missing-checkpoint ask for; None: start afresh.

    Args:
        rejected: {path: why} of checkpoints that are not to be taken, for example after --verify-integrity.

    Raises:
        ConfigError: a checkpoint asked for is not there, or the folder holds checkpoints and none is complete.
    """
    rejected = rejected or {}
    found = None
    if config.load:
        storage = storage_for(config.load)
        # A first start with --load and --save on the same folder is how runs that restart are written. Any other
        # folder was named because something lies there: a misspelt one is no reason to start from random weights.
        same = config.save is not None and same_folder(config.save, config.load)
        if not storage.is_folder() and not config.pretrained_checkpoint and (config.finetune or not same):
            raise ConfigError(
                f"--load {config.load}: there is no such folder{_file_instead(config.load)}"
                + (", which --finetune starts from" if config.finetune else " (nor is it --save's)")
            )
        found = find_in(config.load, config.ckpt_step, rejected)
        lies_there = [] if found or same else _visible(storage)
        if lies_there:
            raise ConfigError(
                f"--load {config.load} holds no checkpoint but {_described(storage, lies_there)}; wanted a folder "
                f"with {POINTER} and iter_* folders, or an empty one to start from random weights"
            )
    if found is None and config.pretrained_checkpoint:
        found = find_in(config.pretrained_checkpoint, None, rejected, flag="--pretrained-checkpoint")
        if found is None:
            storage = storage_for(config.pretrained_checkpoint)
            lies_there = _visible(storage)
            what = f" but {_described(storage, lies_there)}" if lies_there else ""
            raise ConfigError(
                f"--pretrained-checkpoint {config.pretrained_checkpoint}: there is no checkpoint{what}"
            )
        found = replace(found, pretrained=True)
    if found is None and config.exit_on_missing_checkpoint:
        raise ConfigError(
            f"--load {config.load}: there is no checkpoint, and --exit-on-missing-checkpoint is given"
            if config.load
            else "--exit-on-missing-checkpoint is given without --load"
        )
    return found


def same_folder(one: str, other: str) -> bool:
    """Whether two paths or addresses name one folder, by whatever links and spellings."""
    one, other = one.removeprefix("file://"), other.removeprefix("file://")
    if "://" in one or "://" in other:
        return one.rstrip("/") == other.rstrip("/")
    return os.path.realpath(one) == os.path.realpath(other)


def refuse_to_replace(config: CheckpointConfig, found: Found | None, weights_only: bool) -> None:
    """A run that does not go on from --save's checkpoints must not write over them.

    Args:
        weights_only: of what was found only the weights are taken, and steps are counted from 0 again.

    Raises:
        ConfigError: unless --overwrite-checkpoints.
    """
    own = found is not None and config.save and same_folder(parent_of(found.path)[0], config.save)
    if not config.save:
        return
    storage = storage_for(config.save)
    if storage.size(MANIFEST) is not None:
        raise ConfigError(
            f"--save {config.save} is a checkpoint itself, wanted the folder that it lies in, or another"
        )
    if (own and not weights_only) or config.overwrite_checkpoints:
        return
    complete, broken = survey(storage)
    if own and any(complete):  # an imported model is iteration 0, which no save replaces
        raise ConfigError(
            f"--save {config.save} holds the checkpoints that this run takes only the weights from (the newest of "
            f"iteration {max(complete)}), and it starts at step 0: another --save leaves them alone, no --finetune "
            "goes on from them, --overwrite-checkpoints replaces those of the same iterations"
        )
    if not own and (complete or broken):  # what is not complete here may be another program's
        newest = f"the newest of iteration {max(complete)}" if complete else ", ".join(list(broken)[:3])
        go_on = f"--load {config.save} goes on from them, " if complete else ""
        raise ConfigError(
            f"--save {config.save} holds checkpoints of another run ({newest}), which this run does not start from: "
            f"{go_on}another --save leaves them alone, --overwrite-checkpoints replaces those of the same iterations"
        )


def check_folders(config: CheckpointConfig) -> None:
    """For --check: refuse what a run would refuse of --load and --save, as far as they lie on this machine."""
    sources = [path for path in (config.load, config.pretrained_checkpoint) if path is not None]
    if all("://" not in path and Path(path).exists() for path in sources):
        found = find_checkpoint(config) if sources else None
        weights_only = config.finetune or (found is not None and found.pretrained)
        refuse_to_replace(config, found, weights_only)


def _file_instead(path: str) -> str:
    if not Path(path).is_file():
        return ""
    if path.endswith(".pt"):
        return (
            ", it is a file: torch.load reads what --ckpt-convert-format torch writes, no run goes on from it"
        )
    return ", it is a file"


def _visible(storage: Storage) -> list[str]:
    """What lies in a folder, but for what a filesystem or a file manager leaves there."""
    names = storage.names() if storage.is_folder() else []
    return [name for name in names if not name.startswith(".") and name != "lost+found"]


def _described(storage: Storage, names: list[str]) -> str:
    """What a folder holds instead of checkpoints, in words."""
    if "config.json" in names and any(name.endswith((".safetensors", ".bin")) for name in names):
        return "a Hugging Face model (tools/hf_import.py makes a checkpoint of it)"
    if any(re.fullmatch(r"iter_\d+\.pt", name) for name in names):
        return "files of --ckpt-convert-format torch, which torch.load reads and no run goes on from"
    shown = sorted(names)
    inner = [name for name in shown if storage.is_folder(name) and POINTER in storage.names(name)]
    if inner:
        return f"folders that hold checkpoints: {', '.join(inner[:5])}"
    return f"{', '.join(shown[:5])}{f' and {len(shown) - 5:,} more' if len(shown) > 5 else ''}"


def find_in(
    path: str, step: int | None = None, rejected: Mapping[str, str] | None = None, flag: str = "--load"
) -> Found | None:
    """The checkpoint of a folder: the given step, else the pointer's, else the newest complete one.

    path may also be a checkpoint folder itself. None when the folder holds no trace of a checkpoint.

    Raises:
        ConfigError: the step is not there or not complete; or there are checkpoints and none is complete.
    """
    rejected = rejected or {}
    storage = storage_for(path)
    if storage.size(MANIFEST) is not None:
        return _named_directly(path, step, rejected, flag)
    pointer = read_pointer(storage)
    if step is not None:
        return _of_step(storage, step, rejected, flag)
    complete, broken = survey(storage, rejected, None if pointer is None else pointer.step)
    if not complete:
        if not broken and pointer is None:
            return None
        reasons = [f"{name}: {why}" for name, why in broken.items()] or [f"{POINTER} is there, no folder is"]
        raise ConfigError(
            f"{flag} {path}: no complete checkpoint ({'; '.join(reasons[:5])}); remove these to start afresh"
        )
    newest = max(complete)
    notes = [f"{storage.full(name)} does not count: {why}" for name, why in broken.items()]
    chosen = pointer.step if pointer is not None and pointer.step in complete else newest
    if chosen != newest:
        notes.append(
            f"{storage.full(POINTER)} says {chosen}; the newer {complete[newest]} is left alone "
            f"(--ckpt-step {newest} takes it)"
        )
    elif pointer is None or pointer.step != newest:
        problem = "is missing" if pointer is None else pointer.problem or f"says {pointer.step}"
        notes.append(
            f"{storage.full(POINTER)} {problem}: taking the newest complete checkpoint, {complete[newest]}"
        )
    return Found(storage.full(complete[chosen]), chosen, notes=tuple(notes))


def _named_directly(path: str, step: int | None, rejected: Mapping[str, str], flag: str) -> Found:
    parent, name = parent_of(path)
    storage = storage_for(parent)
    reason = rejected.get(storage.full(name)) or why_incomplete(storage, name)
    if reason is not None:
        raise ConfigError(f"{flag} {path}: not a complete checkpoint: {reason}")
    iteration = read_manifest(storage, name).iteration
    if step is not None and step != iteration:
        raise ConfigError(f"--ckpt-step {step}: {flag} {path} holds iteration {iteration}")
    return Found(storage.full(name), iteration)


def _of_step(storage: Storage, step: int, rejected: Mapping[str, str], flag: str) -> Found:
    reason = None
    for name in (folder_name(step), folder_name(step) + REPLACED):
        if storage.is_folder(name):
            why = rejected.get(storage.full(name)) or why_incomplete(storage, name, step)
            if why is None:
                return Found(storage.full(name), step)
            reason = reason or why
    there = ", ".join(str(number) for number, name in _steps(storage)[:10] if _has_manifest(storage, name))
    raise ConfigError(
        f"--ckpt-step {step}: {flag} {storage.full()} has no complete checkpoint of it"
        f"{f' ({reason})' if reason else ''}; there are: {there or 'none'}"
    )


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
        reason = (rejected or {}).get(storage.full(name)) or why_incomplete(storage, name, step)
        if reason is None:
            complete.setdefault(step, name)
        elif storage.size(f"{name}/{WRITING}") is None:
            broken[name] = reason
    return complete, broken


def _steps(storage: Storage) -> list[tuple[int, str]]:
    """(step, folder name), newest first; an iter_N before its iter_N.replaced."""
    found = []
    for name in storage.names():
        match = _STEP.fullmatch(name.removesuffix(REPLACED))
        if match and folder_name(int(match[1])) == match[0]:
            found.append((int(match[1]), name))
    return sorted(found, key=lambda item: (-item[0], item[1]))


def _has_manifest(storage: Storage, name: str) -> bool:
    return storage.size(f"{name}/{MANIFEST}") is not None


def read_pointer(storage: Storage) -> _Pointer | None:
    """What the pointer file says; None when there is none. It is a number and nothing else: no path is read from it."""
    size = storage.size(POINTER)
    if size is None:
        return None
    try:
        text = storage.read(POINTER, _POINTER_LIMIT).decode("ascii").strip()
    except OSError as error:
        return _Pointer(None, f"cannot be read ({error.strerror})")
    except UnicodeDecodeError:
        return _Pointer(None, "does not hold a step")
    if not text:
        return _Pointer(None, "is empty")
    if size > _POINTER_LIMIT or not re.fullmatch(r"\d{1,18}", text):
        return _Pointer(None, f"holds {text[:30]!r}, not a step")
    return _Pointer(int(text), None)


def write_pointer(storage: Storage, iteration: int) -> None:
    """Point at a checkpoint, in one step."""
    storage.write(POINTER, f"{iteration}\n".encode())


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
        unfinished = (
            storage.remote
            and not _has_manifest(storage, name)
            and storage.size(f"{name}/{WRITING}") is not None
        )
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
