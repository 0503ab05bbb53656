"""From a checkpoint to a run that goes on: what is read, what is left, and one line about each choice."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from megatron_lite.arithmetic.lr_schedule import LearningRateSchedule, resumed_schedule
from megatron_lite.checkpoint import StoredCheckpoint
from megatron_lite.checkpoint.checkpointer import Checkpointer
from megatron_lite.config import Config, ConfigError
from megatron_lite.distributed.mesh import ParallelMesh
from megatron_lite.training.gradients import copied_parameters, counted_parameters
from megatron_lite.training.optimizer import named_state
from megatron_lite.training.state import TrainState, restore_random_state

Say = Callable[[str], None]


def checkpoint_tensors(
    chunks: list[nn.Module], optimizer: torch.optim.Optimizer | None
) -> dict[str, torch.Tensor]:
    """{global name: tensor} of my chunks' weights and optimizer state. A tied weight's copy is left out."""
    return named_tensors(counted_parameters(chunks), optimizer)


def tied_copies(chunks: list[nn.Module], optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """The same for the copies: they read what the first stage's weight reads."""
    return named_tensors(copied_parameters(chunks), optimizer)


def named_tensors(
    parameters: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer | None
) -> dict[str, torch.Tensor]:
    """{global name: tensor} of these (global name, parameter) pairs and of their optimizer state.

    Two parameters of one name would replace each other: with V schedules a weight and its tied copy lie on one rank.
    """
    named = list(parameters)
    weights = {name: parameter.data for name, parameter in named}
    assert len(weights) == len(named), "two parameters of this rank have one global name"
    return weights | (dict(named_state(named, optimizer)) if optimizer is not None else {})


def resume(
    config: Config,
    checkpointer: Checkpointer,
    chunks: list[nn.Module],
    optimizer: torch.optim.Optimizer,
    mesh: ParallelMesh,
    say: Say,
    once: Callable[[Callable[[], None]], None] = lambda check: check(),
) -> tuple[TrainState, LearningRateSchedule]:
    """Load what --load, --finetune, --pretrained-checkpoint and their kin ask for, or start afresh.

    once: runs a check but in a restart by torchrun of a run that passed it: --save may hold what it saved itself.

    Raises:
        ConfigError: a checkpoint asked for by name is not there, does not fit the flags, or lacks tensors.
    """
    found = checkpointer.find()
    kept = checkpointer.read_train_state(found) if found is not None else {}
    # tools/hf_import.py says so in what it writes: there is no optimizer state and no place to go on from.
    weights_only = found is not None and (
        config.checkpoint.finetune or found.pretrained or kept.get("weights_only", False)
    )
    once(lambda: checkpointer.refuse_to_replace(found, weights_only))
    if found is None:
        if config.checkpoint.load:
            say(f"no checkpoint in {config.checkpoint.load}: starting from random weights")
        return TrainState(), LearningRateSchedule.from_config(config)
    for line in checkpointer.allowed_differences(found, weights_only):
        say(line)
    with_optimizer = not (weights_only or config.checkpoint.no_load_optim)
    _load_tensors(checkpointer, found, chunks, optimizer if with_optimizer else None)
    if weights_only:
        say(f"weights from {found.path}; everything else starts at step 0")
        origin = {key: value for key, value in kept.items() if key == "hugging_face"}
        return TrainState.from_dict(origin), LearningRateSchedule.from_config(config)
    state = TrainState.from_dict(kept)
    if not config.checkpoint.no_load_rng:
        _restore_random(checkpointer, found, mesh, say)
    say(
        f"resumed from {found.path}: iteration {state.iteration}, {state.consumed_samples:,} samples consumed"
    )
    if not with_optimizer:
        say("--no-load-optim: the optimizer's state starts at zero, the learning rate goes on where it was")
    return state, resumed_schedule(config, kept.get("schedule"))


def check_same_data(config: Config, state: TrainState, fingerprint: str | None) -> None:
    """Refuse to go on when the training samples are others, or in another order, than before the checkpoint.

    The flags may be equal and this differ: files that changed, or a longer run that needs more epochs (all epochs
    are shuffled together, as in Megatron).

    Raises:
        ConfigError: unless --allow-data-change.
    """
    kept, state.data_fingerprint = state.data_fingerprint, fingerprint
    changed = state.iteration and None not in (kept, fingerprint) and kept != fingerprint
    if changed and not config.data.allow_data_change:
        raise ConfigError(
            f"the training samples differ from those before iteration {state.iteration}: the data files have "
            "changed, or the run's new length takes another number of epochs and so another order; "
            "--allow-data-change goes on all the same"
        )


def _load_tensors(
    checkpointer: Checkpointer,
    found: StoredCheckpoint,
    chunks: list[nn.Module],
    optimizer: torch.optim.Optimizer | None,
) -> None:
    checkpointer.load(found, checkpoint_tensors(chunks, optimizer))
    if any(chunk.tied for chunk in chunks):
        checkpointer.load(found, tied_copies(chunks, optimizer))


def _restore_random(
    checkpointer: Checkpointer, found: StoredCheckpoint, mesh: ParallelMesh, say: Say
) -> None:
    kept = checkpointer.load_rank_state(found)
    if kept is None:
        say("the layout differs from the checkpoint's: dropout draws other random numbers from here on")
    elif kept:
        restore_random_state(kept, mesh.device)
