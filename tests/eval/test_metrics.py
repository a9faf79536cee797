# ruff: noqa: RUF001
"""Metrics. Oracles: arithmetic by hand, T5's and t5_cbqa's own tests on other values, and what no
order may change.
"""

import math
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe import ConfigError
from stmoe_eval.scores import metrics
from stmoe_eval.scores.metrics import Metric
from stmoe_eval.scores.superglue import SUPERGLUE, superglue_average

words = st.text(st.sampled_from("ab .'’-Tthe"), max_size=9)
labels = st.lists(st.tuples(st.integers(0, 1), st.integers(-1, 1)), min_size=1, max_size=12)
three_labels = st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 2)), min_size=1, max_size=12)
texts = st.lists(st.tuples(words, words), min_size=1, max_size=7)
references = st.lists(words, min_size=1, max_size=3)
answers = st.lists(st.tuples(references, words), min_size=1, max_size=7)
ratings = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=9)


def grouped(pairs):
    """Mappings with `value`, and in targets the `group`, from ((value, value), group)."""
    made = []
    for (target, answer), group in pairs:
        made.append(({"value": target, "group": group}, {"value": answer}))
    return made


def in_groups(pairs):
    return st.lists(st.tuples(pairs, st.integers(0, 3)), min_size=1, max_size=12).map(grouped)


queries = in_groups(st.tuples(references, words))
questions = in_groups(st.tuples(st.integers(0, 1), st.integers(-1, 1)))

OF_TEXTS = (metrics.ACCURACY, metrics.ROUGE1, metrics.ROUGE2, metrics.ROUGELSUM)
OF_ANSWERS = (metrics.SQUAD_EM, metrics.SQUAD_F1, metrics.TRIVIA_EM, metrics.TRIVIA_F1)
MEANS: list[tuple[Metric, st.SearchStrategy]] = [
    (metrics.ACCURACY, three_labels),
    (metrics.GENDER_PARITY, labels),
    (metrics.MULTIRC_EM, questions),
    (metrics.RECORD_EM, queries),
    (metrics.RECORD_F1, queries),
    *((metric, answers) for metric in OF_ANSWERS),
    *((metric, texts) for metric in OF_TEXTS),
]
OTHERS: list[tuple[Metric, st.SearchStrategy]] = [
    (metrics.MACRO_F1, three_labels),
    (metrics.F1_WITH_INVALID, labels),
    (metrics.MULTIRC_F1A, questions),
    (metrics.MATTHEWS, labels),
    (metrics.PEARSON, ratings),
    (metrics.SPEARMAN, ratings),
]
NAMES = {"ids": lambda value: value.name if isinstance(value, Metric) else ""}


def unzip(pairs):
    return [target for target, _ in pairs], [answer for _, answer in pairs]


FIRST_COUNTS = (metrics.RECORD_EM, metrics.RECORD_F1)


