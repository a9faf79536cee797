"""Batches as a pure function of the step: the position of a run in its data is one integer."""

import hashlib
import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, Protocol

import numpy as np
import torch
from einops import rearrange
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
        """Returns the batch of a step: the same one however often, and in whatever order, it is asked.

        Args:
            step: Number of the batch, from 0.
            rows: Rows of the batch to make; they do not depend on which others are made.
        """
        ...


class SpanCorruptionSource:
    """Pre-training batches: chunks of a long text, in another order and corrupted anew each epoch."""

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
        self.batch_size = batch_size
        self._ids = ids
        self._noise = noise
        self._seed = seed

        # Chunks of as many tokens as corruption shortens to the lengths of a row.
        self.tokens_per_example = tokens_length(inputs_length, noise, ids.num_sentinels)
        self.lengths = corrupted_lengths(self.tokens_per_example, noise)
        self.num_examples = tokens.size // self.tokens_per_example
        if self.num_examples == 0:
            raise DataError(
                f"The text has {tokens.size} tokens, less than one example of "
                f"{self.tokens_per_example}. Give more text or a smaller inputs_length."
            )
        whole_chunks = tokens[: self.num_examples * self.tokens_per_example]
        self._chunks = rearrange(whole_chunks, "(n c) -> n c", c=self.tokens_per_example)

        settings = (inputs_length, batch_size, seed, *noise, *ids)
        text_bytes = np.ascontiguousarray(tokens).tobytes()
        self.fingerprint = fingerprint(text_bytes, repr(settings).encode())

    def batch(self, step: int, rows: slice = ALL_ROWS) -> Batch:
        """Returns `input_ids` <int64>[B, L] and `labels` <int64>[B, T]; all rows have full length."""
        positions = range(step * self.batch_size, (step + 1) * self.batch_size)[rows]
        examples = [self._example(position) for position in positions]

        inputs = np.stack([example[0] for example in examples]).astype(np.int64)  # [B, L]
        targets = np.stack([example[1] for example in examples]).astype(np.int64)  # [B, T]
        return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(targets)}

    def _example(self, position: int) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
        """Returns inputs and targets of the example at `position`, counted over all epochs."""
        epoch, index = divmod(position, self.num_examples)
        order = _epoch_order(self._seed, epoch, self.num_examples)
        chunk = self._chunks[order[index]]

        # The mask follows from (seed, position), so that every epoch masks anew.
        rng = np.random.default_rng([self._seed, 1, position])
        return corrupt(chunk, noise_mask(self.tokens_per_example, self._noise, rng), self._ids)


class PairSource:
    """Fine-tuning batches: pairs of texts, padded to the longest of a batch or packed into rows."""

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
            tokenizer: Tokenizer with an end token. A text that is too long is truncated before it,
                and a warning says how many were.
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
        self.batch_size = batch_size
        self.num_examples = len(pairs)
        self._seed = seed
        self._padding = SpecialIds.of(tokenizer).pad

        # Epoch -1 is the order in which examples are packed.
        row_lengths = (inputs_length, targets_length)
        examples = encode_pairs(pairs, tokenizer, row_lengths, sentinels)
        packing_order = _epoch_order(seed, -1, len(pairs))
        self._examples = [examples[index] for index in packing_order]

        # The indices of the examples in each row.
        if pack:
            self.lengths = row_lengths
            self._rows = pack_rows(self._examples, *row_lengths)
        else:
            self.lengths = None
            self._rows = [[index] for index in range(len(pairs))]

        settings = (*row_lengths, batch_size, seed, pack)  # sentinels show in the examples
        hashed_examples = examples_fingerprint(self._examples)
        self.fingerprint = fingerprint(hashed_examples, repr(settings).encode())

    @property
    def num_rows(self) -> int:
        """Rows of an epoch; less than the examples when packed."""
        return len(self._rows)

    def batch(self, step: int, rows: slice = ALL_ROWS) -> Batch:
        """Returns a batch of pairs.

        L and T are the row lengths when packed, else those of the longest example of all rows,
        rounded up to 8.

        Returns:
            `input_ids` and `segment_ids` <int64>[B, L], `labels` and `decoder_segment_ids`
            <int64>[B, T].
        """
        row_examples = []
        for position in range(step * self.batch_size, (step + 1) * self.batch_size):
            epoch, index = divmod(position, self.num_rows)
            order = _epoch_order(self._seed, epoch, self.num_rows)
            row = self._rows[order[index]]
            row_examples.append([self._examples[example] for example in row])
        return stack_rows(row_examples, self.lengths, self._padding, rows)


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
    sentinel = [ids.first_sentinel] if sentinels == "one" else []
    if min(lengths) <= len(sentinel):
        raise ConfigError(
            f"Rows of {lengths} tokens have no room for a sentinel and an end token. Allow 2."
        )

    # An input ends with the sentinel, and the target begins with it.
    input_texts = [pair[0] for pair in pairs]
    target_texts = [pair[1] for pair in pairs]
    inputs = _encode("inputs", input_texts, tokenizer, lengths[0], end=[*sentinel, ids.eos])
    targets = _encode("targets", target_texts, tokenizer, lengths[1], start=sentinel, end=[ids.eos])
    return list(zip(inputs, targets, strict=True))


