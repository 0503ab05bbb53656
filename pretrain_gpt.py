"""Pretrain a GPT model: `torchrun --nproc-per-node N pretrain_gpt.py --flags` (see --help).

The whole story, top to bottom; no feature lives here.
"""

import logging
import sys
import time

from megatron_lite.arguments.parse import parse_or_exit
from megatron_lite.checkpoint import check_folders, stored_config
from megatron_lite.config import Config
from megatron_lite.distributed.environment import Environment
from megatron_lite.rehearsal.run_report import describe_run, start_banner

if __name__ == "__main__":  # --help, --check and a wrong flag are answered before torch is imported
    STARTED = time.monotonic()
    ENVIRONMENT = Environment.read()
    CONFIG = parse_or_exit(sys.argv[1:], ENVIRONMENT, stored_config, check_folders, describe_run)
    logging.basicConfig(level=CONFIG.logging.logging_level)

# ruff: noqa: E402

from megatron_lite.arithmetic.vocabulary import with_vocabulary
from megatron_lite.checkpoint.conversion import convert_checkpoint
from megatron_lite.data.build import build_datasets
from megatron_lite.data.tokenizer import build_tokenizer
from megatron_lite.distributed import process_group as distributed
from megatron_lite.distributed.mesh import build_mesh
from megatron_lite.rehearsal.dry_run import rehearse
from megatron_lite.training.loop import Trainer
from megatron_lite.training.resume import resume
from megatron_lite.training.run import build_run
from megatron_lite.training.signals import StopConditions


def pretrain(config: Config, environment: Environment, started: float) -> int:
    """Train from start or checkpoint to the end; returns the exit code."""
    if config.checkpoint.ckpt_convert_format:
        if environment.rank == 0:
            print(f"written: {convert_checkpoint(config.checkpoint)}")
        return 0
    with distributed.process_group(config, environment) as (device, once):
        stop = StopConditions(config.training, device, started)
        say = print if environment.rank == 0 else lambda line: None
        mesh = build_mesh(config, device)
        tokenizer = build_tokenizer(config.data, config.model.vocab_size)
        config = with_vocabulary(config, tokenizer.vocab_size)
        for note in config.notes:
            say(f"note: {note}")
        # The first rank of each node builds index arrays, the others wait and read them.
        datasets = build_datasets(
            config,
            tokenizer,
            is_builder=environment.local_rank == 0,
            barrier=mesh.wait_for_all_hosts,
            say=say,
        )
        run = build_run(config, mesh, stop)
        say(start_banner(config, run.plans))
        checkpointer = run.checkpointer(tokenizer.files())
        resume(run, checkpointer, datasets.fingerprint, say, once)
        done, total = run.state.iteration, run.batches.total_iterations
        if done >= total and not config.training.skip_train:
            say(f"nothing to do: the checkpoint is at iteration {done} of {total}")
            return 0
        Trainer(run, datasets, checkpointer, environment).train()
    return 0


if __name__ == "__main__":
    if CONFIG.command.dry_run:
        distributed.run_and_exit(lambda: rehearse(CONFIG), ENVIRONMENT)
    distributed.run_and_exit(lambda: pretrain(CONFIG, ENVIRONMENT, STARTED), ENVIRONMENT)
