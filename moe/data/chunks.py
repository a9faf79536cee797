"""Chunks of a text by their position in training: of a text in memory, and of several texts by their rates.

Comes before `pipeline`, which masks the chunks; `token_stream` has texts larger than memory.
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
from einops import rearrange
from numpy.typing import NDArray

from moe.errors import ConfigError, DataError

WINDOW = 4096
"""Least number of examples whose sources are drawn together."""

_LARGEST_WINDOW = 1 << 22
_WHOLE = 1 << 48  # shares are integers of this: rounding stays exact for any number of steps


class Chunks(Protocol):
    """Chunks of equal length, in the order of training."""

    @property
    def num_examples(self) -> int | None:
        """Chunks of an epoch; None where they are not counted."""
        ...

    def at(self, position: int) -> NDArray[np.int32]:
        """Returns <int32>[C] the chunk at a position, counted over all epochs."""
        ...


class Text(Protocol):
    """A text as tokens."""

    @property
    def fingerprint(self) -> bytes | memoryview:
        """The bytes of the text, or of what identifies it."""
        ...

    def chunks(self, length: int, seed: int) -> Chunks:
        """Returns its chunks of C = `length` tokens, reshuffled in each epoch."""
        ...


class WholeText:
    """A text in memory.

    Attributes:
        tokens: <int32>[N] without special tokens.
    """

    def __init__(self, tokens: NDArray[np.int32]) -> None:
        self.tokens = tokens

    @property
    def fingerprint(self) -> memoryview:
        """The tokens themselves, to be hashed."""
        return np.ascontiguousarray(self.tokens).data

    def chunks(self, length: int, seed: int) -> "WholeChunks":
        """Returns its chunks of C = `length` tokens."""
        return WholeChunks(self.tokens, length, seed)


class WholeChunks:
    """The chunks of a text in memory; each epoch has each of them once."""

    def __init__(self, tokens: NDArray[np.int32], length: int, seed: int) -> None:
        """Divides the text.

        Raises:
            DataError: When the text is shorter than one chunk.
        """
        self.num_examples = tokens.size // length
        if self.num_examples == 0:
            raise DataError(
                f"The text has {tokens.size} tokens, less than one example of {length}. Give more text or a smaller "
                "inputs_length."
            )
        self._chunks = rearrange(tokens[: self.num_examples * length], "(n c) -> n c", c=length)
        self._seed = seed

    def at(self, position: int) -> NDArray[np.int32]:
        """Returns <int32>[C] the chunk at a position, counted over all epochs."""
        epoch, index = divmod(position, self.num_examples)
        order = epoch_order(self._seed, epoch, self.num_examples)
        return self._chunks[order[index]]


@lru_cache(maxsize=8)
def epoch_order(seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    """Returns <int64>[size] the order of an epoch; -1 is the order in which rows are packed."""
    return np.random.default_rng([seed, 0, epoch + 1]).permutation(size)


class MixedText:
    """Several texts, whose chunks are drawn by rates."""

    def __init__(self, texts: Sequence[Text], rates: Sequence[float]) -> None:
        """Takes the texts.

        Args:
            texts: S texts.
            rates: Relative number of chunks of each.
        """
        self._texts = texts
        self._shares = {str(index): rate / sum(rates) for index, rate in enumerate(rates)}

    @property
    def fingerprint(self) -> bytes:
        """Hashes of the texts, and their shares."""
        digests = [hashlib.sha256(text.fingerprint).digest() for text in self._texts]
        return b"".join(digests) + repr(self._shares).encode()

    def chunks(self, length: int, seed: int) -> "MixedChunks":
        """Returns the chunks of C = `length` tokens of all texts."""
        sources = []
        for text in self._texts:
            sources.append(text.chunks(length, seed))
        return MixedChunks(sources, Interleaving(self._shares, seed))


class MixedChunks:
    """Chunks of several sources."""

    num_examples = None

    def __init__(self, sources: Sequence[Chunks], interleaving: "Interleaving") -> None:
        self._sources = sources
        self._interleaving = interleaving

    def at(self, position: int) -> NDArray[np.int32]:
        """Returns <int32>[C] the chunk at a position, counted over all epochs."""
        window, index = divmod(position, self._interleaving.window_size)
        sources = self._interleaving.sources(window)  # [W]
        source = int(sources[index])
        position_in_source = self._interleaving.num_before(window)[source]
        position_in_source += int((sources[:index] == source).sum())
        return self._sources[source].at(position_in_source)


class Interleaving:
    """Which of several sources each example comes from, by their shares.

    A window has a fixed number of examples of each source: its rounded share up to the end of the
    window minus the one up to its start. After any number of windows every source is within one
    example of its share, and no window lacks a source. The order inside a window is drawn from
    (seed, window).
    """

    def __init__(self, shares: Mapping[str, float], seed: int) -> None:
        """Chooses the size of a window, W.

        Args:
            shares: Share of each of S sources by its name; their sum is 1.
            seed: Another seed gives another order.

        Raises:
            ConfigError: When a source is so rare that it would hardly ever be drawn.
        """
        self._seed = seed

        # Source s has the numbers from bounds[s] to bounds[s + 1] of a whole of 2**48.
        cumulative_shares = accumulate(shares.values())
        self.bounds = [0, *(round(total * _WHOLE) for total in cumulative_shares)]
        self.bounds[-1] = _WHOLE
        self.sources = lru_cache(maxsize=4)(self._draw_sources)

        widths = [end - start for start, end in pairwise(self.bounds)]
        smallest_width = min(widths)
        if smallest_width * _LARGEST_WINDOW < 2 * _WHOLE:
            name = list(shares)[widths.index(smallest_width)]
            raise ConfigError(
                f"{name!r} would be {shares[name]:.2g} of the mixture and hardly ever drawn. Make the rates more equal "
                "(for tasks: lower mixture.maximum or raise mixture.temperature), or leave it out."
            )

        # Rounding takes less than one example from a share: two leave one at least.
        self.window_size = max(WINDOW, -(-2 * _WHOLE // smallest_width))

    def num_before(self, window: int) -> list[int]:
        """Returns how many examples of each source come before a window: its rounded share."""
        num_examples = window * self.window_size
        bounds = [num_examples * bound // _WHOLE for bound in self.bounds]
        return [end - start for start, end in pairwise(bounds)]

    def _draw_sources(self, window: int) -> NDArray[np.int64]:
        """Returns <int64>[W] the source of each example of a window, in order."""
        counts = np.subtract(self.num_before(window + 1), self.num_before(window))
        rng = np.random.default_rng([self._seed, 2, window])
        return rng.permutation(np.repeat(np.arange(len(counts)), counts))
