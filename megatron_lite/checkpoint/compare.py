"""The stored configuration against the run's, before any tensor is read. No torch."""

import json
from dataclasses import dataclass
from typing import Any

from megatron_lite.checkpoint.folder import StoredConfig, find_checkpoint
from megatron_lite.checkpoint.manifest import TOKENIZER
from megatron_lite.config import Config, ConfigError
from megatron_lite.config.data import TOKENIZER_FILES, TOKENIZER_FLAGS
from megatron_lite.config.model import TRAINING_ONLY

# Fields of the model that change no weight's meaning: free to change.
_MODEL_FREE = {*TRAINING_ONLY, "make_vocab_size_divisible_by", "padded_vocab_size"}
# Fields that change what a position means, not a shape: a run that only takes the weights may set them anew, which
# is how a context is made longer.
_POSITIONS = {
    "rotary_base",
    "use_rope_scaling",
    "rope_scaling_factor",
    "rope_scaling_low_freq_factor",
    "rope_scaling_high_freq_factor",
    "rope_scaling_original_max_position_embeddings",
    "window_size",
}
_ORDER = {  # what decides which samples come next; a change repeats or skips some
    "data": {
        "seq_length",
        "data_path",
        "train_data_path",
        "split",
        "data_args_path",
        "per_split_data_args_path",
        "mock_data",
        "dataloader_type",
        "reset_position_ids",
        "reset_attention_mask",
        "eod_mask_loss",
        *TOKENIZER_FLAGS,
    },
    "training": {"seed", "global_batch_size", "rampup_batch_size", "step_batch_size_schedule"},
}
# Paths: where both have the files, what is in them is compared instead.
_LISTED = ("model", "precision", "optimizer")
# How the others are treated, not what they are.
_UNTOLD = {"override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"}
_ABSENT = object()
_WAYS = {
    "model": "the model has to stay the same",
    "data": "--allow-data-change allows data, seed and batch to differ",
    "optimizer": "--no-load-optim starts the optimizer's state anew",
}


@dataclass(frozen=True)
class Difference:
    """A field whose stored value is not the run's. `refusal`: None, "model", "data" or "optimizer"."""

    concern: str
    field: str
    stored: Any
    now: Any
    refusal: str | None = None

    def __str__(self) -> str:
        return f"{self.concern}.{self.field} was {_shown(self.stored)}, is {_shown(self.now)}"


def compare_configs(stored: StoredConfig, config: Config, weights_only: bool = False) -> list[Difference]:
    """Every difference in the model, the data's order, the precision and the optimizer.

    Args:
        weights_only: only weights are taken (--finetune, --pretrained-checkpoint): data and optimizer are free.
    """
    differences = []
    for concern, values in config.to_dict().items():
        kept = stored.get(concern, {})
        for field, now in values.items():
            before = kept.get(field, _ABSENT)
            if before is _ABSENT or before == now:
                continue
            refusal = _refusal(concern, field, before, config, weights_only)
            listed = concern in _LISTED and field not in _UNTOLD
            if refusal is not None or listed or field in _ORDER.get(concern, ()):
                differences.append(Difference(concern, field, before, now, refusal))
    return differences


def check_resumable(
    config: Config,
    stored: StoredConfig,
    path: str,
    weights_only: bool = False,
    same_tokenizer: bool | None = None,
) -> list[str]:
    """Lines about the differences that are allowed.

    Args:
        stored, path: the checkpoint's configuration and its folder.
        same_tokenizer: whether the run's tokenizer files hold what the checkpoint's copies hold, wherever they lie;
            None where one side has none: then their paths are compared.

    Raises:
        ConfigError: the model differs; or, unless only weights are taken, data, seed or batch differ without
            --allow-data-change, or the optimizer does without --no-load-optim. Every difference is listed.
    """
    differences = compare_configs(stored, config, weights_only)
    if same_tokenizer is not None:
        differences = [d for d in differences if d.field not in TOKENIZER_FILES]
    if same_tokenizer is False:
        refusal = None if weights_only or config.data.allow_data_change else "data"
        before, now = f"as in {path}/{TOKENIZER}", "of other content"
        differences.append(Difference("data", "tokenizer", before, now, refusal))
    refused = [d for d in differences if d.refusal is not None]
    if refused:
        ways = [way for kind, way in _WAYS.items() if any(d.refusal == kind for d in refused)]
        raise ConfigError(
            f"{path} was made with other flags: {'; '.join(map(str, refused))} ({', '.join(ways)})"
        )
    return [f"differs from the checkpoint: {difference}" for difference in differences]


def stored_config(config: Config) -> StoredConfig | None:
    """For --use-checkpoint-args: the configuration kept by the checkpoint that would be loaded, None without one."""
    checkpoint = find_checkpoint(config.checkpoint)
    return None if checkpoint is None else checkpoint.config


def _refusal(concern: str, field: str, before: Any, config: Config, weights_only: bool) -> str | None:
    if concern == "model":
        learned = config.model.position_embedding_type == "learned_absolute"
        unused = field == "max_position_embeddings" and not learned
        unknown = field == "vocab_size" and before is None  # before the tokenizer was known
        free = field in _MODEL_FREE or (weights_only and field in _POSITIONS)
        return None if unused or unknown or free else "model"
    if field in _ORDER.get(concern, ()):
        return None if weights_only or config.data.allow_data_change else "data"
    if (concern, field) == ("optimizer", "optimizer"):
        return None if weights_only or config.checkpoint.no_load_optim else "optimizer"
    return None


def _shown(value: Any) -> str:
    text = json.dumps(value) if not isinstance(value, str) else f"'{value}'"
    return text if len(text) <= 80 else text[:77] + "..."
