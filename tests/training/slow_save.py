"""pretrain_gpt.py whose saves take SLOW_SAVE_S seconds longer: for test_signals.py, under torchrun."""

import os
import sys
import time

import pretrain_gpt
from megatron_lite.arguments.parse import parse_or_exit
from megatron_lite.checkpoint.checkpointer import Checkpointer
from megatron_lite.distributed.environment import Environment
from megatron_lite.distributed.process_group import run_and_exit

if __name__ == "__main__":
    environment = Environment.read()
    config = parse_or_exit(sys.argv[1:], environment)
    save = Checkpointer.save

    def slow_save(self, *arguments):
        time.sleep(float(os.environ["SLOW_SAVE_S"]))
        return save(self, *arguments)

    Checkpointer.save = slow_save
    run_and_exit(lambda: pretrain_gpt.pretrain(config, environment, time.monotonic()), environment)
