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

from eval.scores import metrics
from eval.scores.metrics import Metric
from eval.scores.superglue import SUPERGLUE, superglue_average
from moe import ConfigError

words = st.text(st.sampled_from("ab .'’-Tthe"), max_size=9)
labels = st.lists(st.tuples(st.integers(0, 1), st.integers(-1, 1)), min_size=1, max_size=12)
three_labels = st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 2)), min_size=1, max_size=12)
texts = st.lists(st.tuples(words, words), min_size=1, max_size=7)
answers = st.lists(
    st.tuples(st.lists(words, min_size=1, max_size=3), words), min_size=1, max_size=7
)


def grouped(pairs):
    """Mappings with `value`, and in targets the `group`, from ((value, value), group)."""
    return [
        ({"value": target, "group": group}, {"value": answer}) for (target, answer), group in pairs
    ]


def in_groups(pairs):
    return st.lists(st.tuples(pairs, st.integers(0, 3)), min_size=1, max_size=12).map(grouped)


queries = in_groups(st.tuples(st.lists(words, min_size=1, max_size=3), words))
questions = in_groups(st.tuples(st.integers(0, 1), st.integers(-1, 1)))

MEANS: list[tuple[Metric, st.SearchStrategy]] = [
    (metrics.ACCURACY, three_labels),
    (metrics.SEQUENCE_ACCURACY, texts),
    (metrics.MULTIRC_EM, questions),
    (metrics.RECORD_EM, queries),
    (metrics.RECORD_F1, queries),
    (metrics.SQUAD_EM, answers),
    (metrics.SQUAD_F1, answers),
    (metrics.TRIVIA_EM, answers),
    (metrics.TRIVIA_F1, answers),
    (metrics.GENDER_PARITY, labels),
    (metrics.ROUGE1, texts),
    (metrics.ROUGE2, texts),
    (metrics.ROUGELSUM, texts),
]
OTHERS: list[tuple[Metric, st.SearchStrategy]] = [
    (metrics.MACRO_F1, three_labels),
    (metrics.F1_WITH_INVALID, labels),
    (metrics.MULTIRC_F1A, questions),
    (metrics.MATTHEWS, labels),
    (
        metrics.PEARSON,
        st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=9),
    ),
    (
        metrics.SPEARMAN,
        st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=9),
    ),
]
NAMES = {"ids": lambda value: value.name if isinstance(value, Metric) else ""}


def unzip(pairs):
    return [target for target, _ in pairs], [answer for _, answer in pairs]


@pytest.mark.parametrize(("metric", "values"), MEANS, **NAMES)
@settings(max_examples=30)
@given(data=st.data())
def test_a_mean_is_the_mean_of_the_scores_that_count(metric, values, data):
    targets, given_answers = unzip(data.draw(values))
    each, score = (
        metric.score_examples(targets, given_answers),
        metric.score(targets, given_answers),
    )
    assert each.shape == (len(targets),)
    assert each.dtype == np.float64
    counted = [value for value in each if not math.isnan(value)]
    assert all(0 <= value <= 100 + 1e-9 for value in counted)
    if counted:
        assert score == pytest.approx(sum(counted) / len(counted))
    else:
        assert math.isnan(score)


PAIRED_BY_PLACE = (metrics.GENDER_PARITY,)
FIRST_COUNTS = (metrics.RECORD_EM, metrics.RECORD_F1)


