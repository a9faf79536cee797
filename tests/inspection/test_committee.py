"""The standing committee: ranks by hand, and the silhouette of sklearn."""

import math

import pytest
import torch
from sklearn.metrics import silhouette_score

from moe import ConfigError, DataError
from moe.inspection.statistics.committee import domain_silhouette, expert_gates, standing_committees
from tests.inspection.by_hand import a_layer, a_stack, a_trace, renamed

DOMAINS = ["prose", "code", "law"]


def three_domains():
    """Returns a trace of three documents of ten tokens, one of each domain, and its layer."""
    tokens = []
    for counts in ([6, 3, 1, 0, 0], [5, 1, 4, 0, 0], [6, 2, 0, 2, 0]):
        for expert, count in enumerate(counts):
            tokens += [expert] * count
    layer = a_layer(tokens, 5)
    return a_trace(a_stack([10] * 3, layer), domains=DOMAINS, domain=[0, 1, 2]), layer


def test_the_committee_is_the_pareto_front_of_ranks():
    trace, _ = three_domains()
    (committee,) = standing_committees(trace, "encoder", num_ranked=3, min_presence=0.6)
    assert committee.domains == tuple(DOMAINS)
    torch.testing.assert_close(
        committee.contribution[1], torch.tensor([0.5, 0.1, 0.4, 0, 0]).double()
    )
    assert committee.rank.tolist() == [[1, 2, 3, 4, 4], [1, 3, 2, 4, 4], [1, 2, 4, 2, 4]]

    # Expert 0 is first everywhere: no other one is as good in the mean or in the variance.
    assert committee.members == (0,)
    assert committee.coverage == pytest.approx((0.6 + 0.5 + 0.6) / 3)
    others = (1 - committee.coverage) / 4
    assert committee.ratio == pytest.approx(committee.coverage / others)


def test_of_two_that_are_better_in_one_each_both_are_members():
    # Ranks of expert 0: 1, 1, 3; of expert 1: 2, 2, 2; mean against variance.
    tokens = [0, 0, 0, 1, 1, 2] * 2 + [2, 2, 2, 1, 1, 0]
    trace = a_trace(a_stack([6] * 3, a_layer(tokens, 3)), domains=DOMAINS, domain=[0, 1, 2])
    (committee,) = standing_committees(trace, "encoder", num_ranked=3)
    assert committee.members == (0, 1)
    (fewer,) = standing_committees(trace, "encoder", num_ranked=2)
    assert fewer.members == (1,)  # expert 0 is among the first two in two of three domains only


def test_permuting_experts_renames_the_members():
    trace, layer = three_domains()
    order = [4, 2, 0, 3, 1]
    other = trace._replace(encoder=trace.encoder._replace(layers=(renamed(layer, order),)))
    (committee,) = standing_committees(trace, "encoder", num_ranked=3, min_presence=0.1)
    (same,) = standing_committees(other, "encoder", num_ranked=3, min_presence=0.1)
    assert same.members == tuple(order[expert] for expert in committee.members)
    assert same.coverage == pytest.approx(committee.coverage)
    assert same.contribution[:, order].equal(committee.contribution)


def test_the_contribution_is_that_of_accepted_choices():
    layer = a_layer([[0, 1], [2, -1]], 3, gate=[[0.75, 0.0], [0.5, 0.0]])
    assert expert_gates(layer).tolist() == [[0.75, 0, 0], [0, 0, 0.5]]


def test_the_silhouette_is_that_of_sklearn():
    generator = torch.Generator().manual_seed(0)
    gates = torch.rand(90, 5, generator=generator, dtype=torch.float64)
    document = torch.arange(90) // 5
    domain = torch.tensor([0, 2, 3])[document % 3]
    gates += torch.nn.functional.one_hot(domain, 5)
    means = gates.reshape(18, 5, 5).mean(dim=1)
    expected = silhouette_score(means, domain[::5], metric="cosine")
    assert domain_silhouette(gates, domain, document) == pytest.approx(expected)
    assert expected > 0.1

    shuffled = domain[::5][torch.randperm(18, generator=generator)].repeat_interleave(5)
    assert domain_silhouette(gates, shuffled, document) < 0.1


def test_documents_of_one_domain_have_no_silhouette():
    gates = torch.ones(4, 3, dtype=torch.float64)
    zeros = torch.zeros(4, dtype=torch.int64)
    assert math.isnan(domain_silhouette(gates, zeros, torch.arange(4)))
    assert math.isnan(domain_silhouette(gates, torch.tensor([0, 0, 0, 1]), torch.arange(4)))
    assert domain_silhouette(gates, torch.tensor([0, 1, 0, 1]), torch.arange(4)) == 0


def test_a_domain_without_tokens_is_left_out_and_one_is_too_few():
    layer = a_layer([0, 1, 1], 2)
    trace = a_trace(a_stack([2, 0, 1], layer), domains=DOMAINS, domain=[0, 1, 2])
    (committee,) = standing_committees(trace, "encoder")
    assert committee.domains == ("prose", "law")
    assert standing_committees(trace._replace(decoder=trace.encoder), "decoder")[0].members
    with pytest.raises(DataError, match=r"has tokens of 1 kinds of text; .* at least 2"):
        standing_committees(a_trace(a_stack([3], layer)), "encoder")


def test_options_are_checked():
    trace, _ = three_domains()
    with pytest.raises(ConfigError, match=r"num_ranked is 6; expected an integer from 1 to 5"):
        standing_committees(trace, "encoder", num_ranked=6)
    with pytest.raises(ConfigError, match="min_presence is 0; expected a finite number above 0"):
        standing_committees(trace, "encoder", min_presence=0)


def test_where_all_or_none_are_members_there_is_no_ratio():
    tokens = [0, 1, 1, 0]
    trace = a_trace(a_stack([2, 2], a_layer(tokens, 2)), domains=DOMAINS[:2], domain=[0, 1])
    (committee,) = standing_committees(trace, "encoder", num_ranked=2)
    assert committee.members == (0, 1)
    assert math.isnan(committee.ratio)
    assert committee.coverage == 1
