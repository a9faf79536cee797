"""n-gram tables against a dictionary of counts, and on texts whose loss is known."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.data.ngrams import NgramTable, ngram_losses
from moe.data.pipeline import SpanCorruptionSource
from moe.data.tokenizer import SpecialIds

V = 5


def kneser_ney(text, order):
    """Returns p(token | context) for tuples of counts, after Chen and Goodman (1999) section 2.7."""
    tables = {order: Counter(tuple(text[i : i + order]) for i in range(len(text) - order + 1))}
    for length in range(order - 1, 0, -1):
        tables[length] = Counter(gram[1:] for gram in tables[length + 1])

    def p(context, token):
        length = len(context) + 1
        shorter = p(context[1:], token) if context else 1 / V
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


def test_only_masked_tokens_of_the_held_out_batches_count():
    rng = np.random.default_rng(0)
    tokens = rng.integers(2, 40, 3000).astype(np.int32)
    ids = SpecialIds(pad=0, eos=1, first_sentinel=59, num_sentinels=19)
    held_out = SpanCorruptionSource(tokens[:700], ids, seed=3, inputs_length=23, batch_size=5)
    losses = ngram_losses(tokens, held_out, 2, 60)

    targets = []
    for step in range(2):
        labels = held_out.batch(step)["labels"].numpy()
        targets += labels[(labels > 1) & (labels <= 40)].tolist()
    table = NgramTable.of(tokens, 1, 60)
    alone = np.array(targets)[:, None]
    unigram = table.losses(alone, np.ones_like(alone, dtype=bool)).mean()
    assert losses["unigram"] == pytest.approx(unigram)
    assert losses["unigram"] == pytest.approx(math.log(38), abs=0.05)
    assert losses["trigram"] < losses["unigram"]  # the table has seen this text
    assert ngram_losses(tokens, held_out, 0, 60) == {}
    assert set(ngram_losses(tokens[:2], held_out, 1, 60)) == {"unigram", "bigram"}
