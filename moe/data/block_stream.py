"""A table larger than memory whose rows become tokens when training needs them, kept on disk.

Comes after `blocks` and `tokens`, before `token_stream` and `pair_stream`. Each block of rows has a
file of tokens, which any process makes that needs it first; ranks and workers share the work, and a
run that resumes finds the files. So the position of a run in its data is one integer, as for data in
memory.
"""

import copy
import hashlib
import logging
import os
import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedTokenizerFast

from moe.data.blocks import BLOCK_ROWS, BlockRow, Blocks
from moe.data.tokens import Arrays, kept_arrays, tokens_name
from moe.errors import DataError

logger = logging.getLogger(__name__)

SHUFFLE_ROWS = 8192
"""Rows that are shuffled together by default."""

HELD_OUT_BLOCK = 0
"""Number of the block that training never sees."""

ROWS = "rows"
"""Name of the array with the number of rows of a block, and the number of them that were skipped."""


class StreamSettings(NamedTuple):
    """How a table is streamed.

    Attributes:
        folder: Where tokens are kept; those of other data may be there, too.
        shuffle_rows: About how many rows are shuffled together.
        skip_bad_rows: Whether rows without a text are left out instead of refused.
    """

    folder: Path
    shuffle_rows: int = SHUFFLE_ROWS
    skip_bad_rows: bool = False


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
        settings: StreamSettings,
        details: object,
    ) -> None:
        """Prepares the stream; nothing is read yet.

        Args:
            blocks: The rows.
            tokenizer: Tokenizer.
            settings: How they are streamed.
            details: Everything else that determines the tokens.
        """
        self.shards = blocks.shards
        self.num_first_blocks = blocks.num_first_blocks
        self.tokenizer = tokenizer
        self._blocks = blocks
        self._reading = threading.local()  # each thread has its own position in the files
        self._skip_bad_rows = settings.skip_bad_rows
        self._blocks_of_window = max(1, settings.shuffle_rows // BLOCK_ROWS)

        # Files may have other times and folders on another machine.
        identity = (blocks.identity, details, settings.skip_bad_rows)
        name = tokens_name((), tokenizer, repr((*identity, blocks.version)))
        self._folder = settings.folder / Path(name).stem
        name = tokens_name((), tokenizer, repr((*identity, self._blocks_of_window)))
        self.fingerprint = hashlib.sha256(name.encode()).digest()

        self.arrays = lru_cache(maxsize=2 * self._blocks_of_window + 1)(self._read_or_make)
        self._block_order = lru_cache(maxsize=2)(self._order_blocks)
        self._ahead: tuple[int, ThreadPoolExecutor] | None = None

    @abstractmethod
    def encode(self, rows: list[tuple[str, ...]]) -> Arrays:
        """Returns the arrays of a block for the texts of its rows."""

    @abstractmethod
    def texts(self, row: BlockRow) -> tuple[str, ...]:
        """Returns the texts of a row.

        Raises:
            DataError: When one is missing.
        """

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

    def window(self, seed: int, epoch: int, number: int) -> list[int]:
        """Returns the blocks of a window of an epoch; none after the last window."""
        # The first windows are small, so that training starts soon: 1 block, 2, 4, ...
        num_small = (self._blocks_of_window - 1).bit_length()
        size = 2**number if number < num_small else self._blocks_of_window
        start = 2 ** min(number, num_small) - 1
        start += max(0, number - num_small) * self._blocks_of_window
        stop = start + size
        if self.shards is not None:
            return self._block_order(seed, epoch)[start:stop]

        # The end of the table shows when it is reached.
        blocks = []
        for block in range(HELD_OUT_BLOCK + 1 + start, HELD_OUT_BLOCK + 1 + stop):
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

    def prepare_ahead(self, blocks: Sequence[int]) -> None:
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
        rows, num_bad = self.read(block)
        counts = np.array([len(rows) + num_bad, num_bad], dtype=np.int64)
        return {**self.encode(rows), ROWS: counts}

    def read(self, block: int) -> tuple[list[tuple[str, ...]], int]:
        """Returns the texts of the rows of a block, and how many rows are skipped.

        Raises:
            DataError: When a row has no text and is not to be skipped.
        """
        if not hasattr(self._reading, "blocks"):
            self._reading.blocks = copy.copy(self._blocks)

        rows: list[tuple[str, ...]] = []
        errors: list[DataError] = []
        for row in self._reading.blocks.read(block):
            try:
                rows.append(self.texts(row))
            except DataError as error:
                if not self._skip_bad_rows:
                    advice = "To leave such rows out, set data.bad_rows to skip."
                    raise DataError(f"{error} {advice}") from None
                errors.append(error)
        if errors:
            num_rows = len(rows) + len(errors)
            logger.warning("%d of %d rows are skipped. %s", len(errors), num_rows, errors[0])
        return rows, len(errors)


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


class Windows:
    """The windows of a stream one after the other, and where each item of training is in them.

    Where an item is follows from the number of items in all windows before it. They are counted as
    the stream is read, and again from the files of tokens by a run that resumes.
    """

    def __init__(self, stream: BlockStream, seed: int, count: Callable[[Window], int]) -> None:
        """Begins at the first window.

        Args:
            stream: The blocks.
            seed: Another seed gives another order.
            count: Returns the items of a window, whose tokens are made.
        """
        self._stream = stream
        self._seed = seed
        self._count = count
        self._windows: list[Window] = []
        self._starts = [0]  # first item of each window, and the number of items so far
        self._next = (0, 0)  # epoch and number of the window to add
        self._epoch_start = 0

    def locate(self, position: int) -> tuple[Window, int]:
        """Returns the window of an item and its index there.

        Args:
            position: Number of the item, counted over all epochs.

        Raises:
            DataError: When an epoch has no item.
        """
        while self._starts[-1] <= position:
            self._add_window()
        number = bisect_right(self._starts, position) - 1
        return self._windows[number], position - self._starts[number]

    def _add_window(self) -> None:
        """Appends the next window, or begins the next epoch after the last one."""
        epoch, number = self._next
        blocks = self._stream.window(self._seed, epoch, number)
        if not blocks:
            if self._starts[-1] == self._epoch_start:
                raise DataError(
                    f"No block of {BLOCK_ROWS} rows gives a training example. Give longer texts, or read the data "
                    "into memory: make a corpus of a text (`stmoe corpus --data ...`), or leave out data.stream."
                )
            self._next = (epoch + 1, 0)
            self._epoch_start = self._starts[-1]
            return

        # The next window is tokenized while this one trains, unless that needs a second reader from the beginning.
        self._stream.prepare(blocks)
        self._next = (epoch, number + 1)
        if self._stream.shards is not None:
            self._stream.prepare_ahead(self._stream.window(self._seed, epoch, number + 1))
        window = Window(tuple(blocks), (self._seed, 6, epoch, number))
        self._windows.append(window)
        self._starts.append(self._starts[-1] + self._count(window))
