"""Whether two systems differ on the same examples by more than chance.

Two tools: the interval of their difference (moe/estimates.py), and the paired permutation test,
which swaps their answers group by group and gives the p-value. They are two methods: near 0.05, one
may be significant while the other is not.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe.estimates import Interval, bounded_interval, mean_difference_interval
from stmoe_eval.scores.additive import ScoreOfSums
from stmoe_eval.scores.intervals import (
    ScoredAnswers,
    bootstrap,
    examples_by_group,
    group_statistic,
    group_sums,
    no_spread,
    score_or_nan,
    with_interval,
)
from stmoe_eval.scores.metrics import Metric

PERMUTATIONS = 9999
RECOMPUTED_PERMUTATIONS = 999
"""Permutations for metrics that are not functions of sums: each is computed from the answers."""

_TOLERANCE = 1e-9  # in points: two differences within rounding error are equal
_CHUNK = 500

SwapStatistic = Callable[[NDArray[np.bool_]], NDArray[np.float64]]
"""<bool>[R, K] which of the K groups that differ are swapped, to <float64>[R] differences a - b."""


@dataclass(frozen=True)
class MetricComparison:
    """One metric of two systems on the same examples; the fields are in the order of compare.json.

    Attributes:
        metric: Name of the metric.
        a: Score of A; None when no example counts.
        b: Score of B.
        difference: a - b.
        p_value: Two-sided p-value of the paired permutation test; None without a difference.
        exact: Whether all permutations were tried.
        wins: Number of examples that A answers better.
        losses: Number of examples that B answers better.
        ties: Number of the other examples that count.
        low: Lower end of the 95 % interval of the difference.
        high: Upper end of the 95 % interval of the difference.
        note: What to know before believing the interval; empty for nothing.
    """

    metric: str
    a: float | None
    b: float | None
    difference: float | None
    p_value: float | None
    exact: bool
    wins: int
    losses: int
    ties: int
    low: float | None
    high: float | None
    note: str


def compare_answers(
    metric: Metric,
    a: ScoredAnswers,
    b: ScoredAnswers,
    groups: Sequence[str],
    seed: Sequence[int] = (0,),
) -> MetricComparison:
    """Returns the difference of two systems in a metric.

    Args:
        metric: What to compare.
        a: N answers of the first system.
        b: N answers of the second system to the same requests.
        groups: The group of each example; whole groups are swapped and drawn.
        seed: Seed of permutations and draws.
    """
    members = examples_by_group(groups)
    score_a = a.score(metric)
    score_b = b.score(metric)

    # Paired bootstrap: both systems on the same drawn groups.
    statistic_a = group_statistic(a, metric, members)
    statistic_b = group_statistic(b, metric, members)

    def difference_of(drawn: NDArray[np.int64]) -> float:
        return statistic_a(drawn) - statistic_b(drawn)

    draws = bootstrap(difference_of, len(members), seed)
    interval = difference_interval(metric, a, b, members, draws)
    difference = with_interval(score_a - score_b, draws, interval, no_spread(draws, interval))

    # Paired permutation test of "the two are alike".
    p_value = None
    exact = False
    if difference.value is not None:
        p_value, exact = permutation_test(metric, a, b, members, seed)

    # Which of them answers single examples better.
    gaps = a.only(metric).headline_scores - b.only(metric).headline_scores  # [N]
    counted = gaps[~np.isnan(gaps)]
    wins = int((counted > _TOLERANCE).sum())
    losses = int((counted < -_TOLERANCE).sum())

    return MetricComparison(
        metric=metric.name,
        a=None if math.isnan(score_a) else score_a,
        b=None if math.isnan(score_b) else score_b,
        difference=difference.value,
        p_value=p_value,
        exact=exact,
        wins=wins,
        losses=losses,
        ties=len(counted) - wins - losses,
        low=difference.low,
        high=difference.high,
        note=difference.note,
    )


def difference_interval(
    metric: Metric,
    a: ScoredAnswers,
    b: ScoredAnswers,
    groups: list[NDArray[np.int64]],
    draws: NDArray[np.float64],
) -> Interval | None:
    """Returns the interval of a - b; None for the percentiles of its draws.

    Args:
        metric: Metric to compare; without bounds it has no such interval.
        a: N answers of the first system.
        b: N answers of the second system.
        groups: Numbers of the examples of each group.
        draws: <float64>[R] draws of the paired bootstrap.
    """
    if metric.score_examples is not None:  # what counts in one system counts in the other
        gaps = a.terms[metric.name] - b.terms[metric.name]  # [N, 2]
        gaps[:, 1] = a.terms[metric.name][:, 1]
        return mean_difference_interval(group_sums(gaps, groups))

    # If all draws are equal, their spread is unknown, and the number of groups is not enough to
    # estimate it.
    bounds = None if metric.additive is None else metric.additive.bounds
    if bounds is None or len(draws) == 0 or np.ptp(draws) <= _TOLERANCE:
        return None
    low, high = bounds
    difference = a.score(metric) - b.score(metric)
    return bounded_interval(difference, draws, len(groups), (low - high, high - low))


def permutation_test(
    metric: Metric,
    a: ScoredAnswers,
    b: ScoredAnswers,
    groups: list[NDArray[np.int64]],
    seed: Sequence[int] = (0,),
) -> tuple[float, bool]:
    """Returns the probability of a difference as large by chance, two-sided, and whether it is
    exact.

    If the systems were alike, a coin toss would decide which of them gave which answers to a group.
    All tosses are tried if there are few, else random ones. Groups that both answer alike
    need no toss: swapping them changes nothing.

    Args:
        metric: What is compared.
        a: N answers of the first system.
        b: N answers of the second system.
        groups: Numbers of the examples of each group.
        seed: Seed of the tosses.

    Source:
        scipy.stats.permutation_test(permutation_type="samples") of the groups; the tests compare
        the two.
    """
    statistic, num_differing, num_permutations = _swap_statistic(metric, a, b, groups)
    if num_differing == 0:
        return 1.0, True
    no_swap = np.zeros((1, num_differing), dtype=bool)
    observed = abs(statistic(no_swap)[0])

    # Few groups: every pattern of tosses, as the binary digits of 0 .. 2^K - 1.
    if 2**num_differing <= num_permutations + 1:
        patterns = np.arange(2**num_differing)[:, None]
        tosses = (patterns >> np.arange(num_differing)) & 1  # [2^K, K]
        return float(np.mean(_as_large(statistic(tosses.astype(bool)), observed))), True

    # Many groups: random tosses, in chunks that bound the memory.
    rng = np.random.default_rng(list(seed))
    num_as_large = 0
    for start in range(0, num_permutations, _CHUNK):
        size = min(_CHUNK, num_permutations - start)
        tosses = rng.random((size, num_differing)) < 0.5  # [R, K]
        num_as_large += int(_as_large(statistic(tosses), observed).sum())

    # The observed pattern counts as one of the permutations, so that no p-value is 0.
    return (num_as_large + 1) / (num_permutations + 1), False


def _swap_statistic(
    metric: Metric, a: ScoredAnswers, b: ScoredAnswers, groups: list[NDArray[np.int64]]
) -> tuple[SwapStatistic, int, int]:
    """Returns the difference after swaps, how many groups differ, and how many permutations to try."""
    if metric.additive is not None:
        sums_a = group_sums(a.terms[metric.name], groups)
        sums_b = group_sums(b.terms[metric.name], groups)
        return *_swap_sums(sums_a, sums_b, metric.additive.score_of_sums), PERMUTATIONS
    return *_swap_answers(metric, a, b, groups), RECOMPUTED_PERMUTATIONS


def _swap_sums(
    a: NDArray[np.float64], b: NDArray[np.float64], score_of_sums: ScoreOfSums
) -> tuple[SwapStatistic, int]:
    """Returns the difference of the scores as a function of swaps, and the number of groups that differ.

    Args:
        a: <float64>[G, P] sums of the groups of the first system.
        b: <float64>[G, P] sums of the groups of the second system.
        score_of_sums: The score.
    """
    # Change of each total when a group is swapped.
    moved = (b - a)[(a != b).any(axis=-1)]  # [K, P]
    total_a = a.sum(axis=0)  # [P]
    total_b = b.sum(axis=0)  # [P]

    def statistic(swaps: NDArray[np.bool_]) -> NDArray[np.float64]:
        change = swaps.astype(np.float64) @ moved  # [R, P]
        return score_of_sums(total_a + change) - score_of_sums(total_b - change)

    return statistic, len(moved)


def _swap_answers(
    metric: Metric, a: ScoredAnswers, b: ScoredAnswers, groups: list[NDArray[np.int64]]
) -> tuple[SwapStatistic, int]:
    """Returns the difference of the recomputed scores after swaps, and how many groups differ."""
    differing = []
    for members in groups:
        if any(a.answers[row] != b.answers[row] for row in members):
            differing.append(members)

    def after_swap(swaps: NDArray[np.bool_]) -> float:
        answers_a = list(a.answers)
        answers_b = list(b.answers)
        for members, swap in zip(differing, swaps, strict=True):
            if swap:
                for row in members:
                    answers_a[row] = b.answers[row]
                    answers_b[row] = a.answers[row]
        score_a = score_or_nan(metric, a.targets, answers_a)
        score_b = score_or_nan(metric, b.targets, answers_b)
        return score_a - score_b

    def statistic(swaps: NDArray[np.bool_]) -> NDArray[np.float64]:
        return np.asarray([after_swap(pattern) for pattern in swaps])

    return statistic, len(differing)


def _as_large(differences: NDArray[np.float64], observed: float) -> NDArray[np.bool_]:
    """Returns <bool>[R] where a difference is not below the observed one.

    One that is not defined counts as large.
    """
    return ~(np.abs(differences) < observed - _TOLERANCE)
