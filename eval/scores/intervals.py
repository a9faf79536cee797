"""Scores with their uncertainty: whole groups of examples are drawn again, and every metric is
taken of each draw.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from eval.scores.additive import OfSums, mean_of_sums, mean_parts
from eval.scores.metrics import Metric, Values, bare_values, exact_matches

RESAMPLES = 1000

Statistic = Callable[[NDArray[np.int64]], float]
"""A number of drawn groups, <int64>[D], of which some may stand several times; NaN where it is not defined."""


class Score(NamedTuple):
    """A score with its uncertainty.

    Attributes:
        value: In the metric's unit; None when no example counts.
        stderr: Standard deviation of the score over draws of groups; None with fewer than two
            groups.
        low: The 2.5th percentile of these draws.
        high: The 97.5th.
        note: What to know before believing the interval; empty for nothing.
    """

    value: float | None
    stderr: float | None = None
    low: float | None = None
    high: float | None = None
    note: str = ""


def rows_by_group(groups: Sequence[str]) -> list[NDArray[np.int64]]:
    """Returns for each group, in the order of their names, the numbers <int64>[n] of its examples,
    in their order.
    """
    _, member = np.unique(np.asarray(groups, dtype=object).astype(str), return_inverse=True)
    order = np.argsort(member, kind="stable")
    return np.split(order, np.cumsum(np.bincount(member))[:-1]) if len(order) else []


class Judged(NamedTuple):
    """Answers beside their targets, each judged once.

    Attributes:
        metrics: Of the task.
        targets: N post-processed targets.
        answers: N post-processed answers.
        each: By metric, <float64>[N] scores of examples, NaN where one does not count; only of
            metrics that are means.
    """

    metrics: Sequence[Metric]
    targets: Values
    answers: Values
    each: Mapping[str, NDArray[np.float64]]

    @property
    def examples(self) -> NDArray[np.float64]:
        """<float64>[N] how well each example was answered: by the first metric if it is a mean,
        else right or wrong.
        """
        headline = self.metrics[0].name
        if headline in self.each:
            return self.each[headline]
        return exact_matches(bare_values(self.targets), bare_values(self.answers))

    def only(self, metric: Metric) -> "Judged":
        """Returns the same for one of the metrics."""
        return self._replace(
            metrics=(metric,), each={n: each for n, each in self.each.items() if n == metric.name}
        )

    def parts(self, metric: Metric) -> tuple[NDArray[np.float64], OfSums] | None:
        """Returns what each example adds to sums <float64>[N, P], and the metric of the sums; None
        if it has none.
        """
        if metric.name in self.each:
            return mean_parts(self.each[metric.name]), mean_of_sums
        if metric.additive is not None:
            return metric.additive.parts(self.targets, self.answers), metric.additive.of_sums
        return None

    def score(self, metric: Metric) -> float:
        """Returns the value of a metric; NaN where it is not defined."""
        if metric.name in self.each:
            return float(mean_of_sums(mean_parts(self.each[metric.name]).sum(axis=0)))
        return quiet_score(metric, self.targets, self.answers)


def judge(metrics: Sequence[Metric], targets: Values, answers: Values) -> Judged:
    """Returns answers beside their targets, each judged once by every metric that is a mean."""
    each = {
        metric.name: metric.each(targets, answers) for metric in metrics if metric.each is not None
    }
    return Judged(metrics, targets, answers, each)


def statistic_of(judged: Judged, metric: Metric, rows: list[NDArray[np.int64]]) -> Statistic:
    """Returns a metric as a function of drawn groups.

    What sums can tell is taken of sums of groups. Any other metric is taken anew of the drawn
    examples, those of a group that was drawn twice standing there twice.
    """
    additive = judged.parts(metric)
    if additive is not None:
        sums, of_sums = group_sums(additive[0], rows), additive[1]
        return lambda drawn: float(of_sums(sums[drawn].sum(axis=0)))
    targets, answers = _objects(judged.targets), _objects(judged.answers)

    def again(drawn: NDArray[np.int64]) -> float:
        chosen = np.concatenate([rows[group] for group in drawn])
        return quiet_score(metric, targets[chosen].tolist(), answers[chosen].tolist())

    return again


def group_sums(parts: NDArray[np.float64], rows: list[NDArray[np.int64]]) -> NDArray[np.float64]:
    """Returns the sums <float64>[G, P] of groups of the parts <float64>[N, P] of examples."""
    return np.stack([parts[members].sum(axis=0) for members in rows]) if rows else parts[:0]


def quiet_score(metric: Metric, targets: Values, answers: Values) -> float:
    """Returns a metric's score; NaN, without a warning, where it is not defined."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return float(metric.score(targets, answers)) if len(targets) else math.nan


