"""Span corruption. Oracles: cases computed by T5's own code; putting the targets back gives the
text again.
"""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
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
from tests.data.conformance import cases_of

NOISE = Noise()
VOCABULARY = SpecialIds(pad=0, eos=1, first_sentinel=999, num_sentinels=100)
# T5 rounds 0.15 x length in float32 when it masks and in float64 when it plans lengths; where the
# product ends in .5 the two differ by one token. We follow the plan, so that targets have the
# planned length: tokens and spans by hand.
FLOAT32_LENGTHS = {190: (28, 9), 350: (52, 17)}

noises = st.builds(
    Noise, st.sampled_from([0.01, 0.15, 0.3, 0.5, 0.85]), st.sampled_from([1.0, 2.5, 3.0, 11.0])
)


@pytest.mark.parametrize(("given", "expected"), cases_of("random_spans_noise_mask"))
def test_the_amount_of_noise_is_t5s(given, expected):
    noise = Noise(given["noise_density"], given["mean_noise_span_length"])
    counts = expected["noise_tokens"], expected["noise_spans"]
    assert count_noise(given["length"], noise) == FLOAT32_LENGTHS.get(given["length"], counts)
    mask = noise_mask(given["length"], noise, np.random.default_rng(5))
    assert bool(mask[0]) is expected["first_is_noise"]
    assert bool(mask[-1]) is expected["last_is_noise"]


@pytest.mark.parametrize(("given", "expected"), cases_of("random_spans_helper"))
def test_the_planned_lengths_are_t5s(given, expected):
    length = tokens_length(given["inputs_length"], NOISE, num_sentinels=200)
    assert length == expected["tokens_length"]
    assert corrupted_lengths(length, NOISE) == (given["inputs_length"], expected["targets_length"])


def test_512_inputs_hold_568_tokens_and_114_targets():
    assert tokens_length(512, NOISE, num_sentinels=100) == 568
    assert corrupted_lengths(568, NOISE) == (512, 114)


@given(st.integers(3, 700), noises)
def test_the_planned_length_is_the_longest_that_fits(inputs_length, noise):
    length = tokens_length(inputs_length, noise, num_sentinels=1000)
    inputs, targets = corrupted_lengths(length, noise)
    assert inputs <= inputs_length
    if noise.density != 0.5:
        assert corrupted_lengths(length + 1, noise)[0] > inputs_length
    else:  # T5's extra rule: at one half the targets are not longer than the inputs
        assert targets <= inputs_length


@pytest.mark.parametrize(("given", "expected"), cases_of("noise/nonnoise_span_to_unique_sentinel"))
def test_sentinels_descend_and_none_closes_the_targets(given, expected):
    ids = SpecialIds(0, 1, given["vocab_size"] - 1, 100)
    inputs, targets = corrupt(
        np.array(given["tokens"]), np.array(given["noise_mask"], dtype=bool), ids
    )
    assert inputs.tolist() == [*expected["inputs"], 1]
    assert targets.tolist() == [*expected["targets"], 1]


@pytest.mark.parametrize(
    ("function", "hidden"),
    [("drop_noise_tokens", "noise"), ("drop_nonnoise_tokens", "everything else")],
)
def test_without_sentinels_the_two_sides_are_the_text_kept_and_the_text_hidden(function, hidden):
    for case, expected in cases_of(function):
        mask = np.array(case["noise_mask"], dtype=bool)
        inputs, targets = corrupt(np.array(case["tokens"]), mask, VOCABULARY)
        side = inputs if hidden == "noise" else targets
        assert [token for token in side.tolist() if 1 < token < 900] == expected


def splice(inputs: list[int], targets: list[int]) -> list[int]:
    """Puts what stands behind each sentinel of the targets in that sentinel's place in the inputs."""
    hidden: dict[int, list[int]] = {}
    for token in targets[:-1]:
        if token > 900:
            hidden[token] = []
        else:
            hidden[next(reversed(hidden))].append(token)
    return [text for token in inputs[:-1] for text in hidden.get(token, [token])]


@given(st.integers(2, 600), st.integers(0, 2**32), noises)
def test_putting_the_targets_back_gives_the_text(length, seed, noise):
    text = np.random.default_rng(seed).integers(2, 900, size=length)
    before = text.copy()
    mask = noise_mask(length, noise, np.random.default_rng(seed))
    masked, spans = count_noise(length, noise)
    inputs, targets = corrupt(
        text, mask, VOCABULARY._replace(num_sentinels=1000, first_sentinel=5000)
    )
    assert mask.sum() == masked
    assert (len(inputs), len(targets)) == corrupted_lengths(length, noise)
    sentinels = list(range(5000, 5000 - spans, -1))
    assert [token for token in inputs.tolist() if token > 900] == sentinels
    assert [token for token in targets.tolist() if token > 900] == sentinels
    assert inputs[-1] == targets[-1] == 1
    assert splice(inputs.tolist(), targets.tolist()) == text.tolist()
    assert (text == before).all()


@given(st.integers(2, 600), st.integers(0, 2**32), noises)
def test_a_mask_begins_with_text_ends_with_noise_and_has_the_planned_spans(length, seed, noise):
    mask = noise_mask(length, noise, np.random.default_rng(seed))
    assert not mask[0]
    assert mask[-1]
    assert (np.diff(mask.astype(int)) == 1).sum() == count_noise(length, noise)[1]


def test_one_token_alone_has_no_noise():
    assert noise_mask(1, NOISE, np.random.default_rng(0)).tolist() == [False]
    assert count_noise(1, NOISE) == (0, 0)


def test_every_division_into_spans_is_equally_likely():
    # 7 tokens, 4 of them noise in 2 spans: C(3,1) divisions of the noise times C(2,1) of the text
    # are 6 masks.
    rng = np.random.default_rng(3)
    noise = Noise(0.57, 2.0)
    assert count_noise(7, noise) == (4, 2)
    drawn = Counter(tuple(noise_mask(7, noise, rng).tolist()) for _ in range(6_000))
    assert len(drawn) == 6
    assert all(
        850 < count < 1_150 for count in drawn.values()
    )  # 1,000 expected; 5 standard deviations are 144


def test_half_a_token_is_rounded_to_even_whatever_the_float():
    assert count_noise(190, NOISE)[0] == 28  # 28.5
    assert count_noise(210, NOISE)[0] == 32  # 31.5
    assert count_noise(350, NOISE)[0] == 52  # 52.5; in float32 a little more


def test_more_spans_than_sentinels_are_refused():
    with pytest.raises(
        ConfigError,
        match="inputs_length 2048 masks 114 spans, but the vocabulary has 100 sentinels",
    ):
        tokens_length(2048, NOISE, num_sentinels=100)


def test_inputs_without_room_for_a_span_are_refused():
    assert tokens_length(3, NOISE, num_sentinels=100) == 2
    with pytest.raises(ConfigError, match="inputs_length is 2; expected at least 3"):
        tokens_length(2, NOISE, num_sentinels=100)


@pytest.mark.parametrize("noise", [Noise(0.0, 3.0), Noise(1.0, 3.0), Noise(0.15, 0.5)])
def test_noise_out_of_range_is_refused(noise):
    with pytest.raises(
        ConfigError, match=r"(noise_density|mean_noise_span_length) is .*; expected a finite number"
    ):
        tokens_length(64, noise, num_sentinels=100)
