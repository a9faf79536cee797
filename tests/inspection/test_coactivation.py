"""Experts that go together, in a layer and from layer to layer."""

import math

import pytest
import torch
from sklearn.metrics import homogeneity_score, mutual_info_score

from moe import DataError
from moe.inspection.statistics.coactivation import coactivation, layer_flows
from moe.inspection.statistics.permutations import TokenShuffle
from tests.inspection.by_hand import a_layer, a_stack, places_of, renamed


def random_choices(num_tokens, num_experts, num_choices, seed=0):
    """Returns <int64>[N, K] different experts of each token, some far more often than others."""
    generator = torch.Generator().manual_seed(seed)
    favour = torch.linspace(0, 2, num_experts)
    noise = -torch.rand(num_tokens, num_experts, generator=generator).log().log1p()
    return (favour - 2 * noise).topk(num_choices).indices


def test_pairs_are_counted_by_hand():
    pairs = coactivation(a_layer([[0, 1], [1, 0], [0, 2], [3, -1], [-1, -1]], 5))
    assert pairs.counts.tolist() == [
        [3, 2, 1, 0, 0],
        [2, 2, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0],
    ]
    torch.testing.assert_close(pairs.share[0], torch.tensor([1, 2 / 3, 1 / 3, 0, 0]).double())
    assert pairs.share[4].isnan().all()
    assert pairs.share[1, 0] == 1  # asymmetric
    assert pairs.even_share == 1 / 4


def test_the_preference_of_two_choices_has_the_sums_of_the_counts():
    pairs = coactivation(a_layer(random_choices(4001, 7, 2), 7))
    off_diagonal = ~torch.eye(7, dtype=torch.bool)
    expected = (pairs.counts / pairs.preference).masked_fill(~off_diagonal, 0)
    observed = pairs.counts * off_diagonal
    torch.testing.assert_close(expected.sum(dim=1), observed.sum(dim=1).double())
    assert pairs.preference.diagonal().isnan().all()

    # It is a product of one weight for each expert.
    a, b, c, d = 0, 2, 4, 6
    cross = expected[a, b] * expected[c, d] / (expected[a, d] * expected[c, b])
    assert float(cross) == pytest.approx(1)


def test_experts_that_combine_at_random_have_no_preference():
    generator = torch.Generator().manual_seed(0)
    even = torch.rand(60_000, 5, generator=generator).topk(2).indices
    pairs = coactivation(a_layer(even, 5))
    off_diagonal = ~torch.eye(5, dtype=torch.bool)
    assert abs(pairs.preference[off_diagonal] - 1).max() < 0.06  # 6,000 of each pair
    assert abs(pairs.share[off_diagonal] - pairs.even_share).max() < 0.03


def test_permuting_experts_permutes_pairs_and_flows():
    order = [2, 0, 4, 1, 3]
    layer = a_layer(random_choices(210, 5, 2), 5)
    other = renamed(layer, order)
    pairs = coactivation(layer)
    same = coactivation(other)
    assert same.counts[order][:, order].equal(pairs.counts)
    torch.testing.assert_close(same.preference[order][:, order], pairs.preference, equal_nan=True)

    second = a_layer(random_choices(210, 3, 1, seed=1), 3, layer=1)
    stack = a_stack([10] * 21, layer, second)
    places = places_of(stack)
    (flow,) = layer_flows(stack, places)
    (same,) = layer_flows(stack._replace(layers=(other, second)), places)
    assert same.counts[order].equal(flow.counts)
    assert same[4:] == pytest.approx(flow[4:])


def test_one_choice_has_no_pairs_and_one_expert_no_others():
    pairs = coactivation(a_layer([0, 2, 2], 3))
    assert pairs.counts.tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 2]]
    assert pairs.even_share == 0
    assert coactivation(a_layer([0, 0], 1)).counts.tolist() == [[2]]
    assert coactivation(a_layer(torch.empty(0, 2).long(), 3)).counts.sum() == 0


def test_a_flow_is_counted_by_hand():
    first = a_layer([0, 0, 1, 1, -1, 2, 0], 4)
    second = a_layer([1, 1, 0, 0, 0, -1, 0], 2, layer=1)
    stack = a_stack([1] * 7, first, second)
    (flow,) = layer_flows(stack, places_of(stack), num_permutations=19)
    assert (flow.layer, flow.next_layer) == (("encoder", 0), ("encoder", 1))
    assert flow.counts.tolist() == [[1, 2], [2, 0], [0, 0], [0, 0]]
    torch.testing.assert_close(flow.share[0], torch.tensor([1 / 3, 2 / 3]).double())
    assert flow.share[2:].isnan().all()

    rows = [0, 0, 1, 1, 0]
    columns = [1, 1, 0, 0, 0]
    assert flow.mutual_information == pytest.approx(mutual_info_score(rows, columns))
    assert flow.information == pytest.approx(homogeneity_score(columns, rows))


def test_a_flow_is_told_from_chance():
    first = random_choices(2100, 5, 1)
    follows = torch.tensor([2, 2, 0, 1, 1])[first]
    independent = random_choices(2100, 3, 1, seed=3)
    layers = [a_layer(first, 5), a_layer(follows, 3, layer=1), a_layer(independent, 3, layer=2)]
    stack = a_stack([21] * 100, *layers)
    flows = layer_flows(stack, places_of(stack))
    assert [flow.layer for flow in flows] == [("encoder", 0), ("encoder", 1)]
    assert flows[0].information == pytest.approx(1)
    assert flows[0].p_value == 0.01
    assert flows[0].chance < 0.02
    assert flows[1].p_value > 0.05
    assert flows[1].information < 0.01


def test_a_flow_needs_two_layers_and_documents():
    stack = a_stack([3, 2], a_layer([0] * 5, 2))
    assert layer_flows(stack, places_of(stack)) == []
    two = a_stack([3, 2], a_layer([0] * 5, 2), a_layer([0] * 5, 1, layer=1))
    with pytest.raises(DataError, match="from 2 documents"):
        layer_flows(two, places_of(two))
    (flow,) = layer_flows(two, places_of(two), null=TokenShuffle)
    assert math.isnan(flow.information)
    assert flow.mutual_information == 0
    with pytest.raises(DataError, match="The places cover 5 tokens; expected 4"):
        layer_flows(a_stack([4]), places_of(two))
