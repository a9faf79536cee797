"""A text larger than memory as chunks of tokens, for pre-training.

Comes after `block_stream`, before `pipeline`, which masks the chunks.
"""

from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from moe.data.block_stream import HELD_OUT_BLOCK, BlockStream, Window
from moe.data.blocks import Blocks
from moe.data.chunks import Chunks
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
        self, blocks: Blocks, tokenizer: PreTrainedTokenizerFast, folder: Path, *, column: str
    ) -> None:
        """Prepares the stream; nothing is read yet.

        Args:
            blocks: The rows.
            tokenizer: Tokenizer.
            folder: Where tokens are kept.
            column: Column of the texts.
        """
        super().__init__(blocks, tokenizer, folder, [column], column)

    def encode(self, rows: list[tuple[str, ...]]) -> Arrays:
        """Returns the tokens of all texts as one array; paragraphs have a blank line between them."""
        encoded = encode_texts([join_lines(text) for (text,) in rows], self.tokenizer)
        return {_TOKENS: np.concatenate([np.empty(0, dtype=np.int32), *encoded])}

    def tokens(self, block: int) -> NDArray[np.int32]:
        """Returns <int32>[N] the tokens of a block."""
        return self.arrays(block)[_TOKENS]

    def num_tokens(self, block: int) -> int:
        """Returns the number of tokens of a block."""
        return self.length_of(block, _TOKENS)

    def held_out(self) -> NDArray[np.int32]:
        """Returns <int32>[N] tokens that training never sees: those of the first block.

        Raises:
            DataError: When there is no other block.
        """
        self.check_held_out()
        return self.tokens(HELD_OUT_BLOCK)

    def chunks(self, length: int, seed: int) -> Chunks:
        """Returns its chunks of C = `length` tokens."""

        @lru_cache(maxsize=2)
        def table(window: Window) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
            """Returns <int64>[B + 1] where the chunks of each block start, and <int64>[N] their order."""
            counts = [self.num_tokens(block) // length for block in window.blocks]
            starts = np.concatenate([[0], np.cumsum(counts)])
            return starts, window.order(int(starts[-1]))

        windows = self.windows(seed, lambda window: int(table(window)[0][-1]))

        def at(position: int) -> NDArray[np.int32]:
            window, index = windows.locate(position)
            starts, order = table(window)
            chunk = int(order[index])
            block = int(np.searchsorted(starts, chunk, side="right")) - 1
            start = (chunk - int(starts[block])) * length
            return self.tokens(window.blocks[block])[start : start + length]

        return Chunks(at, None)
