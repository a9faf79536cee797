"""Scores with their uncertainty, over groups of examples.

Examples of one group, such as the answers to one question, are alike. A bootstrap draw therefore
takes whole groups, with replacement, as many as there are. Every metric is computed on each draw;
the standard deviation of these values is the standard error of its score. moe/estimates.py turns
them into intervals.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from moe.estimates import Interval, bounded_interval, mean_interval, percentile_interval
from stmoe_eval.scores.metrics import Metric, Values, exact_matches, unwrap_values

RESAMPLES = 1000

_ROUNDING = 1e-9  # in points

GroupStatistic = Callable[[NDArray[np.int64]], float]
"""A score as a function of drawn groups <int64>[R], some of which may occur several times; NaN if not defined."""


@dataclass(frozen=True)
class Score:
    """A score with its uncertainty.

    Attributes:
        value: In the metric's unit; None when no example counts.
        stderr: Standard deviation of the score over bootstrap draws; None with fewer than two
            groups.
        low: Lower end of the 95 % interval.
        high: Upper end of the 95 % interval.
        note: What to know before believing the interval; empty for nothing.
    """

    value: float | None
    stderr: float | None = None
    low: float | None = None
    high: float | None = None
    note: str = ""


class ScoredAnswers(NamedTuple):
    """Answers with their targets and what each adds to the scores.

    Attributes:
        metrics: Metrics of the task.
        targets: N post-processed targets.
        answers: N post-processed answers.
        terms: By metric, <float64>[N, P] what each example adds to P sums; only of metrics that are
            functions of sums.
    """

    metrics: Sequence[Metric]
    targets: Values
    answers: Values
    terms: Mapping[str, NDArray[np.float64]]

    @property
    def headline_scores(self) -> NDArray[np.float64]:
        """<float64>[N] how well each example was answered: its score in the first metric if single
        examples have one, NaN where it does not count; else 100 for an answer that equals the
        target.
        """
        headline = self.metrics[0]
        if headline.additive is not None and headline.additive.scores_examples:
            return headline.additive.score_of_sums(self.terms[headline.name])
        return exact_matches(unwrap_values(self.targets), unwrap_values(self.answers))

    def only(self, metric: Metric) -> "ScoredAnswers":
        """Returns the same answers with one of the metrics."""
        return self._replace(metrics=(metric,))

    def score(self, metric: Metric) -> float:
        """Returns the value of a metric; NaN where it is not defined."""
        if metric.additive is not None and metric.score_examples is not None:
            return float(metric.additive.score_of_sums(self.terms[metric.name].sum(axis=0)))
        return score_or_nan(metric, self.targets, self.answers)


def score_answers(metrics: Sequence[Metric], targets: Values, answers: Values) -> ScoredAnswers:
    """Returns answers with their targets, scored once by every metric."""
    terms = {}
    for metric in metrics:
        if metric.additive is not None:
            terms[metric.name] = metric.additive.terms(targets, answers)
    return ScoredAnswers(metrics, targets, answers, terms)


def score_or_nan(metric: Metric, targets: Values, answers: Values) -> float:
    """Returns the value of a metric; NaN, without a warning, if it is not defined."""
    if not len(targets):
        return math.nan
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return float(metric.score(targets, answers))


# ---------------------------------------------------------------------------
# Groups


def examples_by_group(groups: Sequence[str]) -> list[NDArray[np.int64]]:
    """Returns the numbers <int64>[n] of each group's examples, groups in the order of their names.

    Args:
        groups: The group of each of N examples.
    """
    if not len(groups):
        return []
    names = np.asarray(groups, dtype=object).astype(str)
    _, group_of_example = np.unique(names, return_inverse=True)  # [N]

    # Examples sorted by group, split where the next group begins.
    by_group = np.argsort(group_of_example, kind="stable")
    ends = np.cumsum(np.bincount(group_of_example))
    return np.split(by_group, ends[:-1])


def group_sums(terms: NDArray[np.float64], groups: list[NDArray[np.int64]]) -> NDArray[np.float64]:
    """Returns each group's contribution to the sums.

    Args:
        terms: <float64>[N, P] what each example adds.
        groups: Numbers of the examples of each of G groups, none of them empty.

    Returns:
        <float64>[G, P] sums over the examples of each group.
    """
    if not groups:
        return terms[:0]

    # Terms in the order of the groups, summed from the start of each group to the start of the
    # next.
    starts = np.cumsum([0, *map(len, groups[:-1])])
    return np.add.reduceat(terms[np.concatenate(groups)], starts, axis=0)


def group_statistic(
    answers: ScoredAnswers, metric: Metric, groups: list[NDArray[np.int64]]
) -> GroupStatistic:
    """Returns a metric as a function of drawn groups.

    A function of sums is computed from the sums of groups. Any other metric is recomputed on the
    drawn examples; a group that was drawn twice occurs twice.
    """
    additive = metric.additive
    if additive is not None:
        sums = group_sums(answers.terms[metric.name], groups)  # [G, P]

        def from_sums(drawn: NDArray[np.int64]) -> float:
            return float(additive.score_of_sums(sums[drawn].sum(axis=0)))

        return from_sums

    # Arrays of objects: values may be lists, which numpy would join.
    targets = _object_array(answers.targets)
    outputs = _object_array(answers.answers)

    def from_examples(drawn: NDArray[np.int64]) -> float:
        examples = np.concatenate([groups[group] for group in drawn])
        return score_or_nan(metric, targets[examples].tolist(), outputs[examples].tolist())

    return from_examples


# ---------------------------------------------------------------------------
# Bootstrap


def bootstrap(
    statistic: GroupStatistic, num_groups: int, seed: Sequence[int]
) -> NDArray[np.float64]:
    """Returns a statistic of as many groups as there are, drawn with replacement, repeatedly.

    Statistics of the same groups and seed see the same draws, so that their differences and means
    are paired.

    Args:
        statistic: What to compute on each draw.
        num_groups: Number of groups G.
        seed: Seed of the draws.

    Returns:
        <float64>[RESAMPLES] the statistic of each draw; empty with fewer than two groups, where
        there is nothing to draw.
    """
    if num_groups < 2:
        return np.empty(0)

    rng = np.random.default_rng(list(seed))
    values = np.empty(RESAMPLES)
    for number in range(RESAMPLES):
        drawn = rng.integers(num_groups, size=num_groups)  # [G]
        values[number] = statistic(drawn)
    return values


def task_seed(name: str, seed: int = 0) -> tuple[int, int]:
    """Returns the seed of a task's draws; draws of different tasks are independent."""
    return seed, crc32(name.encode())


