"""The paired test beside scipy's, and where the answer is known by hand."""

import numpy as np
import pytest
import scipy.stats

from stmoe_eval.scores.additive import mean_f1
from stmoe_eval.scores.intervals import examples_by_group, score_answers
from stmoe_eval.scores.metrics import ACCURACY, MULTIRC_EM, MULTIRC_F1A, Metric
from stmoe_eval.scores.pairing import PERMUTATIONS, compare_answers, permutation_test
from tests.eval.test_intervals import F1, f1

SUMMED_F1 = Metric("f1", f1, additive=mean_f1([1]))
ANEW = Metric("accuracy", ACCURACY.score)


def compared(metric, targets, a, b, groups=None):
    sides = [score_answers([metric], targets, answers) for answers in (a, b)]
    return compare_answers(metric, *sides, groups or alone(targets))


def alone(targets):
    """Each example is a group."""
    return [str(number) for number in range(len(targets))]


def p_value(metric, targets, a, b, groups=None):
    sides = [score_answers([metric], targets, answers) for answers in (a, b)]
    return permutation_test(metric, *sides, examples_by_group(groups or alone(targets)))


def test_a_coin_that_falls_eight_times_on_one_side():
    """Eight examples differ, all in favour of A: of 2 ** 8 tosses two are as extreme."""
    for metric in (ACCURACY, ANEW):
        pair = compared(metric, [1] * 11, [1] * 11, [0] * 8 + [1] * 3)
        assert pair.p_value == pytest.approx(2 / 2**8)
        assert pair.exact
        assert (pair.wins, pair.losses, pair.ties) == (8, 0, 3)
        assert pair.difference == pytest.approx(800 / 11)

    # Of 97 no random toss does as well, so that only the observed one counts.
    chance = 1 / (PERMUTATIONS + 1)
    assert p_value(ACCURACY, [1] * 97, [1] * 97, [0] * 97) == (chance, False)


def test_wins_of_multirc_are_answers_in_f1_and_questions_in_exact_match():
    """A has every answer right, B one of question 0 and none of question 1, of two answers each."""
    values, groups = [1, 0, 1, 0], ["0", "0", "1", "1"]
    targets = [{"value": v, "group": int(g)} for v, g in zip(values, groups, strict=True)]
    a = [{"value": value} for value in values]
    b = [{"value": value} for value in (1, 1, 0, -1)]
    found = {}
    for metric in (MULTIRC_F1A, MULTIRC_EM):
        pair = compared(metric, targets, a, b, groups)
        found[metric.name] = (pair.wins, pair.losses, pair.ties)
    assert found == {"f1": (3, 0, 1), "exact_match": (2, 0, 0)}
    both = score_answers([MULTIRC_F1A, MULTIRC_EM], targets, b)
    assert both.headline_scores.tolist() == [100, 0, 0, 0]  # by answer, as the headline counts


def test_the_interval_of_a_difference_of_accuracies_is_that_of_bonett_and_price():
    """One example is added to those that each side alone has right, and two to their number."""
    num, only_a, only_b = 83, 9, 2
    a = [1] * only_a + [0] * only_b + [1] * (num - only_a - only_b)
    b = [0] * only_a + [1] * only_b + [1] * (num - only_a - only_b)
    found = compared(ACCURACY, [1] * num, a, b)
    p_a = (only_a + 1) / (num + 2)
    p_b = (only_b + 1) / (num + 2)
    half = scipy.stats.t.ppf(0.975, num - 1) * np.sqrt((p_a + p_b - (p_a - p_b) ** 2) / (num + 2))
    assert found.low == pytest.approx(100 * (p_a - p_b - half))
    assert found.high == pytest.approx(100 * (p_a - p_b + half))


@pytest.mark.parametrize(
    ("metric", "num"),
    [(ACCURACY, 61), (ANEW, 7), (F1, 7), (SUMMED_F1, 61)],
    ids=["mean", "anew", "f1", "summed f1"],
)
def test_the_p_value_is_that_of_scipy(metric, num):
    rng = np.random.default_rng(num)
    targets = rng.integers(2, size=num)
    a = np.where(rng.random(num) < 0.8, targets, 1 - targets)
    b = np.where(rng.random(num) < 0.6, targets, 1 - targets)
    targets = targets.tolist()

    def difference(x, y):
        return metric.score(targets, x.tolist()) - metric.score(targets, y.tolist())

    theirs = scipy.stats.permutation_test(
        (a, b), difference, permutation_type="samples", vectorized=False, n_resamples=999, rng=0
    )
    found, exact = p_value(metric, targets, a.tolist(), b.tolist())
    assert exact == (num == 7)
    assert found == pytest.approx(theirs.pvalue, abs=1e-9 if exact else 0.06)


def test_groups_of_different_sizes_are_swapped_whole():
    """scipy swaps groups when it is given their sums."""
    rng = np.random.default_rng(3)
    groups = sorted(str(number) for number in rng.integers(8, size=41))
    a, b = rng.integers(2, size=(2, 41))
    sums = []
    for answers in (a, b):
        sums.append([answers[members].sum() for members in examples_by_group(groups)])
    theirs = scipy.stats.permutation_test(
        sums,
        lambda x, y, axis: x.sum(axis) - y.sum(axis),
        permutation_type="samples",
        vectorized=True,
    )
    for metric in (ACCURACY, ANEW):
        found, _ = p_value(metric, [1] * 41, a.tolist(), b.tolist(), groups)
        assert found == pytest.approx(theirs.pvalue)


def test_a_and_b_are_the_two_sides_of_one_difference():
    rng = np.random.default_rng(2)
    targets, a, b = (rng.integers(2, size=37).tolist() for _ in range(3))
    there, back = compared(SUMMED_F1, targets, a, b), compared(SUMMED_F1, targets, b, a)
    assert there.difference == -back.difference
    assert there.low == pytest.approx(-back.high)
    assert (there.wins, there.losses) == (back.losses, back.wins)
    assert there.p_value == pytest.approx(back.p_value)


def test_a_metric_without_a_value_has_no_test():
    undefined = Metric("undefined", lambda targets, answers: float("nan"))
    pair = compared(undefined, [1, 1], [1, 0], [0, 1])
    assert pair.a is pair.b is pair.difference is pair.p_value is None
