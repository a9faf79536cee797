"""Intervals beside what can be said of them without a bootstrap: closed forms, scipy and exact bounds."""

import math

import numpy as np
import pytest
import scipy.stats

from stmoe_eval.scores.additive import mean_f1
from stmoe_eval.scores.intervals import (
    RESAMPLES,
    Score,
    bootstrap,
    examples_by_group,
    group_statistic,
    score_answers,
    score_metrics,
    task_seed,
)
from stmoe_eval.scores.metrics import ACCURACY, F1_WITH_INVALID, MACRO_F1, MATTHEWS, Metric, mean_of


def f1(targets, answers):
    hits = sum(t == a == 1 for t, a in zip(targets, answers, strict=True))
    return 200 * hits / max(1, sum(targets) + sum(answers))


F1 = Metric("f1", f1)
SUMMED_F1 = Metric("f1", f1, additive=mean_f1([1])._replace(bounds=None))  # by percentiles


def own_scores(targets, answers):
    """The answers are their own scores; None does not count."""
    return np.asarray([math.nan if a is None else a for a in answers], dtype=np.float64)


MEAN = mean_of("mean", own_scores)


def numbers(found):
    """Returns value, standard error and the ends of the interval."""
    return found.value, found.stderr, found.low, found.high


def score(metric, targets, answers, groups=None, seed=(0,)):
    groups = [str(number) for number in range(len(targets))] if groups is None else groups
    return score_metrics(score_answers([metric], targets, answers), groups, seed)[0][metric.name]


def test_the_interval_is_that_of_scipy():
    answers = np.random.default_rng(1).exponential(17, size=53)
    found = score(MEAN, answers, answers.tolist())
    theirs = scipy.stats.bootstrap(
        (answers,), np.mean, n_resamples=20_000, method="percentile", rng=0
    )
    assert found.value == pytest.approx(np.mean(answers))
    assert found.stderr == pytest.approx(theirs.standard_error, rel=0.1)
    assert found.low == pytest.approx(theirs.confidence_interval.low, abs=0.5)
    assert found.high == pytest.approx(theirs.confidence_interval.high, abs=0.5)


