"""Learning rates at pinned steps, worked out by hand."""

import pytest

from moe import ConfigError
from moe.optim.schedules import SCHEDULES, constant, linear, polynomial, rsqrt, with_cooldown
from moe.training.recipe import OptimRecipe


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


# ---- the schedules of large batches ----

# Rates at ten steps, from the formulas of the submissions' own code, worked out apart from this library
# (mlcommons/training_results_v0.7).

RESNET_JAX = {
    # resnet/train.py: 79 steps are 4 epochs of 1.29 M images, 33 of 92 epochs are the warm-up.
    # step <= 651.75: 23.080977304670448 step / 651.75
    # then: 1e-4 + 23.080877304670448 (1 - (step - 651.75) / 1166.25)^2
    0: 0.0,
    1: 0.035413850870227,
    79: 2.797694218747933,
    316: 11.190776874991732,
    651: 23.054416916517777,
    652: 23.071083026655437,
    948: 12.844313149642602,
    1185: 6.799591244176436,
    1501: 1.7053478995830829,
    1816: 0.0001678779925995127,
}
BERT_TF = {
    # bert/optimization.py: warm-up from step -76 over 287 steps to 0.00288293; then
    # 0.00288293 (1 - step / 560), which has been falling since step 0; the run stops at 496.
    0: 0.0007634239721254356,
    1: 0.0007734690243902439,
    50: 0.0012656765853658537,
    100: 0.0017679291986062717,
    150: 0.00227018181184669,
    210: 0.0028728849477351916,
    211: 0.0017966831607142857,
    300: 0.0013385032142857144,
    400: 0.0008236942857142857,
    495: 0.00033462580357142865,
}
TRANSFORMER_JAX = {
    # transformer/train.py: 3.309 min(1, step / 664) / sqrt(max(step, 664)) / sqrt(1024)
    0: 0.0,
    1: 6.043585489369013e-06,
    10: 6.043585489369012e-05,
    166: 0.001003235191235256,
    332: 0.002006470382470512,
    664: 0.004012940764941024,
    665: 0.0040099223810878964,
    1328: 0.0028375776273897296,
    2000: 0.0023122340429833762,
    2656: 0.002006470382470512,
}


def test_the_rates_of_resnet_on_a_multipod_are_reproduced():
    rate = polynomial(
        lr=23.080977304670448,
        warmup_steps=33 * 79 / 4,
        total_steps=1817,
        end_lr=1e-4,
        decay_steps=1166.25,
        warmup_start=0,
    )
    assert {step: rate(step) for step in RESNET_JAX} == pytest.approx(RESNET_JAX, rel=1e-9)


def test_the_rates_of_bert_on_a_multipod_are_reproduced():
    rate = linear(
        lr=0.00288293,
        warmup_steps=287,
        total_steps=496,
        decay_steps=560,
        decay_start="first_step",
        warmup_start=-76,
    )
    assert {step: rate(step) for step in BERT_TF} == pytest.approx(BERT_TF, rel=1e-9)


def test_the_rates_of_the_transformer_on_a_multipod_are_reproduced():
    rate = rsqrt(lr=3.309 / 1024**0.5, warmup_steps=664, warmup="linear", warmup_start=0)
    assert {step: rate(step) for step in TRANSFORMER_JAX} == pytest.approx(
        TRANSFORMER_JAX, rel=1e-9
    )


def test_a_polynomial_ends_one_step_above_its_end_unless_told_otherwise():
    rate = polynomial(lr=1.0, warmup_steps=4, total_steps=13, power=2)
    assert [rate(step) for step in (0, 1, 3)] == [0.25, 0.5, 1.0]
    assert rate(12) == pytest.approx((1 / 10) ** 2)
    assert [rate(step) for step in (13, 99)] == [0.0, 0.0]
    assert polynomial(lr=1.0, warmup_steps=0, total_steps=4, power=1)(0) == 1.0


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
        ("polynomial", {"power": 0}, "power is 0"),
        ("polynomial", {"end_lr": 0.2}, "end_lr is 0.2"),
        ("linear", {"warmup_start": 1}, "warmup_start is 1"),
        ("linear", {"decay_start": "end"}, "'end'; expected one of warmup_end, first_step"),
    ],
)
def test_options_that_a_schedule_lacks_or_that_are_out_of_range_are_refused(
    schedule, options, message
):
    with pytest.raises(ConfigError, match=f"schedule_options.*{message}"):
        OptimRecipe(schedule=schedule, lr=0.1, schedule_options=options).schedule_for(40)


def test_rsqrt_continues_from_the_steps_of_an_earlier_run():
    whole = rsqrt(lr=1.0, warmup_steps=100)
    rest = rsqrt(lr=1.0, warmup_steps=100, first_step=70)
    assert [rest(step) for step in range(200)] == [whole(70 + step) for step in range(200)]
