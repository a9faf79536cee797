"""A table larger than memory whose rows become tokens when training needs them, kept on disk.

Comes after `blocks` and `tokens`, before `token_stream` and `pair_stream`. Each block of rows has a
file of tokens, which any process makes that needs it first; ranks and workers share the work, and a
run that resumes finds the files. So the position of a run in its data is one integer, as for data in
memory.

The streams of `datasets` cannot replace this (tried with 5.2.0): after `load_state_dict` a shuffled
`IterableDataset` fills its buffer anew, so another order follows and the rows of the old buffer are
never seen (328 of 20,000 rows with a buffer of 512); its position belongs to one number of ranks and
workers, not to a step; and `Dataset.map`, whose rows have numbers, tokenizes the whole table before
the first step.
"""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedTokenizerFast

from moe.data.blocks import BLOCK_ROWS, Blocks
from moe.data.chunks import Windows
from moe.data.rows import text_of
from moe.data.tokens import Arrays, kept_arrays, tokens_name
from moe.errors import DataError

SHUFFLE_ROWS = 8192
"""Rows that are shuffled together."""

HELD_OUT_BLOCK = 0
"""Number of the block that training never sees."""

ROWS = "rows"
"""Name of the array with the number of rows of a block."""


class BlockStream(ABC):
    """The blocks of a table in the order of training, and their tokens.

    The rows of a window of blocks are shuffled together. Windows follow the order of the blocks, whose
    shards are shuffled in every epoch where the table can be read in any order.
    """

    names: tuple[str, ...]
    """Names of the arrays of a block."""

    def __init__(
        self,
        blocks: Blocks,
        tokenizer: PreTrainedTokenizerFast,
        folder: Path,
        columns: Sequence[str],
        details: object,
    ) -> None:
        """Prepares the stream; nothing is read yet.

        Args:
            blocks: The rows.
            tokenizer: Tokenizer.
            folder: Where tokens are kept; those of other data may be there, too.
            columns: Columns of the texts.
            details: Everything else that determines the tokens.
        """
        self.shards = blocks.shards
        self.tokenizer = tokenizer
        self._blocks = blocks
        self._columns = columns
        self._blocks_of_window = max(1, SHUFFLE_ROWS // BLOCK_ROWS)

        # Files may have other times and folders on another machine. False: no row is left out, which
        # earlier versions could do.
        identity = (blocks.identity, details, False)
        name = tokens_name((), tokenizer, repr((*identity, blocks.version)))
        self._folder = folder / Path(name).stem
        name = tokens_name((), tokenizer, repr((*identity, self._blocks_of_window)))
        self.fingerprint = hashlib.sha256(name.encode()).digest()

        self.arrays = lru_cache(maxsize=2 * self._blocks_of_window + 1)(self._read_or_make)
        self._block_order = lru_cache(maxsize=2)(self._order_blocks)
        self._ahead: tuple[int, ThreadPoolExecutor] | None = None

    @abstractmethod
    def encode(self, rows: list[tuple[str, ...]]) -> Arrays:
        """Returns the arrays of a block for the texts in the columns of its rows."""

    def check_held_out(self) -> None:
        """Raises a DataError when there is no block besides the one that is held out."""
        has_one_block = sum(map(len, self.shards or ())) < 2
        if self.shards is None:
            has_one_block = self._num_rows(HELD_OUT_BLOCK + 1) == 0
        if has_one_block:
            raise DataError(
                f"The data have no more than {BLOCK_ROWS} rows, too few to be streamed. Read them into memory: make a "
                "corpus of a text (`stmoe corpus --data ...`), or leave out data.stream."
            )

    def length_of(self, block: int, name: str) -> int:
        """Returns the length of an array of a block, without reading it where it is kept."""
        try:
            with safe_open(self._file(block), framework="numpy") as file:
                return file.get_slice(name).get_shape()[0]
        except (OSError, SafetensorError):
            return len(self.arrays(block)[name])

    def windows(self, seed: int, size: Callable[["Window"], int]) -> "Windows[Window]":
        """Returns the windows of all epochs.

        Args:
            seed: Another seed gives another order.
            size: Returns the number of items of a window, whose tokens are made.
        """
        return Windows(self._read_windows(seed, size))

    def _read_windows(
        self, seed: int, size: Callable[["Window"], int]
    ) -> Iterator[tuple["Window", int]]:
        """Yields the windows of all epochs with their sizes.

        Raises:
            DataError: When an epoch has no item.
        """
        for epoch in count():
            num_items = 0
            for number in count():
                blocks = self.window(seed, epoch, number)
                if not blocks:
                    break
                self.prepare(blocks)

                # The next window is tokenized while this one trains, unless that needs a second
                # reader from the beginning.
                if self.shards is not None:
                    self._prepare_ahead(self.window(seed, epoch, number + 1))
                window = Window(tuple(blocks), (seed, 6, epoch, number))
                num_items_of_window = size(window)
                num_items += num_items_of_window
                yield window, num_items_of_window

            if not num_items:
                raise DataError(
                    f"No block of {BLOCK_ROWS} rows gives a training example. Give longer texts, or read the data "
                    "into memory: make a corpus of a text (`stmoe corpus --data ...`), or leave out data.stream."
                )

    def window(self, seed: int, epoch: int, number: int) -> list[int]:
        """Returns the blocks of a window of an epoch; none after the last window."""
        # The first windows are small, so that training starts soon: 1 block, 2, 4, ...
        num_small = (self._blocks_of_window - 1).bit_length()
        size = 2**number if number < num_small else self._blocks_of_window
        start = 2 ** min(number, num_small) - 1
        start += max(0, number - num_small) * self._blocks_of_window
        if self.shards is not None:
            return self._block_order(seed, epoch)[start : start + size]

        # The end of the table shows when it is reached.
        blocks = []
        for block in range(HELD_OUT_BLOCK + 1 + start, HELD_OUT_BLOCK + 1 + start + size):
            if self._num_rows(block) == 0:
                break
            blocks.append(block)
        return blocks

    def prepare(self, blocks: Sequence[int]) -> None:
        """Makes the tokens of blocks; processes that need the same ones begin at different blocks."""
        missing = [block for block in blocks if not self._file(block).exists()]
        first = os.getpid() % max(1, len(missing)) if self.shards is not None else 0
        for block in chain(missing[first:], missing[:first]):
            self.arrays(block)

    def _prepare_ahead(self, blocks: Sequence[int]) -> None:
        """Makes the tokens of blocks in the background; an error is raised once they are needed."""
        if self._ahead is None or self._ahead[0] != os.getpid():
            self._ahead = (os.getpid(), ThreadPoolExecutor(1, "tokens"))
        self._ahead[1].submit(self.prepare, blocks)

    def _order_blocks(self, seed: int, epoch: int) -> list[int]:
        """Returns the blocks of an epoch without the one that is held out, in the order of training."""
        assert self.shards is not None, "tables without shards are read in their own order"
        order = np.random.default_rng([seed, 5, epoch]).permutation(len(self.shards))
        blocks = chain.from_iterable(self.shards[shard] for shard in order)
        return [block for block in blocks if block != HELD_OUT_BLOCK]

    def _num_rows(self, block: int) -> int:
        return int(self.arrays(block)[ROWS][0])

    def _file(self, block: int) -> Path:
        return self._folder / f"{block:07}.safetensors"

    def _read_or_make(self, block: int) -> Arrays:
        return kept_arrays(self._file(block), (*self.names, ROWS), lambda: self._make(block))

    def _make(self, block: int) -> Arrays:
        """Reads and tokenizes the rows of a block."""
        rows = self.read(block)
        return {**self.encode(rows), ROWS: np.array([len(rows)], dtype=np.int64)}

    def read(self, block: int) -> list[tuple[str, ...]]:
        """Returns the texts of the rows of a block.

        Raises:
            DataError: When a row has no text.
        """
        advice = f"Expected texts in the columns {', '.join(self._columns)}."
        rows: list[tuple[str, ...]] = []
        for where, row in self._blocks.read(block):
            rows.append(
                tuple(text_of(row, name, where=where, advice=advice) for name in self._columns)
            )
        return rows


class Window(NamedTuple):
    """Blocks whose rows are shuffled together.

    Attributes:
        blocks: Their numbers.
        seeds: Numbers that determine their order.
    """

    blocks: tuple[int, ...]
    seeds: tuple[int, ...]

    def order(self, size: int) -> NDArray[np.int64]:
        """Returns <int64>[size] a random order of that many items."""
        return np.random.default_rng(self.seeds).permutation(size)
