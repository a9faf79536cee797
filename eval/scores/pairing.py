"""Whether two systems differ, on the same examples, by more than chance."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eval.scores.additive import OfSums
from eval.scores.intervals import (
    Judged,
    Score,
    draw_groups,
    group_sums,
    quiet_score,
    rows_by_group,
    statistic_of,
    with_interval,
)
from eval.scores.metrics import Metric

PERMUTATIONS = 9999
RECOMPUTED_PERMUTATIONS = 999
_SAME = 1e-9  # in points: two differences that rounding alone tells apart are one
_CHUNK = 500


class Pair(NamedTuple):
    """A metric of two systems on the same examples.

    Attributes:
        metric: Its name.
        a: Score of the first system; None when no example counts.
        b: Of the second.
        difference: a - b with the interval of paired draws of groups.
        p_value: Two-sided, of the paired permutation test; None without a difference.
        exact: Whether every permutation was tried.
        wins: Examples that count which the first answers better.
        losses: Those that the second does.
        ties: The others.
    """

    metric: str
    a: float | None
    b: float | None
    difference: Score
    p_value: float | None
    exact: bool
    wins: int
    losses: int
    ties: int


def compare_answers(
    metric: Metric, a: Judged, b: Judged, groups: Sequence[str], seed: Sequence[int] = (0,)
) -> Pair:
    """Returns how two systems differ in a metric.

    Args:
        metric: What to compare.
        a: N answers of the first system.
        b: N answers of the second, to the same questions.
        groups: N group names; whole groups are swapped and drawn.
        seed: Of permutations and draws.
    """
    rows = rows_by_group(groups)
    of_a, of_b = (statistic_of(judged, metric, rows) for judged in (a, b))
    value_a, value_b = a.score(metric), b.score(metric)
    draws = draw_groups(lambda drawn: of_a(drawn) - of_b(drawn), len(rows), seed)
    difference = with_interval(value_a - value_b, draws)
    p_value, exact = (
        (None, False) if difference.value is None else permutation_test(metric, a, b, rows, seed)
    )
    gaps = a.only(metric).examples - b.only(metric).examples
    counted = gaps[~np.isnan(gaps)]
    wins, losses = int((counted > _SAME).sum()), int((counted < -_SAME).sum())
    a_value, b_value = (None if math.isnan(value) else value for value in (value_a, value_b))
    ties = len(counted) - wins - losses
    return Pair(metric.name, a_value, b_value, difference, p_value, exact, wins, losses, ties)


def permutation_test(
    metric: Metric, a: Judged, b: Judged, rows: list[NDArray[np.int64]], seed: Sequence[int] = (0,)
) -> tuple[float, bool]:
    """Returns how often chance alone makes a difference as large, two-sided, and whether this is
    exact.

    If the systems were alike, which of them gave which answers to a group would be a toss of a
    coin. All tosses are tried where they are few, else random ones; groups that both answer alike
    need none.

    Args:
        metric: What is compared.
        a: N answers of the first.
        b: N answers of the second.
        rows: Examples of each group.
        seed: Of the tosses.

    Source:
        scipy.stats.permutation_test(permutation_type="samples") of the groups; the tests compare
        the two.
    """
    parts_a, parts_b = a.parts(metric), b.parts(metric)
    if parts_a is not None and parts_b is not None:
        statistic, num_groups = _of_sums(
            group_sums(parts_a[0], rows), group_sums(parts_b[0], rows), parts_a[1]
        )
        num_permutations = PERMUTATIONS
    else:
        statistic, num_groups = _of_scores(metric, a, b, rows)
        num_permutations = RECOMPUTED_PERMUTATIONS
    if num_groups == 0:
        return 1.0, True
    observed = abs(statistic(np.zeros((1, num_groups), dtype=bool))[0])
    if 2**num_groups <= num_permutations + 1:
        tosses = (np.arange(2**num_groups)[:, None] >> np.arange(num_groups)) & 1
        return float(np.mean(_as_large(statistic(tosses.astype(bool)), observed))), True
    rng, hits = np.random.default_rng(list(seed)), 0
    for start in range(0, num_permutations, _CHUNK):
        tosses = rng.random((min(_CHUNK, num_permutations - start), num_groups)) < 0.5
        hits += int(_as_large(statistic(tosses), observed).sum())
    return (hits + 1) / (num_permutations + 1), False


_Swapped = Callable[[NDArray[np.bool_]], NDArray[np.float64]]
"""From tosses <bool>[R, K] of the K groups that differ to <float64>[R] differences."""


def _of_sums(
    a: NDArray[np.float64], b: NDArray[np.float64], of_sums: OfSums
) -> tuple[_Swapped, int]:
    """Returns the differences of scores of sums, and how many groups differ.

    Args:
        a: <float64>[G, P] sums of groups of the first system.
        b: <float64>[G, P] those of the second.
        of_sums: The score.
    """
    moved = (b - a)[(a != b).any(axis=-1)]

    def statistic(tosses: NDArray[np.bool_]) -> NDArray[np.float64]:
        swapped = tosses.astype(np.float64) @ moved
        return of_sums(a.sum(axis=0) + swapped) - of_sums(b.sum(axis=0) - swapped)

    return statistic, len(moved)


def _of_scores(
    metric: Metric, a: Judged, b: Judged, rows: list[NDArray[np.int64]]
) -> tuple[_Swapped, int]:
    """Returns the differences of two scores that are taken anew, and how many groups differ."""
    differing = [
        members for members in rows if any(a.answers[row] != b.answers[row] for row in members)
    ]

    def statistic(tosses: NDArray[np.bool_]) -> NDArray[np.float64]:
        differences = []
        for toss in tosses:
            first, second = list(a.answers), list(b.answers)
            for members in (members for members, swap in zip(differing, toss, strict=True) if swap):
                for row in members:
                    first[row], second[row] = b.answers[row], a.answers[row]
            differences.append(
                quiet_score(metric, a.targets, first) - quiet_score(metric, b.targets, second)
            )
        return np.asarray(differences)

    return statistic, len(differing)


def _as_large(differences: NDArray[np.float64], observed: float) -> NDArray[np.bool_]:
    """Returns <bool>[R] where a difference is not below the observed one; one that is not defined
    counts as large.
    """
    return ~(np.abs(differences) < observed - _SAME)
