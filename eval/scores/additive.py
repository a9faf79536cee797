"""Scores that are a function of sums over examples, so that a thousand resamples of them cost next
to nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from einops import rearrange
from numpy.typing import NDArray

OfSums = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""<float64>[..., P] sums to <float64>[...] scores; NaN where a score is not defined."""


class Additive(NamedTuple):
    """A score that is taken of sums.

    Attributes:
        parts: (N targets, N answers) to <float64>[N, P] what each example adds.
        of_sums: The score of the sums.
    """

    parts: Callable[[Sequence[Any], Sequence[Any]], NDArray[np.float64]]
    of_sums: OfSums


def mean_f1(labels: Sequence[int]) -> Additive:
    """Returns the mean F1 of some labels, in 0..100; that of a label that never occurs is 0."""

    def parts(targets: Sequence[Any], answers: Sequence[Any]) -> NDArray[np.float64]:
        wanted = np.asarray(targets)[:, None] == np.asarray(labels)
        given = np.asarray(answers)[:, None] == np.asarray(labels)
        counts = np.stack([wanted & given, given & ~wanted, wanted & ~given])
        return rearrange(counts.astype(np.float64), "kind n label -> n (kind label)")

    def of_sums(sums: NDArray[np.float64]) -> NDArray[np.float64]:
        hits, wrong, missed = rearrange(sums, "... (kind label) -> kind ... label", kind=3)
        return 100 * (2 * hits / np.maximum(2 * hits + wrong + missed, 1)).mean(axis=-1)

    return Additive(parts, of_sums)


def matthews(labels: Sequence[int]) -> Additive:
    """Returns 100 times the Matthews correlation of labels and answers; 0 where either is constant.

    Args:
        labels: All values that targets and answers take.
    """

    def parts(targets: Sequence[Any], answers: Sequence[Any]) -> NDArray[np.float64]:
        wanted = np.asarray(targets)[:, None] == np.asarray(labels)
        given = np.asarray(answers)[:, None] == np.asarray(labels)
        right = (wanted & given).any(axis=-1, keepdims=True)
        return np.concatenate([right, wanted, given], axis=-1).astype(np.float64)

    def of_sums(sums: NDArray[np.float64]) -> NDArray[np.float64]:
        right, (wanted, given) = (
            sums[..., 0],
            rearrange(sums[..., 1:], "... (kind label) -> kind ... label", kind=2),
        )
        total = wanted.sum(axis=-1)
        spread = (total**2 - (wanted**2).sum(axis=-1)) * (total**2 - (given**2).sum(axis=-1))
        covariance = right * total - (wanted * given).sum(axis=-1)
        return np.where(spread > 0, 100 * covariance / np.sqrt(np.maximum(spread, 1)), 0.0)

    return Additive(parts, of_sums)


def mean_parts(each: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the parts <float64>[N, 2] of the mean of scores <float64>[N], of which NaN does not
    count.
    """
    counted = ~np.isnan(each)
    return np.stack([np.where(counted, each, 0.0), counted], axis=-1)


def mean_of_sums(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the means <float64>[...] of sums <float64>[..., 2] of parts; NaN where nothing
    counts.
    """
    return np.where(sums[..., 1] > 0, sums[..., 0] / np.maximum(sums[..., 1], 1), np.nan)
