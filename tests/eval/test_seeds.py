"""Differences of two arms over seeds, beside closed forms, scipy's own tests and a simulation."""

import math

import numpy as np
import pytest
import scipy.stats

from eval.scores.seeds import equivalence, holm, paired_difference, unpaired_difference
from moe.errors import ConfigError, DataError

RNG = np.random.default_rng(0)
A = RNG.normal(2.31, 0.02, size=7)
B = RNG.normal(2.29, 0.05, size=7)
C = RNG.normal(2.29, 0.05, size=11)


def test_two_seeds_give_the_interval_that_can_be_worked_out_by_hand():
    # Differences 1 and 3: mean 2, standard error 1; Student's t with one degree of freedom is Cauchy.
    found = paired_difference([4.0, 7.0], [3.0, 4.0])
    half = math.tan(0.475 * math.pi)
    assert (found.mean, found.num_seeds) == (2.0, 2)
    assert found.low == pytest.approx(2 - half)
    assert found.high == pytest.approx(2 + half)
    assert found.p == pytest.approx(1 - 2 * math.atan(2) / math.pi)


def test_a_paired_difference_is_that_of_scipy():
    found = paired_difference(A, B, confidence=0.9)
    theirs = scipy.stats.ttest_rel(A, B)
    interval = theirs.confidence_interval(0.9)
    assert found.mean == pytest.approx((A - B).mean())
    assert found.p == pytest.approx(theirs.pvalue)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


def test_an_unpaired_difference_is_that_of_scipy():
    found = unpaired_difference(A, C)
    theirs = scipy.stats.ttest_ind(A, C, equal_var=False)
    interval = theirs.confidence_interval(0.95)
    assert found.mean == pytest.approx(A.mean() - C.mean())
    assert found.p == pytest.approx(theirs.pvalue)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.num_seeds == 7


@pytest.mark.parametrize("difference", [paired_difference, unpaired_difference])
def test_the_arms_swapped_change_the_sign_only(difference):
    found = difference(A, B)
    swapped = difference(B, A)
    assert swapped.mean == pytest.approx(-found.mean)
    assert (swapped.low, swapped.high) == pytest.approx((-found.high, -found.low))
    assert swapped.p == pytest.approx(found.p)


def test_what_the_seeds_share_makes_the_paired_interval_narrow():
    shared = RNG.normal(0, 1, size=7)
    paired = paired_difference(A + shared, B + shared)
    unpaired = unpaired_difference(A + shared, B + shared)
    assert paired.low == pytest.approx(paired_difference(A, B).low)
    assert paired.high - paired.low < 0.1 * (unpaired.high - unpaired.low)


@pytest.mark.parametrize("difference", [paired_difference, unpaired_difference])
def test_intervals_hold_the_true_difference_as_often_as_they_say(difference):
    rng = np.random.default_rng(3)
    num_held = 0
    for _ in range(1000):
        found = difference(rng.normal(1.5, 1, size=3), rng.normal(1, 1, size=3))
        num_held += found.low <= 0.5 <= found.high
    # Four standard errors of 950 in 1,000; Welch's is a little conservative with so few.
    assert 922 <= num_held <= 985


@pytest.mark.parametrize("difference", [paired_difference, unpaired_difference])
def test_one_seed_gives_a_difference_without_an_interval(difference):
    found = difference([3.0], [1.0])
    assert found.mean == 2.0
    assert found.num_seeds == 1
    assert math.isnan(found.low) and math.isnan(found.high) and math.isnan(found.p)


@pytest.mark.parametrize("difference", [paired_difference, unpaired_difference])
def test_runs_without_spread_claim_nothing(difference):
    # 0.3 - 0.1 and 0.4 - 0.2 differ by rounding alone.
    if difference is paired_difference:
        found = difference([0.3, 0.4, 0.5], [0.1, 0.2, 0.3])
    else:
        found = difference([0.3, 0.3, 0.3], [0.1, 0.1])
    assert found.mean == pytest.approx(0.2)
    assert math.isnan(found.low) and math.isnan(found.high) and math.isnan(found.p)


