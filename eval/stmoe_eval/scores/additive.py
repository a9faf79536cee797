"""Scores that are functions of sums over examples.

Such a score of a bootstrap draw or of a permutation needs the sums of groups only, so that a
thousand draws cost next to nothing. An example adds a row of terms [P] to P sums.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from einops import rearrange
from numpy.typing import NDArray

ScoreOfSums = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""<float64>[..., P] sums to <float64>[...] scores; NaN where a score is not defined."""

Terms = Callable[[Sequence[Any], Sequence[Any]], NDArray[np.float64]]
"""(N targets, N answers) to <float64>[N, P] what each example adds to the sums."""


def _no_remark(sums: NDArray[np.float64]) -> str:
    return ""


class AdditiveScore(NamedTuple):
    """A score that is a function of sums.

    Attributes:
        terms: Each example's terms of the sums.
        score_of_sums: The score of the sums.
        bounds: Smallest and largest value of a score of classes, for its interval; None for any
            other score.
        remark: From sums <float64>[P] to a remark about the score, e.g. that it is undefined and
            counts as 0; empty for none.
        scores_examples: Whether the score of a single example's sums measures the quality of its
            answer.
    """

    terms: Terms
    score_of_sums: ScoreOfSums
    bounds: tuple[float, float] | None = None
    remark: Callable[[NDArray[np.float64]], str] = _no_remark
    scores_examples: bool = False


def mean_f1(labels: Sequence[int]) -> AdditiveScore:
    """Returns the mean F1 of some labels, in 0..100; labels that never occur count as 0."""

    def terms(targets: Sequence[Any], answers: Sequence[Any]) -> NDArray[np.float64]:
        is_target = _one_hot(targets, labels)  # [N, L]
        is_answer = _one_hot(answers, labels)  # [N, L]

        true_positive = is_target & is_answer
        false_positive = is_answer & ~is_target
        false_negative = is_target & ~is_answer
        counts = np.stack([true_positive, false_positive, false_negative]).astype(np.float64)
        return rearrange(counts, "kind n label -> n (kind label)")  # [N, 3 L]

    def score_of_sums(sums: NDArray[np.float64]) -> NDArray[np.float64]:
        counts = rearrange(sums, "... (kind label) -> kind ... label", kind=3)
        true_positive, false_positive, false_negative = counts

        # F1 = 2 TP / (2 TP + FP + FN)
        doubled = 2 * true_positive
        f1 = doubled / np.maximum(doubled + false_positive + false_negative, 1)
        return 100 * f1.mean(axis=-1)  # [..., L] -> [...]

    def remark(sums: NDArray[np.float64]) -> str:
        counts = rearrange(sums, "(kind label) -> kind label", kind=3)
        num_seen = counts.sum(axis=0)  # [L]

        # A label that is neither right nor wrong nor missed did not occur.
        unseen = []
        for label, number in zip(labels, num_seen, strict=True):
            if number == 0:
                unseen.append(str(label))
        if not unseen:
            return ""
        return f"no target and no answer is of class {', '.join(unseen)}, whose F1 counts as 0"

    return AdditiveScore(terms, score_of_sums, (0.0, 100.0), remark)


def matthews(labels: Sequence[int]) -> AdditiveScore:
    """Returns 100 times the Matthews correlation of labels and answers; 0 where either is constant.

    Args:
        labels: All values that targets and answers take.

    Source:
        Gorodkin (2004), "Comparing two K-category assignments by a K-category correlation
        coefficient", R_K in counts. Differs: no.
    """

    def terms(targets: Sequence[Any], answers: Sequence[Any]) -> NDArray[np.float64]:
        is_target = _one_hot(targets, labels)  # [N, L]
        is_answer = _one_hot(answers, labels)  # [N, L]
        is_right = (is_target & is_answer).any(axis=-1, keepdims=True)  # [N, 1]
        return np.concatenate([is_right, is_target, is_answer], axis=-1).astype(np.float64)

    def score_of_sums(sums: NDArray[np.float64]) -> NDArray[np.float64]:
        # c: right answers; t_k, p_k: how often label k is the target, and the answer; s: examples.
        c = sums[..., 0]
        t, p = rearrange(sums[..., 1:], "... (kind label) -> kind ... label", kind=2)
        s = t.sum(axis=-1)

        # R_K = (c s - sum_k p_k t_k) / sqrt((s^2 - sum_k p_k^2) (s^2 - sum_k t_k^2))
        covariance = c * s - (t * p).sum(axis=-1)
        variances = (s**2 - (t**2).sum(axis=-1)) * (s**2 - (p**2).sum(axis=-1))
        correlation = 100 * covariance / np.sqrt(np.maximum(variances, 1))
        return np.where(variances > 0, correlation, 0.0)

    def remark(sums: NDArray[np.float64]) -> str:
        t, p = rearrange(sums[1:], "(kind label) -> kind label", kind=2)
        constant = ""
        if np.count_nonzero(t) < 2:
            constant = "targets"
        elif np.count_nonzero(p) < 2:
            constant = "answers"

        # The formula would divide by their variance, which is 0.
        if not constant:
            return ""
        return f"all {constant} are alike: the correlation is not defined and counts as 0"

    return AdditiveScore(terms, score_of_sums, (-100.0, 100.0), remark)


def mean_terms(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the terms of a mean: each score, and whether it counts.

    Args:
        scores: <float64>[N] scores of examples; one that is NaN does not count.

    Returns:
        <float64>[N, 2] terms.
    """
    counts = ~np.isnan(scores)
    return np.stack([np.where(counts, scores, 0.0), counts], axis=-1)


def mean_of_sums(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the means for the sums of `mean_terms`.

    Args:
        sums: <float64>[..., 2] sum of the scores, and their number.

    Returns:
        <float64>[...] means; NaN where nothing counts.
    """
    total = sums[..., 0]
    num_counted = sums[..., 1]
    return np.where(num_counted > 0, total / np.maximum(num_counted, 1), np.nan)


def _one_hot(values: Sequence[Any], labels: Sequence[int]) -> NDArray[np.bool_]:
    """Returns <bool>[N, L] whether a value is a label."""
    return np.asarray(values)[:, None] == np.asarray(labels)
