"""Pairs of texts larger than memory as training batches.

Comes after `block_stream` and `pairs`; `pipeline` and `mixture` have batches of pairs in memory.
"""

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from transformers import PreTrainedTokenizerFast

from moe.data.block_stream import HELD_OUT_BLOCK, BlockStream, StreamSettings, Window, Windows
from moe.data.blocks import BlockRow, Blocks
from moe.data.packing import Example, example_rows
from moe.data.pair_files import ADVICE, Pair
from moe.data.pairs import Sentinels, pair_sides, tokenize_side, warn_of_losses
from moe.data.pipeline import ALL_ROWS, Batch, check_source_numbers, fingerprint, stack_rows
from moe.data.tokenizer import SpecialIds
from moe.data.tokens import Arrays


class PairStream(BlockStream):
    """Pairs whose blocks are tokenized when they are needed."""

    names = ("inputs", "inputs_ends", "targets", "targets_ends")

    def __init__(
        self,
        blocks: Blocks,
        tokenizer: PreTrainedTokenizerFast,
        settings: StreamSettings,
        *,
        columns: Mapping[str, str],
        lengths: tuple[int, int],
        sentinels: Sentinels,
    ) -> None:
        """Prepares the stream; nothing is read yet.

        Args:
            blocks: The rows.
            tokenizer: Tokenizer with an end token.
            settings: How they are streamed.
            columns: Names of the columns for `inputs` and `targets`.
            lengths: Maximum number of tokens of an input and of a target.
            sentinels: See `PairSource`.
        """
        self._sides = pair_sides(tokenizer, lengths, sentinels)
        self._columns = (columns["inputs"], columns["targets"])
        self._has_warned = False
        super().__init__(blocks, tokenizer, settings, (self._sides, self._columns))

    def texts(self, row: BlockRow) -> tuple[str, ...]:
        """Returns input and target of a row."""
        inputs, targets = self._columns
        return row.text(inputs, ADVICE), row.text(targets, ADVICE)

    def encode(self, rows: list[tuple[str, ...]]) -> Arrays:
        """Returns the tokens of both sides, and where each text ends."""
        arrays: Arrays = {}
        has_warned = self._has_warned
        for index, side in enumerate(self._sides):
            texts = [row[index] for row in rows]
            encoded = tokenize_side(texts, self.tokenizer, side)
            arrays[side.name] = encoded["tokens"]
            arrays[f"{side.name}_ends"] = np.cumsum(encoded["lengths"], dtype=np.int64)
            if not has_warned:
                block_side = side._replace(name=f"{side.name} of a block")
                self._has_warned |= warn_of_losses(texts, self.tokenizer, block_side, encoded)
        return arrays

    def held_out(self) -> list[Pair]:
        """Returns pairs that training never sees: those of the first block.

        Raises:
            DataError: When there is no other block.
        """
        self.check_held_out()
        rows, _ = self.read(HELD_OUT_BLOCK)
        return [Pair(inputs, targets) for inputs, targets in rows]

    def num_pairs(self, block: int) -> int:
        """Returns the number of pairs of a block."""
        return self.length_of(block, "inputs_ends")

    def examples(self, block: int) -> list[Example]:
        """Returns the tokens <int32>[N] of both texts of each pair of a block."""
        arrays = self.arrays(block)
        inputs = np.split(arrays["inputs"], arrays["inputs_ends"])[:-1]
        targets = np.split(arrays["targets"], arrays["targets_ends"])[:-1]
        return list(zip(inputs, targets, strict=True))


class StreamedPairSource:
    """Fine-tuning batches of a stream of pairs, padded to the longest of a batch or packed into rows."""

    def __init__(
        self,
        stream: PairStream,
        *,
        inputs_length: int,
        targets_length: int,
        batch_size: int,
        seed: int,
        pack: bool = False,
    ) -> None:
        """Prepares the source; nothing is read yet.

        Args:
            stream: The pairs.
            inputs_length: Most encoder tokens of a row.
            targets_length: Most decoder tokens of a row.
            batch_size: Rows in a batch.
            seed: Another seed gives another order.
            pack: Whether rows hold as many examples of a window as fit.

        Raises:
            ConfigError: When a number is out of range.
        """
        check_source_numbers(
            seed, batch_size=batch_size, inputs_length=inputs_length, targets_length=targets_length
        )
        self.batch_size = batch_size
        row_lengths = (inputs_length, targets_length)
        self.lengths = row_lengths if pack else None
        self._stream = stream
        self._padding = SpecialIds.of(stream.tokenizer).pad
        self._rows = lru_cache(maxsize=2)(self._build_rows)
        self._windows = Windows(stream, seed, self._count_rows)
        settings = (*row_lengths, batch_size, seed, pack)
        self.fingerprint = fingerprint(stream.fingerprint, repr(settings).encode())

    def batch(self, step: int, rows: slice = ALL_ROWS) -> Batch:
        """Returns a batch in the form of `PairSource.batch`."""
        positions = range(step * self.batch_size, (step + 1) * self.batch_size)
        return stack_rows(self._row, positions, self.lengths, self._padding, rows)

    def _row(self, position: int) -> list[Example]:
        window, index = self._windows.locate(position)
        return self._rows(window)[index]

    def _count_rows(self, window: Window) -> int:
        if self.lengths is not None:
            return len(self._rows(window))
        return sum(map(self._stream.num_pairs, window.blocks))

    def _build_rows(self, window: Window) -> list[list[Example]]:
        """Returns the rows of a window, in random order before they are packed."""
        examples: list[Example] = []
        for block in window.blocks:
            examples += self._stream.examples(block)
        examples = [examples[index] for index in window.order(len(examples))]
        return example_rows(examples, self.lengths)
