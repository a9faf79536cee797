# ruff: noqa: RUF001
"""Metrics. Oracles: arithmetic by hand, sklearn's metrics, and T5's and t5_cbqa's own tests on other
values. What no order may change is in tests/contracts/test_tasks.py.
"""

import math

import numpy as np
import pytest

from stmoe_eval.scores import metrics
from stmoe_eval.scores.metrics import F1_WITH_INVALID, MACRO_F1, MATTHEWS, MULTIRC_F1A


def grouped(pairs):
    """Mappings with `value`, and in targets the `group`, from ((value, value), group)."""
    made = []
    for (target, answer), group in pairs:
        made.append(({"value": target, "group": group}, {"value": answer}))
    return made


def unzip(pairs):
    return [target for target, _ in pairs], [answer for _, answer in pairs]


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
        sums = metric.additive.terms(targets, answers).sum(axis=0)
        expected = pytest.approx(metric.score(targets, answers))
        assert metric.additive.score_of_sums(sums) == expected


def test_an_answer_that_is_no_label_is_wrong_in_every_metric():
    assert MACRO_F1.score([0, 1, 2], [0, 1, -1]) == pytest.approx(200 / 3)
    # The invalid answers become 0 for target 1 and 1 for target 0: one hit, one miss, one false
    # alarm. The caller's answers stay as they are.
    answers = np.array([0, 1, -1, 5])
    assert F1_WITH_INVALID.score([0, 1, 1, 0], answers) == pytest.approx(50)
    assert answers.tolist() == [0, 1, -1, 5]
    targets, outputs = unzip(grouped([((0, -1), 1), ((1, 1), 2), ((0, 0), 3)]))
    assert metrics.MULTIRC_EM.score(targets, outputs) == pytest.approx(200 / 3)


def test_rows_of_a_question_count_once_wherever_they_stand():
    pairs = [((1, 1), (0, 3)), ((1, 1), (1, 3)), ((0, 1), (0, 3)), ((0, 0), (1, 3))]
    targets, outputs = unzip(grouped(pairs))
    each = metrics.MULTIRC_EM.score_examples(targets, outputs).tolist()
    assert each == pytest.approx([0, 100, math.nan, math.nan], nan_ok=True)
    as_json = [{**target, "group": list(target["group"])} for target in targets]
    assert metrics.MULTIRC_EM.score(as_json, outputs) == 50

    # Of a query's rows the first counts.
    repeated = [((["a x", "b"], "b"), (2, 3)), ((["c"], "wrong but a repetition"), (2, 3))]
    targets, outputs = unzip(grouped(repeated))
    for metric in (metrics.RECORD_EM, metrics.RECORD_F1):
        assert metric.score(targets, outputs) == 100


@pytest.mark.parametrize(
    ("text", "squad", "trivia"),
    [
        ("`Has\tA_LOT of the 'marks'.\"‘", "has alot of marks‘", "has lot of marks"),
        ("Thea, the an-other", "thea another", "thea other"),
        ("’tis U.S.A.", "’tis usa", "tis u s"),
    ],
)
def test_answers_are_normalised_as_the_two_scripts_do(text, squad, trivia):
    assert metrics.normalize_squad(text) == squad
    assert metrics.normalize_trivia_qa(text) == trivia


def test_the_overlap_counts_words_as_often_as_both_have_them():
    # "x x y" against "x z": 1 shared word of 3 and of 2: 2 x 1/3 x 1/2 / (1/3 + 1/2).
    assert metrics.SQUAD_F1.score([["x x y"]], ["x z"]) == pytest.approx(40)
    assert metrics.SQUAD_F1.score([["abc abd", "$$$$"]], ["abd"]) == pytest.approx(200 / 3)
    assert metrics.SQUAD_EM.score([[]], ["x"]) == 0

    # Summaries are split at newlines, and at full stops between spaces.
    assert metrics.ROUGELSUM.score(["a b . c d ."], ["c d .\na b ."]) == 100
    # Without its sentence ends the longest common run is 2 of 4 words.
    assert metrics.ROUGELSUM.score(["a b c d"], ["c d a b"]) == 50


def test_correlations_are_signed_and_undefined_or_0_for_constants():
    assert metrics.SPEARMAN.score([0, 2, 1], [0, 1, 2]) == pytest.approx(50)
    assert MATTHEWS.score([0, 1, 0, 1], [1, 0, 1, 0]) == pytest.approx(-100)
    # 6 true, 1 wrong and 2, 3: (6 x 3 - 1 x 2) / sqrt(7 x 8 x 4 x 5)
    targets, outputs = [1] * 8 + [0] * 4, [1] * 6 + [0] * 2 + [1] + [0] * 3
    expected = 100 * 16 / math.sqrt(7 * 8 * 4 * 5)
    assert MATTHEWS.score(targets, outputs) == pytest.approx(expected)
    assert MATTHEWS.score([1, 1], [1, 1]) == 0
    assert math.isnan(metrics.PEARSON.score([1, 2], [3, 3]))
    assert math.isnan(metrics.SPEARMAN.score([1, 2], [3, 3]))


def test_parity_is_of_pairs_whatever_is_right():
    outputs = [0, 0, 1, 0, -1, -1, 1]
    for targets in ([0] * 7, [1] * 7):
        each = metrics.GENDER_PARITY.score_examples(targets, outputs)
        assert each[::2].tolist() == pytest.approx([100, 0, 100, math.nan], nan_ok=True)
        assert np.isnan(each[1::2]).all()
        assert metrics.GENDER_PARITY.score(targets, outputs) == pytest.approx(200 / 3)
