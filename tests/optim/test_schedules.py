"""Learning rates at pinned steps, worked out by hand."""

import pytest

from moe import ConfigError
from moe.optim.schedules import SCHEDULES, constant, linear, rsqrt, with_cooldown
from moe.training.recipe import OptimRecipe


def test_rsqrt_is_constant_in_warm_up_and_falls_like_one_over_root():
    schedule = rsqrt(lr=1.0, warmup_steps=10_000)
    assert [schedule(step) for step in (0, 1, 9_999, 10_000)] == [0.01] * 4
    assert schedule(40_000) == 0.005

    # It continues from the steps of an earlier run.
    rest = rsqrt(lr=1.0, warmup_steps=10_000, first_step=9_970)
    assert [rest(step) for step in range(60)] == [schedule(9_970 + step) for step in range(60)]


def test_constant_rises_linearly_and_never_starts_at_zero():
    schedule = constant(lr=1e-3, warmup_steps=4)
    assert [schedule(step) for step in (0, 1, 3, 4, 1000)] == pytest.approx(
        [2.5e-4, 5e-4, 1e-3, 1e-3, 1e-3]
    )
    assert constant(lr=1e-3, warmup_steps=0)(0) == 1e-3


def test_linear_rises_and_falls_to_zero_one_step_after_the_run():
    rate = linear(lr=1.0, warmup_steps=4, total_steps=13)
    expected = [0.25, 0.5, 0.75, 1.0, 0.9, 0.8, 0.1, 0.0, 0.0]
    assert [rate(step) for step in (0, 1, 2, 3, 4, 5, 12, 13, 99)] == pytest.approx(expected)
    shorter = linear(lr=1.0, warmup_steps=0, total_steps=13, decay_steps=4)
    assert [shorter(step) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_cooldown_ends_just_above_zero():
    schedule = with_cooldown(constant(lr=1.0, warmup_steps=0), total_steps=10, cooldown_steps=4)
    assert [schedule(step) for step in range(10)] == [1] * 7 + [0.75, 0.5, 0.25]


@pytest.mark.parametrize("schedule", SCHEDULES.names())
def test_every_schedule_is_finite_and_at_most_its_highest_rate(schedule):
    for warmup_steps in (0, 1, 7, 100):
        optim = OptimRecipe(schedule=schedule, lr=3.0, warmup_steps=warmup_steps)
        rate = optim.schedule_for(40)
        assert all(0 <= rate(step) <= 3.0 for step in range(100))


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        ("linear", {"power": 2}, "no option 'power'"),
        ("linear", {"decay_steps": 0}, "decay_steps is 0"),
        ("rsqrt", {"first_step": -1}, "first_step is -1"),
    ],
)
def test_options_that_a_schedule_lacks_or_that_are_out_of_range_are_refused(
    schedule, options, message
):
    with pytest.raises(ConfigError, match=f"schedule_options.*{message}"):
        OptimRecipe(schedule=schedule, lr=0.1, schedule_options=options).schedule_for(40)
