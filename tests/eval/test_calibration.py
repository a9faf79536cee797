"""Calibration beside numbers worked out by hand, and sklearn's Brier score."""

import math

import numpy as np
import pytest
import sklearn.metrics

from stmoe_eval.answers.cost import Tokens
from stmoe_eval.answers.predict import Predicted
from stmoe_eval.answers.predictions_file import Prediction
from stmoe_eval.reports.task_summary import ranked_calibration
from stmoe_eval.scores.calibration import calibration, calibration_of_choices, choice_probabilities
from stmoe_eval.task import TASKS
from tests.eval.rows import examples_of


def logs(*probabilities):
    return [math.log(p) - 3.1 for p in probabilities]  # softmax takes the constant away


def test_four_answers_worked_out_by_hand():
    """Confidences 0.9, 0.9, 0.6 and 0.5 in three bins: (0.867, 0.933], (0.533, 0.6], (0.467, 0.533]."""
    scores = [logs(0.9, 0.1), logs(0.1, 0.9), logs(0.6, 0.4), logs(0.3, 0.2, 0.5)]
    found = calibration(scores, [0, 0, 0, 2])
    assert found.ece == pytest.approx(100 * (2 * abs(0.5 - 0.9) + abs(1 - 0.6) + abs(1 - 0.5)) / 4)
    brier = 2 * 0.1**2 + 2 * 0.9**2 + 2 * 0.4**2 + 0.3**2 + 0.2**2 + 0.5**2
    assert found.brier == pytest.approx(brier / 4)
    assert found.num_examples == 4
    assert [(b.count, b.accuracy) for b in found.bins] == [(1, 100), (1, 100), (2, 50)]
    assert [b.confidence for b in found.bins] == pytest.approx([50, 60, 90])


def test_the_brier_score_is_sklearns():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(61, 5)) * 3
    right = rng.integers(5, size=61)
    probabilities = np.stack([choice_probabilities(row) for row in scores])
    theirs = sklearn.metrics.brier_score_loss(
        right, probabilities, labels=range(5), scale_by_half=False
    )
    found = calibration(scores.tolist(), right.tolist())
    assert found.brier == pytest.approx(theirs)


def test_infinite_scores_share_the_probability():
    assert choice_probabilities([-math.inf, -math.inf]).tolist() == [0.5, 0.5]
    assert choice_probabilities([-math.inf, -900.0]).tolist() == [0, 1]


def test_only_ranked_answers_with_one_right_choice_have_a_calibration():
    assert calibration_of_choices([], []) is None
    found = {}
    for name in ("rte", "record"):
        task = TASKS.get(name)
        examples = examples_of(task, "validation")
        predictions = []
        for example in examples:
            rest = dict.fromkeys(example.choices, math.log(0.2))
            scores = rest | {example.targets: math.log(0.8)}
            predictions.append(Prediction(example.id, example.targets, scores))
        answers = Predicted(predictions, None, Tokens(len(predictions), 0, 0), None)
        found[name] = ranked_calibration(task, examples, answers)
    assert found["rte"].ece == pytest.approx(20)
    assert found["rte"].brier == pytest.approx(2 * 0.2**2)
    assert found["record"] is None  # some queries have several right entities
    answers.predictions[0] = answers.predictions[0]._replace(scores=None)
    assert ranked_calibration(task, examples, answers) is None
