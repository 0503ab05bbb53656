"""Learning rate and weight decay against megatron-core's own numbers, and against Megatron's formulas written out."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_lite.arguments.parse import parse_arguments
from megatron_lite.arithmetic.lr_schedule import (
    ANNEALING,
    LearningRateSchedule,
    resumed_schedule,
)
from megatron_lite.config import ConfigError, OptimizerConfig
from megatron_lite.distributed.environment import Environment

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "lr_golden.json").read_text())
BATCH = GOLDEN["gbs"]
BASE = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1
    --mock-data --vocab-size 60 --lr 1e-3"""


def config_of(flags):
    return parse_arguments(f"{BASE} {flags}".split(), Environment())


def flags_of(case):
    """Megatron's scheduler arguments (in samples) as the flags that make them, by iterations."""
    a = case["args"]
    flags = [
        f"--global-batch-size {BATCH} --train-iters {a['wd_incr_steps'] // BATCH}",
        f"--lr {a['max_lr']} --min-lr {a['min_lr']} --lr-warmup-init {a['init_lr']}",
        f"--lr-decay-style {a['lr_decay_style']} --lr-decay-iters {a['lr_decay_steps'] // BATCH}",
        f"--decoupled-lr {a['max_lr'] * 5} --decoupled-min-lr 2e-4 --weight-decay {a['end_wd']}",
    ]
    if a["lr_warmup_steps"] % BATCH:
        flags.append(f"--lr-warmup-fraction {a['lr_warmup_steps'] / a['lr_decay_steps']}")
    else:
        flags.append(f"--lr-warmup-iters {a['lr_warmup_steps'] // BATCH}")
    if a["wd_incr_style"] != "constant":
        flags.append(f"--weight-decay-incr-style {a['wd_incr_style']}")
        flags.append(f"--start-weight-decay {a['start_wd']} --end-weight-decay {a['end_wd']}")
    if a["lr_decay_style"] == "WSD":
        flags.append(f"--lr-wsd-decay-iters {a['wsd_decay_steps'] // BATCH}")
        flags.append(f"--lr-wsd-decay-style {a['lr_wsd_decay_style']}")
    return " ".join(flags)


@pytest.mark.parametrize("name", GOLDEN["cases"])
def test_equals_megatron_core(name):
    """Every step of every golden case, for the normal and the decoupled parameters."""
    case = GOLDEN["cases"][name]
    schedule = LearningRateSchedule.from_config(config_of(flags_of(case)))
    assert len(case["lr"]) > 100
    for step, (normal, _, decoupled) in enumerate(case["lr"]):
        assert schedule.learning_rate(step * BATCH) == pytest.approx(normal, rel=1e-12, abs=1e-18)
        assert schedule.learning_rate(step * BATCH, decoupled=True) == pytest.approx(
            decoupled, rel=1e-12, abs=1e-18
        )
    for step, (decays, _, _) in enumerate(case["wd"]):
        assert schedule.weight_decay(step * BATCH) == pytest.approx(decays, rel=1e-12)


def closed_form(style, wsd_style, step, warmup, decay, wsd, peak, floor):
    """Megatron's rule for one step, in iterations, written from its documentation."""
    if warmup and step <= warmup:
        return peak * step / warmup
    if style == "constant":
        return peak
    if step > decay:
        return floor
    if style == "inverse-square-root":
        return max(floor, peak * math.sqrt(max(warmup * 4, 1) / max(step * 4, 1)))
    if style == "WSD":
        done = max(0.0, (step - (decay - wsd)) / wsd)
    else:
        done = (step - warmup) / (decay - warmup)
    shape = wsd_style if style == "WSD" else style
    left = {
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "exponential": 2 * math.exp(-done * math.log(2)) - 1,
        "minus_sqrt": 1 - done**0.5,
    }[shape]
    return floor + (peak - floor) * left


CHOICES = {f.name: f.metadata.get("choices") for f in OptimizerConfig.__dataclass_fields__.values()}


