"""Tables by blackboard examples."""

import math

import pytest
import torch

from moe.inspection.tables import (
    format_table,
    health_rows,
    loss_sentence,
    top_tokens,
    unigram_entropy,
)
from moe.tracing.recorder import record_routing, traced_batches
from tests.models.tiny import tiny_batch, tiny_model


def test_the_unigram_entropy_is_that_of_the_frequencies():
    targets = torch.tensor([0, 0, 0, 0, 2, 2, 5, 7])
    assert unigram_entropy(targets) == pytest.approx(1.75 * math.log(2))


@pytest.mark.parametrize(("num_batches", "is_long"), [(27, True), (4, False)])
def test_a_model_that_is_worse_than_the_unigram_entropy_of_a_long_text_is_warned_of(
    num_batches, is_long
):
    batches = [tiny_batch(seed=seed) for seed in range(num_batches)]
    trace = record_routing(tiny_model(), traced_batches(batches))
    entropy = unigram_entropy(trace.decoder.targets)
    for loss, is_worse in ((entropy - 0.1, False), (entropy + 0.1, True)):
        text = loss_sentence(trace._replace(facts=trace.facts._replace(loss=loss)))
        assert f"{loss:.2f} nats" in text
        assert ("Warning" in text) is (is_worse and is_long)


def test_top_tokens_and_lift_by_hand():
    counts = torch.tensor([[30, 10], [0, 40], [10, 10], [1, 0], [10, 0]])
    most = top_tokens(counts, 0)
    counted = [(entry.token, entry.occurrences, entry.seen) for entry in most]
    assert counted == [(0, 30, 40), (2, 10, 20), (4, 10, 10), (3, 1, 1)]

    # Of all 111 tokens expert 0 gets 51 and expert 1 gets 60. Token 3, seen once, is preferred by
    # nobody; ten occurrences are enough.
    preferred = top_tokens(counts, 0, preferred=True)
    assert [entry.token for entry in preferred] == [0, 4, 2]
    share = 51 / 111
    expected = [(30 + 20 * share) / 60, (10 + 20 * share) / 30, (10 + 20 * share) / 40]
    assert [share * entry.lift for entry in preferred] == pytest.approx(expected)
    assert [entry.token for entry in top_tokens(counts, 1, preferred=True)] == [1]


def test_a_table_has_a_row_for_each_layer():
    layers = record_routing(tiny_model(), traced_batches([tiny_batch()])).layers
    rows = health_rows(layers)
    assert [row[0] for row in rows] == ["encoder 1", "decoder 1"]
    assert format_table(["a", "long"], [["wide cell", "x"]]) == "a          long\nwide cell  x"
