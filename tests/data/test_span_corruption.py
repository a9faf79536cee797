"""Span corruption. Oracle: putting the targets back gives the text again; what T5 makes of a text is
in tests/conformance.
"""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.data.span_corruption import (
    Noise,
    corrupt,
    corrupted_lengths,
    count_noise,
    noise_mask,
    tokens_length,
)
from moe.data.tokenizer import SpecialIds
from moe.errors import ConfigError

NOISE = Noise()
VOCABULARY = SpecialIds(pad=0, eos=1, first_sentinel=999, num_sentinels=100)
noises = st.builds(
    Noise, st.sampled_from([0.01, 0.15, 0.3, 0.5, 0.85]), st.sampled_from([1.0, 2.5, 3.0, 11.0])
)


@settings(max_examples=50)
@given(st.integers(3, 700), noises)
def test_the_planned_length_is_the_longest_that_fits(inputs_length, noise):
    length = tokens_length(inputs_length, noise, num_sentinels=1000)
    inputs, targets = corrupted_lengths(length, noise)
    assert inputs <= inputs_length
    if noise.density != 0.5:
        assert corrupted_lengths(length + 1, noise)[0] > inputs_length
    else:  # T5's extra rule: at one half the targets are not longer than the inputs
        assert targets <= inputs_length


def splice(inputs: list[int], targets: list[int]) -> list[int]:
    """Puts what stands behind each sentinel of the targets in that sentinel's place in the inputs."""
    hidden: dict[int, list[int]] = {}
    for token in targets[:-1]:
        if token > 900:
            hidden[token] = []
        else:
            hidden[next(reversed(hidden))].append(token)
    return [text for token in inputs[:-1] for text in hidden.get(token, [token])]


@settings(max_examples=50)
@given(st.integers(2, 600), st.integers(0, 2**32), noises)
def test_putting_the_targets_back_gives_the_text(length, seed, noise):
    text = np.random.default_rng(seed).integers(2, 900, size=length)
    before = text.copy()
    mask = noise_mask(length, noise, np.random.default_rng(seed))
    masked, spans = count_noise(length, noise)
    vocabulary = VOCABULARY._replace(num_sentinels=1000, first_sentinel=5000)
    inputs, targets = corrupt(text, mask, vocabulary)
    assert mask.sum() == masked
    assert not mask[0] and mask[-1]
    assert (np.diff(mask.astype(int)) == 1).sum() == spans
    assert (len(inputs), len(targets)) == corrupted_lengths(length, noise)
    sentinels = list(range(5000, 5000 - spans, -1))
    assert [token for token in inputs.tolist() if token > 900] == sentinels
    assert [token for token in targets.tolist() if token > 900] == sentinels
    assert inputs[-1] == targets[-1] == 1
    assert splice(inputs.tolist(), targets.tolist()) == text.tolist()
    assert (text == before).all()


def test_every_division_into_spans_is_equally_likely():
    # 7 tokens, 4 of them noise in 2 spans: C(3,1) divisions of the noise times C(2,1) of the text
    # are 6 masks.
    rng = np.random.default_rng(3)
    noise = Noise(0.57, 2.0)
    assert count_noise(7, noise) == (4, 2)
    drawn = Counter(tuple(noise_mask(7, noise, rng).tolist()) for _ in range(6_000))
    assert len(drawn) == 6
    assert all(850 < count < 1_150 for count in drawn.values())  # 5 standard deviations are 144


def test_half_a_token_is_rounded_to_even_whatever_the_float():
    assert count_noise(190, NOISE)[0] == 28  # 28.5
    assert count_noise(210, NOISE)[0] == 32  # 31.5
    assert count_noise(350, NOISE)[0] == 52  # 52.5; in float32 a little more
    assert count_noise(1, NOISE) == (0, 0)


def test_inputs_with_too_many_spans_or_without_room_for_one_are_refused():
    with pytest.raises(ConfigError, match="masks 114 spans, but the vocabulary has 100"):
        tokens_length(2048, NOISE, num_sentinels=100)
    assert tokens_length(3, NOISE, num_sentinels=100) == 2
    with pytest.raises(ConfigError, match="inputs_length is 2; expected at least 3"):
        tokens_length(2, NOISE, num_sentinels=100)
