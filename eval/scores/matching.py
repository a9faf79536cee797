"""The matching metric: assigns the right answers to questions that share their choices.

When choices are ranked, a word that is likely for any question wins. It cancels where several
questions share their choices: for each pair, the right matching is compared with the swapped one.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from eval.scores.metrics import Values, mean_of


def matching_scores(
    choices: Sequence[Mapping[str, float]], right: Sequence[str]
) -> NDArray[np.float64]:
    """Returns <float64>[N] the percentage of pairings in which each question is matched correctly.

    With s_nc the score of choice c for question n, and a_n the right one, questions n and m are
    matched right when s(n, a_n) + s(m, a_m) > s(n, a_m) + s(m, a_n); ties count half. Chance is
    50. NaN for questions that share no choices with another question.

    Args:
        choices: Score of each choice of each of N questions.
        right: Right choice of each question.

    Source:
        Calibration by the mean over the questions, as in Batch Calibration (arXiv:2309.17249).
        Differs: pairs in place of the mean, so that nothing is estimated.
    """
    questions_by_choices: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for number, scores in enumerate(choices):
        questions_by_choices[tuple(sorted(scores))].append(number)

    per_cent = np.full(len(right), np.nan)  # [N]
    for questions in questions_by_choices.values():
        answers = [right[number] for number in questions]
        if len(set(answers)) < 2:
            continue

        # Rows are questions, columns the right choices of all of them.
        rows = []
        for number in questions:
            rows.append([choices[number][answer] for answer in answers])
        table = np.array(rows)  # [Q, Q]
        diagonal = np.diag(table)
        margin = diagonal[:, None] + diagonal[None] - table - table.T  # [Q, Q]
        wins = (np.sign(margin) + 1) / 2
        np.fill_diagonal(wins, 0)
        per_cent[questions] = 100 * wins.sum(axis=1) / (len(questions) - 1)
    return per_cent


def _as_given(targets: Values, answers: Values) -> NDArray[np.float64]:
    return np.asarray(answers, dtype=np.float64)


MATCHING = mean_of("matching", _as_given)
"""The mean of `matching_scores`, which take the place of answers."""
