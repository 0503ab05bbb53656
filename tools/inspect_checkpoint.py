"""What is in a checkpoint: step, layout, configuration, tensors, sizes, integrity; what differs between two.

    python tools/inspect_checkpoint.py SAVE                    the checkpoint that --load SAVE would take
    python tools/inspect_checkpoint.py SAVE/iter_0000010 --tensors --verify
    python tools/inspect_checkpoint.py SAVE/iter_0000010 --diff SAVE/iter_0000020

Exit code 0: fine; 1: --verify found damage, or --diff a difference; 2: there is no checkpoint to look at.
"""

import argparse
import math
import sys
from collections.abc import Iterator

import torch

from megatron_lite.checkpoint.manifest import why_corrupt
from megatron_lite.checkpoint.metadata import StoredTensor
from megatron_lite.checkpoint.reading import OPTIMIZER_PREFIX, RANDOM_PREFIX, CheckpointReader
from megatron_lite.files.command_line import Parser, guarded

SHOWN_STATE = ("iteration", "consumed_samples", "consumed_tokens", "skipped_iterations", "nan_iterations")


def main() -> int:
    """Returns the exit code; raises ConfigError when there is nothing to look at."""
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(__doc__.splitlines()[0], epilog=__doc__, formatter_class=form)
    flag = parser.add_argument
    flag("checkpoint", help="a checkpoint folder, or a save folder: what --load would take")
    flag("--tensors", action="store_true", help="a line per tensor")
    flag("--config", action="store_true", help="every stored flag but None, False and empty")
    flag("--verify", action="store_true", help="compute every file's hash")
    flag("--diff", metavar="OTHER", help="compare with another: flags, state, values")
    arguments = parser.parse_args()
    with CheckpointReader(arguments.checkpoint) as reader:
        if arguments.diff:
            with CheckpointReader(arguments.diff) as other:
                return report_difference(reader, other)
        describe(reader)
        if arguments.config:
            print("\n".join(flag_lines(reader)))
        if arguments.tensors:
            print("\n".join(tensor_lines(reader.names())))
        return verify(reader) if arguments.verify else 0


def describe(reader: CheckpointReader) -> None:
    """The summary that is always printed."""
    state, model, tensors = reader.train_state, reader.config.get("model", {}), reader.names()
    layout = ", ".join(f"{axis} {n}" for axis, n in (state.get("layout") or {}).items())
    rows = [("note", note) for note in reader.stored.notes]
    rows += [
        ("folder", reader.path),
        ("state", ", ".join(f"{key} {state[key]:,}" for key in SHOWN_STATE if key in state)),
        ("layout", layout or "one process"),
        (
            "model",
            f"{model.get('num_layers')} layers, hidden {model.get('hidden_size')}, "
            f"{model.get('num_attention_heads')} heads, vocabulary {model.get('vocab_size')} "
            f"(padded {model.get('padded_vocab_size')})",
        ),
    ]
    for kind, prefix in (("weights", None), ("optimizer", OPTIMIZER_PREFIX), ("random", RANDOM_PREFIX)):
        names = [n for n in tensors if n.startswith(prefix)] if prefix else reader.weight_names()
        elements = sum(math.prod(tensors[n].shape) for n in names)
        size = sum(tensors[n].nbytes for n in names)
        rows.append((kind, f"{len(names):,} tensors, {elements:,} elements, {size:,} bytes"))
    files = reader.stored.manifest.files
    rows.append(("files", f"{len(files):,}, {sum(e.size for e in files.values()):,} bytes; sizes agree"))
    for name, text in rows:
        print(f"{name:10} {text}")


def flag_lines(reader: CheckpointReader) -> Iterator[str]:
    """`concern.field = value` of every stored flag that says something."""
    for concern, values in sorted(reader.config.items()):
        yield from (
            f"{concern}.{key} = {value!r}" for key, value in values.items() if value not in (None, False, [])
        )


def tensor_lines(tensors: dict[str, StoredTensor]) -> Iterator[str]:
    """Name, shape, dtype, bytes, chunks."""
    width = max(map(len, tensors), default=0)
    for name, tensor in sorted(tensors.items()):
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        yield f"{name:{width}}  {shape:>14}  {dtype:8}  {tensor.nbytes:>15,} bytes  {len(tensor.chunks)} chunks"


def verify(reader: CheckpointReader) -> int:
    """Hash every file; 1 when one is damaged."""
    stored, manifest = reader.stored, reader.stored.manifest
    problems = (why_corrupt(stored.storage, stored.name, manifest, [file]) for file in manifest.files)
    damage = [f"damaged    {text}" for text in problems if text is not None]
    print("".join(f"{line}\n" for line in damage), end="")
    number = len(manifest.files)
    print(f"verified   {number - len(damage):,} of {number:,} files have their {manifest.algorithm}")
    return 1 if damage else 0


def report_difference(one: CheckpointReader, other: CheckpointReader) -> int:
    """Print what differs: flags, counters, tensors by name, shape and value; 1 when anything does."""
    print(f"- {one.path}\n+ {other.path}")
    lines = [*nested_difference(one.config, other.config)]
    lines += nested_difference(one.train_state, other.train_state)
    lines += tensor_difference(one, other)
    print("\n".join(lines) if lines else "no difference")
    return 1 if lines else 0


def nested_difference(one: dict, other: dict, prefix: str = "") -> Iterator[str]:
    """`key: a -> b` for nested dicts."""
    for key in sorted(one.keys() | other.keys()):
        a, b = one.get(key), other.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from nested_difference(a, b, f"{prefix}{key}.")
        elif a != b:
            yield f"{prefix}{key}: {a!r} -> {b!r}"


def tensor_difference(one: CheckpointReader, other: CheckpointReader) -> Iterator[str]:
    """A line per tensor that is only in one, or has another shape, dtype or value; one pair in memory at a time."""
    first, second = one.names(), other.names()
    for name in sorted(first.keys() | second.keys()):
        if name not in first or name not in second:
            yield f"{name}: only in {'-' if name in first else '+'}"
            continue
        a, b = first[name], second[name]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            yield f"{name}: {list(a.shape)} {a.dtype} -> {list(b.shape)} {b.dtype}"
            continue
        x, y = one.read(name), other.read(name)
        if not torch.equal(x, y):
            change = (x.double() - y.double()).norm().item() / max(x.double().norm().item(), 1e-300)
            yield f"{name}: {(x != y).sum().item():,} of {x.numel():,} elements differ, relative change {change:.2e}"


if __name__ == "__main__":
    sys.exit(guarded(main))