@pytest.mark.parametrize(("metric", "values"), [*MEANS, *OTHERS], **NAMES)
@settings(max_examples=20)
@given(data=st.data())
def test_order_does_not_matter_and_a_mean_is_that_of_the_scores_that_count(metric, values, data):
    pairs = data.draw(values)
    if metric is metrics.GENDER_PARITY:
        # Two rows in a row belong together.
        twos = [pairs[i : i + 2] for i in range(0, len(pairs) // 2 * 2, 2)]
        pairs = list(chain.from_iterable(twos))
        shuffled = list(chain.from_iterable(data.draw(st.permutations(twos))))
    elif metric in FIRST_COUNTS:
        # The order of queries does not matter; among rows of one the first counts.
        shuffled = sorted(pairs, key=lambda pair: pair[0]["group"])
    else:
        shuffled = data.draw(st.permutations(pairs))
    expected = metric.score(*unzip(pairs))
    assert metric.score(*unzip(shuffled)) == pytest.approx(expected, nan_ok=True)

    # A mean is the mean of the scores that count.
    if metric.score_examples is not None:
        each = metric.score_examples(*unzip(pairs))
        assert each.shape == (len(pairs),)
        counted = [value for value in each if not math.isnan(value)]
        assert all(0 <= value <= 100 + 1e-9 for value in counted)
        mean = sum(counted) / len(counted) if counted else math.nan
        assert expected == pytest.approx(mean, nan_ok=True)


def test_perfect_is_100_for_groups_too():
    targets, outputs = unzip(grouped([((1, 1), 3), ((0, 0), 3), ((1, 1), 5)]))
    assert metrics.MULTIRC_EM.score(targets, outputs) == 100
    assert metrics.MULTIRC_F1A.score(targets, outputs) == pytest.approx(100)
    repeated = [((["a x", "b"], "b"), (2, 3)), ((["c"], "wrong but a repetition"), (2, 3))]
    targets, outputs = unzip(grouped(repeated))
    for metric in FIRST_COUNTS:
        assert metric.score(targets, outputs) == 100


def test_an_answer_that_is_no_label_is_wrong_in_every_metric():
    assert metrics.ACCURACY.score([0, 1], [0, -1]) == 50
    assert metrics.MACRO_F1.score([0, 1, 2], [0, 1, -1]) == pytest.approx(200 / 3)
    # The invalid answers become 0 for target 1 and 1 for target 0: one hit, one miss, one false
    # alarm. The caller's answers stay as they are.
    answers = np.array([0, 1, -1, 5])
    assert metrics.F1_WITH_INVALID.score([0, 1, 1, 0], answers) == pytest.approx(50)
    assert answers.tolist() == [0, 1, -1, 5]
    targets, outputs = unzip(grouped([((0, -1), 1), ((1, 1), 2), ((0, 0), 3)]))
    assert metrics.MULTIRC_EM.score(targets, outputs) == pytest.approx(200 / 3)


def test_a_class_that_never_occurs_has_f1_0_and_says_nothing():
    assert metrics.MACRO_F1.score([0, 1], [0, 1]) == pytest.approx(200 / 3)
    # T5's own test.
    assert metrics.MACRO_F1.score([0, 1, 1, 2], [0, 0, 2, 2]) == pytest.approx(400 / 9)
    assert metrics.F1_WITH_INVALID.score([0, 0], [0, 0]) == 0


def test_the_middle_of_a_question_is_no_question_of_its_own():
    pairs = [((1, 1), (0, 3)), ((1, 1), (1, 3)), ((0, 1), (0, 3)), ((0, 0), (1, 3))]
    targets, outputs = unzip(grouped(pairs))
    each = metrics.MULTIRC_EM.score_examples(targets, outputs).tolist()
    assert each == pytest.approx([0, 100, math.nan, math.nan], nan_ok=True)
    as_json = [{**target, "group": list(target["group"])} for target in targets]
    assert metrics.MULTIRC_EM.score(as_json, outputs) == 50


@pytest.mark.parametrize(
    ("text", "squad", "trivia"),
    [
        ("`Has\tA_LOT of the 'marks'.\"‘", "has alot of marks‘", "has lot of marks"),
        ("Thea, the an-other", "thea another", "thea other"),
        ("’tis U.S.A.", "’tis usa", "tis u s"),
        ("naïve – the", "naïve –", "naïve –"),
    ],
)
def test_answers_are_normalised_as_the_two_scripts_do(text, squad, trivia):
    assert metrics.normalize_squad(text) == squad
    assert metrics.normalize_trivia_qa(text) == trivia


def test_the_overlap_counts_words_as_often_as_both_have_them():
    # "x x y" against "x z": 1 shared word of 3 and of 2: 2 x 1/3 x 1/2 / (1/3 + 1/2).
    assert metrics.SQUAD_F1.score([["x x y"]], ["x z"]) == pytest.approx(40)
    assert metrics.SQUAD_F1.score([["abc abd", "$$$$"]], ["abd"]) == pytest.approx(200 / 3)
    references = [["big moose", "hippo"], ["a.b", "a.c"]]
    assert metrics.SQUAD_EM.score(references, ["a big  Moose!", "ac"]) == 100
    assert metrics.SQUAD_EM.score([[]], ["x"]) == 0


def test_summaries_are_split_at_newlines_and_at_full_stops_between_spaces():
    assert metrics.ROUGELSUM.score(["a b . c d ."], ["c d .\na b ."]) == 100
    # Without its sentence ends the longest common run is 2 of 4 words.
    assert metrics.ROUGELSUM.score(["a b c d"], ["c d a b"]) == 50
    assert metrics.ROUGE1.score(["dogs"], ["dog"]) == 0


def test_correlations_are_signed_and_undefined_or_0_for_constants():
    assert metrics.PEARSON.score([0, 2], [0, 1]) == pytest.approx(100)
    assert metrics.SPEARMAN.score([0, 2, 1], [0, 1, 2]) == pytest.approx(50)
    assert metrics.MATTHEWS.score([0, 1, 0, 1], [1, 0, 1, 0]) == pytest.approx(-100)
    # 6 true, 1 wrong and 2, 3: (6 x 3 - 1 x 2) / sqrt(7 x 8 x 4 x 5)
    targets, outputs = [1] * 8 + [0] * 4, [1] * 6 + [0] * 2 + [1] + [0] * 3
    expected = 100 * 16 / math.sqrt(7 * 8 * 4 * 5)
    assert metrics.MATTHEWS.score(targets, outputs) == pytest.approx(expected)
    assert metrics.MATTHEWS.score([1, 1], [1, 1]) == 0
    assert math.isnan(metrics.PEARSON.score([1, 2], [3, 3]))
    assert math.isnan(metrics.SPEARMAN.score([1, 2], [3, 3]))


def test_parity_is_of_pairs_whatever_is_right():
    outputs = [0, 0, 1, 0, -1, -1, 1]
    for targets in ([0] * 7, [1] * 7):
        each = metrics.GENDER_PARITY.score_examples(targets, outputs)
        assert each[::2].tolist() == pytest.approx([100, 0, 100, math.nan], nan_ok=True)
        assert np.isnan(each[1::2]).all()
        assert metrics.GENDER_PARITY.score(targets, outputs) == pytest.approx(200 / 3)
    assert metrics.GENDER_PARITY.score([0, 1] * 5, [1] * 10) == 100


def test_the_superglue_average_is_of_eight_tasks_with_two_scores_of_three_halved():
    scores = dict(zip(("boolq", "copa", "rte", "wic", "wsc"), (2, 3, 5, 7, 11), strict=True))
    scores |= {"cb": {"a": 13, "b": 17}, "multirc": {"a": 19, "b": 23}}
    scores |= {"record": {"a": 29, "b": 31}, "axb": 37, "axg": {"parity": 41}}
    halves = (13 + 17 + 19 + 23 + 29 + 31) / 2
    assert superglue_average(scores) == pytest.approx((2 + 3 + 5 + 7 + 11 + halves) / 8)
    with pytest.raises(ConfigError, match="missing: wic, wsc"):
        superglue_average(dict.fromkeys(SUPERGLUE[:6], 50.0))