@pytest.mark.parametrize("style", CHOICES["lr_decay_style"])
@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize("by", ["iters", "samples"])
def test_closed_forms(style, warmup, by):
    """Every style at every step, the run counted in iterations or in samples: the same numbers."""
    unit = 1 if by == "iters" else 4
    for wsd_style in ANNEALING if style == "WSD" else ["cosine"]:
        schedule = LearningRateSchedule.from_config(
            config_of(
                f"--global-batch-size 4 --train-{by} {60 * unit} --lr-decay-{by} {50 * unit} --min-lr 2e-4 "
                f"--lr-warmup-{by} {warmup * unit} --lr-decay-style {style} --lr-wsd-decay-style {wsd_style} "
                f"--lr-wsd-decay-{by} {20 * unit}"
            )
        )
        for step in range(70):
            wanted = closed_form(style, wsd_style, step, warmup, 50, 20, 1e-3, 2e-4)
            assert schedule.learning_rate(step * 4) == pytest.approx(wanted, rel=1e-12), (
                style,
                wsd_style,
                step,
            )


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_weight_decay_rises_from_start_to_end(style):
    schedule = LearningRateSchedule.from_config(
        config_of(
            "--global-batch-size 2 --train-iters 40 --start-weight-decay 0.02 --end-weight-decay 0.1 "
            f"--weight-decay-incr-style {style}"
        )
    )
    for step in range(50):
        part = min(1.0, step / 40)
        part = part if style == "linear" else (1 - math.cos(math.pi * part)) / 2
        assert schedule.weight_decay(step * 2) == pytest.approx(0.02 + 0.08 * part, rel=1e-12)


def test_a_fraction_of_the_warmup_is_not_rounded():
    schedule = LearningRateSchedule.from_config(
        config_of("--global-batch-size 1 --train-samples 1000 --lr-warmup-fraction 0.0105")
    )
    assert schedule.warmup_samples == 10.5
    assert schedule.learning_rate(10) == pytest.approx(1e-3 * 10 / 10.5)
    assert schedule.learning_rate(11) == pytest.approx(1e-3 * (1 - 0.5 / 989.5))


def test_lengths_in_iterations_follow_a_growing_batch():
    """--lr-decay-iters N ends at iteration N, however many samples those iterations took."""
    config = config_of(
        "--step-batch-size-schedule 0:2 320:8 --train-iters 30 --lr-decay-iters 20 --lr-warmup-iters 5"
    )
    schedule = LearningRateSchedule.from_config(config)
    assert schedule.warmup_samples == 10  # 320 tokens are 20 samples: ten steps of 2
    assert schedule.decay_samples == 10 * 2 + 10 * 8
    assert schedule.learning_rate(schedule.decay_samples) == 0.0


def test_wsd_decays_by_any_shape():
    assert set(CHOICES["lr_wsd_decay_style"]) == set(ANNEALING)


RUN = "--global-batch-size 2 --train-iters 40 --lr-decay-style cosine --lr-warmup-iters 4"


def stored(flags=RUN):
    return json.loads(json.dumps(LearningRateSchedule.from_config(config_of(flags)).to_dict()))


def test_the_same_flags_resume():
    assert resumed_schedule(config_of(RUN), stored()) == LearningRateSchedule.from_config(config_of(RUN))


def test_other_flags_are_refused_with_both_values_and_both_ways_out():
    with pytest.raises(ConfigError) as error:
        resumed_schedule(config_of(f"{RUN} --lr 2e-3 --lr-warmup-iters 5"), stored())
    text = str(error.value)
    for part in (
        "--lr is 0.002 here and 0.001 there",
        "10 here and 8 there",
        "--override-opt_param-scheduler",
    ):
        assert part in text
    assert "--use-checkpoint-opt_param-scheduler" in text and "\n" not in text


def test_override_takes_the_flags_and_use_checkpoint_the_checkpoint():
    there = stored()
    for spelling in ("opt_param", "opt-param"):
        overriding = config_of(f"{RUN} --lr 2e-3 --override-{spelling}-scheduler")
        assert resumed_schedule(overriding, there).lr == 2e-3
        keeping = config_of(f"{RUN} --lr 2e-3 --use-checkpoint-{spelling}-scheduler")
        assert resumed_schedule(keeping, there).lr == 1e-3


def test_a_constant_schedule_may_be_longer():
    """Nothing in it depends on the length, so training to 100 and then to 200 needs no flag."""
    constant = "--global-batch-size 2 --lr-decay-style constant --train-iters"
    assert resumed_schedule(config_of(f"{constant} 200"), stored(f"{constant} 100")).lr == 1e-3
    with pytest.raises(ConfigError, match="decay samples"):
        resumed_schedule(config_of(RUN.replace("40", "80")), stored())


def test_a_stored_schedule_of_another_form_is_refused():
    with pytest.raises(ConfigError, match="keys: plateau"):
        resumed_schedule(config_of(RUN), stored() | {"plateau": 3})


def test_frozen():
    schedule = LearningRateSchedule.from_config(config_of(RUN))
    assert replace(schedule, lr=1.0) != schedule
