"""Batches as a pure function of the step: the position of a run in its data is one integer."""

import hashlib
import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from moe.checks import check_integer
from moe.data.packing import LONGEST_ROW, WHY_LONGEST_ROW, Example, Tokens, fill_row, pack_rows
from moe.data.span_corruption import Noise, corrupt, corrupted_lengths, noise_mask, tokens_length
from moe.data.tokenizer import SpecialIds
from moe.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

Batch = dict[str, Tensor]
"""Keyword arguments of a model's forward."""

Sentinels = Literal["none", "one"]
"""Which sentinels stand in pairs of texts: none, or one at the end of the input and the front of the target."""

ALL_ROWS = slice(None)

LARGEST_BATCH = 2**20
"""Most rows of a batch."""

WHY_LARGEST_BATCH = "a batch is drawn at once"

_NOT_A_TARGET = -100
_ROUND_UP_TO = 8
_TEXTS_AT_ONCE = 4096  # lists of Python's integers take ten times the memory of arrays


class BatchSource(Protocol):
    """What a training loop reads."""

    @property
    def batch_size(self) -> int:
        """Rows of a batch."""
        ...

    @property
    def lengths(self) -> tuple[int, int] | None:
        """Tokens of every row in the encoder and the decoder, L and T; None when batches differ."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hash of data and settings: equal for sources that give the same batches."""
        ...

    def batch(self, step: int, rows: slice = ALL_ROWS) -> Batch:
        """Returns the batch of `step`, counted from 0: the same one however often and in whatever
        order it is asked.

        Args:
            step: Number of the batch.
            rows: Which of its rows to make; they are the same whoever makes the others.
        """
        ...


class SpanCorruptionSource:
    """Pre-training batches: chunks of a long text, each epoch in another order, corrupted anew each
    time.
    """

    def __init__(
        self,
        tokens: NDArray[np.int32],
        ids: SpecialIds,
        *,
        inputs_length: int,
        batch_size: int,
        seed: int,
        noise: Noise = Noise(),  # noqa: B008  an immutable tuple
    ) -> None:
        """Prepares the chunks.

        Args:
            tokens: <int32>[N] text without special tokens.
            ids: Special tokens.
            inputs_length: Encoder tokens of an example, L; the targets' length T follows.
            batch_size: Examples in a batch.
            seed: Another seed gives another order and other masks.
            noise: How much is masked.

        Raises:
            DataError: When the text is shorter than one chunk, or has ids that are not text.
            ConfigError: When a number is out of range, or `inputs_length` does not go with the
                noise and the sentinels.
        """
        check_source_numbers(seed, batch_size=batch_size)
        _check_text(tokens, ids)
        self.batch_size, self._ids, self._noise, self._seed = batch_size, ids, noise, seed
        self._length = tokens_length(inputs_length, noise, ids.num_sentinels)
        self.lengths = corrupted_lengths(self._length, noise)
        self.num_examples = tokens.size // self._length
        if self.num_examples == 0:
            raise DataError(
                f"The text has {tokens.size} tokens, less than one example of {self._length}. Give more text or a "
                "smaller inputs_length."
            )
        self._chunks = tokens[: self.num_examples * self._length].reshape(
            self.num_examples, self._length
        )
        settings = (inputs_length, batch_size, seed, *noise, *ids)
        self.fingerprint = fingerprint(
            np.ascontiguousarray(tokens).tobytes(), repr(settings).encode()
        )

    def batch(self, step: int, rows: slice = ALL_ROWS) -> Batch:
        """Returns `input_ids` <int64>[B, L] and `labels` <int64>[B, T]; all rows have full length."""
        positions = range(step * self.batch_size, (step + 1) * self.batch_size)[rows]
        pairs = [self._example(position) for position in positions]
        inputs, targets = (np.stack(side).astype(np.int64) for side in zip(*pairs, strict=True))
        return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(targets)}

    def _example(self, position: int) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
        """Returns inputs and targets of the example at `position`, counted over all epochs."""
        epoch, place = divmod(position, self.num_examples)
        chunk = self._chunks[_permutation(self._seed, epoch, self.num_examples)[place]]
        rng = np.random.default_rng([self._seed, 1, position])
        return corrupt(chunk, noise_mask(self._length, self._noise, rng), self._ids)


