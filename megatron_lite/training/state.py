"""Where a run stands: what a checkpoint keeps besides tensors."""

from dataclasses import asdict, dataclass, field
from typing import Any, get_type_hints

import torch

from megatron_lite.config.declare import ConfigError, is_of_kind, kind_in_words


@dataclass
class TrainState:
    """Counters of the run, the same on every rank.

    consumed_samples advances with every step, schedule_samples (what the learning rate follows) only with steps
    that changed the weights: a skipped step does not warm up. tokens_of_source (path prefix -> tokens read) is brought
    up to date when it is logged or saved. hugging_face: what the model that training began from says beside its maths,
    for an export to say again.
    """

    iteration: int = 0
    consumed_samples: int = 0
    schedule_samples: int = 0
    consumed_tokens: int = 0
    skipped_iterations: int = 0
    nan_iterations: int = 0
    flops: float = 0.0
    tokens_of_source: dict[str, int] = field(default_factory=dict)
    loss_scale: dict[str, float] | None = None
    wandb_run_id: str | None = None
    hugging_face: dict[str, Any] | None = None
    data_fingerprint: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    def advance(self, batch_size: int, seq_length: int, trained: bool) -> None:
        """Count a step over so many samples; trained: it changed the weights."""
        self.iteration += 1
        self.consumed_samples += batch_size
        self.consumed_tokens += batch_size * seq_length
        self.schedule_samples += batch_size if trained else 0
        self.skipped_iterations += 0 if trained else 1

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> "TrainState":
        """The reverse of to_dict; keys of other versions are left out.

        Raises:
            ConfigError: a count is no count, or another value not of its kind.
        """
        known = get_type_hints(cls)
        values = {key: value for key, value in stored.items() if key in known}
        for key, value in values.items():
            counts = isinstance(value, (int, float))
            if not is_of_kind(value, known[key]) or (counts and not value >= 0):
                wanted = kind_in_words(known[key]) + (" of at least 0" if counts else "")
                raise ConfigError(f"the checkpoint's {key} is {str(value)[:80]!r}, wanted {wanted}")
        return cls(**values)


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """This rank's generators, uint8 tensors."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Set this rank's generators to a kept state."""
    torch.set_rng_state(state["cpu"].cpu())
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
