"""How many samples a step takes, as a function of the samples consumed so far. Imports no torch.

Constant (--global-batch-size), in equal increments (--rampup-batch-size), or in steps written out
(--step-batch-size-schedule). All three are one list of (first sample, samples a step).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_lite.config import Config, ConfigError
from megatron_lite.config.declare import whole_number

Step = tuple[int, int]  # from this many consumed samples on, this many samples a step

_MOST_INCREMENTS = 100_000


@dataclass(frozen=True)
class BatchSchedule:
    """`steps` in ascending order, the first at 0; `samples_per_microbatch` = micro batch size x data-parallel size."""

    steps: tuple[Step, ...]
    samples_per_microbatch: int
    total_iterations: int
    total_samples: int

    @classmethod
    def from_config(cls, config: Config) -> "BatchSchedule":
        """The schedule of a resolved config.

        With --train-samples the iterations are those whose whole batch fits; a last partial batch is not trained on.
        """
        training = config.training
        steps = batch_steps(config)
        per_microbatch = training.micro_batch_size * config.parallel.data_parallel_size
        if training.train_iters is not None:
            iterations = training.train_iters
        else:
            iterations = _iterations_within(steps, training.train_samples or 0)
        return cls(steps, per_microbatch, iterations, samples_after(steps, iterations))

    def global_batch_size(self, consumed_samples: int) -> int:
        """Samples of the step that starts after `consumed_samples` samples."""
        return max((first, batch) for first, batch in self.steps if first <= consumed_samples)[1]

    def num_microbatches(self, consumed_samples: int) -> int:
        """Microbatches of that step on each data-parallel rank."""
        return self.global_batch_size(consumed_samples) // self.samples_per_microbatch

    def samples_after(self, iterations: int) -> int:
        """Samples consumed by the first `iterations` steps."""
        return samples_after(self.steps, iterations)


def batch_steps(config: Config) -> tuple[Step, ...]:
    """The (first sample, batch) steps that the flags describe.

    Raises:
        ConfigError: the schedule cannot be read or does not fit the global batch size.
    """
    training = config.training
    if training.step_batch_size_schedule is not None:
        return parse_step_schedule(training.step_batch_size_schedule, config.data.seq_length)
    if training.rampup_batch_size is not None:
        return ramp_up_steps(*training.rampup_batch_size, training.global_batch_size)
    return ((0, training.global_batch_size),)


def parse_step_schedule(words: Sequence[str], seq_length: int) -> tuple[Step, ...]:
    """'0:768 250B:1536' -> steps. Thresholds count tokens and are turned into samples, as Megatron-core does.

    Raises:
        ConfigError: a word is not THRESHOLD:BATCH, or the thresholds do not rise from 0.
    """
    flag = "--step-batch-size-schedule"
    steps = []
    for word in " ".join(words).replace(",", " ").replace("'", " ").replace('"', " ").split():
        threshold, _, batch = word.partition(":")
        try:
            tokens, size = whole_number(threshold), whole_number(batch)
        except ValueError:
            tokens = size = -1
        if tokens < 0 or size < 1:
            raise ConfigError(f"{flag}: '{word}' is not TOKENS:BATCH, for example 0:256 or 10B:512")
        steps.append((tokens // seq_length, size))
    steps.sort()
    if not steps or steps[0][0] != 0:
        first = f"the first threshold is {steps[0][0] * seq_length:,} tokens" if steps else "it is empty"
        raise ConfigError(f"{flag} has to start with 0:BATCH, {first}")
    for (before, _), (after, size) in zip(steps, steps[1:]):
        if before == after:
            raise ConfigError(
                f"{flag}: the step to batch {size} begins at the same sample ({after:,}) as the one before it, "
                f"with --seq-length {seq_length}"
            )
    return tuple(steps)


def ramp_up_steps(start: int, increment: int, ramp_samples: int, final: int) -> tuple[Step, ...]:
    """--rampup-batch-size START INCREMENT SAMPLES up to the global batch size `final`, as Megatron-core's calculator.

    The batch grows by `increment` after each equal part of `ramp_samples`.

    Raises:
        ConfigError: final - start is no multiple of the increment.
    """
    flag = f"--rampup-batch-size {start} {increment} {ramp_samples}"
    if start > final:
        raise ConfigError(f"{flag} starts above --global-batch-size {final}")
    if (final - start) % increment:
        raise ConfigError(
            f"{flag}: the increment {increment} does not divide --global-batch-size {final} - {start} = {final - start}"
        )
    count = (final - start) // increment
    if count > _MOST_INCREMENTS:
        raise ConfigError(f"{flag} makes {count:,} increments, at most {_MOST_INCREMENTS:,} are possible")
    if count == 0:
        return ((0, final),)
    part = ramp_samples / count  # a float to divide by, since Megatron's boundaries come from its rounding
    steps = [(0, start)]
    for number in range(1, count + 1):
        first = -(-number * ramp_samples // count)
        while int(first / part) < number and first <= ramp_samples:
            first += 1
        steps.append((first, start + number * increment))
    # One step for each first sample, the largest batch: increments shorter than a sample are jumped over.
    return tuple(sorted(dict(steps).items()))


def samples_after(steps: Sequence[Step], iterations: int) -> int:
    """Samples that the first `iterations` steps consume."""
    for consumed, batch, count in _phases(steps):
        if count is None or iterations <= count:
            return consumed + iterations * batch
        iterations -= count
    raise AssertionError("the last phase has no end")


def pass_size(num_microbatches: int, limit: int | None) -> int:
    """Microbatches of one pipeline pass of a step: equal passes of at most `limit` (--max-microbatches-per-step).

    A schedule holds something of each of its microbatches; several passes bound that, and pay the fill and drain of
    the pipeline again. The size divides num_microbatches, so one schedule serves all passes.
    """
    most = min(limit or num_microbatches, num_microbatches)
    return max(size for size in range(1, most + 1) if num_microbatches % size == 0)


def _iterations_within(steps: Sequence[Step], samples: int) -> int:
    """How many whole batches lie within `samples` samples."""
    iterations = 0
    for consumed, batch, count in _phases(steps):
        fitting = max(0, samples - consumed) // batch
        if count is None or fitting < count:
            return iterations + fitting
        iterations += count
    raise AssertionError("the last phase has no end")


def _phases(steps: Sequence[Step]) -> Iterator[tuple[int, int, int | None]]:
    """(samples consumed before, batch, iterations with it) one after the other; the last has no end (None).

    A batch is never cut: a step begins with the first iteration at or after its threshold.
    """
    consumed = 0
    for (_, batch), (after, _) in zip(steps, steps[1:]):
        count = max(0, -(-(after - consumed) // batch))
        yield consumed, batch, count
        consumed += count * batch
    yield consumed, steps[-1][1], None
