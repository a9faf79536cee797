"""A text larger than memory as chunks of tokens, for pre-training.

Comes after `block_stream`, before `pipeline`, which masks the chunks.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from moe.data.block_stream import HELD_OUT_BLOCK, BlockStream, StreamSettings, Window, Windows
from moe.data.blocks import BlockRow, Blocks
from moe.data.documents import join_lines
from moe.data.tokens import Arrays, encode_texts

_TOKENS = "tokens"


class TokenStream(BlockStream):
    """A text whose blocks are tokenized when they are needed.

    The texts of a block are one after the other. Its last tokens are left out when they are fewer than
    a chunk.
    """

    names = (_TOKENS,)

    def __init__(
        self,
        blocks: Blocks,
        tokenizer: PreTrainedTokenizerFast,
        settings: StreamSettings,
        *,
        column: str,
    ) -> None:
        """Prepares the stream; nothing is read yet.

        Args:
            blocks: The rows.
            tokenizer: Tokenizer.
            settings: How they are streamed.
            column: Column of the texts.
        """
        super().__init__(blocks, tokenizer, settings, column)
        self._column = column

    def texts(self, row: BlockRow) -> tuple[str, ...]:
        """Returns the text of a row, with a blank line between paragraphs."""
        advice = f"Expected a text in the column {self._column!r}; --column names another one."
        return (join_lines(row.text(self._column, advice)),)

    def encode(self, rows: list[tuple[str, ...]]) -> Arrays:
        """Returns the tokens of all texts as one array."""
        encoded = encode_texts([text for (text,) in rows], self.tokenizer)
        return {_TOKENS: np.concatenate([np.empty(0, dtype=np.int32), *encoded])}

    def tokens(self, block: int) -> NDArray[np.int32]:
        """Returns <int32>[N] the tokens of a block."""
        return self.arrays(block)[_TOKENS]

    def num_tokens(self, block: int) -> int:
        """Returns the number of tokens of a block."""
        return self.length_of(block, _TOKENS)

    @property
    def estimated_tokens(self) -> int | None:
        """Tokens of the first block times the size of the table in such blocks; None for what is read from
        its beginning.
        """
        if self.shards is None:
            return None
        return round(self.num_tokens(HELD_OUT_BLOCK) * self.num_first_blocks)

    def held_out(self) -> NDArray[np.int32]:
        """Returns <int32>[N] tokens that training never sees: those of the first block.

        Raises:
            DataError: When there is no other block.
        """
        self.check_held_out()
        return self.tokens(HELD_OUT_BLOCK)

    def chunks(self, length: int, seed: int) -> "StreamedChunks":
        """Returns its chunks of C = `length` tokens."""
        return StreamedChunks(self, length, seed)


class StreamedChunks:
    """The chunks of a stream, in the order of training."""

    num_examples = None

    def __init__(self, stream: TokenStream, length: int, seed: int) -> None:
        self._stream = stream
        self._length = length
        self._table = lru_cache(maxsize=2)(self._build_table)
        self._windows = Windows(stream, seed, lambda window: int(self._table(window)[0][-1]))

    def at(self, position: int) -> NDArray[np.int32]:
        """Returns <int32>[C] the chunk at a position, counted over all epochs."""
        window, index = self._windows.locate(position)
        starts, order = self._table(window)
        chunk = int(order[index])
        block = int(np.searchsorted(starts, chunk, side="right")) - 1
        start = (chunk - int(starts[block])) * self._length
        return self._stream.tokens(window.blocks[block])[start : start + self._length]

    def _build_table(self, window: Window) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns <int64>[B + 1] where the chunks of each block start, and <int64>[N] their order."""
        counts = [self._stream.num_tokens(block) // self._length for block in window.blocks]
        starts = np.concatenate([[0], np.cumsum(counts)])
        return starts, window.order(int(starts[-1]))
