"""Pretrain a GPT model: `torchrun --nproc-per-node N pretrain_gpt.py --flags` (see --help).

The whole story, top to bottom; no feature lives here.
"""

import logging
import sys
import time

from megatron_lite.arguments.parse import parse_or_exit, print_and_exit
from megatron_lite.checkpoint import check_folders, stored_config
from megatron_lite.config import Config
from megatron_lite.distributed.environment import Environment
from megatron_lite.rehearsal.run_report import describe_run, start_banner

if __name__ == "__main__":  # --help, --check and a wrong flag are answered before torch is imported
    STARTED = time.monotonic()
    ENVIRONMENT = Environment.read()
    CONFIG = parse_or_exit(sys.argv[1:], ENVIRONMENT, stored_config, check_folders)
    logging.basicConfig(level=CONFIG.logging.logging_level)
    if CONFIG.command.check:
        print_and_exit(describe_run(CONFIG))

# ruff: noqa: E402

from megatron_lite.arithmetic.batch_size import BatchSchedule
from megatron_lite.arithmetic.mesh_sizes import mesh_sizes
from megatron_lite.arithmetic.partition import StagePlan, plan_from_config, stages_of_rank
from megatron_lite.arithmetic.vocabulary import with_vocabulary
from megatron_lite.checkpoint.checkpointer import Checkpointer
from megatron_lite.checkpoint.conversion import convert_checkpoint
from megatron_lite.data.build import Builder, build_datasets, sample_counts
from megatron_lite.data.loader import Loader
from megatron_lite.data.tokenizer import build_tokenizer
from megatron_lite.distributed import process_group as distributed
from megatron_lite.distributed.mesh import build_mesh
from megatron_lite.model.gpt import GPTChunk
from megatron_lite.parallel.parallelize import build_chunks
from megatron_lite.parallel.pipeline import Pipeline
from megatron_lite.rehearsal.dry_run import rehearse
from megatron_lite.training.evaluate import Evaluator
from megatron_lite.training.loop import Trainer, evaluate_at_end
from megatron_lite.training.loss_scale import LossScale
from megatron_lite.training.metrics import Metrics
from megatron_lite.training.optimizer import build_optimizer
from megatron_lite.training.profile import profiled
from megatron_lite.training.resume import check_same_data, resume
from megatron_lite.training.signals import StopWatch
from megatron_lite.training.timeline import timeline
from megatron_lite.training.timers import Timers
from megatron_lite.training.trackers import ProgressLog, build_tracker


def pretrain(config: Config, environment: Environment, started: float) -> int:
    """Train from start or checkpoint to the end; returns the exit code."""
    if config.checkpoint.ckpt_convert_format:
        if environment.rank == 0:
            print(f"written: {convert_checkpoint(config.checkpoint)}")
        return 0
    with distributed.process_group(config, environment) as (device, once):
        stop = StopWatch(config.training, device, started)
        mesh = build_mesh(config, device)
        distributed.seed_everything(
            config, mesh.rank("pp"), mesh.data_parallel_rank, mesh.rank("cp"), mesh.rank("tp")
        )
        tokenizer = build_tokenizer(config.data, config.model.vocab_size)
        config = with_vocabulary(config, tokenizer.vocab_size)
        say = print if environment.rank == 0 else lambda line: None
        for note in config.notes:
            say(f"note: {note}")
        # The first rank of each node builds index arrays, the others wait and read them.
        builder = Builder(
            environment.local_rank == 0, barrier=lambda: distributed.patient_barrier(mesh.host_group)
        )
        datasets = build_datasets(config, tokenizer, sample_counts(config), builder, say)

        def build(stage: StagePlan) -> GPTChunk:
            return GPTChunk(config.model, stage.layers, stage.has_embedding, stage.has_lm_head)

        plans = plan_from_config(config)
        say(start_banner(config, plans))
        chunks = build_chunks(config, stages_of_rank(plans, mesh.rank("pp")), mesh, build)
        pipeline = Pipeline(config, plans, chunks, mesh)
        optimizer = build_optimizer(chunks, config.optimizer)
        layout = mesh_sizes(config) | {"chunks": config.parallel.num_virtual_stages_per_pipeline_rank}
        checkpointer = Checkpointer(config, mesh.host_group, layout, mesh.coordinates, tokenizer.files())
        loss_scale = LossScale.from_config(config.precision)
        state, schedule = resume(config, checkpointer, chunks, optimizer, mesh, say, once)
        checkpointer.overlap_copy_with(optimizer)
        loss_scale.load_dict(state.loss_scale)
        check_same_data(config, state, datasets.fingerprint)
        batches = BatchSchedule.from_config(config)
        if state.iteration >= batches.total_iterations and not config.training.skip_train:
            say(
                f"nothing to do: the checkpoint is at iteration {state.iteration} of {batches.total_iterations}"
            )
            return 0

        def build_loader(dataset: object, consumed_samples: int) -> Loader:
            return Loader(
                dataset, config, mesh.data_parallel_rank, mesh.data_parallel_size, consumed_samples, device
            )

        tracker = build_tracker(config, environment, state.wandb_run_id)
        state.wandb_run_id = distributed.from_first_rank(tracker.wandb_run_id, mesh.host_group)
        timers, progress = Timers(config.logging, device), ProgressLog(config, environment)
        metrics = Metrics(config, device, environment.world_size, batches.total_iterations, tracker, timers)
        progress.started(state)
        validation = Evaluator(config, pipeline, mesh, datasets.valid, build_loader, stop.asked)
        test = Evaluator(config, pipeline, mesh, datasets.test, build_loader, stop.asked)
        reason = None
        if not config.training.skip_train:
            with profiled(config, mesh, state.iteration) as a, timeline(config, mesh, pipeline) as b:
                trainer = Trainer(
                    config=config,
                    mesh=mesh,
                    chunks=chunks,
                    pipeline=pipeline,
                    optimizer=optimizer,
                    schedule=schedule,
                    batches=batches,
                    loader=build_loader(datasets.train, state.consumed_samples),
                    validation=validation,
                    checkpointer=checkpointer,
                    metrics=metrics,
                    stop=stop,
                    state=state,
                    loss_scale=loss_scale,
                    timers=timers,
                    progress=progress,
                    on_step=(a, b),
                )
                reason = trainer.run()
                trainer.loader.close()
        if reason is not None:
            metrics.note(f"stopped after iteration {state.iteration}: {reason}")
        else:
            evaluate_at_end(config, validation, "validation", metrics, state)
            evaluate_at_end(config, test, "test", metrics, state)
        for part in (validation, test, checkpointer, tracker):
            part.close()
    return 0


if __name__ == "__main__":
    if CONFIG.command.dry_run:
        distributed.run_and_exit(lambda: rehearse(CONFIG), ENVIRONMENT)
    distributed.run_and_exit(lambda: pretrain(CONFIG, ENVIRONMENT, STARTED), ENVIRONMENT)
