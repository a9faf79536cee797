"""T5's span corruption: spans of tokens become sentinels in the inputs, and the targets hold what
they hid.
"""

from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe.checks import check_integer, check_number
from moe.data.packing import LONGEST_ROW, WHY_LONGEST_ROW
from moe.data.tokenizer import SpecialIds
from moe.errors import ConfigError

Tokens = NDArray[np.integer]

_DENSEST = 0.99


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
        noise: How much is masked.
        prefix: Put before the names in messages, e.g. `data.`.
    """
    reason = "with more, hundreds of tokens are hidden for each one that is seen"
    check_number(f"{prefix}noise_density", noise.density, above=0, most=_DENSEST, reason=reason)
    check_number(f"{prefix}mean_noise_span_length", noise.mean_span_length, least=1)


def count_noise(length: int, noise: Noise) -> tuple[int, int]:
    """Returns masked tokens and spans among `length` tokens.

    Both are rounded half to even on exact fractions of the decimal settings.

    Source:
        T5 preprocessors.py `random_spans_noise_mask` at e081111. Differs: that computes in float32
        and its twin, `random_spans_helper`, in float64; they disagree with each other at 39 lengths
        below 4,097 (190, 350, ...).
    """
    if length < 2:
        return 0, 0
    masked = min(max(round(length * Fraction(str(noise.density))), 1), length - 1)
    spans = max(1, round(masked / Fraction(str(noise.mean_span_length))))
    return masked, min(spans, masked, length - masked)


def corrupted_lengths(length: int, noise: Noise) -> tuple[int, int]:
    """Returns the tokens of inputs and targets, with sentinels and end, that `length` tokens
    become.
    """
    masked, spans = count_noise(length, noise)
    return length - masked + spans + 1, masked + spans + 1


def tokens_length(inputs_length: int, noise: Noise, num_sentinels: int) -> int:
    """Returns the most tokens whose corrupted inputs fit into `inputs_length`: 568 for 512.

    Raises:
        ConfigError: When the noise or the length is out of range, or `inputs_length` is too short
            for any span or needs more spans than there are sentinels.

    Source:
        T5 preprocessors.py `random_spans_helper` at e081111. Differs: no.
    """
    check_noise(noise)
    check_integer("inputs_length", inputs_length, least=1, most=LONGEST_ROW, reason=WHY_LONGEST_ROW)

    # Inputs never get shorter as there are more tokens, so that halving an interval finds the last
    # that fits.
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

    inputs, targets = corrupted_lengths(length, noise)
    if inputs > inputs_length:
        raise ConfigError(
            f"inputs_length is {inputs_length}; expected at least {inputs} tokens for one masked span."
        )
    if noise.density == 0.5 and targets > inputs_length:
        length -= 1
    spans = count_noise(length, noise)[1]
    if spans > num_sentinels:
        raise ConfigError(
            f"inputs_length {inputs_length} masks {spans} spans, but the vocabulary has {num_sentinels} sentinels. "
            "Choose shorter inputs, longer spans or less noise."
        )
    return length


def noise_mask(length: int, noise: Noise, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Returns <bool>[length]: which tokens are masked; it starts with kept tokens and ends with
    masked ones.
    """
    return spread_noise(length, *count_noise(length, noise), rng)


def spread_noise(
    length: int, masked: int, spans: int, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """Returns <bool>[length] with `masked` masked tokens in `spans` spans; all such masks are
    equally likely.

    Source:
        T5 preprocessors.py `random_spans_noise_mask` at e081111. Differs: no.
    """
    if spans == 0:
        return np.zeros(length, dtype=np.bool_)
    runs = np.stack(
        [_random_parts(length - masked, spans, rng), _random_parts(masked, spans, rng)], axis=1
    )
    return np.repeat(np.tile([False, True], spans), runs.ravel())


def corrupt(tokens: Tokens, mask: NDArray[np.bool_], ids: SpecialIds) -> tuple[Tokens, Tokens]:
    """Returns inputs and targets, each with the end token.

    Each run of masked tokens is one sentinel in the inputs; in the targets the same sentinel stands
    before what it hid. There is no closing sentinel.

    Args:
        tokens: <int>[N] text without special tokens.
        mask: <bool>[N] tokens to hide.
        ids: End token and sentinels.
    """
    inputs = _replace_runs(tokens, mask, ids)
    targets = _replace_runs(tokens, ~mask, ids)
    return np.append(inputs, ids.eos), np.append(targets, ids.eos)


def _random_parts(total: int, parts: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Returns <int64>[parts] positive sizes that add up to `total`, all compositions equally
    likely.
    """
    cuts = np.sort(rng.permutation(total - 1)[: parts - 1]) + 1
    return np.diff(np.concatenate(([0], cuts, [total])))


def _replace_runs(tokens: Tokens, mask: NDArray[np.bool_], ids: SpecialIds) -> Tokens:
    """Returns the tokens with every run of `mask` replaced by the next sentinel, descending from
    the first.
    """
    starts = mask & ~np.concatenate(([False], mask[:-1]))
    sentinels = ids.first_sentinel - (np.cumsum(starts) - 1)
    return np.where(starts, sentinels, tokens)[starts | ~mask]
