"""The activations of the MLP: what each computes and what it costs, in one row.

Another activation is a row of ACTIVATIONS and, where transformers has it, its name there in
hugging_face/activation_names.py. `--activation` offers it, the model computes it, the planner and the FLOP count
read its cost. Imports no torch: a row's function is handed torch.nn.functional.

Shapes: F feed-forward width.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Activation:
    """One activation.

    Attributes:
        apply: apply(torch.nn.functional, *inputs), each input [..., F] -> [..., F].
        num_inputs: projections of the hidden state that it takes: up, or gate and up.
        num_saved: tensors [tokens, F] that autograd saves from the projections to the input of the down projection.
    """

    apply: Callable[..., Any]
    num_inputs: int
    num_saved: int

    @property
    def num_matrices(self) -> int:
        """Weight matrices H x F of an MLP with it: its projections and the one back to H."""
        return self.num_inputs + 1

    def limited(self, clamp: float | None, offset: float) -> "Activation":
        """The same with --activation-func-clamp-value and --glu-linear-offset, which gated activations have."""
        if self.num_inputs == 1 or (clamp is None and not offset):
            return self

        def apply(f: Any, gate: Any, up: Any) -> Any:
            if clamp is not None:
                gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
            return self.apply(f, gate, up + offset)

        return replace(self, apply=apply)


# The function is torch's where it has one. GELU is its tanh form, as Megatron's fused bias+GELU and GPT-2 use it;
# gelu_erf
# is its exact form; squared ReLU is Primer's (So et al. 2021), SwiGLU is Shazeer's (2020).
ACTIVATIONS = {
    "gelu": Activation(lambda f, up: f.gelu(up, approximate="tanh"), num_inputs=1, num_saved=2),
    "gelu_erf": Activation(lambda f, up: f.gelu(up), num_inputs=1, num_saved=2),
    "squared_relu": Activation(lambda f, up: f.relu(up).square(), num_inputs=1, num_saved=2),
    "swiglu": Activation(lambda f, gate, up: f.silu(gate) * up, num_inputs=2, num_saved=4),
    "quick_geglu": Activation(
        lambda f, gate, up: gate * f.sigmoid(1.702 * gate) * up, num_inputs=2, num_saved=5
    ),
}
