"""The factor that keeps fp16 gradients from rounding to zero (Micikevicius et al. 2018). Imports no torch.

Megatron-LM's DynamicGradScaler: the scale doubles after a window of good steps and halves when overflows have
used the hysteresis up; the hysteresis is refilled when the scale doubles, so a run of overflows goes on halving.
"""

from dataclasses import dataclass

from megatron_lite.config.model import PrecisionConfig

GROWTH = 2.0
BACKOFF = 0.5


@dataclass
class LossScale:
    """The scale of the next step, and what decides about the one after.

    Multiply the loss by `scale`, divide the gradients by it, call `update` once a step. Only fp16 has a scale;
    elsewhere it is 1 and stays 1.
    """

    scale: float
    dynamic: bool = False
    window: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0
    good_steps: int = 0
    overflows_left: int = 2

    @classmethod
    def from_config(cls, precision: PrecisionConfig) -> "LossScale":
        """--loss-scale is a fixed scale; without it the scale is dynamic and starts at --initial-loss-scale."""
        if not precision.fp16:
            return cls(scale=1.0)
        if precision.loss_scale is not None:
            return cls(scale=precision.loss_scale)
        return cls(
            scale=precision.initial_loss_scale,
            dynamic=True,
            window=int(precision.loss_scale_window),
            hysteresis=precision.hysteresis,
            minimum=precision.min_loss_scale,
            overflows_left=precision.hysteresis,
        )

    def is_overflow(self, loss_is_finite: bool) -> bool:
        """Whether gradients that are not finite mean only that the scale is still too large: it can go down."""
        return self.dynamic and loss_is_finite and self.scale > self.minimum

    def update(self, finite: bool) -> None:
        """Note whether this step's gradients were finite (the same answer on every rank)."""
        if not self.dynamic:
            return
        if not finite:
            self.good_steps = 0
            self.overflows_left -= 1
            if self.overflows_left <= 0:
                self.scale = max(self.scale * BACKOFF, self.minimum)
            return
        self.good_steps += 1
        if self.good_steps == self.window:
            self.good_steps = 0
            self.overflows_left = self.hysteresis
            self.scale *= GROWTH

    def to_dict(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {
            "scale": self.scale,
            "good_steps": self.good_steps,
            "overflows_left": self.overflows_left,
        }

    def load_dict(self, kept: dict[str, float] | None) -> None:
        """Go on from a checkpoint; a fixed scale stays what the flags say, None (another precision) changes nothing."""
        if self.dynamic and kept is not None:
            self.scale = kept["scale"]
            self.good_steps = int(kept["good_steps"])
            self.overflows_left = int(kept["overflows_left"])
