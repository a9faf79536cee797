"""Entropy of a class's routing: closed forms, a known bias, and an interval over documents."""

import math

import numpy as np
import pytest
import torch

from moe.inspection.statistics.routing_entropy import (
    class_entropy,
    corrected_entropy,
    sentinel_entropies,
)
from tests.inspection.by_hand import a_layer, a_stack, a_tokenizer, a_trace, ids_of


def entropy_of(expert, num_experts=4, document=None):
    expert = torch.as_tensor(expert)
    document = torch.arange(len(expert)) if document is None else torch.as_tensor(document)
    everything = torch.ones(len(expert), dtype=torch.bool)
    return class_entropy(a_layer(expert, num_experts), everything, document)


def test_the_entropy_is_in_nats_and_corrected_for_few_counts():
    assert entropy_of([0, 0, 1, 1, -1]).value == pytest.approx(math.log(2) + 1 / 8)
    assert entropy_of([0, 1, 2, 3]).value == math.log(4)  # at most
    assert entropy_of([2, 2, 2]).value == 0


def test_the_correction_takes_most_of_the_bias():
    generator = torch.Generator().manual_seed(0)
    share = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    truth = float(torch.special.entr(share).sum())
    draws = torch.multinomial(share, 2000 * 20, replacement=True, generator=generator)
    counts = torch.nn.functional.one_hot(draws.reshape(2000, 20), 4).sum(dim=1)
    plug_in = torch.special.entr(counts.double() / 20).sum(dim=1).mean()
    assert float(plug_in) - truth < -0.06
    assert abs(float(corrected_entropy(counts).mean()) - truth) < 0.015


def test_the_interval_holds_the_truth_where_tokens_of_a_document_are_alike():
    generator = np.random.default_rng(0)
    share = np.array([0.4, 0.3, 0.2, 0.1])
    truth = -(share * np.log(share)).sum()
    document = np.repeat(np.arange(30), 10)
    num_held = 0
    for _ in range(100):
        of_document = generator.dirichlet(5 * share, 30)
        expert = [generator.choice(4, 10, p=mix) for mix in of_document]
        estimate = entropy_of(np.concatenate(expert), document=document)
        num_held += estimate.low <= truth <= estimate.high
        assert estimate.low < estimate.value < estimate.high

    # 95 expected: 83 and fewer have a probability below 1e-4.
    assert num_held > 83


def test_one_document_has_no_interval_and_no_token_no_entropy():
    estimate = entropy_of([0, 1, 1], document=[5, 5, 5])
    assert estimate.value > 0
    assert math.isnan(estimate.low) and math.isnan(estimate.high)
    assert all(map(math.isnan, entropy_of([-1, -1])))


def test_sentinels_are_set_beside_all_tokens_in_each_layer_of_both_stacks():
    tokenizer = a_tokenizer("~a", "~b")
    pieces = ["~a", "<extra_id_0>", "~b", "<extra_id_1>", "</s>"]
    ids = ids_of(tokenizer, pieces * 2)
    even = a_layer([0, 1, 2, 3, 4, 0, 1, 2, 3, 4], 5)
    alone = a_layer([0, 4, 1, 4, 2, 3, 4, 0, 4, 1], 5, layer=1)
    encoder = a_stack([5, 5], even, alone, ids=ids)
    decoder = a_stack([5, 5], a_layer([3] * 10, 5, stack="decoder"), ids=ids, targets=ids)
    rows = sentinel_entropies(a_trace(encoder, decoder), tokenizer)

    assert [row["layer"] for row in rows] == ["encoder 1", "encoder 2", "decoder 1"]
    corrected = math.log(2) + 1 / 8
    assert [row["sentinels"].value for row in rows] == [pytest.approx(corrected), 0, 0]
    assert [row["sentinel_tokens"] for row in rows] == [4] * 3
    assert rows[0]["all_tokens"].value == rows[0]["even"] == math.log(5)
    assert rows[2]["all_tokens"].value == 0

    # A stack without sparse layers has no row.
    (row,) = sentinel_entropies(a_trace(encoder._replace(layers=(even,))), tokenizer)
    assert row["layer"] == "encoder 1"
