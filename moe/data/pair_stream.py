"""Pairs of texts larger than memory as training batches.

Comes after `block_stream` and `pairs`; `pipeline` and `mixture` have batches of pairs in memory.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Unpack

import numpy as np
from transformers import PreTrainedTokenizerFast

from moe.data.block_stream import HELD_OUT_BLOCK, BlockStream, Window
from moe.data.blocks import Blocks
from moe.data.packing import Example, example_rows
from moe.data.pair_files import Pair
from moe.data.pairs import Sentinels, pair_sides, tokenize_side, warn_of_losses
from moe.data.pipeline import RowSettings, RowSource, fingerprint
from moe.data.tokens import Arrays


class PairStream(BlockStream):
    """Pairs whose blocks are tokenized when they are needed."""

    names = ("inputs", "inputs_ends", "targets", "targets_ends")

    def __init__(
        self,
        blocks: Blocks,
        tokenizer: PreTrainedTokenizerFast,
        folder: Path,
        *,
        columns: Mapping[str, str],
        lengths: tuple[int, int],
        sentinels: Sentinels,
    ) -> None:
        """Prepares the stream; nothing is read yet.

        Args:
            blocks: The rows.
            tokenizer: Tokenizer with an end token.
            folder: Where tokens are kept.
            columns: Names of the columns for `inputs` and `targets`.
            lengths: Maximum number of tokens of an input and of a target.
            sentinels: See `PairSource`.
        """
        self._sides = pair_sides(tokenizer, lengths, sentinels)
        names = (columns["inputs"], columns["targets"])
        self._has_warned = False
        super().__init__(blocks, tokenizer, folder, names, (self._sides, names))

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
        return [Pair(inputs, targets) for inputs, targets in self.read(HELD_OUT_BLOCK)]

    def num_pairs(self, block: int) -> int:
        """Returns the number of pairs of a block."""
        return self.length_of(block, "inputs_ends")

    def examples(self, block: int) -> list[Example]:
        """Returns the tokens <int32>[N] of both texts of each pair of a block."""
        arrays = self.arrays(block)
        inputs = np.split(arrays["inputs"], arrays["inputs_ends"])[:-1]
        targets = np.split(arrays["targets"], arrays["targets_ends"])[:-1]
        return list(zip(inputs, targets, strict=True))


class StreamedPairSource(RowSource):
    """Fine-tuning batches of a stream of pairs; packed rows hold examples of one window."""

    def __init__(self, stream: PairStream, **settings: Unpack[RowSettings]) -> None:
        """Prepares the source; nothing is read yet.

        Args:
            stream: The pairs.
            settings: See `RowSettings`.

        Raises:
            ConfigError: When a number is out of range.
        """
        super().__init__(stream.tokenizer, **settings)
        self._stream = stream
        self._rows = lru_cache(maxsize=2)(self._build_rows)
        self._windows = stream.windows(self.seed, self._num_rows)
        self.fingerprint = fingerprint(stream.fingerprint, repr(self.settings).encode())

    def row(self, position: int) -> list[Example]:
        """Returns the examples of the row at a position, counted over all epochs."""
        window, index = self._windows.locate(position)
        return self._rows(window)[index]

    def _num_rows(self, window: Window) -> int:
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
