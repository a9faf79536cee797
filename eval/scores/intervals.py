"""Scores with their uncertainty, by the bootstrap over groups of examples.

Examples of one group, as the answers to one question, are alike. A bootstrap draw therefore takes
whole groups, with replacement, as many as there are. Every metric is computed on each draw; the
spread of these values is the uncertainty of its score.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from eval.scores.additive import ScoreOfSums, mean_of_sums, mean_terms
from eval.scores.metrics import Metric, Values, exact_matches, unwrap_values

RESAMPLES = 1000

GroupStatistic = Callable[[NDArray[np.int64]], float]
"""A score as a function of drawn groups <int64>[R], of which some may stand several times; NaN where
it is not defined."""


class Score(NamedTuple):
    """A score with its uncertainty.

    Attributes:
        value: In the metric's unit; None when no example counts.
        stderr: Standard deviation of the score over bootstrap draws; None with fewer than two
            groups.
        low: The 2.5th percentile of these draws.
        high: The 97.5th percentile of these draws.
        note: What to know before believing the interval; empty for nothing.
    """

    value: float | None
    stderr: float | None = None
    low: float | None = None
    high: float | None = None
    note: str = ""


class ScoredAnswers(NamedTuple):
    """Answers beside their targets, with the scores of single examples.

    Attributes:
        metrics: Metrics of the task.
        targets: N post-processed targets.
        answers: N post-processed answers.
        example_scores: By metric, <float64>[N] scores of examples, NaN where one does not count;
            only of metrics that are means.
    """

    metrics: Sequence[Metric]
    targets: Values
    answers: Values
    example_scores: Mapping[str, NDArray[np.float64]]

    @property
    def headline_scores(self) -> NDArray[np.float64]:
        """<float64>[N] how well each example was answered: its score in the first metric if that is
        a mean, else 100 for an answer that equals the target.
        """
        headline = self.metrics[0].name
        if headline in self.example_scores:
            return self.example_scores[headline]
        return exact_matches(unwrap_values(self.targets), unwrap_values(self.answers))

    def only(self, metric: Metric) -> "ScoredAnswers":
        """Returns the same answers with one of the metrics."""
        scores = {}
        if metric.name in self.example_scores:
            scores[metric.name] = self.example_scores[metric.name]
        return self._replace(metrics=(metric,), example_scores=scores)

    def terms(self, metric: Metric) -> tuple[NDArray[np.float64], ScoreOfSums] | None:
        """Returns a metric as a function of sums over examples.

        Returns:
            <float64>[N, P] what each example adds to P sums, and the score of the sums; None for a
            metric that is no function of sums.
        """
        if metric.name in self.example_scores:
            return mean_terms(self.example_scores[metric.name]), mean_of_sums
        if metric.additive is not None:
            return metric.additive.terms(self.targets, self.answers), metric.additive.score_of_sums
        return None

    def score(self, metric: Metric) -> float:
        """Returns the value of a metric; NaN where it is not defined."""
        if metric.name in self.example_scores:
            sums = mean_terms(self.example_scores[metric.name]).sum(axis=0)  # [N, 2] -> [2]
            return float(mean_of_sums(sums))
        return score_or_nan(metric, self.targets, self.answers)


def score_answers(metrics: Sequence[Metric], targets: Values, answers: Values) -> ScoredAnswers:
    """Returns answers beside their targets, each scored once by every metric that is a mean."""
    example_scores = {}
    for metric in metrics:
        if metric.score_examples is not None:
            example_scores[metric.name] = metric.score_examples(targets, answers)
    return ScoredAnswers(metrics, targets, answers, example_scores)


def score_or_nan(metric: Metric, targets: Values, answers: Values) -> float:
    """Returns the value of a metric; NaN, without a warning, where it is not defined."""
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
    """Returns what each group adds to the sums.

    Args:
        terms: <float64>[N, P] what each example adds.
        groups: Numbers of the examples of each of G groups.

    Returns:
        <float64>[G, P] sums over the examples of each group.
    """
    if not groups:
        return terms[:0]
    return np.stack([terms[members].sum(axis=0) for members in groups])


def group_statistic(
    answers: ScoredAnswers, metric: Metric, groups: list[NDArray[np.int64]]
) -> GroupStatistic:
    """Returns a metric as a function of drawn groups.

    A function of sums is computed from the sums of groups. Any other metric is computed anew on the
    drawn examples, in which those of a group that was drawn twice stand twice.
    """
    additive = answers.terms(metric)
    if additive is not None:
        terms, score_of_sums = additive
        sums = group_sums(terms, groups)  # [G, P]

        def from_sums(drawn: NDArray[np.int64]) -> float:
            return float(score_of_sums(sums[drawn].sum(axis=0)))

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
    """Returns a statistic of as many groups as there are, drawn with replacement, again and again.

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


def with_interval(value: float, draws: NDArray[np.float64], note: str = "") -> Score:
    """Returns a score with the standard deviation and the 95 % percentile interval of its draws.

    Args:
        value: Score of the examples as they are; NaN when none counts.
        draws: <float64>[R] or empty; those that are NaN are left out.
        note: What to know before believing the interval.
    """
    if math.isnan(value):
        return Score(None, note=note or "no example counts")

    draws = draws[~np.isnan(draws)]
    if len(draws) < 2:
        return Score(value, note=note or "one group of examples: there is no interval")

    # The percentile interval needs no normal distribution.
    low, high = np.percentile(draws, [2.5, 97.5])
    return Score(value, float(draws.std(ddof=1)), float(low), float(high), note)


def score_metrics(
    answers: ScoredAnswers, groups: Sequence[str], seed: Sequence[int] = (0,)
) -> tuple[dict[str, Score], dict[str, NDArray[np.float64]]]:
    """Returns every metric's score with its interval, and the draws that the intervals are of.

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
        note = _no_spread_note(answers.example_scores.get(metric.name), members)
        scores[metric.name] = with_interval(answers.score(metric), draws[metric.name], note)
    return scores, draws


def _no_spread_note(
    example_scores: NDArray[np.float64] | None, groups: list[NDArray[np.int64]]
) -> str:
    """Returns a warning where the bootstrap sees no spread because all groups score alike."""
    if example_scores is None or len(groups) < 2:
        return ""
    sums = group_sums(mean_terms(example_scores), groups)  # [G, 2]
    group_means = mean_of_sums(sums)  # [G]
    group_means = group_means[~np.isnan(group_means)]
    if len(group_means) < 2 or np.ptp(group_means) > 0:
        return ""

    num_groups = len(group_means)
    mean = group_means[0]
    if mean not in (0.0, 100.0):
        return f"all {num_groups} groups score alike: the interval sees no spread"

    # All right or all wrong: Clopper and Pearson's interval still says how sure that is.
    num_right = num_groups if mean else 0
    exact = binomtest(num_right, num_groups).proportion_ci(method="exact")
    return (
        f"all {num_groups} groups score {mean:.0f}, so the bootstrap sees no spread; the exact binomial interval "
        f"of so many groups is {100 * exact.low:.1f} to {100 * exact.high:.1f}"
    )


def _object_array(values: Values) -> NDArray[np.object_]:
    """Returns values of any kind as an array [N], of which rows can be taken."""
    array = np.empty(len(values), dtype=object)
    for number, value in enumerate(values):
        array[number] = value
    return array
