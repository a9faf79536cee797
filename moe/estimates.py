"""Estimates with 95 % intervals.

- Wilson's interval for scores with bounds: if 56 answers are each right with probability 0.98, all
  are right in one sample of three. Every bootstrap draw of such a sample scores 100, and so do both
  percentiles; Wilson's interval still reflects the uncertainty of 56 examples.
- Bonett and Price's interval for means of paired differences.
- The jackknife with Student's t for means over tokens, with documents as units: tokens of a
  document depend on each other. A claim about one of hundreds of cells needs a confidence far
  beyond 95 %, for which a bootstrap needs many thousands of draws. Changes of loss are skewed to
  the right, so with few documents the upper end is too low and the lower end is safe: effects are
  not claimed too often, but may be ruled out too often.
- The bootstrap's percentiles for all others.

Source:
    Wilson (1927); effective numbers of examples as in Dean and Pagano (2015), "Evaluating
    confidence interval methods for binomial proportions in clustered surveys".
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit
from torch import Tensor

CONFIDENCE = 0.95

_UPPER = (1 + CONFIDENCE) / 2  # of a two-sided interval


class Estimate(NamedTuple):
    """A value and its interval.

    The value is NaN where there is no token; the ends are infinite where no spread is known.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "-"
        if math.isinf(self.low):
            return f"{self.value:+.4f}"
        return f"{self.value:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


class Interval(NamedTuple):
    """The ends of an interval, in the unit of the score."""

    low: float
    high: float


# ---------------------------------------------------------------------------
# Scores over groups of examples


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
        return _wilson(p, n, float(ndtri(_UPPER)))

    # v: variance of the mean over groups, of which each has an error of s_g - p m_g.
    errors = s - p * m  # [G]
    v = num_groups / (num_groups - 1) * (errors**2).sum() / n**2

    # p (1 - p) / v independent scores have the same variance; groups that agree in all have the most.
    least = n**2 / (m**2).sum()
    effective = p * (1 - p) / v if v > 0 else 0.0
    quantile = float(stdtrit(num_groups - 1, _UPPER))
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
    half = float(stdtrit(num_groups - 1, _UPPER)) * stderr
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
    if num_groups < 2:
        return None
    low, high = bounds
    p = (value - low) / (high - low)
    v = draws.var(ddof=1) / (high - low) ** 2
    effective = num_groups if v == 0 else p * (1 - p) / v
    if effective == 0:  # the score is at a bound, but its draws are not
        return None

    quantile = float(stdtrit(num_groups - 1, _UPPER))
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


# ---------------------------------------------------------------------------
# Means over the tokens of documents


class TokenSums(NamedTuple):
    """Sums over some tokens of each of G documents, of which a mean is computed.

    Attributes:
        sums: <float64>[..., G].
        counts: <float64>[..., G] number of tokens, of a broadcastable shape.
    """

    sums: Tensor
    counts: Tensor


def mean_over_tokens(tokens: TokenSums, confidence: float = CONFIDENCE) -> list[Estimate]:
    """Returns the mean over tokens, with the spread of documents, in the order of the flattened sums."""
    return _jackknife(_leave_one_out(tokens), (tokens.counts > 0).sum(dim=-1), confidence)


def difference_of_means(
    a: TokenSums, b: TokenSums, confidence: float = CONFIDENCE
) -> list[Estimate]:
    """Returns the mean over the tokens of `a` minus the mean over those of `b`, from the same
    documents.

    Effects of a document that is in both sets cancel. The degrees of freedom come from the set with
    tokens in fewer documents.
    """
    num_documents = torch.minimum((a.counts > 0).sum(dim=-1), (b.counts > 0).sum(dim=-1))
    return _jackknife(_leave_one_out(a) - _leave_one_out(b), num_documents, confidence)


def student_half_width(stderr: Tensor, freedom: Tensor, confidence: float = CONFIDENCE) -> Tensor:
    """Returns half the width of Student's interval.

    Args:
        stderr: <float64>[...] standard errors.
        freedom: <int64>[...] degrees of freedom.
        confidence: Share of intervals that contain the true value.

    Returns:
        <float64>[...] infinite where the standard error is not finite or there is no degree of
        freedom.
    """
    quantile = torch.as_tensor(stdtrit(freedom.double().numpy(), (1 + confidence) / 2))
    is_known = stderr.isfinite() & (freedom > 0)
    return (quantile * stderr).masked_fill(~is_known, math.inf)


def _leave_one_out(tokens: TokenSums) -> Tensor:
    """Returns <float64>[..., 1 + G]: the mean, and the mean without each of the documents."""
    sums, counts = torch.broadcast_tensors(*tokens)
    total = sums.sum(dim=-1, keepdim=True)
    total_count = counts.sum(dim=-1, keepdim=True)
    sums_left = torch.cat([total, total - sums], dim=-1)
    counts_left = torch.cat([total_count, total_count - counts], dim=-1)
    return sums_left / counts_left


def _jackknife(values: Tensor, num_documents: Tensor, confidence: float) -> list[Estimate]:
    """Returns the estimates of values <float64>[..., 1 + G] by `_leave_one_out`.

    Args:
        values: The mean over all documents, then without each one.
        num_documents: <int64>[...] documents from which the spread is estimated.
        confidence: Share of intervals that contain the true value.
    """
    value = values[..., 0]
    num_documents = num_documents.expand(value.shape)

    # Around the estimate itself: a little wider than around the mean of the replicates. A document
    # that holds none of the tokens changes nothing when it is left out.
    squares = (values[..., 1:] - value[..., None]).square().sum(dim=-1)
    variance = squares * (num_documents - 1) / num_documents
    half = student_half_width(variance.sqrt(), num_documents - 1, confidence)

    center = value.nan_to_num(0.0)
    rows = torch.stack([value, center - half, center + half], dim=-1)
    return [Estimate(*row) for row in rows.reshape(-1, 3).tolist()]
