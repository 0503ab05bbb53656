"""Is my layout right? Trains a few steps in it and in one plain process, and compares every number.

    torchrun --nproc-per-node 8 tools/verify_parity.py <the flags of pretrain_gpt.py> [--parity-steps 2]

All sides start from the same weights and see the same random tokens, some masked. Compared: the loss and the
gradient norm of every step, every parameter's gradient by name, the evaluation loss at the end. The one process
uses plain autograd over the whole batch and torch's own clipping and optimizers. It runs twice: in fp64, which is
the truth, and in the run's format, which shows what rounding costs there; a layout is equal when its error is at
most a small factor of that (see allowed_error). A model too large for one process is made small first, the layout
stays. Computes in fp32 without dropout; --parity-precision keep takes the run's own format. Exit code 0 when
everything is equal, 1 when not, 2 for a wrong flag.
"""

import argparse
import sys
from collections.abc import Sequence

from megatron_lite.arguments.parse import parse_or_exit
from megatron_lite.arithmetic.vocabulary import known_vocabulary, with_vocabulary
from megatron_lite.config import Config
from megatron_lite.distributed.environment import Environment
from megatron_lite.files.command_line import Parser, guarded, number
from megatron_lite.parallel.miniature import VOCABULARY, describe_change, miniature

# A layout adds up the same numbers in another order and in other pieces, on kernels chosen by other shapes: its error
# is that of one process in the same format times a chance factor. Over all layouts of the tests and five kinds of CPU
# kernels that was at most 3.3; a mistake in a layout is orders of magnitude larger.
FACTOR = 8.0


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """(this tool's own flags, the run's flags)."""
    parser = Parser(__doc__.splitlines()[0], prog="verify_parity.py")
    flag = parser.add_argument
    flag("--parity-steps", type=number(1), default=2, help="steps to train (default 2)")
    flag(
        "--parity-factor",
        type=number(0, float),
        default=FACTOR,
        help="how many times the rounding error of one process a layout may have (default %(default)g)",
    )
    flag("--parity-precision", choices=("fp32", "keep"), default="fp32", help="fp32, or keep the run's")
    flag("--parity-max-parameters", type=number(1), default=20_000_000, help="larger models are made small")
    return parser.parse_known_args(argv)


if __name__ == "__main__":  # a wrong flag is answered before torch is imported
    ENVIRONMENT = Environment.read()
    OWN, FLAGS = guarded(lambda: parse(sys.argv[1:]))
    CONFIG = parse_or_exit(FLAGS, ENVIRONMENT)

# ruff: noqa: E402

import torch
import torch.distributed as dist

from megatron_lite.distributed.collectives import from_first_rank
from megatron_lite.distributed.mesh import build_mesh
from megatron_lite.distributed.process_group import process_group, run_and_exit
from megatron_lite.rehearsal.parity import (
    comparable,
    compare_with_one_process,
    random_batch,
    report,
    run_layout,
)


def with_any_vocabulary(config: Config) -> Config:
    """The config with a vocabulary size: tokens are random here, and no tokenizer is read."""
    return with_vocabulary(config, known_vocabulary(config) or VOCABULARY)


def verify(config: Config, device: torch.device, steps: int, factor: float) -> tuple[str, bool]:
    """(report, equal), on every rank; rank 0 compares."""
    mesh = build_mesh(config, device)
    batches = [random_batch(config, step) for step in range(steps + 1)]
    layout = run_layout(config, mesh, batches)
    collected: list[dict[str, torch.Tensor] | None] = [None] * dist.get_world_size()
    first = all(mesh.rank(axis) == 0 for axis in ("dp_replicate", "dp_shard", "cp", "tp"))
    gathered = collected if dist.get_rank() == 0 else None
    dist.gather_object(layout.gradients if first else {}, gathered, dst=0)
    answer = None
    if dist.get_rank() == 0:
        layout.gradients = {name: g for part in collected for name, g in part.items()}
        rows, margin = compare_with_one_process(config, layout, batches, device, factor)
        answer = report(rows, factor, margin), not any(row.fails for row in rows)
    return from_first_rank(answer)


def main(own: argparse.Namespace, given: Config, environment: Environment) -> int:
    """Shrink, run both sides, print; the exit code."""
    given = with_any_vocabulary(given)
    config = miniature(given, own.parity_max_parameters, max_tokens=16_384)
    change = describe_change(given, config)
    with process_group(config, environment) as (device, _):
        text, equal = verify(
            comparable(config, own.parity_precision), device, own.parity_steps, own.parity_factor
        )
        if environment.rank == 0:
            print(f"made small: {change}" if change else "the run's own size", text, sep="\n")
    return 0 if equal else 1


if __name__ == "__main__":
    run_and_exit(lambda: main(OWN, CONFIG, ENVIRONMENT), ENVIRONMENT)
