"""Paired differences of two arms over their seeds, with tests of difference and of equality.

The unit is a run: one number for each seed of each arm. Runs of one seed share the order of the data
and the weights that both arms have, so their differences are paired. The conclusions hold for other
seeds, not for other test examples (`stmoe_eval.scores.pairing` covers those).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe.errors import DataError

_ROUNDING = 10 * np.finfo(np.float64).eps  # a spread below this share of the values is rounding


class Difference(NamedTuple):
    """The difference a - b of two arms over seeds.

    With one seed, or if all differences are equal, their spread is unknown: `low`, `high` and `p`
    are NaN.

    Attributes:
        mean: Mean of a minus mean of b.
        low: Lower end of the interval.
        high: Upper end of the interval.
        p: Two-sided p-value of "the arms do not differ".
    """

    mean: float
    low: float
    high: float
    p: float

    def __format__(self, digits: str) -> str:
        """Returns the mean, and the interval in parentheses where there is one, e.g. for `+.1f`."""
        if math.isnan(self.low):
            return f"{self.mean:{digits}}"
        return f"{self.mean:{digits}} ({self.low:{digits}} to {self.high:{digits}})"


def paired_difference(
    a: Sequence[float], b: Sequence[float], *, confidence: float = 0.95
) -> Difference:
    """Returns the difference of two arms by the paired t test.

    Args:
        a: <float>[N] a number for each seed of the first arm.
        b: <float>[N] the same seeds of the second arm, in the same order.
        confidence: Share of such intervals that contain the true difference.

    Raises:
        DataError: When a run has no finite number.
    """
    from scipy.stats import ttest_1samp

    gaps = _gaps(a, b)
    mean = float(gaps.mean())
    if not _has_spread(a, b):
        return Difference(mean, math.nan, math.nan, math.nan)
    test: Any = ttest_1samp(gaps, 0.0)
    low, high = test.confidence_interval(confidence)
    return Difference(mean, float(low), float(high), float(test.pvalue))


def equivalence_p(a: Sequence[float], b: Sequence[float], margin: float) -> float:
    """Returns the p-value of "the arms differ by the margin or more", by two one-sided t tests.

    A nonsignificant difference does not show equality; this test can. The result is NaN if the
    spread is unknown.

    Args:
        a: <float>[N] a number for each seed of the first arm.
        b: <float>[N] the same seeds of the second arm, in the same order.
        margin: Largest negligible difference, above 0; declare it before seeing the runs.

    Raises:
        DataError: When a run has no finite number.

    Source:
        Schuirmann (1987), "A comparison of the two one-sided tests procedure and the power approach
        for assessing the equivalence of average bioavailability". Differs: no.
    """
    from scipy.stats import ttest_1samp

    gaps = _gaps(a, b)
    if not _has_spread(a, b):
        return math.nan
    above: Any = ttest_1samp(gaps, -margin, alternative="greater")
    below: Any = ttest_1samp(gaps, margin, alternative="less")
    return float(max(above.pvalue, below.pvalue))


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p-values adjusted for the number of comparisons, in the same order.

    Adjusted values below 0.05 hold with a chance of 5 % for a single false claim in the family.

    Source:
        Holm (1979), "A simple sequentially rejective multiple test procedure"; R's
        `p.adjust(method="holm")`. Differs: no.
    """
    # The i-th smallest of m is multiplied by m - i + 1; none falls below a smaller one before it.
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p)
    scaled = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))

    # Restore the caller's order.
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(scaled, 1.0)
    return adjusted.tolist()


def _gaps(a: Sequence[float], b: Sequence[float]) -> NDArray[np.float64]:
    """Returns <float64>[N] the differences of the seeds."""
    gaps = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    if not np.isfinite(gaps).all():
        raise DataError(
            f"The runs of two arms are {list(a)} and {list(b)}; expected finite numbers. "
            "Leave the seeds out whose runs diverged."
        )
    return gaps


def _has_spread(a: Sequence[float], b: Sequence[float]) -> bool:
    """Returns whether the differences of the seeds differ by more than rounding."""
    gaps = _gaps(a, b)
    return len(gaps) > 1 and bool(gaps.std(ddof=1) > _ROUNDING * np.abs([a, b]).max())