@pytest.mark.parametrize(("metric", "values"), [*MEANS, *OTHERS], **NAMES)
@settings(max_examples=30)
@given(data=st.data())
def test_the_order_of_examples_does_not_matter(metric, values, data):
    pairs = data.draw(values)
    if metric in PAIRED_BY_PLACE:
        twos = [pairs[i : i + 2] for i in range(0, len(pairs) // 2 * 2, 2)]
        pairs, shuffled = (
            list(chain.from_iterable(order)) for order in (twos, data.draw(st.permutations(twos)))
        )
    elif (
        metric in FIRST_COUNTS
    ):  # the order of queries does not matter; among rows of one the first counts
        shuffled = sorted(pairs, key=lambda pair: pair[0]["group"])
    else:
        shuffled = data.draw(st.permutations(pairs))
    scores = metric.score(*unzip(pairs)), metric.score(*unzip(shuffled))
    assert scores[0] == pytest.approx(scores[1], nan_ok=True)


@pytest.mark.parametrize(
    "pair",
    [(metrics.SQUAD_EM, metrics.SQUAD_F1), (metrics.TRIVIA_EM, metrics.TRIVIA_F1)],
    ids=["squad", "trivia_qa"],
)
@settings(max_examples=200)
@given(cases=answers)
def test_an_exact_match_is_a_full_overlap_unless_both_are_empty(pair, cases):
    targets, outputs = unzip(cases)
    normalize = (
        metrics.normalize_squad if pair[0] is metrics.SQUAD_EM else metrics.normalize_trivia_qa
    )
    for exact, overlap, output in zip(
        *(metric.score_examples(targets, outputs) for metric in pair), outputs, strict=True
    ):
        assert exact <= overlap + 1e-9 or normalize(output) == ""


def perfect(kind):
    values = {"label": [0, 1, 2, 1], "text": ["a b.", "c d"], "answers": [["a", "b c"], ["d"]]}[
        kind
    ]
    return values, [value[-1] if kind == "answers" else value for value in values]


@pytest.mark.parametrize(
    ("metric", "kind"),
    [
        (metrics.ACCURACY, "label"),
        (metrics.MACRO_F1, "label"),
        (metrics.MATTHEWS, "label"),
        (metrics.PEARSON, "label"),
        (metrics.SPEARMAN, "label"),
        (metrics.SEQUENCE_ACCURACY, "text"),
        (metrics.ROUGE1, "text"),
        (metrics.ROUGE2, "text"),
        (metrics.ROUGELSUM, "text"),
        (metrics.SQUAD_EM, "answers"),
        (metrics.SQUAD_F1, "answers"),
        (metrics.TRIVIA_EM, "answers"),
        (metrics.TRIVIA_F1, "answers"),
    ],
)
def test_perfect_is_100(metric, kind):
    assert metric.score(*perfect(kind)) == pytest.approx(100)


def test_perfect_is_100_for_groups_too():
    targets, outputs = unzip(grouped([((1, 1), 3), ((0, 0), 3), ((1, 1), 5)]))
    assert metrics.MULTIRC_EM.score(targets, outputs) == 100
    assert metrics.MULTIRC_F1A.score(targets, outputs) == pytest.approx(100)
    targets, outputs = unzip(
        grouped([((["a x", "b"], "b"), (2, 3)), ((["c"], "wrong but a repetition"), (2, 3))])
    )
    assert (
        metrics.RECORD_EM.score(targets, outputs)
        == metrics.RECORD_F1.score(targets, outputs)
        == 100
    )


def test_an_answer_that_is_no_label_is_wrong_in_every_metric():
    assert metrics.ACCURACY.score([0, 1], [0, -1]) == 50
    assert metrics.MACRO_F1.score([0, 1, 2], [0, 1, -1]) == pytest.approx(200 / 3)
    # The invalid answers become 0 for target 1 and 1 for target 0: one hit, one miss, one false
    # alarm.
    assert metrics.F1_WITH_INVALID.score([0, 1, 1, 0], [0, 1, -1, 5]) == pytest.approx(50)
    targets, outputs = unzip(grouped([((0, -1), 1), ((1, 1), 2), ((0, 0), 3)]))
    assert metrics.MULTIRC_EM.score(targets, outputs) == pytest.approx(200 / 3)


def test_answers_are_not_changed_by_scoring_them():
    outputs = np.array([0, 1, -1])
    metrics.F1_WITH_INVALID.score([0, 1, 1], outputs)
    assert outputs.tolist() == [0, 1, -1]


def test_a_class_that_never_occurs_has_f1_0_and_says_nothing():
    assert metrics.MACRO_F1.score([0, 1], [0, 1]) == pytest.approx(200 / 3)
    assert metrics.MACRO_F1.score([0, 1, 1, 2], [0, 0, 2, 2]) == pytest.approx(
        400 / 9
    )  # T5's own test
    assert metrics.F1_WITH_INVALID.score([0, 0], [0, 0]) == 0


def test_the_middle_of_a_question_is_no_question_of_its_own():
    targets, outputs = unzip(
        grouped([((1, 1), (0, 3)), ((1, 1), (1, 3)), ((0, 1), (0, 3)), ((0, 0), (1, 3))])
    )
    assert metrics.MULTIRC_EM.score_examples(targets, outputs).tolist() == pytest.approx(
        [0, 100, math.nan, math.nan], nan_ok=True
    )
    as_json = [{**target, "group": list(target["group"])} for target in targets]
    assert metrics.MULTIRC_EM.score(as_json, outputs) == 50


@pytest.mark.parametrize(
    ("text", "squad", "trivia"),
    [
        ("`Has\tA_LOT of the 'marks'.\"‘", "has alot of marks‘", "has lot of marks"),
        ("no marks", "no marks", "no marks"),
        ("Thea, the an-other", "thea another", "thea other"),
        ("a", "", ""),
        ("’tis U.S.A.", "’tis usa", "tis u s"),
        ("naïve – the", "naïve –", "naïve –"),
    ],
)
def test_answers_are_normalised_as_the_two_scripts_do(text, squad, trivia):
    assert metrics.normalize_squad(text) == squad
    assert metrics.normalize_trivia_qa(text) == trivia


@given(words)
def test_normalising_twice_is_normalising_once(text):
    for normalize in (metrics.normalize_squad, metrics.normalize_trivia_qa):
        assert normalize(normalize(text)) == normalize(text)


def test_the_overlap_counts_words_as_often_as_both_have_them():
    # "x x y" against "x z": 1 shared word of 3 and of 2: 2 x 1/3 x 1/2 / (1/3 + 1/2).
    assert metrics.SQUAD_F1.score([["x x y"]], ["x z"]) == pytest.approx(40)
    assert metrics.SQUAD_F1.score([["abc abd", "$$$$"]], ["abd"]) == pytest.approx(200 / 3)
    assert (
        metrics.SQUAD_EM.score([["big moose", "hippo"], ["a.b", "a.c"]], ["a big  Moose!", "ac"])
        == 100
    )
    assert metrics.SQUAD_EM.score([[]], ["x"]) == 0


def test_summaries_are_split_at_newlines_and_at_full_stops_between_spaces():
    one, other = "a b . c d .", "c d .\na b ."
    assert metrics.ROUGELSUM.score([one], [other]) == 100
    # Without its sentence ends the longest common run is 2 of 4 words.
    assert (
        metrics.ROUGELSUM.score([one.replace(" .", "")], [other.replace(".", "").replace("\n", "")])
        == 50
    )
    assert metrics.ROUGE1.score(["dogs"], ["dog"]) == 0


def test_correlations_are_signed_and_undefined_or_0_for_constants():
    assert metrics.PEARSON.score([0, 2], [0, 1]) == pytest.approx(100)
    assert metrics.SPEARMAN.score([0, 2, 1], [0, 1, 2]) == pytest.approx(50)
    assert metrics.MATTHEWS.score([0, 1, 0, 1], [1, 0, 1, 0]) == pytest.approx(-100)
    # 6 true, 1 wrong and 2, 3: (6 x 3 - 1 x 2) / sqrt(7 x 8 x 4 x 5)
    targets, outputs = [1] * 8 + [0] * 4, [1] * 6 + [0] * 2 + [1] + [0] * 3
    assert metrics.MATTHEWS.score(targets, outputs) == pytest.approx(
        100 * 16 / math.sqrt(7 * 8 * 4 * 5)
    )
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


scores = st.floats(0, 100)


@given(st.lists(scores, min_size=11, max_size=11), scores)
def test_the_superglue_average_is_of_eight_tasks_with_two_scores_of_three_halved(
    values, diagnostic
):
    single = dict(zip(("boolq", "copa", "rte", "wic", "wsc"), values[:5], strict=True))
    double = {
        task: {"a": values[i], "b": values[i + 1]}
        for task, i in (("cb", 5), ("multirc", 7), ("record", 9))
    }
    average = superglue_average(
        {**single, **double, "axb": diagnostic, "axg": {"parity": diagnostic}}
    )
    assert average == pytest.approx((sum(values[:5]) + sum(values[5:]) / 2) / 8)


def test_an_average_of_fewer_tasks_is_refused():
    with pytest.raises(ConfigError, match="missing: wic, wsc"):
        superglue_average(dict.fromkeys(SUPERGLUE[:6], 50.0))
