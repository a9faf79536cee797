"""Intervals that hold near 0 and 100 and with few groups, where the percentile bootstrap does not.

Of 56 answers with a chance of 98 % to be right, all are right in one sample of three. Each draw of
such a sample scores 100, and so does each end of the percentile interval. The methods here know how
little so many examples can show. `python -m scripts.benchmark intervals` measures how often each
interval holds the true value.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eval.scores.additive import ScoreOfSums

CONFIDENCE = 0.95
SMOOTHED_DRAWS = 2000

_UPPER = (1 + CONFIDENCE) / 2  # of a two-sided interval
_CHUNK_NUMBERS = 4_000_000  # weights that are drawn at once: 32 MB


class Interval(NamedTuple):
    """The ends of an interval, in the unit of the score."""

    low: float
    high: float


def percentile_interval(draws: NDArray[np.float64]) -> Interval:
    """Returns the interval of the middle 95 % of bootstrap draws <float64>[R]."""
    low, high = np.percentile(draws, [100 * (1 - _UPPER), 100 * _UPPER])
    return Interval(float(low), float(high))


# ---------------------------------------------------------------------------
# Means


def mean_interval(sums: NDArray[np.float64]) -> Interval | None:
    """Returns Wilson's interval of the mean of scores in 0..100, at the effective number of them.

    That is the number of scores 0 and 100 whose mean would be as sure. Of scores that are 0 or 100
    and independent it is their own number, and the interval is Wilson's own. Where the groups show
    no spread, it is the number of groups, if they are of one size: no scores in 0..100 are less
    sure than that.

    Args:
        sums: <float64>[G, 2] of each group, the sum of its scores and how many they are.

    Returns:
        The interval; None with fewer than two groups in which a score counts.

    Source:
        Wilson (1927); effective numbers as in Korn and Graubard (1998), "Confidence intervals for
        proportions with small expected number of positive counts estimated from survey data".
        Differs: Wilson's interval in place of Clopper and Pearson's.
    """
    from scipy.stats import norm
    from scipy.stats import t as student

    sums = sums[sums[:, 1] > 0]
    num_groups = len(sums)
    if num_groups < 2:
        return None

    # p: mean in 0..1; m_g: scores of group g; n: all of them.
    s = sums[:, 0] / 100
    m = sums[:, 1]
    n = m.sum()
    p = min(max(s.sum() / n, 0.0), 1.0)

    # Independent scores of 0 and 100.
    if (m == 1).all() and np.isin(s, (0.0, 1.0)).all():
        return _wilson(p, n, float(norm.ppf(_UPPER)))

    # v: variance of the mean over groups, of which each has an error of s_g - p m_g.
    errors = s - p * m  # [G]
    v = num_groups / (num_groups - 1) * (errors**2).sum() / n**2

    # p (1 - p) / v scores of 0 and 100 are as sure; groups that agree in all are the least sure.
    least = n**2 / (m**2).sum()
    effective = p * (1 - p) / v if v > 0 else 0.0
    quantile = float(student.ppf(_UPPER, num_groups - 1))
    return _wilson(p, max(effective, least), quantile)


def _wilson(p: float, n: float, z: float) -> Interval:
    """Returns Wilson's interval, in 0..100, of a share.

    Args:
        p: The share that was seen, in 0..1.
        n: Number of trials.
        z: Quantile of the error in standard deviations.
    """
    shrinkage = 1 + z**2 / n
    center = (p + z**2 / (2 * n)) / shrinkage
    variance = p * (1 - p) / n + z**2 / (4 * n**2)
    half = z * math.sqrt(variance) / shrinkage

    # Exact at the bounds, where rounding would leave the score outside.
    low = max(0.0, center - half) if p > 0 else 0.0
    high = min(1.0, center + half) if p < 1 else 1.0
    return Interval(100 * float(low), 100 * float(high))


def mean_difference_interval(sums: NDArray[np.float64]) -> Interval | None:
    """Returns the t interval of a mean of paired differences, with two groups added to those there.

    One favours each side, by as much as groups that differ do on average (100 points for each
    example where none differs): two systems that agree on all examples need not agree on the next.

    Args:
        sums: <float64>[G, 2] of each group, the sum of its differences and how many they are.

    Returns:
        The interval; None with fewer than two groups in which a difference counts.

    Source:
        Bonett and Price (2012), "Adjusted Wald confidence interval for a difference of binomial
        proportions based on paired data", which it is for single examples of 0 and 100. Differs:
        Student's t for the normal quantile; groups, and scores between 0 and 100.
    """
    from scipy.stats import t as student

    sums = sums[sums[:, 1] > 0]
    num_groups = len(sums)
    if num_groups < 2:
        return None

    # u: root mean square of the differences of those groups that differ.
    d = sums[:, 0]
    mean_size = sums[:, 1].mean()
    differing = d[d != 0]
    u = 100 * mean_size
    if len(differing):
        u = math.sqrt((differing**2).mean())

    # The two added groups have the mean size.
    d = np.append(d, [u, -u])  # [G + 2]
    m = np.append(sums[:, 1], [mean_size, mean_size])  # [G + 2]
    n = m.sum()
    mean = d.sum() / n
    errors = d - mean * m  # [G + 2]
    stderr = math.sqrt((errors**2).sum()) / n

    value = sums[:, 0].sum() / sums[:, 1].sum()
    half = float(student.ppf(_UPPER, num_groups - 1)) * stderr
    return _including(value, mean - half, mean + half)


# ---------------------------------------------------------------------------
# Other scores of sums


def smoothed_interval(
    sums: NDArray[np.float64],
    unseen: NDArray[np.float64],
    score_of_sums: ScoreOfSums,
    *,
    mass: float,
    seed: Sequence[int],
) -> Interval | None:
    """Returns the interval of a score of sums, by a Bayesian bootstrap that knows what may come.

    A draw gives each group a random weight in place of a number of copies. So it does to examples
    that were not seen but may come, each pair of classes as target and answer; together these weigh
    as much as `mass` groups. The interval is widened for few groups as Student's t is.

    Args:
        sums: <float64>[G, P] of each group.
        unseen: <float64>[C, P] what a group of the mean size adds that has one kind of examples.
        score_of_sums: The score.
        mass: Groups that the unseen examples count for, all together.
        seed: Seed of the draws.

    Returns:
        The interval; None with fewer than two groups.

    Source:
        Rubin (1981), "The Bayesian bootstrap"; Hesterberg (2015), "What teachers should know about
        the bootstrap", for the widening. Differs: the unseen examples, which are a Dirichlet prior.
    """
    from scipy.stats import norm
    from scipy.stats import t as student

    num_groups = len(sums)
    if num_groups < 2:
        return None

    # Groups alike are one row: the sum of their weights is gamma distributed too.
    rows, num_alike = np.unique(sums, axis=0, return_counts=True)
    rows = np.concatenate([rows, unseen])  # [U, P]
    mass_of_each = np.full(len(unseen), mass / len(unseen))
    shapes = np.concatenate([num_alike, mass_of_each])  # [U]

    # Draws in chunks that bound the memory; the weights of a draw add up to the groups.
    rng = np.random.default_rng(list(seed))
    chunk = max(1, _CHUNK_NUMBERS // len(rows))
    draws: list[NDArray[np.float64]] = []
    for start in range(0, SMOOTHED_DRAWS, chunk):
        size = (min(chunk, SMOOTHED_DRAWS - start), len(rows))
        weights = rng.standard_gamma(shapes, size=size)  # [R, U]
        weights *= num_groups / weights.sum(axis=-1, keepdims=True)
        draws.append(score_of_sums(weights @ rows))

    # Few groups: as far into the tails as t is, for a spread that is too small by (G - 1) / G.
    quantile = float(student.ppf(_UPPER, num_groups - 1))
    widening = math.sqrt(num_groups / (num_groups - 1))
    tail = float(norm.sf(quantile * widening))
    scores = np.concatenate(draws)
    low, high = np.quantile(scores, [tail, 1 - tail])
    value = float(score_of_sums(sums.sum(axis=0)))
    return _including(value, low, high)


def _including(value: float, low: float, high: float) -> Interval:
    """Returns an interval that holds the score itself."""
    return Interval(float(min(low, value)), float(max(high, value)))
