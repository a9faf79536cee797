"""Scores of sums beside the metrics of examples, which are sklearn's."""

import numpy as np
import pytest

from stmoe_eval.scores.additive import matthews, mean_f1, mean_of_sums, mean_terms
from stmoe_eval.scores.metrics import F1_WITH_INVALID, MACRO_F1, MATTHEWS, MULTIRC_F1A


def both(additive, targets, answers):
    return additive.score_of_sums(additive.terms(targets, answers).sum(axis=0))


def test_a_class_that_never_occurs_and_constant_answers_count_zero():
    assert both(mean_f1(range(3)), [0, 0, 1], [0, 0, 1]) == pytest.approx(200 / 3)
    assert both(matthews((0, 1)), [0, 1, 0], [1, 1, 1]) == 0


def test_many_sums_at_once_are_each_alone():
    parts = mean_f1(range(3)).terms([0, 1, 2, 1], [0, 2, 2, 1])
    sums = np.stack([parts[:2].sum(axis=0), parts[1:].sum(axis=0)])
    assert mean_f1(range(3)).score_of_sums(sums).tolist() == [
        mean_f1(range(3)).score_of_sums(one) for one in sums
    ]


def test_a_mean_leaves_out_what_does_not_count():
    assert mean_of_sums(mean_terms(np.asarray([10, np.nan, 30])).sum(axis=0)) == 20
    assert np.isnan(mean_of_sums(mean_terms(np.asarray([np.nan])).sum(axis=0)))


@pytest.mark.parametrize(
    "metric", [MACRO_F1, F1_WITH_INVALID, MULTIRC_F1A, MATTHEWS], ids=lambda metric: metric.name
)
def test_metrics_of_sums_are_the_metrics_of_examples(metric):
    num_classes = 3 if metric is MACRO_F1 else 2
    for seed in range(7):
        rng = np.random.default_rng(seed)
        targets = rng.integers(num_classes, size=23).tolist()
        answers = rng.integers(-1, num_classes, size=23).tolist()
        if metric is MULTIRC_F1A:
            targets = [{"group": i // 3, "value": value} for i, value in enumerate(targets)]
            answers = [{"value": value} for value in answers]
        expected = metric.score(targets, answers)
        assert both(metric.additive, targets, answers) == pytest.approx(expected)
