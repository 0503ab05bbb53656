"""Hand-made checkpoint folders for tests, and a second opinion on whether one is whole."""

import hashlib
import json
from pathlib import Path

import xxhash


def make_checkpoint(save, step, name=None, version=2):
    """A complete folder of this step, its manifest of this version; returns its path."""
    folder = save / (name or f"iter_{step:07d}")
    folder.mkdir(parents=True)
    files = {
        "config.json": b"{}",
        "train_state.json": json.dumps({"iteration": step}).encode(),
        ".metadata": b"metadata",
        "__0_0.distcp": b"tensors" * 100,
    }
    for file, data in files.items():
        (folder / file).write_bytes(data)
    algorithm, digest = {1: ("sha256", hashlib.sha256), 2: ("xxh3_128", xxhash.xxh3_128)}[version]
    entries = {f: {"size": len(d), algorithm: digest(d).hexdigest()} for f, d in files.items()}
    manifest = {"version": version, "iteration": step, "files": entries}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def point(save, text):
    """Write the pointer file."""
    data = text if isinstance(text, bytes) else str(text).encode()
    (save / "latest_checkpointed_iteration.txt").write_bytes(data)


def is_intact(folder):
    """By the manifest's hashes, with code of its own."""
    files = json.loads(Path(folder, "manifest.json").read_text())["files"]
    return all(
        xxhash.xxh3_128(Path(folder, name).read_bytes()).hexdigest() == entry["xxh3_128"]
        for name, entry in files.items()
    )
