"""Metrics in 0..100 of post-processed targets and answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.additive import Additive

Values = Sequence[Any]
"""Post-processed targets or answers, one for each example, in the order of the examples."""


@dataclass(frozen=True)
class Metric:
    """A score of a whole split.

    Attributes:
        name: As in the report.
        score: (targets, answers) to a number in 0..100; Matthews correlation may be below 0.
        each: (targets, answers) to <float64>[N] scores whose mean over those that are not NaN is `score`: examples
            that do not count, as a repeated query, are NaN. None for a score that is no mean.
        additive: The same score of sums, for those that are no mean and have it.
    """

    name: str
    score: Callable[[Values, Values], float]
    each: Callable[[Values, Values], NDArray[np.float64]] | None = None
    additive: Additive | None = None


def mean_of(name: str, each: Callable[[Values, Values], NDArray[np.float64]]) -> Metric:
    """Returns the metric that is the mean of `each`."""
    return Metric(name, lambda targets, answers: float(np.nanmean(each(targets, answers))), each)


def exact_matches(targets: Values, answers: Values) -> NDArray[np.float64]:
    """Returns <float64>[N] 100 where an answer equals its target, 0 elsewhere."""
    return np.asarray([100.0 * (target == answer) for target, answer in zip(targets, answers, strict=True)])


ACCURACY = mean_of("accuracy", exact_matches)
