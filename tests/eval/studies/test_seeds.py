"""Differences of two arms over seeds, beside closed forms; test_study.py compares them with scipy's."""

import math

import numpy as np
import pytest

from moe.errors import DataError
from stmoe_eval.studies.seeds import equivalence_p, holm, paired_difference

RNG = np.random.default_rng(0)
A = RNG.normal(2.31, 0.02, size=7)
B = RNG.normal(2.29, 0.05, size=7)


def test_two_seeds_give_the_interval_that_can_be_worked_out_by_hand():
    # Differences 1 and 3: mean 2, standard error 1; Student's t with one degree of freedom is Cauchy.
    found = paired_difference([4.0, 7.0], [3.0, 4.0])
    half = math.tan(0.475 * math.pi)
    assert found.mean == 2.0
    assert found.low == pytest.approx(2 - half)
    assert found.high == pytest.approx(2 + half)
    assert found.p == pytest.approx(1 - 2 * math.atan(2) / math.pi)


@pytest.mark.parametrize(
    ("a", "b", "mean"),
    # 0.3 - 0.1 and 0.4 - 0.2 differ by rounding alone.
    [([3.0], [1.0], 2.0), ([0.3, 0.4, 0.5], [0.1, 0.2, 0.3], 0.2), ([0.5, 0.5], [0.5, 0.5], 0.0)],
)
def test_runs_without_spread_claim_nothing(a, b, mean):
    found = paired_difference(a, b)
    assert found.mean == pytest.approx(mean)
    assert math.isnan(found.low) and math.isnan(found.high) and math.isnan(found.p)
    assert math.isnan(equivalence_p(a, b, margin=1.0))


def test_holm_of_an_example_worked_out_by_hand():
    # Sorted: 0.01 x 4, 0.02 x 3, 0.03 x 2, 0.5 x 1; none falls below the one before it.
    assert holm([0.03, 0.5, 0.01, 0.02]) == pytest.approx([0.06, 0.5, 0.04, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_arms_are_equivalent_when_the_90_percent_interval_lies_within_the_margin():
    difference = paired_difference(A, B, confidence=0.9)
    verdicts = set()
    for margin in np.linspace(0.01, 0.2, 39):
        is_within = -margin < difference.low and difference.high < margin
        assert (equivalence_p(A, B, margin) < 0.05) == is_within
        verdicts.add(is_within)
    assert verdicts == {True, False}


def test_a_run_without_a_number_is_refused():
    with pytest.raises(DataError, match=r"nan.*expected finite numbers"):
        paired_difference([1, math.nan], [1, 2])