def draw_groups(statistic: Statistic, num_groups: int, seed: Sequence[int]) -> NDArray[np.float64]:
    """Returns <float64>[RESAMPLES] the statistic of as many groups as there are, drawn with
    replacement.

    Statistics of the same groups and seed see the same draws, so that their differences and means
    are paired. With fewer than two groups there is nothing to draw, and the result is empty.
    """
    if num_groups < 2:
        return np.empty(0)
    rng = np.random.default_rng(list(seed))
    return np.asarray(
        [statistic(rng.integers(num_groups, size=num_groups)) for _ in range(RESAMPLES)]
    )


def seed_of(name: str, seed: int = 0) -> tuple[int, int]:
    """Returns the seed of a task's draws: those of different tasks have nothing to do with each
    other.
    """
    return seed, crc32(name.encode())


def with_interval(value: float, draws: NDArray[np.float64], note: str = "") -> Score:
    """Returns a score with the standard deviation and the 95 % percentile interval of its draws.

    Args:
        value: Of the examples as they are; NaN when none counts.
        draws: <float64>[R] or empty; those that are NaN are left out.
        note: Of the score.
    """
    if math.isnan(value):
        return Score(None, note=note or "no example counts")
    draws = draws[~np.isnan(draws)]
    if len(draws) < 2:
        return Score(value, note=note or "one group of examples: there is no interval")
    low, high = np.percentile(draws, [2.5, 97.5])
    return Score(value, float(draws.std(ddof=1)), float(low), float(high), note)


def score_metrics(
    judged: Judged, groups: Sequence[str], seed: Sequence[int] = (0,)
) -> tuple[dict[str, Score], dict[str, NDArray[np.float64]]]:
    """Returns every metric's score with its interval, and the draws that the intervals are of.

    The interval says how much another choice of groups would have changed the score. Examples of
    one group are alike and are drawn together.

    Args:
        judged: N answers.
        groups: N group names.
        seed: Of the draws.
    """
    rows = rows_by_group(groups)
    scores, drawn = {}, {}
    for metric in judged.metrics:
        drawn[metric.name] = draw_groups(statistic_of(judged, metric, rows), len(rows), seed)
        note = _note(judged.each.get(metric.name), rows)
        scores[metric.name] = with_interval(judged.score(metric), drawn[metric.name], note)
    return scores, drawn


def _note(each: NDArray[np.float64] | None, rows: list[NDArray[np.int64]]) -> str:
    """Returns a warning where the bootstrap sees no spread because all groups score alike."""
    if each is None or len(rows) < 2:
        return ""
    means = mean_of_sums(group_sums(mean_parts(each), rows))
    means = means[~np.isnan(means)]
    if len(means) < 2 or np.ptp(means) > 0:
        return ""
    if means[0] not in (0.0, 100.0):
        return f"all {len(means)} groups score alike: the interval sees no spread"
    exact = binomtest(len(means) if means[0] else 0, len(means)).proportion_ci(method="exact")
    return (
        f"all {len(means)} groups score {means[0]:.0f}, so the bootstrap sees no spread; the exact binomial interval "
        f"of so many groups is {100 * exact.low:.1f} to {100 * exact.high:.1f}"
    )


def _objects(values: Values) -> NDArray[np.object_]:
    """Returns values of any kind as an array [N] to take rows of."""
    array = np.empty(len(values), dtype=object)
    for number, value in enumerate(values):
        array[number] = value
    return array
