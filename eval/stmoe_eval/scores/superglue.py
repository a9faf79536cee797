"""The SuperGLUE average: its tasks, and the mean of their scores."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

SUPERGLUE = ("boolq", "cb", "copa", "multirc", "record", "rte", "wic", "wsc")
"""The tasks of the average; the diagnostics axb and axg are not part of it."""


def superglue_average(scores: Mapping[str, ArrayLike | Mapping[str, float]]) -> NDArray[np.float64]:
    """Returns the leaderboard's number: the mean of the eight tasks' scores.

    Args:
        scores: By task, its score (`stmoe_eval.task.Task.headline_score`), <float64>[R] draws of it, or
            the scores of its metrics, whose mean it is. Other tasks do not count.

    Returns:
        <float64>[] or <float64>[R] the average.
    """
    task_scores = []
    for task in SUPERGLUE:
        score = scores[task]
        if isinstance(score, Mapping):
            score = np.mean(list(score.values()))
        task_scores.append(np.asarray(score, dtype=np.float64))
    return np.mean(task_scores, axis=0)
