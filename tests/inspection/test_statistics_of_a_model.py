"""The statistics of a real model's trace agree with what its routers say of themselves."""

import pytest
import torch

from moe.inspection.statistics.matching import choice_agreement, match_traces
from moe.inspection.statistics.permutations import TokenShuffle, token_places
from moe.inspection.statistics.routing_entropy import sentinel_entropies
from moe.inspection.statistics.specialization import class_table, specialization_test
from moe.inspection.statistics.token_classes import classify
from moe.tracing.recorder import record_routing, traced_batches
from tests.inspection.by_hand import a_tokenizer
from tests.models.tiny import tiny_batch, tiny_model

NUM_PIECES = 125  # with 3 special tokens and 3 sentinels, the vocabulary of the model


@pytest.fixture(scope="module")
def tokenizer():
    pieces = [f"~piece{number}" for number in range(NUM_PIECES)]
    return a_tokenizer(*pieces)


@pytest.fixture(scope="module")
def trace():
    batches = [tiny_batch(batch=7, seed=seed) for seed in range(3)]
    model = tiny_model(num_sparse_encoder_layers=2)
    return record_routing(model, traced_batches(batches))


def test_a_word_of_every_kind_adds_up_to_the_load(trace, tokenizer):
    assert len(tokenizer) == 131
    kinds = ["sentinel", "special", "number"]  # every piece has a digit
    for stack in ("encoder", "decoder"):
        part = trace.stack(stack)
        classes = classify(part, tokenizer, kinds)
        assert (classes.members.sum(dim=0) == 1).all()
        for layer in part.layers:
            table = class_table(layer, classes, choices="all")
            assert table.counts.sum(dim=0).equal(layer.stats.expert_load)
            assert table.tokens.sum() == layer.stats.num_tokens


def test_every_layer_has_its_row(trace, tokenizer):
    rows = sentinel_entropies(trace, tokenizer)
    assert [row.layer for row in rows] == [layer.key for layer in trace.layers]
    for row, layer in zip(rows, trace.layers, strict=True):
        load = torch.bincount(layer.first.long(), minlength=7).double()
        expected = torch.special.entr(load / load.sum()).sum()
        assert row.all_tokens.plug_in == pytest.approx(float(expected))

    places = token_places(trace, "encoder")
    classes = classify(trace.encoder, tokenizer)
    tests = specialization_test(trace.encoder.layers, classes, places, num_permutations=19)
    assert [test.layer for test in tests] == [("encoder", 0), ("encoder", 1)]


def test_a_model_is_matched_with_itself(trace):
    for matching in match_traces(trace, trace).values():
        assert matching.agreement == matching.adjusted_rand == 1
    for layer in trace.layers:
        choices = layer.choices
        assert choice_agreement(choices, choices, layer.facts.num_experts).share == 1


def test_a_decoder_that_is_all_padding_has_empty_statistics(tokenizer):
    batch = tiny_batch()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    trace = record_routing(tiny_model(), traced_batches([batch]))
    part = trace.decoder
    for tokens in ("input", "target"):
        classes = classify(part, tokenizer, tokens=tokens)
        assert class_table(part.layers[0], classes).counts.sum() == 0
        places = token_places(trace, "decoder")
        (test,) = specialization_test(part.layers, classes, places, null=TokenShuffle)
        assert (test.p_value == 1).all()
    assert sentinel_entropies(trace, tokenizer)[-1].all_tokens.tokens == 0


def test_a_stack_without_sparse_layers_has_no_tables(tokenizer):
    model = tiny_model(num_sparse_decoder_layers=0)
    trace = record_routing(model, traced_batches([tiny_batch()]))
    places = token_places(trace, "decoder")
    classes = classify(trace.decoder, tokenizer)
    assert specialization_test(trace.decoder.layers, classes, places) == []
    assert [row.layer for row in sentinel_entropies(trace, tokenizer)] == [("encoder", 0)]
