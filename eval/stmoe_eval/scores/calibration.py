"""Calibration of ranked choices: expected calibration error and Brier score.

Only ranked answers have a probability for each choice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_BINS = 15


@dataclass(frozen=True)
class ReliabilityBin:
    """The answers of a range of confidence.

    Attributes:
        count: Number of answers.
        confidence: Their mean confidence, in 0..100.
        accuracy: Percentage of right answers.
    """

    count: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Calibration:
    """Calibration of a system.

    Attributes:
        ece: Expected calibration error, in points of 0..100; 0 is best. With few examples it is
            above 0 for a perfectly calibrated model too.
        brier: Brier score, in 0..2; 0 is best, always 1 / C for each of C choices has 1 - 1 / C.
        num_examples: Number of examples.
        bins: The ranges of confidence that have answers, in ascending order.
    """

    ece: float
    brier: float
    num_examples: int
    bins: Sequence[ReliabilityBin]


def choice_probabilities(scores: Sequence[float]) -> NDArray[np.float64]:
    """Returns <float64>[C] the softmax of the scores of C choices.

    The scores are those that select the answer: log-probabilities, divided by lengths where the
    evaluation does so. If all are minus infinity, every choice is equally probable.
    """
    exponents = np.asarray(scores, dtype=np.float64)

    # Infinite scores: the highest ones share all the probability.
    if not np.isfinite(exponents.max()):
        exponents = np.where(exponents == exponents.max(), 0.0, -np.inf)
    odds = np.exp(exponents - exponents.max())
    return odds / odds.sum()


def calibration(choice_scores: Sequence[Sequence[float]], right: Sequence[int]) -> Calibration:
    """Returns the calibration of ranked answers.

    With p_nc the probability of choice c of example n, and y_nc whether it is the right one:

        Brier = 1 / N sum_n sum_c (p_nc - y_nc)^2
        ECE = sum_b |B_b| / N  | accuracy(B_b) - confidence(B_b) |

    The confidence of an answer is its own probability, max_c p_nc. B_b are the answers whose
    confidence lies in ((b - 1) / 15, b / 15], for b = 1 .. 15: bins of equal width.

    Args:
        choice_scores: Scores of the choices of each of N examples; their number may differ.
        right: Index of the right choice of each example.

    Source:
        Brier (1950), over all classes; Guo et al. (2017), "On calibration of modern neural
        networks" (arXiv:1706.04599) eq. 3, with their 15 bins. Differs: no.
    """
    assert len(choice_scores) == len(right) > 0, "an example is needed"

    # Confidence, rightness and squared error of each example.
    confidence = np.empty(len(right))  # [N]
    is_right = np.empty(len(right))  # [N]
    squared_error = np.empty(len(right))  # [N]
    for n, (scores, answer) in enumerate(zip(choice_scores, right, strict=True)):
        p = choice_probabilities(scores)  # [C]
        y = np.arange(len(p)) == answer  # [C]
        confidence[n] = p.max()
        is_right[n] = p.argmax() == answer
        squared_error[n] = ((p - y) ** 2).sum()

    # Equal width, closed above.
    bin_of_answer = np.ceil(confidence * NUM_BINS).astype(int)  # [N]
    bins = []
    ece = 0.0
    for number in np.unique(bin_of_answer):
        members = bin_of_answer == number
        mean_confidence = float(confidence[members].mean())
        accuracy = float(is_right[members].mean())
        ece += float(members.mean()) * abs(accuracy - mean_confidence)
        bins.append(
            ReliabilityBin(
                count=int(members.sum()), confidence=100 * mean_confidence, accuracy=100 * accuracy
            )
        )

    return Calibration(
        ece=100 * ece, brier=float(squared_error.mean()), num_examples=len(right), bins=bins
    )


def calibration_of_choices(
    choices: Sequence[Mapping[str, float]], right: Sequence[Sequence[str]]
) -> Calibration | None:
    """Returns the calibration of choices by their texts.

    Args:
        choices: Score of each choice of each example.
        right: Right choices of each example.

    Returns:
        The calibration; None if there is no example, or one does not have exactly one right choice:
        confidence is then undefined.
    """
    scores = []
    indices = []
    for by_text, texts in zip(choices, right, strict=True):
        if len(texts) != 1:
            return None
        scores.append(list(by_text.values()))
        indices.append(list(by_text).index(texts[0]))
    return calibration(scores, indices) if scores else None
