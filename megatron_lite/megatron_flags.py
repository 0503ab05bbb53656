"""Megatron's flags that are no field here: renamed, accepted without effect, refused."""

from typing import NamedTuple


class Accepted(NamedTuple):
    """A flag read without effect: nargs as argparse's, 0 = a switch; values = what may follow, if bounded."""

    nargs: int | str
    reason: str
    values: tuple[str, ...] | None = None


# Switches that set other fields: flag -> {field: value}. Old and shorter spellings.
SETS: dict[str, dict[str, object]] = {
    "--use-rotary-position-embeddings": {"position_embedding_type": "rope"},
    "--checkpoint-activations": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}

_FSDP = "FSDP2 does this by itself"
_KERNEL = "kernels are PyTorch's own"
_WRITER = "checkpoints are written by torch.distributed.checkpoint"

ACCEPTED: dict[str, Accepted] = {
    "--ckpt-format": Accepted(1, _WRITER),
    "--transformer-impl": Accepted(1, "there is one implementation"),
    "--use-mcore-models": Accepted(0, "there is one implementation"),
    "--distributed-backend": Accepted(1, "NCCL on GPUs, gloo on CPUs", ("nccl", "gloo")),
}

REFUSED: dict[str, str] = {
    "--fp8-format": "FP8 is not supported: train in --bf16",
}


def why_refused(name: str) -> str | None:
    """Why a flag is refused and what to use instead; None for a flag that is not known to be refused."""
    return REFUSED.get(name)
