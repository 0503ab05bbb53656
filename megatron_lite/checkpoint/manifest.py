"""The manifest of a checkpoint folder: every other file's size and sha256. A folder without one does not count."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from megatron_lite.checkpoint.storage import Storage

MANIFEST = "manifest.json"
CONFIG, TRAIN_STATE, METADATA = "config.json", "train_state.json", ".metadata"
TOKENIZER = "tokenizer"  # folder of the tokenizer's files
REQUIRED = (CONFIG, TRAIN_STATE, METADATA)
VERSION = 1
_BLOCK = 8 << 20


@dataclass(frozen=True)
class FileEntry:
    """What a file was when it was written."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The step a folder holds and its files, by name relative to the folder."""

    iteration: int
    files: dict[str, FileEntry]

    def to_bytes(self) -> bytes:
        """JSON."""
        files = {name: asdict(entry) for name, entry in sorted(self.files.items())}
        return json.dumps(
            {"version": VERSION, "iteration": self.iteration, "files": files}, indent=1
        ).encode()


class IncompleteError(ValueError):
    """Why a folder does not count as a checkpoint; not an error of the run."""


def entry_of(data: bytes) -> FileEntry:
    """The entry of a file with this content."""
    return FileEntry(len(data), hashlib.sha256(data).hexdigest())


def parse_object(data: bytes) -> dict:
    """The JSON object that a small file holds.

    Raises:
        ValueError: it holds something else, or nests so deep that nobody wrote it.
    """
    try:
        content = json.loads(data)
    except RecursionError:
        raise ValueError("it nests too deep") from None
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, wanted an object")
    return content


def read_manifest(storage: Storage, folder: str) -> Manifest:
    """The manifest of a folder.

    Raises:
        IncompleteError: there is none, or it is no manifest.
    """
    path = f"{folder}/{MANIFEST}"
    if storage.size(path) is None:
        raise IncompleteError(f"it has no {MANIFEST}")
    try:
        stored = parse_object(storage.read(path))
        if stored["version"] != VERSION:
            raise IncompleteError(f"its {MANIFEST} is of version {stored['version']}, wanted {VERSION}")
        files = {
            str(name): FileEntry(int(e["size"]), str(e["sha256"])) for name, e in stored["files"].items()
        }
        manifest = Manifest(int(stored["iteration"]), files)
    except IncompleteError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, OSError) as error:
        raise IncompleteError(f"its {MANIFEST} cannot be read ({type(error).__name__}: {error})") from None
    strange = [name for name in manifest.files if not _is_inside(name)]
    if strange:
        raise IncompleteError(f"its {MANIFEST} names {strange[0][:80]!r}, which is outside the folder")
    return manifest


def _is_inside(name: str) -> bool:
    return name.isprintable() and not {"", ".", ".."} & set(name.split("/"))


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
    absent = [name for name in (*REQUIRED, *tensor_files) if name not in manifest.files]
    if absent:
        return f"its {MANIFEST} does not list {absent[0]}"
    for name, entry in manifest.files.items():
        size = storage.size(f"{folder}/{name}")
        if size is None:
            return f"{name} is missing"
        if size != entry.size:
            return f"{name} has {size:,} bytes, wanted {entry.size:,}"
    return why_corrupt(storage, folder, manifest, REQUIRED)


def why_corrupt(storage: Storage, folder: str, manifest: Manifest, names: Iterable[str]) -> str | None:
    """The first of the named files whose content has another sha256 than the manifest's; None when all agree."""
    for name in names:
        try:
            found = sha256_of(storage, f"{folder}/{name}")
        except OSError as error:
            return f"{name} cannot be read: {error.strerror or error}"
        if found != manifest.files[name].sha256:
            return f"{name} has sha256 {found[:12]}..., wanted {manifest.files[name].sha256[:12]}..."
    return None


def sha256_of(storage: Storage, path: str) -> str:
    """Hex digest of a file, read in blocks."""
    digest = hashlib.sha256()
    with storage.open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
