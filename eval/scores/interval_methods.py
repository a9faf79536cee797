"""95 % intervals: Wilson's for scores with bounds, Bonett and Price's for differences of means,
the bootstrap's percentiles for all others.

If 56 answers are each right with probability 0.98, all are right in one sample of three. Every
bootstrap draw of such a sample scores 100, and so do both percentiles. Wilson's interval still
reflects the uncertainty of 56 examples. docs/results.md says how often
each interval holds the true value.

Source:
    Wilson (1927); effective numbers of examples as in Dean and Pagano (2015), "Evaluating
    confidence interval methods for binomial proportions in clustered surveys".
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95

_UPPER = (1 + CONFIDENCE) / 2  # of a two-sided interval


class Interval(NamedTuple):
    """The ends of an interval, in the unit of the score."""

    low: float
    high: float


def percentile_interval(draws: NDArray[np.float64]) -> Interval:
    """Returns the interval of the middle 95 % of bootstrap draws <float64>[R]."""
    low, high = np.percentile(draws, [100 * (1 - _UPPER), 100 * _UPPER])
    return Interval(float(low), float(high))


def mean_interval(sums: NDArray[np.float64]) -> Interval | None:
    """Returns Wilson's interval of the mean of scores in 0..100, over groups of examples.

    Independent scores of 0 and 100 have Wilson's own interval. Others count as the number of such
    scores whose mean would have the same variance. If all groups have the same score and size, that
    is the number of groups: no scores in 0..100 can be less certain.

    Args:
        sums: <float64>[G, 2] of each group, the sum of its scores and how many they are.

    Returns:
        The interval; None with fewer than two groups that have a score.
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
    if (m == 1).all() and np.isin(s, (0.0, 1.0)).all():
        return _wilson(p, n, float(norm.ppf(_UPPER)))

    # v: variance of the mean over groups, of which each has an error of s_g - p m_g.
    errors = s - p * m  # [G]
    v = num_groups / (num_groups - 1) * (errors**2).sum() / n**2

    # p (1 - p) / v independent scores have the same variance; groups that agree in all have the most.
    least = n**2 / (m**2).sum()
    effective = p * (1 - p) / v if v > 0 else 0.0
    quantile = float(student.ppf(_UPPER, num_groups - 1))
    return _wilson(p, max(effective, least), quantile)


def mean_difference_interval(sums: NDArray[np.float64]) -> Interval | None:
    """Returns the t interval of a mean of paired differences after adding two groups.

    One favors each system, with the average size of the differing groups (100 points per example
    where none differs): two systems that agree on all examples may differ on the next.

    Args:
        sums: <float64>[G, 2] sum and number of the differences in each group.

    Returns:
        The interval; None with fewer than two groups that have a difference.

    Source:
        Bonett and Price (2012), "Adjusted Wald confidence interval for a difference of binomial
        proportions based on paired data", equal to it for single examples scored 0 or 100. Differs:
        Student's t instead of the normal quantile; groups; scores between 0 and 100.
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
    return Interval(float(min(mean - half, value)), float(max(mean + half, value)))


def bounded_interval(
    value: float, draws: NDArray[np.float64], num_groups: int, bounds: tuple[float, float]
) -> Interval | None:
    """Returns Wilson's interval of any score with bounds, by the variance of its bootstrap draws.

    Args:
        value: The score.
        draws: <float64>[R] bootstrap draws of it.
        num_groups: Number of groups, which counts where the draws have no variance.
        bounds: Smallest and largest score.

    Returns:
        The interval; None with fewer than two groups.
    """
    from scipy.stats import t as student

    if num_groups < 2:
        return None
    low, high = bounds
    p = (value - low) / (high - low)
    v = draws.var(ddof=1) / (high - low) ** 2
    effective = num_groups if v == 0 else p * (1 - p) / v
    if effective == 0:  # the score is at a bound, but its draws are not
        return None

    quantile = float(student.ppf(_UPPER, num_groups - 1))
    interval = _wilson(p, effective, quantile)
    return Interval(*(low + (high - low) * end / 100 for end in interval))


def _wilson(p: float, n: float, z: float) -> Interval:
    """Returns Wilson's interval, in 0..100, of a share.

    Args:
        p: The observed share, in 0..1.
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
