"""--ckpt-convert-format: a checkpoint written anew, in one process, without a model or a process group."""

from pathlib import Path

import torch

from megatron_lite.checkpoint.agreement import sentence
from megatron_lite.checkpoint.folder import StoredCheckpoint, find_checkpoint, folder_name, same_folder
from megatron_lite.checkpoint.manifest import TOKENIZER
from megatron_lite.checkpoint.reading import OPTIMIZER_PREFIX, RANDOM_PREFIX, CheckpointReader
from megatron_lite.checkpoint.storage import Storage
from megatron_lite.checkpoint.writing import write_checkpoint
from megatron_lite.config.declare import ConfigError
from megatron_lite.config.output import CheckpointConfig
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
    checkpoint = find_checkpoint(config)
    if checkpoint is None:
        raise ConfigError(
            f"--ckpt-convert-format {config.ckpt_convert_format}: --load {config.load} is empty"
        )
    target = config.ckpt_convert_save.removeprefix("file://")
    _refuse_place(target, checkpoint)
    left_out = (RANDOM_PREFIX, *([OPTIMIZER_PREFIX] if config.no_load_optim or config.finetune else []))
    with CheckpointReader(checkpoint) as reader:
        names = [name for name in sorted(reader.names()) if not name.startswith(left_out)]
        tensors = ((name, reader.read(name)) for name in names)
        state = {key: value for key, value in reader.train_state.items() if key != "layout"}
        if config.ckpt_convert_format == "torch":
            whole = {"iteration": checkpoint.iteration, "config": reader.config, "train_state": state}
            return _save_one_file(target, checkpoint.iteration, whole | {"tensors": dict(tensors)})
        if OPTIMIZER_PREFIX in left_out:
            state["weights_only"] = True
        files = _tokenizer_files(checkpoint)
        return write_checkpoint(target, checkpoint.iteration, tensors, reader.config, state, files)


def _refuse_place(target: str, checkpoint: StoredCheckpoint) -> None:
    """A conversion never writes over what it reads, nor over what another run or conversion wrote."""
    step, place = folder_name(checkpoint.iteration), Path(target).resolve()
    inside = "://" not in target and Path(checkpoint.path).resolve() in (place, *place.parents)
    if inside or same_folder(target, checkpoint.storage.root):
        raise ConfigError(
            f"--ckpt-convert-save {target} is where {checkpoint.path} lies, wanted another folder: it would be replaced"
        )
    there = {step, f"{step}.pt"} & set(Storage(target).names())
    if there:
        raise ConfigError(f"--ckpt-convert-save {target} holds {min(there)}, wanted a folder without it")


def _tokenizer_files(checkpoint: StoredCheckpoint) -> list[Path]:
    folder = f"{checkpoint.name}/{TOKENIZER}"
    names = [] if checkpoint.storage.remote else checkpoint.storage.names(folder)
    return [Path(checkpoint.storage.full(f"{folder}/{name}")) for name in names]


def _save_one_file(folder: str, iteration: int, content: dict) -> str:
    path = Path(folder) / f"{folder_name(iteration)}.pt"
    try:
        with opened_aside(path) as file:
            torch.save(content, file)
    except OSError as error:
        raise ConfigError(f"--ckpt-convert-save {folder} cannot be written: {sentence(error)}") from None
    return str(path)
