"""Scores with their uncertainty."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_RESAMPLES = 2000


class Score(NamedTuple):
    """A share of right answers in 0..1 with its 95 % interval."""

    mean: float
    low: float
    high: float


def accuracy(outputs: Sequence[str], targets: Sequence[str], groups: Sequence[str], seed: int = 0) -> Score:
    """Returns the share of outputs that equal their target to the letter, with a bootstrap interval.

    The interval is the 2.5th to the 97.5th percentile of resampled means. Whole groups are drawn, since examples of
    one group are alike: the interval says how much another choice of groups would have changed the score.

    Args:
        outputs: N answers; one that is no valid answer counts as wrong.
        targets: N references.
        groups: N group names.
        seed: Of the resampling.
    """
    right = np.asarray([output == target for output, target in zip(outputs, targets, strict=True)], dtype=np.float64)
    names, member = np.unique(np.asarray(groups), return_inverse=True)
    hits = np.bincount(member, weights=right, minlength=len(names))
    sizes = np.bincount(member, minlength=len(names))
    drawn = np.random.default_rng(seed).integers(len(names), size=(_RESAMPLES, len(names)))
    means = hits[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return Score(float(right.mean()), float(low), float(high))


def accuracy_by_class(outputs: Sequence[str], targets: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Returns for each target how many of its examples are right, and how many there are."""
    counts: dict[str, tuple[int, int]] = {}
    for output, target in zip(outputs, targets, strict=True):
        right, total = counts.get(target, (0, 0))
        counts[target] = (right + (output == target), total + 1)
    return dict(sorted(counts.items()))
