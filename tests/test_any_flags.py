"""Whatever the flags: a config that describes itself, or one sentence. Never another exception, never silence."""

import re
from dataclasses import fields

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_lite.arguments.parse import parse_arguments
from megatron_lite.arithmetic.batch_size import BatchSchedule
from megatron_lite.arithmetic.lr_schedule import LearningRateSchedule
from megatron_lite.arithmetic.partition import plan_from_config
from megatron_lite.config import CONCERNS, Config, ConfigError
from megatron_lite.config.declare import flag_of
from megatron_lite.distributed.environment import Environment
from megatron_lite.rehearsal.run_report import describe_run

SMALL = st.integers(-1, 12).map(str) | st.sampled_from(["16", "24", "32", "48", "64"])
ODD = st.sampled_from(
    ["", "0", "-1", "nan", "1e400", "'", "x", "0,0", "1:2", "--", "a b", "1e3", "9" * 30, "\ud800"]
)
FIELDS = [item for concern in CONCERNS.values() for item in fields(concern)]
# What decides the layout, the batch and the schedules is drawn more often than the rest.
CENTRAL = re.compile(
    r"num_|size|layers|pipeline|parallel|batch|iters|samples|lr|decay|recompute|group|length|split"
)


@st.composite
def flag(draw, items, values):
    item = draw(st.sampled_from(items))
    if isinstance(item.default, bool):
        return [flag_of(item)]
    choices = item.metadata.get("choices")
    value = st.sampled_from(choices) if choices and draw(st.booleans()) else values
    nargs = item.metadata.get("nargs")
    count = nargs if isinstance(nargs, int) else draw(st.integers(1, 3)) if nargs else 1
    return [flag_of(item), *(draw(value) for _ in range(count))]


def words_of(items, values):
    return st.lists(flag(items, values), max_size=7).map(
        lambda flags: [word for words in flags for word in words]
    )


BASE = """--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1
    --global-batch-size 48 --train-iters 40 --lr 1e-2 --mock-data --vocab-size 60 --check --world-size 12"""
QUICK = settings(max_examples=120, suppress_health_check=list(HealthCheck))


def answer(words):
    """The config, or None after one sentence."""
    try:
        return parse_arguments([*BASE.split(), *words], Environment())
    except ConfigError as error:
        text = str(error)
        assert text and "\n" not in text and len(text) < 1500
        return None


@QUICK
@given(words_of([item for item in FIELDS if CENTRAL.search(item.name)], SMALL))
def test_numbers(words):
    """What passes the checks can be planned, described and scheduled."""
    config = answer(words)
    if config is None or config.training.micro_batch_size is None:
        return
    assert "Layout of" in describe_run(config)
    batches, schedule = BatchSchedule.from_config(config), LearningRateSchedule.from_config(config)
    for step in range(0, min(60, batches.total_iterations)):
        consumed = batches.samples_after(step)
        assert batches.num_microbatches(
            consumed
        ) * batches.samples_per_microbatch == batches.global_batch_size(consumed)
        low, high = min(schedule.min_lr, schedule.warmup_init), max(schedule.lr, schedule.warmup_init)
        assert low <= schedule.learning_rate(consumed) <= high * (1 + 1e-12)
        schedule.learning_rate(consumed, decoupled=True)
        assert schedule.weight_decay(consumed) >= 0
    assert Config.from_dict(config.to_dict()).to_dict() == config.to_dict()


@QUICK
@given(words_of(FIELDS, ODD))
def test_nonsense(words):
    answer(words)


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=60)
def test_every_layer_lies_on_one_stage(layers, size, chunks):
    words = ["--num-layers", layers, "--pipeline-model-parallel-size", size, "--world-size", size]
    words += ["--num-virtual-stages-per-pipeline-rank", chunks, "--padded-vocab-size", 128]
    config = answer([str(word) for word in words])
    if config is not None:
        plans = plan_from_config(config)
        assert [layer for plan in plans for layer in plan.layers] == list(range(layers))
