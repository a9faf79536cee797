"""n-gram tables against a dictionary of counts, and on texts whose loss is known."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.data.ngrams import NAMES, NgramTable, ngram_losses, sample_text
from moe.data.pipeline import SpanCorruptionSource
from moe.data.tokenizer import SpecialIds

V = 5
VOCABULARY = 60
SENTINELS = range(41, VOCABULARY)


def held_out_source(largest):
    """Returns batches of 5 rows, each with 4 masked tokens, of random tokens up to one."""
    ids = SpecialIds(pad=0, eos=1, first_sentinel=SENTINELS[-1], num_sentinels=len(SENTINELS))
    text = np.random.default_rng(1).integers(2, largest, 700).astype(np.int32)
    return SpanCorruptionSource(text, ids, seed=3, inputs_length=23, batch_size=5)


def kneser_ney(text, order, vocab_size=V):
    """Returns p(token | context) for tuples of counts, after Chen and Goodman (1999) section 2.7."""
    tables = {order: Counter(tuple(text[i : i + order]) for i in range(len(text) - order + 1))}
    for length in range(order - 1, 0, -1):
        tables[length] = Counter(gram[1:] for gram in tables[length + 1])

    def p(context, token):
        length = len(context) + 1
        shorter = p(context[1:], token) if context else 1 / vocab_size
        table = tables[length]
        followers = {gram[-1]: count for gram, count in table.items() if gram[:-1] == context}
        if not followers:
            return shorter
        once = sum(count == 1 for count in table.values())
        twice = sum(count == 2 for count in table.values())
        d = once / (once + 2 * twice) if once else 0.5
        seen = max(followers.get(token, 0) - d, 0)
        return (seen + d * len(followers) * shorter) / sum(followers.values())

    return p


@given(st.lists(st.integers(0, V - 1), min_size=3, max_size=40), st.integers(1, 3), st.data())
def test_losses_equal_a_dictionary_of_counts(text, order, data):
    table = NgramTable.of(np.array(text), order, V)
    row = data.draw(st.lists(st.integers(0, V - 1), min_size=4, max_size=4))
    losses = table.losses(np.array([row]), np.ones((1, 4), dtype=bool))
    p = kneser_ney(text, order)
    for position, loss in enumerate(losses):
        context = tuple(row[max(0, position - order + 1) : position])
        assert loss == pytest.approx(-math.log(p(context, row[position])))


@given(st.lists(st.integers(0, V - 1), min_size=3, max_size=40), st.integers(1, 3))
def test_the_probabilities_after_a_context_sum_to_one(text, order):
    table = NgramTable.of(np.array(text), order, V)
    rows = np.array([[1, 2, token] for token in range(V)])
    masks = np.array([[False, False, True]] * V)
    assert np.exp(-table.losses(rows, masks)).sum() == pytest.approx(1)


def masked_in(batch):
    """Returns each masked token of a batch with all tokens to its left that the model can see there."""
    masked = []
    for inputs, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        spans = {}
        for token in labels[:-1]:  # without the end token
            if token in SENTINELS:
                span = spans.setdefault(token, [])
            else:
                span.append(token)

        left = []
        for token in inputs[:-1]:
            for hidden in spans.get(token, []):
                masked.append((tuple(left), hidden))
                left.append(hidden)
            if token not in spans:
                left.append(token)
    return masked


@pytest.mark.parametrize("order", [1, 2, 3])
def test_the_tables_predict_what_the_batches_mask_from_what_a_model_sees(order):
    training = np.random.default_rng(0).integers(2, 30, 431).astype(np.int32)
    held_out = held_out_source(largest=40)  # tokens from 30 on are not in the training text
    losses = ngram_losses(training, held_out, 2, VOCABULARY)

    p = kneser_ney(training.tolist(), order, VOCABULARY)
    expected = []
    for left, token in masked_in(held_out.batch(0)) + masked_in(held_out.batch(1)):
        context = left[max(0, len(left) - order + 1) :]
        expected.append(-math.log(p(context, token)))
    assert len(expected) == 2 * 5 * 4
    assert losses[NAMES[order]] == pytest.approx(sum(expected) / len(expected))


def test_a_text_too_short_for_an_order_has_no_table_of_it():
    one_token = np.array([7], dtype=np.int32)
    held_out = held_out_source(largest=8)
    losses = ngram_losses(one_token, held_out, 1, VOCABULARY)
    assert set(losses) == {"unigram"}

    # Its count is 1, all of which the discount n1 / (n1 + 2 n2) gives to the uniform distribution.
    assert losses["unigram"] == pytest.approx(math.log(VOCABULARY))
    two_tokens = np.array([7, 5], dtype=np.int32)
    assert set(ngram_losses(two_tokens, held_out, 1, VOCABULARY)) == {"unigram", "bigram"}
    assert ngram_losses(one_token, held_out, 0, VOCABULARY) == {}


def test_a_long_text_is_sampled_from_beginning_to_end():
    text = np.arange(103)
    sample = sample_text(text, 23, 5)
    assert sample.reshape(4, 5)[:, 0].tolist() == [0, 32, 65, 98]
    assert (np.diff(sample.reshape(4, 5)) == 1).all()
    assert sample_text(text, 103, 5) is text
