"""From a checkpoint to a run that goes on: what is read, what is left, and one line about each choice."""

from collections.abc import Callable

from megatron_lite.arithmetic.lr_schedule import resumed_schedule
from megatron_lite.checkpoint import StoredCheckpoint
from megatron_lite.checkpoint.checkpointer import Checkpointer
from megatron_lite.config import Config, ConfigError
from megatron_lite.training.named_tensors import checkpoint_tensors, tied_copies
from megatron_lite.training.run import Run
from megatron_lite.training.state import TrainState, restore_random_state

Say = Callable[[str], None]


def resume(
    run: Run,
    checkpointer: Checkpointer,
    fingerprint: str | None,
    say: Say,
    once: Callable[[Callable[[], None]], None],
) -> None:
    """Load what --load, --finetune and --pretrained-checkpoint ask for into the run, or leave it at its start.

    Args:
        fingerprint: of the training samples.
        once: runs a check but in a restart by torchrun of a run that passed it: --save may hold what it saved itself.

    Raises:
        ConfigError: a checkpoint asked for by name is not there, does not fit the flags, or lacks tensors.
    """
    found = checkpointer.find()
    kept = checkpointer.read_train_state(found) if found is not None else {}
    # tools/hf_import.py says so in what it writes: there is no optimizer state and no place to go on from.
    weights_only = found is not None and (
        run.config.checkpoint.finetune or found.pretrained or kept.get("weights_only", False)
    )
    once(lambda: checkpointer.refuse_to_replace(found, weights_only))
    if found is not None:
        _load(run, checkpointer, found, kept, weights_only, say)
    elif run.config.checkpoint.load:
        say(f"no checkpoint in {run.config.checkpoint.load}: starting from random weights")
    check_same_data(run.config, run.state, fingerprint)


def _load(
    run: Run, checkpointer: Checkpointer, found: StoredCheckpoint, kept: dict, weights_only: bool, say: Say
) -> None:
    config = run.config
    for line in checkpointer.allowed_differences(found, weights_only):
        say(line)
    with_optimizer = not (weights_only or config.checkpoint.no_load_optim)
    optimizer = run.optimizer if with_optimizer else None
    checkpointer.load(found, checkpoint_tensors(run.chunks, optimizer))
    if any(chunk.tied for chunk in run.chunks):
        checkpointer.load(found, tied_copies(run.chunks, optimizer))
    if weights_only:
        say(f"weights from {found.path}; everything else starts at step 0")
        run.state = TrainState.from_dict({key: kept[key] for key in kept if key == "hugging_face"})
        return
    run.state = state = TrainState.from_dict(kept)
    run.loss_scale.load_dict(state.loss_scale)
    if not config.checkpoint.no_load_rng:
        _restore_random(run, checkpointer, found, say)
    say(
        f"resumed from {found.path}: iteration {state.iteration}, {state.consumed_samples:,} samples consumed"
    )
    if not with_optimizer:
        say("--no-load-optim: the optimizer's state starts at zero, the learning rate goes on where it was")
    run.schedule = resumed_schedule(config, kept.get("schedule"))


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


def _restore_random(run: Run, checkpointer: Checkpointer, found: StoredCheckpoint, say: Say) -> None:
    kept = checkpointer.load_rank_state(found)
    if kept is None:
        say("the layout differs from the checkpoint's: dropout draws other random numbers from here on")
    elif kept:
        restore_random_state(kept, run.mesh.device)
