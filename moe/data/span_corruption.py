"""T5's span corruption: sentinels hide spans of tokens in the inputs; the targets hold the spans."""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe.checks import check, check_integer, check_number
from moe.data.tokenizer import SpecialIds
from moe.errors import ConfigError

Tokens = NDArray[np.integer]

DENSEST = 0.99
"""Largest noise density."""


class Noise(NamedTuple):
    """How much is masked.

    Attributes:
        density: Share of tokens that are masked.
        mean_span_length: Mean length of a masked span in tokens.

    Source:
        T5 (arXiv:1910.10683) §3.1.4; ST-MoE (arXiv:2202.08906) uses the same.
    """

    density: float = 0.15
    mean_span_length: float = 3.0


def check_noise(noise: Noise, *, prefix: str = "") -> None:
    """Raises a ConfigError when nothing can be masked like this.

    Args:
        noise: Settings of the masking.
        prefix: Put before the names in messages, e.g. `data.`.
    """
    reason = "with more, hundreds of tokens are hidden for each one that is seen"
    check_number(f"{prefix}noise_density", noise.density, above=0, most=DENSEST, reason=reason)
    check_number(f"{prefix}mean_noise_span_length", noise.mean_span_length, least=1)


@lru_cache(maxsize=64)
def count_noise(length: int, noise: Noise) -> tuple[int, int]:
    """Returns the number of masked tokens and of masked spans among `length` tokens.

    Both are rounded half to even on exact fractions of the decimal settings.

    Source:
        T5 preprocessors.py `random_spans_noise_mask` at e081111. Differs: that computes in float32
        and its twin, `random_spans_helper`, in float64; they disagree with each other at 39 lengths
        below 4,097 (190, 350, ...).
    """
    if length < 2:
        return 0, 0

    # At least one token is masked, and one is kept.
    num_masked = round(length * Fraction(str(noise.density)))
    num_masked = min(max(num_masked, 1), length - 1)

    # Every span has a masked token, and a kept one before it.
    num_spans = max(1, round(num_masked / Fraction(str(noise.mean_span_length))))
    return num_masked, min(num_spans, num_masked, length - num_masked)


def corrupted_lengths(length: int, noise: Noise) -> tuple[int, int]:
    """Returns the lengths of inputs and targets that `length` tokens become, with the end tokens."""
    num_masked, num_spans = count_noise(length, noise)
    inputs_length = (length - num_masked) + num_spans + 1
    targets_length = num_masked + num_spans + 1
    return inputs_length, targets_length