def test_one_arm_without_spread_leaves_the_spread_of_the_other():
    found = unpaired_difference([1.0, 1.0, 1.0], [0.0, 0.5, 1.0])
    theirs = scipy.stats.ttest_1samp([0.0, 0.5, 1.0], 1.0)
    assert found.p == pytest.approx(theirs.pvalue)


def test_spreads_near_the_smallest_float_have_an_interval():
    small = np.asarray([1.0, 2.0, 4.0]) * 1e-120
    found = unpaired_difference(small, 2 * small)
    assert found.p == pytest.approx(unpaired_difference(small * 1e120, 2 * small * 1e120).p)


def test_holm_of_an_example_worked_out_by_hand():
    # Sorted: 0.01 x 4, 0.02 x 3, 0.03 x 2, 0.5 x 1; none falls below the one before it.
    assert holm([0.03, 0.5, 0.01, 0.02]) == pytest.approx([0.06, 0.5, 0.04, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_leaves_out_what_has_no_p_value():
    adjusted = holm([0.04, math.nan, 0.01])
    assert adjusted[0] == pytest.approx(0.04)
    assert math.isnan(adjusted[1])
    assert adjusted[2] == pytest.approx(0.02)


def test_holm_bounds_the_chance_of_a_false_claim():
    rng = np.random.default_rng(4)
    num_claims = 0
    for _ in range(2000):
        num_claims += min(holm(rng.random(5).tolist())) < 0.05
    assert num_claims == pytest.approx(100, abs=40)


@pytest.mark.parametrize("paired", [True, False])
def test_equivalence_is_the_larger_of_two_one_sided_tests(paired):
    found = equivalence(A, B, margin=0.1, paired=paired)
    if paired:
        above = scipy.stats.ttest_rel(A + 0.1, B, alternative="greater").pvalue
        below = scipy.stats.ttest_rel(A - 0.1, B, alternative="less").pvalue
    else:
        above = scipy.stats.ttest_ind(A + 0.1, B, equal_var=False, alternative="greater").pvalue
        below = scipy.stats.ttest_ind(A - 0.1, B, equal_var=False, alternative="less").pvalue
    assert found.p == pytest.approx(max(above, below))


def test_arms_are_equivalent_when_the_90_percent_interval_lies_within_the_margin():
    verdicts = set()
    for margin in np.linspace(0.01, 0.2, 39):
        found = equivalence(A, B, margin=margin)
        difference = paired_difference(A, B, confidence=0.9)
        assert (found.low, found.high) == (difference.low, difference.high)
        assert found.is_equivalent == (-margin < found.low and found.high < margin)
        verdicts.add(found.is_equivalent)
    assert verdicts == {True, False}


def test_arms_at_the_margin_are_called_equivalent_in_5_percent():
    rng = np.random.default_rng(5)
    num_equivalent = 0
    for _ in range(1000):
        a = rng.normal(0.5, 0.2, size=5)
        num_equivalent += equivalence(a, np.zeros(5), margin=0.5).is_equivalent
    assert num_equivalent == pytest.approx(50, abs=28)


@pytest.mark.parametrize("arms", [([1.0], [1.0]), ([0.5, 0.5], [0.5, 0.5])])
def test_equivalence_is_not_claimed_where_the_spread_is_unknown(arms):
    found = equivalence(*arms, margin=1.0)
    assert not found.is_equivalent
    assert math.isnan(found.p) and math.isnan(found.low)


def test_wrong_numbers_are_named():
    with pytest.raises(DataError, match="Arm a has 2 seeds and arm b 3; expected the same seeds"):
        paired_difference([1, 2], [1, 2, 3])
    with pytest.raises(DataError, match=r"Arm b has the shape \[0\]; expected one number"):
        unpaired_difference([1, 2], [])
    with pytest.raises(DataError, match="Run 1 of arm a is nan; expected a finite number"):
        paired_difference([1, math.nan], [1, 2])
    with pytest.raises(DataError, match=r"A p-value is 1\.5; expected a number from 0 to 1"):
        holm([0.1, 1.5])
    with pytest.raises(ConfigError, match=r"margin is 0; expected a finite number above 0"):
        equivalence([1, 2], [1, 2], margin=0)
    with pytest.raises(
        ConfigError, match=r"confidence is 95; expected a finite number above 0 and"
    ):
        paired_difference([1, 2], [1, 3], confidence=95)
