"""The jackknife beside scipy's t interval, by hand, and in simulations."""

import math

import pytest
import scipy.stats
import torch

from moe.inspection.statistics.document_intervals import (
    TokenSums,
    difference_of_means,
    mean_over_tokens,
)


def test_with_one_token_a_document_the_interval_is_the_t_interval_of_a_mean():
    values = torch.tensor([0.3, -1.1, 2.0, 0.7, 0.1], dtype=torch.float64)
    low, high = mean_over_tokens(TokenSums(values, torch.ones(5))).interval(0.95)
    theirs = scipy.stats.ttest_1samp(values.numpy(), 0.0).confidence_interval(0.95)
    assert (float(low), float(high)) == pytest.approx(tuple(theirs))


def test_what_a_document_has_in_common_cancels_in_a_difference():
    shift = torch.tensor([5.0, -3.0, 11.0, 0.0], dtype=torch.float64)
    two = torch.full((4,), 2.0)
    a = TokenSums(2 * (shift + 1), two)
    b = TokenSums(2 * shift, two)
    difference = difference_of_means(a, b)
    assert float(difference.value) == pytest.approx(1)
    assert float(difference.stderr) == pytest.approx(0, abs=1e-12)
    assert float(mean_over_tokens(a).stderr) > 2


def test_a_document_without_the_tokens_changes_nothing():
    sums = torch.tensor([1.0, 4.0, 2.0], dtype=torch.float64)
    counts = torch.tensor([2.0, 3.0, 1.0], dtype=torch.float64)
    longer = TokenSums(torch.cat([sums, torch.zeros(7)]), torch.cat([counts, torch.zeros(7)]))
    for ours, theirs in zip(
        mean_over_tokens(longer), mean_over_tokens(TokenSums(sums, counts)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_without_tokens_or_with_one_document_no_value_is_ruled_out():
    sums = torch.tensor([[0.0, 0.0], [3.0, 0.0]])
    counts = torch.tensor([[0.0, 0.0], [2.0, 0.0]])
    estimates = mean_over_tokens(TokenSums(sums, counts))
    low, high = estimates.interval(0.95)
    assert math.isnan(estimates.value[0]) and float(estimates.value[1]) == 1.5
    assert low.tolist() == [-math.inf] * 2
    assert high.tolist() == [math.inf] * 2


def draws_of_documents(distribution):
    """Returns 2000 trials with documents of unequal length, whose effects have mean 0."""
    generator = torch.Generator().manual_seed(0)
    shape = (2000, 23)
    lengths = torch.randint(1, 40, shape, generator=generator).double()
    effect = distribution(torch.empty(shape, dtype=torch.float64), generator)
    return mean_over_tokens(TokenSums(effect * lengths, lengths)).interval(0.95)


def test_intervals_hold_the_mean_as_often_as_they_say():
    low, high = draws_of_documents(lambda x, generator: x.normal_(generator=generator))
    assert 0.94 < ((low <= 0) & (high >= 0)).double().mean() < 0.97
    low, high = draws_of_documents(lambda x, generator: x.normal_(generator=generator) ** 3)
    assert 0.94 < ((low <= 0) & (high >= 0)).double().mean() < 0.99


def test_effects_skewed_to_the_right_are_not_claimed_too_often():
    low, high = draws_of_documents(lambda x, generator: x.exponential_(generator=generator) - 1)
    assert (low > 0).double().mean() < 0.02
    assert 0.05 < (high < 0).double().mean() < 0.1