def stack_rows(
    row_examples: Sequence[Sequence[Example]],
    lengths: tuple[int, int] | None,
    padding: int,
    rows: slice = ALL_ROWS,
) -> Batch:
    """Returns the batch of rows of examples; see `PairSource.batch`.

    Args:
        row_examples: Examples of each row of the whole batch.
        lengths: L and T; None for those of the longest row of all, rounded up.
        padding: Token of input positions without an input.
        rows: Rows of the batch to make.
    """
    input_rows: list[list[Tokens]] = []
    target_rows: list[list[Tokens]] = []
    for examples in row_examples:
        input_rows.append([inputs for inputs, _ in examples])
        target_rows.append([targets for _, targets in examples])

    # The length is that of the whole batch, whichever rows are made.
    if lengths is None:
        lengths = (_padded_length(input_rows), _padded_length(target_rows))
    inputs, segments = _stack(input_rows[rows], lengths[0], padding)  # [B, L]
    labels, decoder_segments = _stack(target_rows[rows], lengths[1], _NOT_A_TARGET)  # [B, T]
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
            digest.update(len(tokens).to_bytes(4, "little"))
            digest.update(np.asarray(tokens, dtype=np.int32).tobytes())
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
    """Returns the tokens of each text between `start` and `end`, at most `length` in all."""
    num_truncated = 0
    encoded: list[NDArray[np.int32]] = []

    # A few thousand texts at once: the tokenizer's lists are large.
    for first in range(0, len(texts), _TEXTS_AT_ONCE):
        chunk = texts[first : first + _TEXTS_AT_ONCE]
        chunk_ids: list[list[int]] = tokenizer(chunk, add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
        for ids in chunk_ids:
            num_truncated += len(start) + len(ids) + len(end) > length
            enclosed = enclose(ids, length, start=start, end=end)
            encoded.append(np.asarray(enclosed, dtype=np.int32))

    if num_truncated:
        logger.warning(
            "%d of %d %s are longer than %d tokens and are truncated.",
            num_truncated,
            len(texts),
            side,
            length,
        )
    return encoded


def enclose(
    ids: Sequence[int], length: int | None, *, start: Sequence[int] = (), end: Sequence[int] = ()
) -> list[int]:
    """Returns tokens between `start` and `end`, truncated so that there are `length` in all.

    Args:
        ids: Tokens of a text; they alone are truncated.
        length: Most tokens with both ends; None for any number.
        start: Tokens in front, e.g. a sentinel.
        end: Tokens behind, e.g. the end token.

    Source:
        seqio `preprocessors.append_eos_after_trim` and `experimental.add_task_with_sentinels` at
        b898b9f. Differs: no.
    """
    room = len(ids) if length is None else max(0, length - len(start) - len(end))
    return [*start, *ids[:room], *end]


def check_source_numbers(seed: int, *, batch_size: int, **lengths: int) -> None:
    """Raises a ConfigError when a number of a source is out of range.

    Args:
        seed: Seed of all draws.
        batch_size: Rows of a batch.
        lengths: Tokens of a row, by the name of the setting.
    """
    check_integer("seed", seed, least=0)
    check_integer("batch_size", batch_size, least=1, most=LARGEST_BATCH, reason=WHY_LARGEST_BATCH)
    for name, length in lengths.items():
        check_integer(name, length, least=1, most=LONGEST_ROW, reason=WHY_LONGEST_ROW)


def _check_text(tokens: NDArray[np.int32], ids: SpecialIds) -> None:
    """Raises when a token could not be told from a sentinel, padding or end."""
    if not tokens.size:
        return
    highest_special = max(ids.pad, ids.eos)
    lowest_sentinel = ids.first_sentinel - ids.num_sentinels + 1
    if tokens.min() <= highest_special or tokens.max() >= lowest_sentinel:
        raise DataError(
            f"The tokens range from {tokens.min()} to {tokens.max()}; expected text only, between "
            f"the special tokens (up to {highest_special}) and the sentinels (from "
            f"{lowest_sentinel}). Tokenize the corpus again with this tokenizer."
        )


def fingerprint(*parts: bytes) -> str:
    """Returns a short hash of the parts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:16]


@lru_cache(maxsize=8)
def _epoch_order(seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    """Returns <int64>[size] the order of an epoch; -1 is the order in which rows are packed."""
    return np.random.default_rng([seed, 0, epoch + 1]).permutation(size)


def _padded_length(rows: Sequence[Sequence[Tokens]]) -> int:
    """Returns the length of the longest row, rounded up."""
    longest = 0
    for row in rows:
        longest = max(longest, sum(map(len, row)))
    return -(-longest // _ROUND_UP_TO) * _ROUND_UP_TO


def _stack(rows: Sequence[Sequence[Tokens]], length: int, padding: int) -> tuple[Tensor, Tensor]:
    """Returns tokens and segment numbers <int64>[B, length] of rows of examples."""
    tokens = np.empty((len(rows), length), dtype=np.int64)  # [B, length]
    segments = np.empty_like(tokens)  # [B, length]
    for index, row in enumerate(rows):
        tokens[index], segments[index] = fill_row(row, length, padding)
    return torch.from_numpy(tokens), torch.from_numpy(segments)
