"""The expected duration of a run. Oracle: a clock that the test moves."""

import pytest

from moe.training import forecast
from moe.training.forecast import Forecast, show_about
from moe.training.recipe import TrainingRecipe


class Clock:
    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(forecast, "time", clock)
    return clock


def texts(run, clock, *seconds):
    """Returns what the run prints while steps take these seconds."""
    said = []
    for step_seconds in seconds:
        clock.now += step_seconds
        said.append(run.count_step())
    return said


def test_the_duration_is_that_of_all_steps_and_evaluations_without_the_slow_first_step(clock):
    run = Forecast(TrainingRecipe(steps=1000, evaluate_every=300), first_step=0)
    run.count_evaluation(300, 30.0)  # again after 300, 600, 900 and 1000 steps
    said = texts(run, clock, 50.0, *(20 * [0.5]))
    assert said[:-1] == 20 * [None]
    assert said[-1] == "About 10 minutes for 1,000 steps of 0.5 s and 2 minutes of evaluations."
    assert texts(run, clock, *(30 * [0.5])) == 30 * [None]


def test_slow_steps_are_measured_for_ten_seconds_and_a_resumed_run_counts_the_rest(clock):
    run = Forecast(TrainingRecipe(steps=1000), first_step=900)
    said = texts(run, clock, 9.0, 7.0, 7.0)
    assert said == [None, None, "About 12 minutes for 100 steps of 7 s."]


def test_durations_are_rounded_to_two_digits():
    shown = {
        1: "1 second",
        2.345: "2.3 seconds",
        83: "83 seconds",
        100: "1.7 minutes",
        7200: "2 hours",
        90_000: "25 hours",
        400_000: "4.6 days",
        1e8: "1,157 days",
    }
    for seconds, text in shown.items():
        assert show_about(seconds) == text
