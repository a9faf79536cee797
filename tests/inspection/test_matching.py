"""Experts of two models matched: renamed, pruned and independent ones; sklearn's index."""

import math

import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from moe import DataError
from moe.inspection.statistics.contingency import adjusted_rand
from moe.inspection.statistics.matching import match_experts, match_traces
from tests.inspection.by_hand import a_layer, a_stack, a_trace, renamed


def test_the_index_is_that_of_sklearn():
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(0, 5, (301,), generator=generator)
    b = torch.where(torch.rand(301, generator=generator) < 0.6, (3 * a + 1) % 7, a.flip(0))
    matching = match_experts(a_layer(a, 5), a_layer(b, 7))
    assert matching.adjusted_rand == pytest.approx(adjusted_rand_score(a, b))

    for counts, expected in (([[5, 0]], 1), ([[1, 0], [0, 1]], 1), ([[1]], 1), ([[1, 1]], 0)):
        assert adjusted_rand(torch.tensor(counts)) == expected
    assert math.isnan(adjusted_rand(torch.zeros(2, 3)))


def test_renamed_experts_find_their_partners():
    generator = torch.Generator().manual_seed(1)
    order = [3, 5, 0, 6, 1, 4, 2]
    layer = a_layer(torch.randint(-1, 7, (200,), generator=generator), 7)
    matching = match_experts(layer, renamed(layer, order))
    assert matching.partner.tolist() == order
    assert (matching.agreement, matching.adjusted_rand) == (1, 1)
    assert matching.counts.sum() == (layer.first >= 0).sum()


def test_pruned_experts_have_no_partner():
    a = torch.tensor([0, 0, 1, 1, 1, 2])
    b = torch.tensor([1, 1, 0, 0, 0, 0])
    matching = match_experts(a_layer(a, 3), a_layer(b, 2))
    assert matching.counts.tolist() == [[0, 2], [3, 0], [1, 0]]
    assert matching.partner.tolist() == [1, 0, -1]
    assert matching.agreement == 5 / 6
    assert match_experts(a_layer(b, 2), a_layer(a, 3)).partner.tolist() == [1, 0]


def test_traces_are_matched_layer_by_layer():
    layers = [a_layer([0, 1, 2], 3), a_layer([1, 1, 0], 2, layer=1)]
    trace = a_trace(a_stack([3], *layers))
    matchings = match_traces(trace, trace)
    assert list(matchings) == [("encoder", 0), ("encoder", 1)]
    assert matchings["encoder", 1].partner.tolist() == [0, 1]
    with pytest.raises(DataError, match="layers encoder 1, encoder 2 and encoder 1; expected"):
        match_traces(trace, a_trace(a_stack([3], *layers[:1])))


def test_tokens_without_experts_match_nothing():
    matching = match_experts(a_layer([-1, -1], 2), a_layer([0, 1], 2))
    assert math.isnan(matching.agreement)
    assert sorted(matching.partner.tolist()) == [0, 1]
