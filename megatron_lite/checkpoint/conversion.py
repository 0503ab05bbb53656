"""--ckpt-convert-format: a checkpoint written anew, in one process, without a model or a process group."""

from collections.abc import Iterator
from pathlib import Path

import torch

from megatron_lite.checkpoint.agreement import sentence
from megatron_lite.checkpoint.folder import Found, find_checkpoint, folder_name, same_folder
from megatron_lite.checkpoint.manifest import TOKENIZER
from megatron_lite.checkpoint.reading import OPTIMIZER_PREFIX, RANDOM_PREFIX, CheckpointReader
from megatron_lite.checkpoint.storage import parent_of, storage_for
from megatron_lite.checkpoint.writing import write_checkpoint
from megatron_lite.config import CheckpointConfig, ConfigError
from megatron_lite.files.writing import opened_aside


def convert_checkpoint(config: CheckpointConfig) -> str:
    """Write what --load (and --ckpt-step) names into --ckpt-convert-save; returns the new path.

    torch_dist: a checkpoint folder as this program saves it, in as few files as one process makes; without random
    states, which belong to the layout it was saved in. torch: one file iter_N.pt for
    `torch.load(weights_only=True)`, {"iteration", "config", "train_state", "tensors": {name: tensor}}; the whole
    has to fit in memory. With --no-load-optim or --finetune only the weights.

    Raises:
        ConfigError: there is nothing to convert, or it cannot be written.
    """
    found = find_checkpoint(config)
    if found is None:
        raise ConfigError(
            f"--ckpt-convert-format {config.ckpt_convert_format}: --load {config.load} is empty"
        )
    target = config.ckpt_convert_save.removeprefix("file://")
    _refuse_place(target, found)
    left_out = (RANDOM_PREFIX, *([OPTIMIZER_PREFIX] if config.no_load_optim or config.finetune else []))
    with CheckpointReader(found) as reader:

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            return (
                (name, reader.read(name)) for name in sorted(reader.names()) if not name.startswith(left_out)
            )

        state = {key: value for key, value in reader.train_state.items() if key != "layout"}
        if config.ckpt_convert_format == "torch":
            whole = {"iteration": found.iteration, "config": reader.config, "train_state": state}
            return _save_one_file(target, found.iteration, whole | {"tensors": dict(tensors())})
        if OPTIMIZER_PREFIX in left_out:
            state["weights_only"] = True
        return write_checkpoint(
            target,
            found.iteration,
            tensors(),
            reader.config,
            state,
            _tokenizer_files(found.path),
        )


def _refuse_place(target: str, found: Found) -> None:
    """A conversion never writes over what it reads, nor over what another run or conversion wrote."""
    step = folder_name(found.iteration)
    inside = "://" not in target and Path(found.path.removeprefix("file://")).resolve() in (
        Path(target).resolve(),
        *Path(target).resolve().parents,
    )
    if inside or same_folder(target, parent_of(found.path)[0]):
        raise ConfigError(
            f"--ckpt-convert-save {target} is where {found.path} lies, wanted another folder: it would be replaced"
        )
    storage = storage_for(target)
    for name in (step, f"{step}.pt"):
        if storage.is_folder(name) or storage.size(name) is not None:
            raise ConfigError(
                f"--ckpt-convert-save {target} holds {name} already, wanted a folder without it"
            )


def _tokenizer_files(path: str) -> list[Path]:
    parent, name = parent_of(path)
    storage = storage_for(parent)
    files = storage.names(f"{name}/{TOKENIZER}") if storage.is_folder(f"{name}/{TOKENIZER}") else []
    return [] if storage.remote else [Path(storage.full(f"{name}/{TOKENIZER}/{file}")) for file in files]


def _save_one_file(folder: str, iteration: int, content: dict) -> str:
    path = Path(folder) / f"{folder_name(iteration)}.pt"
    try:
        with opened_aside(path) as file:
            torch.save(content, file)
    except OSError as error:
        raise ConfigError(f"--ckpt-convert-save {folder} cannot be written: {sentence(error)}") from None
    return str(path)
