"""verify_parity on every rank, with one that raises in the middle of a step: for test_failure.py, under torchrun."""

import sys
import time

from megatron_lite.arguments.parse import parse_or_exit
from megatron_lite.distributed.environment import Environment
from megatron_lite.distributed.process_group import run_and_exit
from megatron_lite.model.gpt import GPTChunk
from tools import verify_parity

if __name__ == "__main__":
    environment = Environment.read()
    own, flags = verify_parity.parse(sys.argv[1:])
    config = parse_or_exit(flags, environment)
    calls, right = [], GPTChunk.forward

    def forward(self, *arguments, **options):
        calls.append(1)
        if environment.rank == 2 and len(calls) == 6:
            print("failing at", time.time(), file=sys.stderr, flush=True)
            raise ValueError("planted on rank 2")
        return right(self, *arguments, **options)

    GPTChunk.forward = forward
    run_and_exit(lambda: verify_parity.main(own, config, environment), environment)