@pytest.mark.parametrize(
    ("summed", "anew"), [(ACCURACY, Metric("accuracy", ACCURACY.score)), (SUMMED_F1, F1)]
)
def test_a_score_by_sums_of_groups_is_the_same_as_taken_anew(summed, anew):
    targets, answers = np.random.default_rng(3).integers(2, size=(2, 61)).tolist()
    groups = [str(number // 4) for number in range(61)]
    found = score(summed, targets, answers, groups)
    expected = score(anew, targets, answers, groups)
    assert numbers(found)[:2] == pytest.approx(numbers(expected)[:2])
    if summed is SUMMED_F1:
        assert numbers(found) == pytest.approx(numbers(expected))


def test_groups_are_drawn_whole_though_their_rows_are_apart():
    groups = ["b", "a", "c", "a", "b"]
    assert [members.tolist() for members in examples_by_group(groups)] == [[1, 3], [0, 4], [2]]
    seen = []
    counted = Metric("count", lambda targets, answers: float(seen.append(sorted(answers)) or 0))
    judged = score_answers([counted], [0] * 5, groups)
    bootstrap(group_statistic(judged, counted, examples_by_group(groups)), 3, (0,))
    assert len(seen) == RESAMPLES
    assert all(answers.count("a") % 2 == 0 and answers.count("b") % 2 == 0 for answers in seen)


def test_the_same_seed_gives_the_same_interval_and_tasks_have_their_own():
    targets, answers = np.random.default_rng(4).integers(2, size=(2, 31)).tolist()
    for metric in (MATTHEWS, SUMMED_F1):
        rte, again, cb = (
            score(metric, targets, answers, seed=task_seed(name)) for name in ("rte", "rte", "cb")
        )
        assert rte == again
        assert rte.stderr != cb.stderr
        assert rte.low != cb.low


def test_a_score_without_spread_has_an_interval_and_a_note():
    for answer in (0, 1):
        found = score(ACCURACY, [1] * 56, [answer] * 56)
        assert found.stderr == 0
        assert found.high - found.low == pytest.approx(6.4194, abs=1e-3)  # z^2 / (56 + z^2)
        assert "no spread was seen; the interval rests on the number of groups" in found.note
    assert score(ACCURACY, [1, 1], [1, 0]).note == ""

    # One group has a score, and no interval.
    found = score(ACCURACY, [1, 1, 1], [1, 0, 1], ["a"] * 3)
    assert found.value == pytest.approx(200 / 3)
    assert found.stderr is found.low is found.high is None
    assert "one group" in found.note


def test_groups_of_one_answer_copied_are_as_many_examples_as_groups():
    right = [1] * 23 + [0] * 6
    copied = score(ACCURACY, [1] * 87, right * 3, [str(number) for number in range(29)] * 3)
    single = score(MEAN, right, [100.0 * value for value in right])
    theirs = scipy.stats.binomtest(23, 29).proportion_ci(method="wilson")
    assert numbers(single)[2:] == pytest.approx((100 * theirs.low, 100 * theirs.high))

    # Only Student's t for the normal quantile is left between the two.
    assert copied.low == pytest.approx(100 * theirs.low, abs=1.5)
    assert copied.high == pytest.approx(100 * theirs.high, abs=1.5)
    assert copied.high - copied.low > 100 * (theirs.high - theirs.low)


@pytest.mark.parametrize("metric", [F1_WITH_INVALID, MACRO_F1, MATTHEWS], ids=lambda m: m.name)
def test_f1_and_correlation_of_right_answers_alone_leave_room_for_an_error(metric):
    widths = []
    for num in (28, 112):
        classes = [0, 1, 2] if metric is MACRO_F1 else [0, 1]
        targets = (classes * num)[:num]
        found = score(metric, targets, targets)
        assert found.value == pytest.approx(100)
        assert 100 - 1200 / num < found.low < 100 - 50 / num
        assert found.high == pytest.approx(100)
        assert "no spread was seen" in found.note
        widths.append(found.high - found.low)
    assert widths[0] > 2 * widths[1]


def test_a_score_that_is_not_defined_says_so():
    constant = score(MATTHEWS, [0, 1] * 20, [1] * 40)
    assert constant.value == 0
    assert "all answers are alike: the correlation is not defined and counts as 0" in constant.note
    assert constant.low < 0 < constant.high
    assert "all targets are alike" in score(MATTHEWS, [1] * 4, [0, 1] * 2).note
    missing = score(MACRO_F1, [0, 1] * 20, [0, 1] * 20)
    assert "no target and no answer is of class 2, whose F1 counts as 0" in missing.note
    assert score(MATTHEWS, [0, 1, 0, 1], [0, 1, 1, 1]).note == ""


def test_examples_that_do_not_count_are_left_out_and_nothing_that_counts_is_said():
    found = score(MEAN, [0] * 5, [10, None, 30, None, 50])
    assert found.value == 30
    alone = score(MEAN, [0] * 3, [10, 30, 50])
    assert numbers(found)[2:] == pytest.approx(numbers(alone)[2:])
    nothing = score(MEAN, [0, 0, 0], [None, None, None])
    assert nothing == Score(None, note="no example counts")
    assert score(MEAN, [], []).value is None


def test_a_score_that_draws_may_leave_undefined_has_an_interval_of_the_others():
    def correlation(targets, answers):
        return 100 * float(scipy.stats.pearsonr(targets, answers)[0])  # warns of constant values

    found = score(Metric("pearson", correlation), [1, 2, 3], [1.0, 2.5, 2.9])
    assert found.value == pytest.approx(correlation([1, 2, 3], [1.0, 2.5, 2.9]))
    assert not math.isnan(found.low)
    assert score(Metric("pearson", correlation), [1, 1, 1], [1, 2, 3]).value is None
