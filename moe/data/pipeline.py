"""Batches as a pure function of the step: the position of a run in its data is one integer."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from moe.data.chunks import Text, WholeText, epoch_order
from moe.data.packing import Example, Tokens, example_rows, fill_row
from moe.data.pairs import Sentinels, encode_pairs
from moe.data.span_corruption import Noise, corrupt, corrupted_lengths, noise_masks, tokens_length
from moe.data.tokenizer import SpecialIds, has_sentinels, pad_and_eos
from moe.errors import ConfigError, DataError

Batch = dict[str, Tensor]
"""Keyword arguments of a model's forward."""

ALL_ROWS = slice(None)

_NOT_A_TARGET = -100
_ROUND_UP_TO = 8


class BatchSource(Protocol):
    """Batches for a training loop."""

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
        """Returns the batch of a step, the same one in every call and in any order of calls.

        Args:
            step: Number of the batch, from 0.
            rows: Rows of the batch to make; they do not depend on which others are made.
        """
        ...


class SpanCorruptionSource:
    """Pre-training batches: chunks of a long text, reshuffled and corrupted differently in each epoch.

    Attributes:
        tokens_per_example: Tokens of a chunk.
        num_examples: Chunks of an epoch; None for a stream.
    """

    def __init__(
        self,
        text: NDArray[np.int32] | Text,
        ids: SpecialIds,
        *,
        inputs_length: int,
        batch_size: int,
        seed: int,
        noise: Noise = Noise(),  # noqa: B008  an immutable tuple
    ) -> None:
        """Prepares the chunks.

        Args:
            text: Text without special tokens: <int32>[N], or one that is read as a stream.
            ids: Special tokens.
            inputs_length: Encoder tokens of an example, L; the targets' length T follows.
            batch_size: Examples in a batch.
            seed: Different seeds give different orders and masks.
            noise: How much is masked.

        Raises:
            DataError: When the text is shorter than one chunk.
            ConfigError: When `inputs_length` does not fit the noise and the sentinels.
        """
        if isinstance(text, np.ndarray):
            text = WholeText(text)
        self.batch_size = batch_size
        self.padding = ids.pad
        self._ids = ids
        self._noise = noise
        self._seed = seed

        # Chunks of as many tokens as corruption shortens to the lengths of a row.
        self.tokens_per_example = tokens_length(inputs_length, noise, ids.num_sentinels)
        self.lengths = corrupted_lengths(self.tokens_per_example, noise)
        self._text = text
        self._chunks = text.chunks(self.tokens_per_example, seed)
        self.num_examples = self._chunks.num_examples

        settings = (inputs_length, batch_size, seed, *noise, *ids)
        self.fingerprint = fingerprint(text.fingerprint, repr(settings).encode())

    def batch(self, step: int, rows: slice = ALL_ROWS) -> Batch:
        """Returns `input_ids` <int64>[B, L] and `labels` <int64>[B, T]; all rows have full length."""
        chunks, masks = self.masked_text(step, rows)
        inputs, targets = corrupt(chunks, masks, self._ids)  # [B, L], [B, T]
        return {
            "input_ids": torch.from_numpy(inputs.astype(np.int64, copy=False)),
            "labels": torch.from_numpy(targets.astype(np.int64, copy=False)),
        }

    def masked_text(
        self, step: int, rows: slice = ALL_ROWS
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Returns the text <int32>[B, N] of a batch and which of its tokens <bool>[B, N] are masked."""
        chunks: list[NDArray[np.int32]] = []
        rngs: list[np.random.Generator] = []
        for position in range(step * self.batch_size, (step + 1) * self.batch_size)[rows]:
            chunks.append(self._chunks.at(position))

            # The mask follows from (seed, position), so every epoch has different masks.
            rngs.append(np.random.default_rng([self._seed, 1, position]))

        masks = noise_masks(self.tokens_per_example, self._noise, rngs)  # [B, N]
        return np.stack(chunks), masks

    def shorter(self, inputs_length: int) -> "SpanCorruptionSource":
        """Returns the source of shorter examples of the same text, as many for a row as fit into it.

        Args:
            inputs_length: Encoder tokens of a shorter example.

        Raises:
            ConfigError: When fewer than two fit.
        """
        num_tokens = tokens_length(inputs_length, self._noise, self._ids.num_sentinels)
        lengths = corrupted_lengths(num_tokens, self._noise)
        per_row = min(row // short for row, short in zip(self.lengths, lengths, strict=True))
        if per_row < 2:
            raise ConfigError(
                f"data.short_inputs_length is {inputs_length}: an example has {lengths[0]} input and "
                f"{lengths[1]} target tokens, and a row has {self.lengths[0]} and {self.lengths[1]}. "
                "Choose a length at which two examples fit into a row."
            )
        return SpanCorruptionSource(
            self._text,
            self._ids,
            inputs_length=inputs_length,
            batch_size=self.batch_size * per_row,
            seed=self._seed,
            noise=self._noise,
        )


class ShortExamplesFirst:
    """Batches of which the first have several short examples in each row instead of one long one.

    A fresh model has to find the sentinel of a masked span in its input before it can use the text
    around it. It learns this sooner among few tokens, and then soon finds it among many
    (docs/results.md). Rows have the same lengths throughout; examples of a row do not see each
    other.
    """

    def __init__(self, source: SpanCorruptionSource, inputs_length: int, steps: int) -> None:
        """Prepares the short examples.

        Args:
            source: Batches of all later steps.
            inputs_length: Encoder tokens of a short example.
            steps: Number of batches with short examples.

        Raises:
            ConfigError: When fewer than two short examples fit into a row.
        """
        self.batch_size = source.batch_size
        self.lengths = source.lengths
        self._source = source
        self._short = source.shorter(inputs_length)
        self._per_row = self._short.batch_size // source.batch_size
        self._steps = steps
        settings = (source.fingerprint, self._short.fingerprint, steps)
        self.fingerprint = fingerprint(repr(settings).encode())

    def batch(self, step: int, rows: slice = ALL_ROWS) -> Batch:
        """Returns `input_ids` <int64>[B, L] and `labels` <int64>[B, T]; of short examples also their
        `segment_ids` <int64>[B, L] and `decoder_segment_ids` <int64>[B, T], 0 for padding.
        """
        if step >= self._steps:
            return self._source.batch(step, rows)

        start, stop, _ = rows.indices(self.batch_size)
        examples = self._short.batch(step, slice(start * self._per_row, stop * self._per_row))
        inputs_length, targets_length = self.lengths
        inputs, segments = self._pack(examples["input_ids"], inputs_length, self._short.padding)
        labels, decoder_segments = self._pack(examples["labels"], targets_length, _NOT_A_TARGET)
        return {
            "input_ids": inputs,
            "segment_ids": segments,
            "labels": labels,
            "decoder_segment_ids": decoder_segments,
        }

    def _pack(self, examples: Tensor, length: int, padding: int) -> tuple[Tensor, Tensor]:
        """Returns rows <int64>[B, length] of examples <int64>[B * n, l], and their segments."""
        tokens = rearrange(examples, "(b n) l -> b (n l)", n=self._per_row)
        segments = torch.arange(1, self._per_row + 1).repeat_interleave(examples.shape[1])
        room = (0, length - tokens.shape[1])
        segments = F.pad(segments, room).expand(len(tokens), -1)
        return F.pad(tokens, room, value=padding), segments.contiguous()


class RowSource(ABC):
    """Fine-tuning batches: rows of pairs, padded to the longest of a batch or packed.

    Subclasses set `fingerprint`.
    """

    fingerprint: str

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        inputs_length: int,
        targets_length: int,
        batch_size: int,
        seed: int,
        pack: bool = False,
    ) -> None:
        """Takes the settings.

        Args:
            tokenizer: Tokenizer with a padding token.
            inputs_length: Most encoder tokens of a row.
            targets_length: Most decoder tokens of a row.
            batch_size: Rows in a batch.
            seed: Another seed gives another order.
            pack: Whether rows hold as many examples as fit, in the order of training.
        """
        self.batch_size = batch_size
        self.row_lengths = (inputs_length, targets_length)
        self.lengths = self.row_lengths if pack else None
        self.seed = seed
        self.settings = (*self.row_lengths, batch_size, seed, pack)
        self._padding, _ = pad_and_eos(tokenizer)
        self._has_segments = pack or has_sentinels(tokenizer)  # other models know masks

    @abstractmethod
    def row(self, position: int) -> list[Example]:
        """Returns the examples of the row at a position, counted over all epochs."""

    def batch(self, step: int, rows: slice = ALL_ROWS) -> Batch:
        """Returns a batch of pairs.

        L and T are the row lengths when packed, else the lengths of the longest example of all
        rows, rounded up to 8.

        Returns:
            `input_ids` and `segment_ids` <int64>[B, L], `labels` and `decoder_segment_ids`
            <int64>[B, T]; `input_ids`, `attention_mask` and `labels` if the tokenizer has no
            sentinels, as those of other models.
        """
        positions = range(step * self.batch_size, (step + 1) * self.batch_size)
        batch = stack_rows(self.row, positions, self.lengths, self._padding, rows)
        if not self._has_segments:
            del batch["decoder_segment_ids"]
            batch["attention_mask"] = batch.pop("segment_ids").clamp(max=1)
        return batch


class PairSource(RowSource):
    """Fine-tuning batches of pairs in memory.

    Attributes:
        num_examples: Pairs.
        num_rows: Rows of an epoch; fewer than the examples when packed.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[str, str]],
        tokenizer: PreTrainedTokenizerFast,
        *,
        sentinels: Sentinels = "none",
        keep_in: Path | None = None,
        **settings: Any,
    ) -> None:
        """Tokenizes the pairs once.

        Args:
            pairs: Input and target texts.
            tokenizer: Tokenizer with an end token. A text that is too long is truncated before it,
                and a warning says how many were.
            sentinels: `one` puts the first sentinel before the end token of an input, and before a
                target.
            keep_in: Folder that keeps the tokens of many texts for the next run; None for none.
            settings: See `RowSource`.

        Raises:
            DataError: When there are no pairs.
        """
        super().__init__(tokenizer, **settings)
        if not pairs:
            raise DataError(
                "There are no training pairs. Give at least one (inputs, targets) pair."
            )
        self.num_examples = len(pairs)

        # Epoch -1 is the order in which examples are packed.
        examples = encode_pairs(pairs, tokenizer, self.row_lengths, sentinels, keep_in)
        packing_order = epoch_order(self.seed, -1, len(pairs))
        examples = [examples[index] for index in packing_order]
        self._rows = example_rows(examples, self.lengths)
        self.num_rows = len(self._rows)
        self.fingerprint = fingerprint(examples_fingerprint(examples), repr(self.settings).encode())

    def row(self, position: int) -> list[Example]:
        """Returns the examples of the row at a position, counted over all epochs."""
        epoch, index = divmod(position, self.num_rows)
        return self._rows[epoch_order(self.seed, epoch, self.num_rows)[index]]


def stack_rows(
    row_at: Callable[[int], Sequence[Example]],
    positions: range,
    lengths: tuple[int, int] | None,
    padding: int,
    rows: slice = ALL_ROWS,
) -> Batch:
    """Returns the batch of rows of examples; see `RowSource.batch`.

    Args:
        row_at: Returns the examples of the row at a position.
        positions: Positions of the rows of the whole batch.
        lengths: L and T; None uses the longest row, rounded up.
        padding: Token of input positions without an input.
        rows: Rows of the batch to make.
    """
    # The longest row of the whole batch determines the length, whichever rows are made. If all rows
    # have the same length, the others need not be read.
    if lengths is not None:
        positions = positions[rows]
        rows = ALL_ROWS

    input_rows: list[list[Tokens]] = []
    target_rows: list[list[Tokens]] = []
    for position in positions:
        examples = row_at(position)
        input_rows.append([inputs for inputs, _ in examples])
        target_rows.append([targets for _, targets in examples])

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


def fingerprint(*parts: bytes | memoryview) -> str:
    """Returns a short hash of the parts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:16]


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
