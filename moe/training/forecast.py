"""The expected duration of a run, measured on its first steps.

reporter.py counts steps and evaluations, and prints the forecast once.
"""

import time

from moe.training.recipe import TrainingRecipe

_MOST_STEPS = 20
_MOST_SECONDS = 10.0


class Forecast:
    """Expected duration of the steps of a run, and of the evaluations between them.

    The first step, which allocates memory and may compile, is left out. The next 20 are measured,
    or as many as take 10 seconds.

    Args:
        training: Length of the run, and how often it evaluates.
        first_step: Updates so far.
    """

    def __init__(self, training: TrainingRecipe, first_step: int) -> None:
        self._training = training
        self._first_step = first_step
        self._num_steps = 0
        self._started = 0.0
        self._evaluation_seconds = 0.0
        self._is_done = False

    def count_evaluation(self, every: int, seconds: float) -> None:
        """Counts an evaluation before the first step, which is repeated every `every` steps."""
        if self._num_steps == 0:
            last = self._training.steps
            times = last // every + (last % every > 0) - self._first_step // every
            self._evaluation_seconds += times * seconds

    def count_step(self) -> str | None:
        """Counts a finished step; returns the forecast once enough steps are measured."""
        now = time.perf_counter()
        self._num_steps += 1
        if self._num_steps == 1:
            self._started = now

        measured = self._num_steps - 1
        seconds = now - self._started
        is_enough = measured >= _MOST_STEPS or (measured > 1 and seconds >= _MOST_SECONDS)
        if self._is_done or not is_enough:
            return None

        self._is_done = True
        return self._describe(seconds / measured)

    def _describe(self, step_seconds: float) -> str:
        steps = self._training.steps - self._first_step
        evaluations = self._evaluation_seconds
        expected = show_about(steps * step_seconds + evaluations)
        text = f"About {expected} for {steps:,} steps of {step_seconds:.2g} s"
        return (
            f"{text} and {show_about(evaluations)} of evaluations." if evaluations else f"{text}."
        )


def show_about(seconds: float) -> str:
    """Returns a rounded duration, e.g. `40 seconds`, `2.5 minutes`, `5 hours` or `123 days`."""
    count, unit = seconds / 86_400, "day"
    for length, shorter in ((1, "second"), (60, "minute"), (3600, "hour")):
        if seconds < 99.5 * length:
            count, unit = seconds / length, shorter
            break
    text = f"{count:,.0f}" if count >= 9.95 else f"{count:.2g}"
    return f"{text} {unit}" if text == "1" else f"{text} {unit}s"
