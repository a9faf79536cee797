"""Counts against a loop over tokens; tables by blackboard examples."""

import math

import pytest
import torch

from moe.inspection.tables import (
    first_choices,
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


def test_counts_equal_a_loop_over_tokens_and_padding_is_not_counted():
    model, batches = tiny_model().train(), [tiny_batch(seed=seed) for seed in (0, 1)]
    trace = record_routing(model, traced_batches(batches))
    assert model.training
    model.eval()
    expected = [[[0] * 7 for _ in range(131)] for _ in range(2)]
    for batch in batches:
        out = model(**batch)
        decoder_ids = model.prepare_decoder_input_ids_from_labels(batch["labels"])
        sides = (
            (batch["input_ids"], batch["attention_mask"] == 1, out.encoder_router_outputs[0].plan),
            (decoder_ids, batch["labels"] != -100, out.decoder_router_outputs[0].plan),
        )
        for side, (ids, real, plan) in enumerate(sides):
            index = plan.expert_index.reshape(*ids.shape, 2)
            for row in range(ids.shape[0]):
                for position in range(ids.shape[1]):
                    if real[row, position]:
                        token = int(ids[row, position])
                        expected[side][token][int(index[row, position, 0])] += 1
    for side, layer in enumerate(trace.layers):
        assert first_choices(trace, layer, 131).tolist() == expected[side]


def test_top_tokens_and_lift_by_hand():
    counts = torch.tensor([[30, 10], [0, 40], [10, 10], [1, 0]])
    most = top_tokens(counts, 0)
    counted = [(entry.token, entry.occurrences, entry.seen) for entry in most]
    assert counted == [(0, 30, 40), (2, 10, 20), (3, 1, 1)]

    # Of all 101 tokens expert 0 gets 41 and expert 1 gets 60. Token 3, seen once, is preferred by
    # nobody.
    preferred = top_tokens(counts, 0, preferred=True)
    assert [entry.token for entry in preferred] == [0, 2]
    assert preferred[0].lift == pytest.approx((30 + 20 * 41 / 101) / (40 + 20) / (41 / 101))
    assert preferred[1].lift == pytest.approx((10 + 20 * 41 / 101) / (20 + 20) / (41 / 101))
    assert [entry.token for entry in top_tokens(counts, 1, preferred=True)] == [1]


def test_lift_ranks_tokens_that_never_go_elsewhere_by_evidence():
    counts = torch.tensor([[1000, 0, 0, 0], [10, 0, 0, 0], [0, 1010, 1010, 1010]])
    preferred = top_tokens(counts, 0, preferred=True)
    counted = [(entry.token, entry.occurrences, entry.seen) for entry in preferred]
    assert counted == [(0, 1000, 1000), (1, 10, 10)]
    assert 3.9 < preferred[0].lift < 4  # the most that the expert's quarter of all tokens allows
    assert preferred[1].lift == pytest.approx((10 + 20 / 4) / 30 * 4)


def test_a_table_has_a_row_for_each_layer():
    layers = record_routing(tiny_model(), traced_batches([tiny_batch()])).layers
    rows = health_rows(layers)
    assert [row[0] for row in rows] == ["encoder 1", "decoder 1"]
    assert format_table(["a", "long"], [["wide cell", "x"]]) == "a          long\nwide cell  x"
