"""Intervals beside scipy's, by hand, and in simulations."""

import math

import numpy as np
import pytest
import scipy.stats
import torch

from moe.estimates import (
    Estimate,
    TokenSums,
    difference_of_means,
    mean_difference_interval,
    mean_interval,
    mean_over_tokens,
)


@pytest.mark.parametrize("num_right", [0, 1, 28, 55, 56])
def test_the_interval_of_an_accuracy_is_wilsons(num_right):
    sums = np.ones((56, 2))
    sums[:, 0] = 100.0 * (np.arange(56) < num_right)
    interval = mean_interval(sums)
    theirs = scipy.stats.binomtest(num_right, 56).proportion_ci(method="wilson")
    assert interval == pytest.approx((100 * theirs.low, 100 * theirs.high))


def test_no_difference_of_eleven_pairs_is_one_each_way_of_thirteen():
    interval = mean_difference_interval(np.tile([0.0, 1.0], (11, 1)))
    half = scipy.stats.t.ppf(0.975, 10) * math.sqrt(2 * 100**2) / 13
    assert interval == pytest.approx((-half, half))


def test_with_one_token_a_document_the_interval_is_the_t_interval_of_a_mean():
    values = torch.tensor([0.3, -1.1, 2.0, 0.7, 0.1], dtype=torch.float64)
    (ours,) = mean_over_tokens(TokenSums(values, torch.ones(5)))
    theirs = scipy.stats.ttest_1samp(values.numpy(), 0.0).confidence_interval(0.95)
    assert ours == pytest.approx((0.4, *theirs))


def test_what_a_document_has_in_common_cancels_in_a_difference():
    shift = torch.tensor([5.0, -3.0, 11.0, 0.0], dtype=torch.float64)
    two = torch.full((4,), 2.0)
    a = TokenSums(2 * (shift + 1), two)
    b = TokenSums(2 * shift, two)
    (difference,) = difference_of_means(a, b)
    assert difference == pytest.approx((1, 1, 1), abs=1e-11)
    (alone,) = mean_over_tokens(a)
    assert alone.high - alone.low > 10


def test_a_document_without_the_tokens_changes_nothing():
    sums = torch.tensor([1.0, 4.0, 2.0], dtype=torch.float64)
    counts = torch.tensor([2.0, 3.0, 1.0], dtype=torch.float64)
    longer = TokenSums(torch.cat([sums, torch.zeros(7)]), torch.cat([counts, torch.zeros(7)]))
    (with_empty,) = mean_over_tokens(longer)
    (without,) = mean_over_tokens(TokenSums(sums, counts))
    assert with_empty == pytest.approx(without)


def test_without_tokens_or_with_one_document_no_value_is_ruled_out():
    sums = torch.tensor([[0.0, 0.0], [3.0, 0.0]])
    counts = torch.tensor([[0.0, 0.0], [2.0, 0.0]])
    no_token, one_document = mean_over_tokens(TokenSums(sums, counts))
    assert math.isnan(no_token.value)
    assert no_token[1:] == (-math.inf, math.inf)
    assert one_document == Estimate(1.5, -math.inf, math.inf)


def draws_of_documents(distribution):
    """Returns the ends of 2000 trials with documents of unequal length, whose effects have mean 0."""
    generator = torch.Generator().manual_seed(0)
    shape = (2000, 23)
    lengths = torch.randint(1, 40, shape, generator=generator).double()
    effect = distribution(torch.empty(shape, dtype=torch.float64), generator)
    _, low, high = np.transpose(mean_over_tokens(TokenSums(effect * lengths, lengths)))
    return low, high


def test_intervals_hold_the_mean_as_often_as_they_say():
    low, high = draws_of_documents(lambda x, generator: x.normal_(generator=generator))
    assert 0.94 < ((low <= 0) & (high >= 0)).mean() < 0.97
    low, high = draws_of_documents(lambda x, generator: x.normal_(generator=generator) ** 3)
    assert 0.94 < ((low <= 0) & (high >= 0)).mean() < 0.99


def test_effects_skewed_to_the_right_are_not_claimed_too_often():
    low, high = draws_of_documents(lambda x, generator: x.exponential_(generator=generator) - 1)
    assert (low > 0).mean() < 0.02
    assert 0.05 < (high < 0).mean() < 0.1
