"""The program that a start is measured against: imports torch, builds the bare model, does one step, prints the loss.

    python -m tools.benchmarks.bare_start '{"layers": 2, ...}' [FILE with weights and a batch]

Without a file it draws weights and a batch itself, as a hand-written program would.
"""

import json
import sys

import torch

from tools.benchmarks.baseline_model import BareModel, Sizes, build_optimizer, random_batches, train_step


def main(sizes: Sizes, given: str | None) -> None:
    """One step, one line."""
    model = BareModel(sizes)
    batch = random_batches(sizes, sizes.micro_batch, 1)[0]
    if given is not None:
        kept = torch.load(given)
        model.load_state_dict(kept["weights"])
        batch = kept["batch"]
    loss = train_step(model, build_optimizer(model), batch, 1)
    print(f"loss {loss:.6E}", flush=True)


if __name__ == "__main__":
    main(Sizes(**json.loads(sys.argv[1])), sys.argv[2] if len(sys.argv) > 2 else None)
