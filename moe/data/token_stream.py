"""A text larger than memory as chunks of tokens: its rows become tokens when training needs them, kept on disk.

Comes after `blocks` and `tokens`, before `pipeline`, which masks the chunks. Each block of rows has a
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import chain, count, takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedTokenizerFast

from moe.data.blocks import BLOCK_ROWS, Blocks
from moe.data.chunks import Chunks, Windows
from moe.data.documents import join_lines
from moe.data.rows import text_of
from moe.data.tokens import Arrays, encode_texts, kept_arrays, tokens_name
from moe.errors import DataError

SHUFFLE_ROWS = 8192
"""Rows that are shuffled together."""

HELD_OUT_BLOCK = 0
"""Number of the block that training never sees."""

_TOKENS = "tokens"
_ROWS = "rows"  # array with the number of rows of a block


class _Window(NamedTuple):
    """Blocks whose chunks are shuffled together, by an order drawn from `seeds`.

    Attributes:
        blocks: Numbers of B blocks.
        starts: <int64>[B + 1] number of the first chunk of each block, and of all chunks.
        seeds: Numbers that determine the order.
    """

    blocks: list[int]
    starts: NDArray[np.int64]
    seeds: tuple[int, ...]


class TokenStream:
    """A text whose blocks are tokenized when they are needed.

    The texts of a block are one after the other. Its last tokens are left out when they are fewer than
    a chunk. The chunks of a window of blocks are shuffled together. Windows follow the order of the
    blocks, whose shards are shuffled in every epoch where the table can be read in any order.
    """

    def __init__(
        self, blocks: Blocks, tokenizer: PreTrainedTokenizerFast, folder: Path, *, column: str
    ) -> None:
        """Prepares the stream; nothing is read yet.

        Args:
            blocks: The rows.
            tokenizer: Tokenizer.
            folder: Where tokens are kept; those of other data may be there, too.
            column: Column of the texts.
        """
        self.shards = blocks.shards
        self._blocks = blocks
        self._tokenizer = tokenizer
        self._column = column
        self._blocks_of_window = max(1, SHUFFLE_ROWS // BLOCK_ROWS)

        # Files may have other times and folders on another machine. False: no row is left out, which
        # earlier versions could do.
        identity = (blocks.identity, column, False)
        name = tokens_name((), tokenizer, repr((*identity, blocks.version)))
        self._folder = folder / Path(name).stem
        name = tokens_name((), tokenizer, repr((*identity, self._blocks_of_window)))
        self.fingerprint = hashlib.sha256(name.encode()).digest()

        self._arrays = lru_cache(maxsize=2 * self._blocks_of_window + 1)(self._read_or_make)
        self._block_order = lru_cache(maxsize=2)(self._order_blocks)
        self._ahead: tuple[int, ThreadPoolExecutor] | None = None

    def tokens(self, block: int) -> NDArray[np.int32]:
        """Returns <int32>[N] the tokens of a block.

        Raises:
            DataError: When a row has no text.
        """
        return self._arrays(block)[_TOKENS]

    def held_out(self) -> NDArray[np.int32]:
        """Returns <int32>[N] tokens that training never sees: those of the first block.

        Raises:
            DataError: When there is no other block.
        """
        has_one_block = sum(map(len, self.shards or ())) < 2
        if self.shards is None:
            has_one_block = self._num_rows(HELD_OUT_BLOCK + 1) == 0
        if has_one_block:
            raise DataError(
                f"The data have no more than {BLOCK_ROWS} rows, too few to be streamed. Make a corpus of the text: "
                "`stmoe corpus --data ...`."
            )
        return self.tokens(HELD_OUT_BLOCK)

    def chunks(self, length: int, seed: int) -> Chunks:
        """Returns its chunks of C = `length` tokens."""
        windows = Windows(self._read_windows(length, seed))

        @lru_cache(maxsize=2)
        def shuffled(seeds: tuple[int, ...], size: int) -> NDArray[np.int64]:
            return np.random.default_rng(seeds).permutation(size)

        def at(position: int) -> NDArray[np.int32]:
            window, index = windows.locate(position)
            chunk = int(shuffled(window.seeds, int(window.starts[-1]))[index])
            block = int(np.searchsorted(window.starts, chunk, side="right")) - 1
            start = (chunk - int(window.starts[block])) * length
            return self.tokens(window.blocks[block])[start : start + length]

        return Chunks(at, None)

    def _read_windows(self, length: int, seed: int) -> Iterator[tuple[_Window, int]]:
        """Yields the windows of all epochs with their numbers of chunks.

        Raises:
            DataError: When an epoch has no chunk.
        """
        for epoch in count():
            num_chunks = 0
            for number in count():
                blocks = self.window(seed, epoch, number)
                if not blocks:
                    break
                self.prepare(blocks)

                # The next window is tokenized while this one trains, unless that needs a second
                # reader from the beginning.
                if self.shards is not None:
                    self._prepare_ahead(self.window(seed, epoch, number + 1))
                counts = [self._num_tokens(block) // length for block in blocks]
                starts = np.concatenate([[0], np.cumsum(counts)])
                num_chunks += sum(counts)
                yield _Window(blocks, starts, (seed, 6, epoch, number)), sum(counts)

            if not num_chunks:
                raise DataError(
                    f"No block of {BLOCK_ROWS} rows gives a training example. Give longer texts, or make a corpus of "
                    "them: `stmoe corpus --data ...`."
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
        blocks = range(HELD_OUT_BLOCK + 1 + start, HELD_OUT_BLOCK + 1 + start + size)
        return list(takewhile(self._num_rows, blocks))

    def prepare(self, blocks: Sequence[int]) -> None:
        """Makes the tokens of blocks; processes that need the same ones begin at different blocks."""
        missing = [block for block in blocks if not self._file(block).exists()]
        first = os.getpid() % max(1, len(missing)) if self.shards is not None else 0
        for block in chain(missing[first:], missing[:first]):
            self._arrays(block)

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

    def _num_tokens(self, block: int) -> int:
        """Returns the number of tokens of a block, without reading them where they are kept."""
        try:
            with safe_open(self._file(block), framework="numpy") as file:
                return file.get_slice(_TOKENS).get_shape()[0]
        except (OSError, SafetensorError):
            return len(self.tokens(block))

    def _num_rows(self, block: int) -> int:
        return int(self._arrays(block)[_ROWS][0])

    def _file(self, block: int) -> Path:
        return self._folder / f"{block:07}.safetensors"

    def _read_or_make(self, block: int) -> Arrays:
        return kept_arrays(self._file(block), (_TOKENS, _ROWS), partial(self._make, block))

    def _make(self, block: int) -> Arrays:
        """Reads and tokenizes the rows of a block; paragraphs have a blank line between them."""
        advice = f"Expected a text in the column {self._column!r}."
        texts = []
        for where, row in self._blocks.read(block):
            texts.append(join_lines(text_of(row, self._column, where=where, advice=advice)))
        encoded = encode_texts(texts, self._tokenizer)
        return {
            _TOKENS: np.concatenate([np.empty(0, dtype=np.int32), *encoded]),
            _ROWS: np.array([len(texts)], dtype=np.int64),
        }
