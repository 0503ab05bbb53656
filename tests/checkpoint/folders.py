"""Hand-made checkpoint folders for tests: complete by the rules of the manifest, without a tensor in them."""

import hashlib
import json


def make_checkpoint(save, step, name=None):
    """A complete folder of this step; returns its path."""
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
    entries = {f: {"size": len(d), "sha256": hashlib.sha256(d).hexdigest()} for f, d in files.items()}
    manifest = {"version": 1, "iteration": step, "files": entries}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def point(save, text):
    """Write the pointer file."""
    data = text if isinstance(text, bytes) else str(text).encode()
    (save / "latest_checkpointed_iteration.txt").write_bytes(data)
