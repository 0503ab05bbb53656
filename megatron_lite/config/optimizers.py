"""The optimizers, a row each: what --optimizer takes, the class, its arguments, and the state it keeps. No torch.

A new one is one row here: the flag's choices, training/optimizer.py, checkpoints and the planner read this table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

# What a state tensor is like: one fp32 value a parameter element, or one fp32 number a parameter.
FULL, SCALAR = "full", "scalar"
ADAM_STATE = {"step": SCALAR, "exp_avg": FULL, "exp_avg_sq": FULL}


@dataclass(frozen=True)
class OptimizerRow:
    """One optimizer.

    Args:
        factory: "module:class", called with parameter groups, lr and the arguments.
        arguments: its keyword -> field of OptimizerConfig, a tuple of fields, or a constant that is neither.
        state: name of a state tensor -> FULL or SCALAR; it starts as zeros, or as `initial` says.
        matrix_state: the same for the matrices of the layers, where they have another (groups with `orthogonal`).
    """

    factory: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    state: Mapping[str, str] = field(default_factory=dict)
    matrix_state: Mapping[str, str] | None = None
    initial: Mapping[str, float] = field(default_factory=dict)

    def bytes_of(self, elements: float, matrix_elements: float) -> float:
        """Bytes of state of so many parameter elements, of which so many lie in matrices of layers."""

        def each(state: Mapping[str, str]) -> int:
            return 4 * sum(kind == FULL for kind in state.values())

        matrices = matrix_elements if self.matrix_state is not None else 0
        return each(self.state) * (elements - matrices) + each(self.matrix_state or {}) * matrices


_ADAM_ARGUMENTS = {"betas": ("adam_beta1", "adam_beta2"), "eps": "adam_eps"}

OPTIMIZERS: dict[str, OptimizerRow] = {
    # AdamW (Loshchilov and Hutter 2019), fused: one kernel on CUDA and on the CPU alike.
    "adam": OptimizerRow("torch.optim:AdamW", _ADAM_ARGUMENTS | {"fused": True}, ADAM_STATE),
    "sgd": OptimizerRow("torch.optim:SGD", {"momentum": "sgd_momentum"}, {"momentum_buffer": FULL}),
    # Muon for the matrices of the layers, AdamW for embedding, head, norms and biases.
    "muon": OptimizerRow(
        "megatron_lite.training.muon:Muon", _ADAM_ARGUMENTS, ADAM_STATE, {"momentum_buffer": FULL}
    ),
}
