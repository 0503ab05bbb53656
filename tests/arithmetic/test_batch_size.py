"""The batch schedule against a step-by-step re-telling of Megatron's calculators."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_lite.arguments.parse import parse_arguments
from megatron_lite.arithmetic.batch_size import (
    BatchSchedule,
    parse_step_schedule,
    ramp_up_steps,
    samples_after,
)
from megatron_lite.config import ConfigError
from megatron_lite.distributed.environment import Environment

BASE = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1
    --mock-data --vocab-size 60 --lr 1e-3"""


def schedule_of(flags, world_size=1):
    words = f"{BASE} --check --world-size {world_size} {flags}".split()
    return BatchSchedule.from_config(parse_arguments(words, Environment()))


def megatron_ramp_up(consumed, start, increment, ramp, final):
    """megatron-core's rule, as its documentation gives it, for the batch at `consumed` samples."""
    if consumed > ramp or final == start:
        return final
    per_increment = ramp / ((final - start) // increment)
    return start + int(consumed / per_increment) * increment


@settings(max_examples=50)
@given(st.integers(1, 64), st.integers(1, 16), st.integers(0, 40), st.integers(1, 5000), st.data())
def test_ramp_up_is_megatrons_at_every_sample(start, increment, count, ramp, data):
    final = start + increment * count
    steps = ramp_up_steps(start, increment, ramp, final)
    schedule = BatchSchedule(steps, 1, 0, 0)
    near = [first + offset for first, _ in steps for offset in (-1, 0, 1)]
    for consumed in [*near, *data.draw(st.lists(st.integers(0, 2 * ramp), max_size=20))]:
        if consumed >= 0:
            assert schedule.global_batch_size(consumed) == megatron_ramp_up(
                consumed, start, increment, ramp, final
            )


def test_gpt3s_ramp_up():
    """GPT-3's own: 16 to 1536 by 16 over 5,859,375 samples."""
    schedule = schedule_of(
        "--rampup-batch-size 16 16 5859375 --global-batch-size 1536 --train-samples 146484375"
    )
    assert (
        schedule.steps[0] == (0, 16) and schedule.steps[-1] == (5859375, 1536) and len(schedule.steps) == 96
    )
    consumed = iterations = 0
    while consumed + schedule.global_batch_size(consumed) <= 146484375:
        consumed += megatron_ramp_up(consumed, 16, 16, 5859375, 1536)
        iterations += 1
    assert (schedule.total_iterations, schedule.total_samples) == (iterations, consumed)


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 40)), max_size=6),
    st.integers(1, 40),
    st.integers(0, 200),
)
def test_totals_equal_walking_step_by_step(more, first_batch, iterations):
    steps, start = [(0, first_batch)], 0
    for gap, batch in more:
        start += gap
        steps.append((start, batch))
    schedule = BatchSchedule(tuple(steps), 1, 0, 0)
    consumed = 0
    for done in range(iterations + 1):
        assert samples_after(steps, done) == consumed
        consumed += schedule.global_batch_size(consumed)


@settings(max_examples=50)
@example(206)  # the last batch of 8 leaves room for one of 6, not for another of 8
@given(st.integers(0, 3000))
def test_train_samples_counts_whole_batches(samples):
    schedule = schedule_of(f"--step-batch-size-schedule 0:4 640:8 3200:6 --train-samples {samples}")
    consumed = iterations = 0
    while True:
        batch = 4 if consumed < 40 else 8 if consumed < 200 else 6
        if consumed + batch > samples:
            break
        consumed, iterations = consumed + batch, iterations + 1
    assert (schedule.total_iterations, schedule.total_samples) == (iterations, consumed)


def test_constant():
    schedule = schedule_of("--global-batch-size 24 --micro-batch-size 3 --train-iters 7", world_size=4)
    assert schedule.total_samples == 168
    assert {schedule.num_microbatches(consumed) for consumed in (0, 24, 10**9)} == {2}


def test_without_a_global_batch_one_microbatch_a_rank():
    assert schedule_of("--micro-batch-size 3 --train-iters 7", world_size=4).global_batch_size(0) == 12


@pytest.mark.parametrize(
    "words",
    [["0:768 250B:1536 500B:3072"], ["0:768", "250B:1536", "500B:3072"], ["500b:3072,0:768,0.25T:1536"]],
)
def test_steps_are_tokens_in_one_word_or_several(words):
    steps = parse_step_schedule(words, 8192)
    assert steps == ((0, 768), (250_000_000_000 // 8192, 1536), (500_000_000_000 // 8192, 3072))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it is empty"),
        ("10B:512", "start with 0:BATCH"),
        ("0:256 10B", "'10B' is not TOKENS:BATCH"),
        ("0:256 x:512", "'x:512' is not TOKENS:BATCH"),
        ("0:0", "'0:0' is not TOKENS:BATCH"),
        ("0:256 1e400:512", "'1e400:512' is not TOKENS:BATCH"),
        ("0:256 5:512", "begins at the same sample (0)"),
        ("0:-4", "is not TOKENS:BATCH"),
    ],
)
def test_what_is_no_step_schedule(text, says):
    with pytest.raises(ConfigError) as error:
        parse_step_schedule([text], 16)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--rampup-batch-size 8 3 100 --global-batch-size 16", "the increment 3 does not divide"),
        ("--rampup-batch-size 32 8 100 --global-batch-size 16", "starts above --global-batch-size 16"),
        ("--rampup-batch-size 1 1 100 --global-batch-size 300000", "299,999 increments"),
        (
            "--rampup-batch-size 2 2 100 --global-batch-size 16 --step-batch-size-schedule 0:4",
            "cannot be given together",
        ),
        (
            "--rampup-batch-size 2 4 100 --global-batch-size 18",
            "the start 2 of --rampup-batch-size does not divide",
        ),
        ("--step-batch-size-schedule 0:4 160:6", "the batch of 6 from sample 10 on does not divide"),
        ("--global-batch-size 6", "--global-batch-size 6 does not divide"),
        ("--global-batch-size 8 --eval-global-batch-size 6", "--eval-global-batch-size 6 does not divide"),
    ],
)
def test_batches_that_do_not_fit(flags, says):
    with pytest.raises(ConfigError) as error:
        schedule_of(f"{flags} --train-iters 10", world_size=4)
    assert says in str(error.value)


def test_the_step_schedule_wins_over_the_global_batch():
    words = f"{BASE} --step-batch-size-schedule 0:4 160:8 --global-batch-size 6 --train-iters 9".split()
    config = parse_arguments(words, Environment())
    assert config.training.global_batch_size == 8
    assert any("wins over --global-batch-size 6" in note for note in config.notes)
