"""The manifest of a checkpoint folder: every other file's size and hash. A folder without one does not count.

The hash is XXH3 (128 bits, https://github.com/Cyan4973/xxHash): it finds damage and keeps up with the disk, which
sha256 does not. It is no proof against forgery; nor is anything else that lies in the folder beside the data.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import xxhash

from megatron_lite.checkpoint.storage import Storage
from megatron_lite.files.reading import parse_object

MANIFEST = "manifest.json"
CONFIG, TRAIN_STATE, METADATA = "config.json", "train_state.json", ".metadata"
TOKENIZER = "tokenizer"  # folder of the tokenizer's files
REQUIRED = (CONFIG, TRAIN_STATE, METADATA)
VERSION = 2
HASH = "xxh3_128"
_DIGESTS = {HASH: xxhash.xxh3_128, "sha256": hashlib.sha256}
_HASH_OF_VERSION = {1: "sha256", VERSION: HASH}


@dataclass(frozen=True)
class FileEntry:
    """What a file was when it was written: bytes, hex digest."""

    size: int
    hash: str


@dataclass(frozen=True)
class Manifest:
    """The step a folder holds and its files, by name relative to the folder."""

    iteration: int
    files: dict[str, FileEntry]
    algorithm: str = HASH

    def to_bytes(self) -> bytes:
        """JSON of the present version."""
        assert self.algorithm == HASH
        files = {name: {"size": entry.size, HASH: entry.hash} for name, entry in sorted(self.files.items())}
        content = {"version": VERSION, "iteration": self.iteration, "files": files}
        return json.dumps(content, indent=1).encode()


class IncompleteError(ValueError):
    """Why a folder does not count as a checkpoint; not an error of the run."""


def new_digest(algorithm: str = HASH) -> Any:
    """An empty digest, with hashlib's interface."""
    return _DIGESTS[algorithm]()


def entry_of(data: bytes, algorithm: str = HASH) -> FileEntry:
    """The entry of a file with this content."""
    return FileEntry(len(data), _DIGESTS[algorithm](data).hexdigest())


def read_manifest(storage: Storage, folder: str) -> Manifest:
    """The manifest of a folder. Raises IncompleteError when there is none, or it is no manifest."""
    path = f"{folder}/{MANIFEST}"
    if storage.size(path) is None:
        raise IncompleteError(f"it has no {MANIFEST}")
    try:
        stored = parse_object(storage.read(path))
        version = stored["version"]
        if version not in _HASH_OF_VERSION:
            raise IncompleteError(f"its {MANIFEST} is of version {version}, wanted 1 to {VERSION}")
        algorithm = _HASH_OF_VERSION[version]
        files = {str(n): FileEntry(int(e["size"]), str(e[algorithm])) for n, e in stored["files"].items()}
        manifest = Manifest(int(stored["iteration"]), files, algorithm)
    except IncompleteError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, OSError) as error:
        raise IncompleteError(f"its {MANIFEST} cannot be read ({type(error).__name__}: {error})") from None
    for name in files:
        if not name.isprintable() or {"", ".", ".."} & set(name.split("/")):
            raise IncompleteError(f"its {MANIFEST} names {name[:80]!r}, which is outside the folder")
    return manifest


def why_incomplete(storage: Storage, folder: str, iteration: int | None = None) -> str | None:
    """Why a folder is not a complete checkpoint (of this step), by files, sizes and the small files' hashes.

    None when it is complete. The hashes of the tensor files are not computed: see why_corrupt.
    """
    try:
        manifest = read_manifest(storage, folder)
    except IncompleteError as error:
        return str(error)
    if iteration is not None and manifest.iteration != iteration:
        return f"it holds iteration {manifest.iteration}: it was renamed"
    tensor_files = [name for name in storage.names(folder) if name.endswith(".distcp")]
    for name in (*REQUIRED, *tensor_files):
        if name not in manifest.files:
            return f"its {MANIFEST} does not list {name}"
    for name, entry in manifest.files.items():
        size = storage.size(f"{folder}/{name}")
        if size != entry.size:
            seen = "is missing" if size is None else f"has {size:,} bytes, wanted {entry.size:,}"
            return f"{name} {seen}"
    return why_corrupt(storage, folder, manifest, REQUIRED)


def why_corrupt(storage: Storage, folder: str, manifest: Manifest, names: Iterable[str]) -> str | None:
    """The first of the named files whose content has another hash than the manifest's; None when all agree."""
    for name in names:
        try:
            with storage.open(f"{folder}/{name}", "rb") as file:
                seen = hashlib.file_digest(file, _DIGESTS[manifest.algorithm]).hexdigest()
        except OSError as error:
            return f"{name} cannot be read: {error.strerror or error}"
        wanted = manifest.files[name].hash
        if seen != wanted:
            return f"{name} has {manifest.algorithm} {seen[:12]}..., wanted {wanted[:12]}..."
    return None
