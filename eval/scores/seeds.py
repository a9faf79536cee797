"""Two arms of a study over seeds: their difference, whether it is chance, whether they are equal.

The unit is a run: one number for each seed of each arm. Runs of one seed share data order and the
weights that both arms have, so their differences are paired. What is said holds for other seeds,
not for other test examples (`eval.scores.pairing` says that).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe.checks import check_number
from moe.errors import DataError

SIGNIFICANCE = 0.05
"""Level of the test of equivalence."""

_ROUNDING = 10 * np.finfo(np.float64).eps  # a spread below this share of the values is rounding


@dataclass(frozen=True)
class Difference:
    """The difference a - b of two arms over seeds.

    With one seed, or where all differences are the same number, nothing is known of their spread:
    `low`, `high` and `p` are NaN, and a caller has to say so in their place.

    Attributes:
        mean: Mean of a minus mean of b.
        low: Lower end of the interval.
        high: Upper end of the interval.
        p: Two-sided p-value of "the arms do not differ".
        num_seeds: Seeds of each arm; of the arm that has fewer where they are not paired.
    """

    mean: float
    low: float
    high: float
    p: float
    num_seeds: int


@dataclass(frozen=True)
class Equivalence:
    """Whether two arms differ by less than a margin.

    Attributes:
        p: Of "they differ by the margin or more"; NaN where nothing is known of the spread.
        is_equivalent: Whether `p` is below 0.05: the interval lies between -margin and margin.
        low: Lower end of the 90 % interval of a - b.
        high: Upper end of the 90 % interval of a - b.
    """

    p: float
    is_equivalent: bool
    low: float
    high: float


class _Estimate(NamedTuple):
    """A mean difference with its standard error.

    Attributes:
        mean: The difference.
        stderr: Its standard error; NaN where it cannot be estimated.
        freedom: Degrees of freedom of the t distribution.
        num_seeds: Seeds of the smaller arm.
    """

    mean: float
    stderr: float
    freedom: float
    num_seeds: int

    def interval(self, confidence: float) -> tuple[float, float]:
        """Returns the two-sided t interval."""
        from scipy.stats import t as student

        quantile = float(student.ppf((1 + confidence) / 2, self.freedom))
        half = quantile * self.stderr
        return self.mean - half, self.mean + half


def paired_difference(
    a: Sequence[float], b: Sequence[float], *, confidence: float = 0.95
) -> Difference:
    """Returns the difference of two arms that share their seeds, by the paired t test.

    Args:
        a: <float>[N] a number for each seed of the first arm.
        b: <float>[N] the same seeds of the second arm, in the same order.
        confidence: How often intervals like this one hold the true difference.

    Raises:
        DataError: When the arms have different numbers of seeds, none, or a run without a number.
        ConfigError: When `confidence` is not between 0 and 1.
    """
    return _describe(_paired(a, b), confidence)


def unpaired_difference(
    a: Sequence[float], b: Sequence[float], *, confidence: float = 0.95
) -> Difference:
    """Returns the difference of two arms with seeds of their own, by Welch's t test.

    Args:
        a: <float>[N] a number for each seed of the first arm.
        b: <float>[M] a number for each seed of the second arm.
        confidence: How often intervals like this one hold the true difference.

    Raises:
        DataError: When an arm has no seed, or a run without a number.
        ConfigError: When `confidence` is not between 0 and 1.
    """
    return _describe(_unpaired(a, b), confidence)


def equivalence(
    a: Sequence[float], b: Sequence[float], *, margin: float, paired: bool = True
) -> Equivalence:
    """Returns whether two arms differ by less than a margin, by two one-sided t tests (TOST).

    That no difference was found does not mean that there is none; this test can say so.

    Args:
        a: <float>[N] a number for each seed of the first arm.
        b: <float>[M] a number for each seed of the second arm.
        margin: Largest difference that would not matter, in the unit of the numbers; declare it
            before the runs are seen.
        paired: Whether the arms share their seeds, in the same order.

    Raises:
        DataError: As `paired_difference` and `unpaired_difference` do.
        ConfigError: When `margin` is not above 0.

    Source:
        Schuirmann (1987), "A comparison of the two one-sided tests procedure and the power approach
        for assessing the equivalence of average bioavailability". Differs: no.
    """
    from scipy.stats import t as student

    check_number("margin", margin, above=0)
    estimate = _paired(a, b) if paired else _unpaired(a, b)

    # Without a spread nothing is shown. Otherwise the interval belongs to tests at half of 10 %.
    confidence = 1 - 2 * SIGNIFICANCE
    low, high = estimate.interval(confidence)
    if math.isnan(estimate.stderr):
        return Equivalence(math.nan, False, low, high)

    # The mean lies above -margin, and it lies below margin: both must be shown.
    t_above = (estimate.mean + margin) / estimate.stderr
    t_below = (estimate.mean - margin) / estimate.stderr
    p_above = student.sf(t_above, estimate.freedom)
    p_below = student.cdf(t_below, estimate.freedom)
    p = float(max(p_above, p_below))
    return Equivalence(p, p < SIGNIFICANCE, low, high)


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p-values adjusted for the number of comparisons that were made, in the same order.

    An adjusted value below 0.05 holds with a chance of 5 % for a single false claim in the family.

    Args:
        p_values: Of a family of comparisons; one that is NaN stays NaN and is not counted.

    Raises:
        DataError: When a value is not between 0 and 1.

    Source:
        Holm (1979), "A simple sequentially rejective multiple test procedure"; R's
        `p.adjust(method="holm")`. Differs: no.
    """
    # NaN compares as neither, and passes.
    p = np.asarray(p_values, dtype=np.float64)
    wrong = p[(p < 0) | (p > 1)]
    if len(wrong):
        raise DataError(f"A p-value is {wrong[0]:g}; expected a number from 0 to 1.")

    # The i-th smallest of m is multiplied by m - i + 1; none falls below a smaller one before it.
    num_counted = np.count_nonzero(~np.isnan(p))
    order = np.argsort(p)[:num_counted]  # NaN is sorted to the end
    factors = np.arange(num_counted, 0, -1)
    scaled = np.maximum.accumulate(p[order] * factors)

    # Back to the order of the caller.
    adjusted = np.full_like(p, np.nan)
    adjusted[order] = np.minimum(scaled, 1.0)
    return adjusted.tolist()


