"""The statistics of a real model's trace agree with what its routers say of themselves."""

import math

import pytest
import torch

from moe.inspection.statistics.routing_entropy import sentinel_entropies
from moe.inspection.statistics.specialization import class_table
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
    model = tiny_model(
        num_sparse_encoder_layers=2, num_selected_experts=1, router="switch", router_options=None
    )
    return record_routing(model, traced_batches(batches))


def test_a_word_of_every_kind_adds_up_to_the_load(trace, tokenizer):
    assert len(tokenizer) == 131
    kinds = ["sentinel", "special", "number"]  # every piece has a digit
    for stack in ("encoder", "decoder"):
        part = trace.stack(stack)
        classes = classify(part, tokenizer, kinds)
        assert (classes.members.sum(dim=0) == 1).all()
        for layer in part.layers:
            table = class_table(layer, classes)
            assert table.counts.sum(dim=0).equal(layer.stats.expert_load)
            assert table.tokens.sum() == layer.stats.num_tokens

    # The entropy of all tokens is that of the load, corrected for few counts.
    for row, layer in zip(sentinel_entropies(trace, tokenizer), trace.layers, strict=True):
        load = layer.stats.expert_load.double()
        entropy = (
            torch.special.entr(load / load.sum()).sum() + ((load > 0).sum() - 1) / load.sum() / 2
        )
        assert row["all_tokens"].value == pytest.approx(min(float(entropy), math.log(7)))


def test_a_decoder_that_is_all_padding_has_empty_statistics(tokenizer):
    batch = tiny_batch()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    trace = record_routing(tiny_model(), traced_batches([batch]))
    part = trace.decoder
    for tokens in ("input", "target"):
        classes = classify(part, tokenizer, tokens=tokens)
        assert class_table(part.layers[0], classes).counts.sum() == 0
    assert math.isnan(sentinel_entropies(trace, tokenizer)[-1]["all_tokens"].value)


def test_a_stack_without_sparse_layers_has_no_tables(tokenizer):
    model = tiny_model(num_sparse_decoder_layers=0)
    trace = record_routing(model, traced_batches([tiny_batch()]))
    assert [row["layer"] for row in sentinel_entropies(trace, tokenizer)] == ["encoder 1"]