class PairSource:
    """Fine-tuning batches: pairs of texts, padded to the longest of a batch or packed into full
    rows.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[str, str]],
        tokenizer: PreTrainedTokenizerFast,
        *,
        inputs_length: int,
        targets_length: int,
        batch_size: int,
        seed: int,
        pack: bool = False,
        sentinels: Sentinels = "none",
    ) -> None:
        """Tokenizes the pairs once.

        Args:
            pairs: Input and target texts.
            tokenizer: Knows the end token; a longer text is cut before it, and a warning says how
                many were.
            inputs_length: Most encoder tokens of a row.
            targets_length: Most decoder tokens of a row.
            batch_size: Rows in a batch.
            seed: Another seed gives another order.
            pack: Whether rows hold as many examples as fit.
            sentinels: `one` puts the first sentinel before the end token of an input, and before a
                target.

        Raises:
            DataError: When there are no pairs.
            ConfigError: When a number is out of range.
        """
        check_source_numbers(
            seed, batch_size=batch_size, inputs_length=inputs_length, targets_length=targets_length
        )
        if not pairs:
            raise DataError(
                "There are no training pairs. Give at least one (inputs, targets) pair."
            )
        self.batch_size, self._seed = batch_size, seed
        lengths = inputs_length, targets_length
        self.lengths = lengths if pack else None
        self._padding = SpecialIds.of(tokenizer).pad
        examples = encode_pairs(pairs, tokenizer, lengths, sentinels)
        self._examples = [examples[i] for i in _permutation(seed, -1, len(pairs))]
        self._rows = (
            pack_rows(self._examples, *lengths) if pack else [[i] for i in range(len(pairs))]
        )
        self.num_examples = len(pairs)
        settings = (*lengths, batch_size, seed, pack)  # sentinels show in the examples
        self.fingerprint = fingerprint(
            examples_fingerprint(self._examples), repr(settings).encode()
        )

    @property
    def num_rows(self) -> int:
        """Rows of an epoch; less than the examples when packed."""
        return len(self._rows)

    def batch(self, step: int, rows: slice = ALL_ROWS) -> Batch:
        """Returns `input_ids` and `segment_ids` <int64>[B, L], `labels` and `decoder_segment_ids`
        <int64>[B, T].

        L and T are the row lengths when packed, else those of the longest example of all rows,
        rounded up to 8.
        """
        packed = []
        for position in range(step * self.batch_size, (step + 1) * self.batch_size):
            epoch, place = divmod(position, self.num_rows)
            row = self._rows[_permutation(self._seed, epoch, self.num_rows)[place]]
            packed.append([self._examples[i] for i in row])
        return stack_rows(packed, self.lengths, self._padding, rows)


def encode_pairs(
    pairs: Sequence[tuple[str, str]],
    tokenizer: PreTrainedTokenizerFast,
    lengths: tuple[int, int],
    sentinels: Sentinels,
) -> list[Example]:
    """Returns the tokens <int32>[N] of both texts of each pair, in order; see `PairSource`.

    Raises:
        ConfigError: When a row has no room for a sentinel and an end token.
    """
    ids = SpecialIds.of(tokenizer)
    sentinel = [ids.first_sentinel] * (sentinels == "one")
    if min(lengths) <= len(sentinel):
        raise ConfigError(
            f"Rows of {lengths} tokens have no room for a sentinel and an end token. Allow 2."
        )
    inputs = _encode(
        "inputs", [p[0] for p in pairs], tokenizer, lengths[0], end=[*sentinel, ids.eos]
    )
    targets = _encode(
        "targets", [p[1] for p in pairs], tokenizer, lengths[1], start=sentinel, end=[ids.eos]
    )
    return list(zip(inputs, targets, strict=True))


def stack_rows(
    packed: Sequence[Sequence[Example]],
    lengths: tuple[int, int] | None,
    padding: int,
    rows: slice = ALL_ROWS,
) -> Batch:
    """Returns the batch of rows of examples; see `PairSource.batch`.

    Args:
        packed: The examples of each row of the whole batch.
        lengths: L and T; None for those of the longest row of all, rounded up.
        padding: Token that stands where no input is.
        rows: Which of them to make.
    """
    sides = [[[example[side] for example in row] for row in packed] for side in (0, 1)]
    lengths = lengths or (_round_up(sides[0]), _round_up(sides[1]))
    inputs, segments = _stack(sides[0][rows], lengths[0], padding)
    labels, decoder_segments = _stack(sides[1][rows], lengths[1], _NOT_A_TARGET)
    return {
        "input_ids": inputs,
        "segment_ids": segments,
        "labels": labels,
        "decoder_segment_ids": decoder_segments,
    }


def examples_fingerprint(examples: Sequence[Example]) -> bytes:
    """Returns a hash of encoded examples and their order."""
    digest = hashlib.sha256()
    for example in examples:
        for tokens in example:
            digest.update(
                len(tokens).to_bytes(4, "little") + np.asarray(tokens, dtype=np.int32).tobytes()
            )
    return digest.digest()


def _encode(
    side: str,
    texts: list[str],
    tokenizer: PreTrainedTokenizerFast,
    length: int,
    *,
    start: Sequence[int] = (),
    end: Sequence[int] = (),
) -> list[NDArray[np.int32]]:
    """Returns the tokens of each text between those of `start` and `end`, at most `length` in all."""
    num_cut = 0
    encoded: list[NDArray[np.int32]] = []
    for first in range(0, len(texts), _TEXTS_AT_ONCE):
        part: list[list[int]] = tokenizer(
            texts[first : first + _TEXTS_AT_ONCE], add_special_tokens=False, verbose=False
        )["input_ids"]
        num_cut += sum(len(start) + len(ids) + len(end) > length for ids in part)
        encoded += [
            np.asarray(enclose(ids, length, start=start, end=end), dtype=np.int32) for ids in part
        ]
    if num_cut:
        logger.warning(
            "%d of %d %s are longer than %d tokens and are cut.", num_cut, len(texts), side, length
        )
    return encoded


def enclose(
    ids: Sequence[int], length: int | None, *, start: Sequence[int] = (), end: Sequence[int] = ()
) -> list[int]:
    """Returns the tokens between those of `start` and `end`; only they are cut to have `length` in
    all.

    Args:
        ids: Tokens of a text.
        length: Most tokens with both ends; None for any number.
        start: What stands in front, e.g. a sentinel.
        end: What stands behind, e.g. the end token.

    Source:
        seqio `preprocessors.append_eos_after_trim` and `experimental.add_task_with_sentinels` at
        b898b9f. Differs: no.
    """
    room = len(ids) if length is None else max(0, length - len(start) - len(end))
    return [*start, *ids[:room], *end]


def check_source_numbers(seed: int, *, batch_size: int, **lengths: int) -> None:
    """Raises a ConfigError when a number of a source is out of range.

    Args:
        seed: Of all draws.
        batch_size: Rows of a batch.
        lengths: Tokens of a row, by the name of the setting.
    """
    check_integer("seed", seed, least=0)
    check_integer("batch_size", batch_size, least=1, most=LARGEST_BATCH, reason=WHY_LARGEST_BATCH)
    for name, length in lengths.items():
        check_integer(name, length, least=1, most=LONGEST_ROW, reason=WHY_LONGEST_ROW)


def _check_text(tokens: NDArray[np.int32], ids: SpecialIds) -> None:
    """Raises when a token could not be told from a sentinel, padding or end."""
    lowest_sentinel = ids.first_sentinel - ids.num_sentinels + 1
    if tokens.size and (tokens.min() <= max(ids.pad, ids.eos) or tokens.max() >= lowest_sentinel):
        raise DataError(
            f"The tokens range from {tokens.min()} to {tokens.max()}; expected text only, between the special tokens "
            f"(up to {max(ids.pad, ids.eos)}) and the sentinels (from {lowest_sentinel}). Tokenize the corpus again "
            "with this tokenizer."
        )


def fingerprint(*parts: bytes) -> str:
    """Returns a short hash of the parts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:16]


@lru_cache(maxsize=8)
def _permutation(seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    """Returns <int64>[size] the order of an epoch; -1 is the order in which rows are packed."""
    return np.random.default_rng([seed, 0, epoch + 1]).permutation(size)


def _round_up(rows: Sequence[Sequence[Tokens]]) -> int:
    """Returns the length of the longest row, rounded up."""
    longest = max(sum(map(len, row)) for row in rows)
    return -(-longest // _ROUND_UP_TO) * _ROUND_UP_TO


def _stack(rows: Sequence[Sequence[Tokens]], length: int, padding: int) -> tuple[Tensor, Tensor]:
    """Returns tokens and segment numbers <int64>[B, length] of rows of examples."""
    filled = [fill_row(row, length, padding) for row in rows]
    tokens, segments = (torch.from_numpy(np.stack(side)) for side in zip(*filled, strict=True))
    return tokens, segments