def _describe(estimate: _Estimate, confidence: float) -> Difference:
    """Returns a difference with its interval and the p-value of "there is none"."""
    from scipy.stats import t as student

    check_number("confidence", confidence, above=0, below=1)
    low, high = estimate.interval(confidence)

    # Two-sided: as far from 0 on either side.
    distance = abs(estimate.mean) / estimate.stderr
    p = 2 * float(student.sf(distance, estimate.freedom))
    return Difference(mean=estimate.mean, low=low, high=high, p=p, num_seeds=estimate.num_seeds)


def _paired(a: Sequence[float], b: Sequence[float]) -> _Estimate:
    """Returns the mean of the differences of each seed."""
    first = _numbers("a", a)
    second = _numbers("b", b)
    if len(first) != len(second):
        raise DataError(
            f"Arm a has {len(first)} seeds and arm b {len(second)}; "
            "expected the same seeds in both, in the same order "
            "(arms with seeds of their own: unpaired_difference, or paired=False)."
        )

    # What the seeds have in common falls out of the differences.
    gaps = first - second  # [N]
    scale = np.abs([first, second]).max()
    variance = _variance_of_mean(gaps, scale)

    # A spread of 0 is one that so few seeds do not show.
    stderr = math.sqrt(variance) if variance else math.nan
    mean = float(gaps.mean())
    num_seeds = len(gaps)
    return _Estimate(mean, stderr, num_seeds - 1, num_seeds)


def _unpaired(a: Sequence[float], b: Sequence[float]) -> _Estimate:
    """Returns the difference of the means, with Welch's degrees of freedom."""
    first = _numbers("a", a)
    second = _numbers("b", b)
    mean = float(first.mean() - second.mean())
    num_seeds = min(len(first), len(second))

    # v_a, v_b: variances of the two means.
    v_a = _variance_of_mean(first, np.abs(first).max())
    v_b = _variance_of_mean(second, np.abs(second).max())
    variance = v_a + v_b
    if num_seeds < 2 or variance == 0:
        return _Estimate(mean, math.nan, math.nan, num_seeds)

    # Welch: (v_a + v_b)^2 / (v_a^2 / (N - 1) + v_b^2 / (M - 1)), in shares, which do not underflow.
    term_a = (v_a / variance) ** 2 / (len(first) - 1)
    term_b = (v_b / variance) ** 2 / (len(second) - 1)
    freedom = 1 / (term_a + term_b)
    return _Estimate(mean, math.sqrt(variance), freedom, num_seeds)


def _variance_of_mean(values: NDArray[np.float64], scale: float) -> float:
    """Returns the variance of the mean of <float64>[N] values; NaN for one value.

    Args:
        values: The values.
        scale: Size of the numbers they were made from; a spread of its rounding error is 0.
    """
    if len(values) < 2:
        return math.nan
    deviation = float(values.std(ddof=1))
    if deviation <= _ROUNDING * scale:
        return 0.0

    return deviation**2 / len(values)


def _numbers(name: str, values: Sequence[float]) -> NDArray[np.float64]:
    """Returns the values of an arm as <float64>[N]."""
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.ndim != 1 or not len(numbers):
        raise DataError(
            f"Arm {name} has the shape {list(numbers.shape)}; "
            "expected one number for each of one or more seeds."
        )

    diverged = np.flatnonzero(~np.isfinite(numbers))
    if len(diverged):
        run = diverged[0]
        raise DataError(
            f"Run {run} of arm {name} is {numbers[run]:g}; "
            "expected a finite number. Give a run that diverged the value "
            "that was declared for it, as the loss at the start, and say so."
        )
    return numbers
