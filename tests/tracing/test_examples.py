"""Batches to trace. Oracles: the texts that they were made of; the model's own answers."""

import pytest
import torch

from moe import DataError, STMoEConfig
from moe.data.span_corruption import Noise
from moe.data.tokenizer import SpecialIds, load_tokenizer, train_tokenizer
from moe.tracing.examples import (
    SourceText,
    batches_of,
    corrupted_batches,
    describe_noise,
    generated_batches,
    paired_batches,
    pretraining_noise,
)
from moe.tracing.recorder import record_routing, traced_batches
from tests.tracing.models import build_batch, build_model

TEXTS = [
    SourceText("some words to learn, and some more words " * 9, "", 0, "long"),
    SourceText("a", "", 1, "short"),
    SourceText("more words to learn and more and more", "", 2, "middle"),
]
PAIRS = [
    SourceText("some words", "more words", 4, "a"),
    SourceText("words to learn", "some", 4, "b"),
    SourceText("and", "and some more words", 9, "a"),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples") / "tokenizer"
    train_tokenizer([source.text for source in TEXTS] * 3, 118, folder)
    return load_tokenizer(folder)


def restore(inputs, targets, ids):
    """Returns the text of an example: each sentinel replaced by what the target says behind it."""
    lowest = ids.first_sentinel - ids.num_sentinels + 1
    hidden, current = {}, None
    for token in targets:
        if lowest <= token <= ids.first_sentinel:
            current = hidden.setdefault(token, [])
        elif token != ids.eos:
            current.append(token)
    restored = []
    for token in inputs:
        if token != ids.eos:
            restored += hidden.get(token, [token])
    return restored


def rows_of(batches):
    for traced in batches:
        batch = traced.batch
        for row in range(len(traced.documents)):
            inputs = batch["input_ids"][row][batch["attention_mask"][row] == 1]
            targets = batch["labels"][row][batch["labels"][row] >= 0]
            yield inputs.tolist(), targets.tolist(), traced.documents[row], traced.domains[row]


def test_masked_texts_are_whole_with_what_is_masked(tokenizer):
    ids = SpecialIds.of(tokenizer)
    batches = corrupted_batches(TEXTS, tokenizer, inputs_length=16, batch_size=2, noise=Noise())
    restored = {}
    for inputs, targets, document, domain in rows_of(batches):
        assert len(inputs) <= 16
        assert domain == TEXTS[document].domain
        restored.setdefault(document, []).extend(restore(inputs, targets, ids))

    # A text of one token has nothing to mask.
    assert list(restored) == [0, 2]
    for document, tokens in restored.items():
        whole = tokenizer(TEXTS[document].text, add_special_tokens=False)["input_ids"]
        assert tokens == whole[: len(tokens)]
        assert len(whole) - len(tokens) < 4


def test_few_examples_lie_evenly_and_have_the_masks_that_they_have_among_all(tokenizer):
    settings = {"inputs_length": 16, "batch_size": 3, "noise": Noise(0.5, 3.0)}
    everything = list(rows_of(corrupted_batches(TEXTS, tokenizer, **settings)))
    few = list(rows_of(corrupted_batches(TEXTS, tokenizer, most_examples=4, **settings)))
    chosen = [index * len(everything) // 4 for index in range(4)]
    assert few == [everything[index] for index in chosen]
    other = list(rows_of(corrupted_batches(TEXTS, tokenizer, seed=1, **settings)))
    assert other != everything


IN_SPANS = "of the tokens masked, in spans of 7 on average"
UNKNOWN = "the model does not say how its pre-training masked text"


@pytest.mark.parametrize(
    ("fields", "density", "noise", "text"),
    [
        ((0.5, 7.0), None, Noise(0.5, 7.0), f"50 % {IN_SPANS}, as in pre-training"),
        ((0.5, 7.0), 0.25, Noise(0.25, 7.0), f"25 % {IN_SPANS} (50 % in pre-training)"),
        (None, 0.25, Noise(0.25, 3.0), UNKNOWN),
    ],
)
def test_text_is_masked_as_in_pre_training_unless_told_otherwise(fields, density, noise, text):
    config = STMoEConfig()
    if fields is not None:
        config = STMoEConfig(noise_density=fields[0], mean_noise_span_length=fields[1])
    assert pretraining_noise(config, density) == noise
    assert text in describe_noise(noise, config)


@pytest.mark.parametrize("sentinels", ["none", "one"])
def test_pairs_are_those_of_fine_tuning(tokenizer, sentinels):
    ids = SpecialIds.of(tokenizer)
    batches = paired_batches(
        PAIRS, tokenizer, inputs_length=40, targets_length=40, batch_size=2, sentinels=sentinels
    )
    sentinel = [ids.first_sentinel] if sentinels == "one" else []
    rows = list(rows_of(batches))
    assert [row[2:] for row in rows] == [(4, "a"), (4, "b"), (9, "a")]
    for (inputs, targets, *_), pair in zip(rows, PAIRS, strict=True):
        text, target = tokenizer([pair.text, pair.target], add_special_tokens=False)["input_ids"]
        assert inputs == [*text, *sentinel, ids.eos]
        assert targets == [*sentinel, *target, ids.eos]


def test_nothing_to_trace_is_refused(tokenizer):
    settings = {"inputs_length": 8, "batch_size": 3}
    with pytest.raises(DataError, match="no text has 4 tokens"):
        corrupted_batches(TEXTS[1:2], tokenizer, noise=Noise(), **settings)
    with pytest.raises(DataError, match="no pairs"):
        paired_batches([], tokenizer, targets_length=8, **settings)


def test_a_trace_gives_its_examples_back():
    model = build_model(eval_capacity_factor=None)
    trace = record_routing(model, traced_batches([build_batch(), build_batch(seed=3)], "x"))
    again = record_routing(model, batches_of(trace, batch_size=5))
    assert again.facts.inputs_fingerprint == trace.facts.inputs_fingerprint
    assert torch.equal(again.document, trace.document)
    assert again.facts.domains == ["x"]
    for layer, recorded in zip(again.layers, trace.layers, strict=True):
        assert torch.equal(layer.choices, recorded.choices)


def test_answers_are_what_the_model_generates_up_to_their_end():
    model = build_model(eval_capacity_factor=None)
    batch = build_batch()
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    answers = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    model.config.eos_token_id = model.generation_config.eos_token_id = int(answers[1, 3])
    expected = model.generate(**inputs, max_new_tokens=6, do_sample=False)

    [traced] = generated_batches(model, traced_batches([batch]), max_tokens=6)
    labels = traced.batch["labels"]
    for row, answer in zip(labels, expected[:, 1:], strict=True):
        end = (answer == model.config.eos_token_id).nonzero()
        length = int(end[0]) + 1 if len(end) else len(answer)
        assert row[row >= 0].tolist() == answer[:length].tolist()
    assert (labels == -100).any()
