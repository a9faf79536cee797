"""Pairs of texts as tokens, cached on disk.

Comes after `tokens`, before `pipeline` and `mixture`, which make batches of them.
"""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from moe.data.language_codes import by_languages
from moe.data.packing import Example
from moe.data.tokenizer import SpecialIds, enclose, input_frame, target_frame, text_ids
from moe.data.tokens import Arrays, kept_arrays, tokens_name

logger = logging.getLogger(__name__)

Sentinels = Literal["none", "one"]
"""Sentinels of a pair of texts: none, or one at the end of the input and at the front of the target."""

_NAMES = ("tokens", "lengths", "num_truncated")
_WORTH_KEEPING = 2**17  # characters; fewer are tokenized in a tenth of a second
_TEXTS_AT_ONCE = 4096  # lists of Python's integers take ten times the memory of arrays


class Side(NamedTuple):
    """How the texts of one side become tokens.

    Attributes:
        name: `inputs` or `targets`.
        length: Maximum number of tokens of a text.
        start: Tokens to prepend to each.
        end: Tokens to append to each.
    """

    name: str
    length: int
    start: Sequence[int]
    end: Sequence[int]


def encode_pairs(
    pairs: Sequence[tuple[Any, ...]],
    tokenizer: PreTrainedTokenizerFast,
    lengths: tuple[int, int],
    sentinels: Sentinels,
    keep_in: Path | None = None,
) -> list[Example]:
    """Returns the tokens <int32>[N] of both texts of each pair, in order; see `PairSource`.

    Args:
        pairs: Input and target texts; also the codes of their languages, if they are not the
            tokenizer's.
        tokenizer: Tokenizer with an end token.
        lengths: Maximum number of tokens of an input and of a target.
        sentinels: See `PairSource`.
        keep_in: Folder that keeps the tokens of many texts for the next run; None for none.

    Raises:
        ConfigError: When a language is missing or unknown.
    """
    # For few texts, a file costs more time than it saves.
    num_characters = sum(len(inputs) + len(targets) for inputs, targets, *_ in pairs)
    if num_characters < _WORTH_KEEPING or not tokenizer.is_fast:
        keep_in = None

    examples: dict[int, Example] = {}
    for of_languages, numbers in by_languages(tokenizer, [pair[2:] for pair in pairs]):
        inputs_side, targets_side = _sides(of_languages, lengths, sentinels)
        inputs = _encode([pairs[n][0] for n in numbers], of_languages, inputs_side, keep_in)
        targets = _encode([pairs[n][1] for n in numbers], of_languages, targets_side, keep_in)
        examples.update(zip(numbers, zip(inputs, targets, strict=True), strict=True))
    return [examples[number] for number in range(len(pairs))]


def _sides(
    tokenizer: PreTrainedTokenizerFast, lengths: tuple[int, int], sentinels: Sentinels
) -> tuple[Side, Side]:
    """Returns how inputs and targets become tokens."""
    # An input ends with the sentinel, and a target begins with it.
    sentinel = [SpecialIds.of(tokenizer).first_sentinel] if sentinels == "one" else []
    start, end = input_frame(tokenizer)
    inputs = Side("inputs", lengths[0], start=start, end=[*sentinel, *end])
    start, end = target_frame(tokenizer)
    return inputs, Side("targets", lengths[1], start=[*sentinel, *start], end=end)


def _encode(
    texts: list[str], tokenizer: PreTrainedTokenizerFast, side: Side, keep_in: Path | None
) -> list[NDArray[np.int32]]:
    """Returns the tokens of each text of a side: views of one array, which may be on disk."""
    path = None
    if keep_in is not None:
        # Besides texts and tokenizer, these determine the tokens.
        name = tokens_name(texts, tokenizer, repr((side, tokenizer.split_special_tokens)))
        path = keep_in / name
    arrays = kept_arrays(path, _NAMES, partial(tokenize_side, texts, tokenizer, side))

    # Warn in every run, also when the tokens were read from disk.
    _warn_of_losses(texts, tokenizer, side, arrays)

    # Views, so that a rank reads only the texts of its rows.
    starts = np.cumsum(arrays["lengths"]) - arrays["lengths"]
    return np.split(arrays["tokens"], starts)[1:]


def _warn_of_losses(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerFast, side: Side, arrays: Arrays
) -> None:
    """Warns of texts that lose tokens or characters, from the result of `tokenize_side`."""
    texts_of_side = f"of {len(texts)} {side.name}"
    num_truncated = arrays["num_truncated"].item()
    if num_truncated:
        message = "%d %s are longer than %d tokens and are truncated."
        logger.warning(message, num_truncated, texts_of_side, side.length)

    # The number of the text of each unknown token.
    unknown = tokenizer.unk_token_id
    numbers = np.repeat(np.arange(len(texts)), arrays["lengths"])[arrays["tokens"] == unknown]
    if numbers.size:
        text = texts[numbers[0]]
        of_side = partial(text_ids, tokenizer, targets=side.name == "targets")
        lost = "".join(letter for letter in text if unknown in of_side([letter])[0])
        message = "%d %s have characters that the vocabulary lacks, such as %r: all are one token."
        logger.warning(message, np.unique(numbers).size, texts_of_side, lost[:1])


def tokenize_side(texts: list[str], tokenizer: PreTrainedTokenizerFast, side: Side) -> Arrays:
    """Returns the `tokens` of all texts, how many each has (`lengths`), and `num_truncated` texts."""
    room = side.length - len(side.start) - len(side.end)
    num_truncated = 0
    encoded = [np.empty(0, dtype=np.int32)]

    # A few thousand texts at once: the tokenizer's lists are large.
    for first in range(0, len(texts), _TEXTS_AT_ONCE):
        chunk = texts[first : first + _TEXTS_AT_ONCE]
        for ids in text_ids(tokenizer, chunk, markers=True, targets=side.name == "targets"):
            num_truncated += len(ids) > room
            enclosed = enclose(ids, side.length, start=side.start, end=side.end)
            encoded.append(np.asarray(enclosed, dtype=np.int32))

    # Texts are stored one after the other on disk.
    lengths = [len(tokens) for tokens in encoded[1:]]
    return {
        "tokens": np.concatenate(encoded),
        "lengths": np.array(lengths, dtype=np.int32),
        "num_truncated": np.array([num_truncated], dtype=np.int32),
    }
