"""Learning rates at pinned steps, worked out by hand."""

import pytest

from moe import ConfigError
from moe.optim.schedules import constant, rsqrt, with_cooldown


def test_rsqrt_is_constant_in_warm_up_and_falls_like_one_over_root():
    schedule = rsqrt(lr=1.0, warmup_steps=10_000)
    assert [schedule(step) for step in (0, 1, 9_999, 10_000)] == [0.01] * 4
    assert schedule(40_000) == 0.005


def test_constant_rises_linearly_and_never_starts_at_zero():
    schedule = constant(lr=1e-3, warmup_steps=4)
    assert [schedule(step) for step in (0, 1, 3, 4, 1000)] == pytest.approx(
        [2.5e-4, 5e-4, 1e-3, 1e-3, 1e-3]
    )
    assert constant(lr=1e-3, warmup_steps=0)(0) == 1e-3


def test_cooldown_ends_just_above_zero():
    schedule = with_cooldown(constant(lr=1.0, warmup_steps=0), total_steps=10, cooldown_steps=4)
    assert [schedule(step) for step in (5, 6, 7, 8, 9)] == [1.0, 1.0, 0.75, 0.5, 0.25]


def test_a_cooldown_longer_than_the_run_is_refused():
    with pytest.raises(ConfigError, match="cooldown_steps is 11; expected 0 to the 10 steps"):
        with_cooldown(constant(lr=1.0, warmup_steps=0), total_steps=10, cooldown_steps=11)