def tokens_length(inputs_length: int, noise: Noise, num_sentinels: int) -> int:
    """Returns the maximum number of tokens whose corrupted inputs fit into `inputs_length`: 568 for
    512.

    Raises:
        ConfigError: When the noise or the length is out of range, or `inputs_length` is too short
            for any span or needs more spans than there are sentinels.

    Source:
        T5 preprocessors.py `random_spans_helper` at e081111. Differs: no.
    """
    check_noise(noise)
    check_integer("inputs_length", inputs_length, least=1)

    # More tokens never give shorter inputs, so bisection finds the last length that fits.
    length = max(2, inputs_length // 2)
    too_long = 2 * length
    while corrupted_lengths(too_long, noise)[0] <= inputs_length:
        too_long *= 2
    while too_long - length > 1:
        middle = (length + too_long) // 2
        if corrupted_lengths(middle, noise)[0] <= inputs_length:
            length = middle
        else:
            too_long = middle

    # T5's exception: with a density of one half, targets must not be longer than inputs.
    corrupted_inputs, corrupted_targets = corrupted_lengths(length, noise)
    expected = f"at least {corrupted_inputs} tokens for one masked span"
    check(corrupted_inputs <= inputs_length, "inputs_length", inputs_length, expected)
    if noise.density == 0.5 and corrupted_targets > inputs_length:
        length -= 1

    _, num_spans = count_noise(length, noise)
    if num_spans > num_sentinels:
        raise ConfigError(
            f"inputs_length {inputs_length} masks {num_spans} spans, but the vocabulary has "
            f"{num_sentinels} sentinels. Choose shorter inputs, longer spans or less noise."
        )
    return length


def noise_mask(length: int, noise: Noise, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Returns <bool>[length] whether a token is masked; see `noise_masks`."""
    return noise_masks(length, noise, [rng])[0]


def noise_masks(
    length: int, noise: Noise, rngs: Sequence[np.random.Generator]
) -> NDArray[np.bool_]:
    """Returns <bool>[B, length] whether a token is masked; each row is drawn from its generator.

    A mask starts with kept tokens and ends with masked ones.
    """
    num_masked, num_spans = count_noise(length, noise)
    return random_spans_masks(length, num_masked, num_spans, rngs)


def random_spans_masks(
    length: int, num_masked: int, num_spans: int, rngs: Sequence[np.random.Generator]
) -> NDArray[np.bool_]:
    """Returns <bool>[B, length], drawn evenly from all masks of so many masked tokens and spans.

    Source:
        T5 preprocessors.py `random_spans_noise_mask` at e081111. Differs: a row for each generator.
    """
    num_rows = len(rngs)
    if num_spans == 0:
        return np.zeros((num_rows, length), dtype=np.bool_)

    # num_spans - 1 of the borders between neighbouring kept tokens, and between masked ones.
    kept_borders = np.empty((num_rows, num_spans - 1), dtype=np.int64)  # [B, spans - 1]
    masked_borders = np.empty_like(kept_borders)  # [B, spans - 1]
    num_kept = length - num_masked
    for row, rng in enumerate(rngs):
        kept_borders[row] = rng.permutation(num_kept - 1)[: num_spans - 1]
        masked_borders[row] = rng.permutation(num_masked - 1)[: num_spans - 1]

    # Kept and masked spans alternate, and each has at least one token.
    kept_lengths = _part_lengths(kept_borders, num_kept)  # [B, spans]
    masked_lengths = _part_lengths(masked_borders, num_masked)  # [B, spans]
    span_lengths = np.stack([kept_lengths, masked_lengths], axis=-1)  # [B, spans, 2]
    is_masked = np.tile([False, True], num_rows * num_spans)  # [B spans 2]
    return np.repeat(is_masked, span_lengths.ravel()).reshape(num_rows, length)


def _part_lengths(borders: NDArray[np.int64], total: int) -> NDArray[np.int64]:
    """Returns <int64>[B, parts] positive numbers that sum to `total` in every row.

    Args:
        borders: <int64>[B, parts - 1] borders between neighbouring units, from 0, all different.
        total: Units of a row.
    """
    num_rows, num_borders = borders.shape
    ends = np.empty((num_rows, num_borders + 2), dtype=np.int64)  # [B, parts + 1]
    ends[:, 0] = 0
    ends[:, 1:-1] = np.sort(borders, axis=1) + 1
    ends[:, -1] = total
    return np.diff(ends, axis=1)


def corrupt(tokens: Tokens, masks: NDArray[np.bool_], ids: SpecialIds) -> tuple[Tokens, Tokens]:
    """Returns inputs <int>[..., L] and targets <int>[..., T], each with the end token.

    Each run of masked tokens is one sentinel in the inputs; in the targets the same sentinel comes
    before the tokens that it hides. There is no closing sentinel.

    Args:
        tokens: <int>[..., N] text without special tokens.
        masks: <bool>[..., N] tokens to hide: as many tokens and runs in every row.
        ids: End token and sentinels.
    """
    return _replace_runs(tokens, masks, ids), _replace_runs(tokens, ~masks, ids)


def _replace_runs(tokens: Tokens, masks: NDArray[np.bool_], ids: SpecialIds) -> Tokens:
    """Returns each row with the n-th run of its mask replaced by the n-th sentinel, and the end."""
    # The first token of each masked run.
    starts = masks.copy()
    starts[..., 1:] &= ~masks[..., :-1]

    # The ids of the sentinels descend from the first.
    sentinels = ids.first_sentinel + 1 - np.cumsum(starts, axis=-1)
    replaced = np.where(starts, sentinels, tokens)

    # The rest of each row, followed by the end token.
    rows = tokens.shape[:-1]
    left = replaced[starts | ~masks].reshape(*rows, -1)
    ends = np.full((*rows, 1), ids.eos)
    return np.concatenate([left, ends], axis=-1)
