"""The loss scale by hand, and against a plain re-telling of Megatron's rule."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.config import PrecisionConfig
from megatron_lite.training.loss_scale import LossScale


def test_dynamic_by_hand():
    scale = LossScale.from_config(
        PrecisionConfig(
            fp16=True, initial_loss_scale=1024.0, loss_scale_window=3, hysteresis=2, min_loss_scale=256
        )
    )
    seen = []
    for finite in [False, False, False, False, True, True, False, True, True, True, False, False]:
        scale.update(finite)
        seen.append(scale.scale)
    # one overflow is forgiven, then each halves, not below 256; three good steps in a row double and refill
    assert seen == [1024, 512, 256, 256, 256, 256, 256, 256, 256, 512, 512, 256]


def test_an_overflow_is_none_at_the_smallest_scale_nor_with_a_loss_that_is_not_finite():
    scale = LossScale.from_config(PrecisionConfig(fp16=True, initial_loss_scale=512.0, min_loss_scale=256))
    assert scale.is_overflow(loss_is_finite=True) and not scale.is_overflow(loss_is_finite=False)
    for _ in range(3):
        scale.update(False)
    assert scale.scale == 256 and not scale.is_overflow(loss_is_finite=True)
    assert not LossScale.from_config(PrecisionConfig(fp16=True, loss_scale=512.0)).is_overflow(True)
    assert not LossScale.from_config(PrecisionConfig(bf16=True)).is_overflow(True)


def test_only_fp16_has_a_scale_and_a_fixed_one_stays():
    plain = LossScale.from_config(PrecisionConfig(bf16=True, loss_scale=8.0))
    fixed = LossScale.from_config(PrecisionConfig(fp16=True, loss_scale=8.0))
    for scale in (plain, fixed):
        for finite in (False, False, True):
            scale.update(finite)
    assert (plain.scale, fixed.scale) == (1.0, 8.0)


@given(st.lists(st.booleans(), max_size=60), st.integers(0, 60), st.integers(1, 5), st.integers(1, 4))
def test_resumed_is_straight(steps, stop, window, hysteresis):
    precision = PrecisionConfig(
        fp16=True, initial_loss_scale=2.0**8, loss_scale_window=window, hysteresis=hysteresis
    )
    straight, first, second = (LossScale.from_config(precision) for _ in range(3))
    for finite in steps:
        straight.update(finite)
    for finite in steps[:stop]:
        first.update(finite)
    second.load_dict(first.to_dict())
    for finite in steps[stop:]:
        second.update(finite)
    assert second == straight
    assert straight.scale >= 1.0
