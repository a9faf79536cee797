"""Intervals: of a share, and the quantile that an estimate from few documents needs."""

import math
from statistics import NormalDist

from torch import Tensor

_LARGE = 100  # degrees of freedom from which a series gives five digits
_HALVINGS = 60


def wilson_interval(counts: Tensor, tokens: Tensor, confidence: float) -> tuple[Tensor, Tensor]:
    """Returns the ends, <float64>[...] each, of Wilson's score interval of a share.

    Args:
        counts: <any>[...] how often.
        tokens: <any>[...] of how many; NaN is returned where that is 0.
        confidence: Share of intervals that hold the truth.
    """
    # The deviations that hold so much of a normal distribution.
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    n = tokens.double()
    share = counts.double() / n

    # Shares whose own deviation would reach the one that was seen.
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    spread = (share * (1 - share) / n + (z / (2 * n)) ** 2).sqrt()
    half = z / (1 + z**2 / n) * spread
    return (centre - half).clamp(min=0), (centre + half).clamp(max=1)


def student_quantile(probability: float, freedom: int) -> float:
    """Returns the quantile of Student's t distribution.

    Args:
        probability: Share of the distribution below the quantile, above 1/2 and below 1.
        freedom: Degrees of freedom, at least 1.

    Source:
        Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 to 26.7.5.
    """
    # Near to normal: a series.
    if freedom > _LARGE:
        z = NormalDist().inv_cdf(probability)
        first = (z**3 + z) / 4
        second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
        return z + first / freedom + second / freedom**2

    # The angle whose distribution function has the value, by halving.
    low = 0.0
    high = math.pi / 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        is_below = _share_within(middle, freedom) < 2 * probability - 1
        low = middle if is_below else low
        high = high if is_below else middle
    return math.sqrt(freedom) * math.tan(low)


def _share_within(angle: float, freedom: int) -> float:
    """Returns P(|t| <= sqrt(freedom) tan(angle))."""
    # A finite sum of powers of the cosine.
    cosine = math.cos(angle)
    is_odd = freedom % 2
    term = cosine if is_odd else 1.0
    total = 0.0
    for power in range(is_odd, freedom - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * cosine**2
    total *= math.sin(angle)
    return (angle + total) * 2 / math.pi if is_odd else total