def with_interval(
    value: float, draws: NDArray[np.float64], interval: Interval | None = None, note: str = ""
) -> Score:
    """Returns a score with the standard deviation of its draws, and its 95 % interval.

    Args:
        value: Score of the examples as they are; NaN when none counts.
        draws: <float64>[R] or empty; those that are NaN are left out.
        interval: None for the percentiles of the draws.
        note: What to know before believing the interval.
    """
    if math.isnan(value):
        return Score(None, note=note or "no example counts")

    draws = draws[~np.isnan(draws)]
    if len(draws) < 2:
        return Score(value, note=note or "one group of examples: there is no interval")

    stderr = float(draws.std(ddof=1))
    low, high = interval or percentile_interval(draws)
    return Score(value, stderr, low, high, note)


def score_metrics(
    answers: ScoredAnswers, groups: Sequence[str], seed: Sequence[int] = (0,)
) -> tuple[dict[str, Score], dict[str, NDArray[np.float64]]]:
    """Returns every metric's score with its interval, and the bootstrap draws of it.

    The interval says how much another choice of groups would have changed the score.

    Args:
        answers: N scored answers.
        groups: The group of each of them.
        seed: Seed of the draws.
    """
    members = examples_by_group(groups)
    scores = {}
    draws = {}
    for metric in answers.metrics:
        statistic = group_statistic(answers, metric, members)
        draws[metric.name] = bootstrap(statistic, len(members), seed)

        interval = metric_interval(answers, metric, members, draws[metric.name])
        notes = [no_spread(draws[metric.name], interval)]
        if metric.additive is not None and len(answers.targets):
            notes.insert(0, metric.additive.remark(answers.terms[metric.name].sum(axis=0)))
        scores[metric.name] = with_interval(
            value=answers.score(metric),
            draws=draws[metric.name],
            interval=interval,
            note="; ".join(filter(None, notes)),
        )
    return scores, draws


def metric_interval(
    answers: ScoredAnswers,
    metric: Metric,
    groups: list[NDArray[np.int64]],
    draws: NDArray[np.float64],
) -> Interval | None:
    """Returns Wilson's interval of a mean or of a score of classes; None for any other metric.

    Args:
        answers: N scored answers.
        metric: The metric.
        groups: Numbers of the examples of each group.
        draws: <float64>[R] bootstrap draws of the metric.
    """
    if metric.score_examples is not None:
        return mean_interval(group_sums(answers.terms[metric.name], groups))
    if metric.additive is None or metric.additive.bounds is None:
        return None
    return bounded_interval(answers.score(metric), draws, len(groups), metric.additive.bounds)


def no_spread(draws: NDArray[np.float64], interval: Interval | None) -> str:
    """Returns a warning if all draws have the same score; `interval` is not of them, if there is one."""
    draws = draws[~np.isnan(draws)]
    if len(draws) < 2 or np.ptp(draws) > _ROUNDING:
        return ""
    warning = f"all bootstrap draws score {draws[0]:.1f}, so no spread was seen"
    if interval is not None:
        warning += "; the interval rests on the number of groups"
    return warning


def _object_array(values: Values) -> NDArray[np.object_]:
    """Returns values of any kind as an array [N], of which rows can be taken."""
    array = np.empty(len(values), dtype=object)
    for number, value in enumerate(values):
        array[number] = value
    return array
