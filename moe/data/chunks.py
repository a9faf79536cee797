"""Chunks of a text by their position in training: of a text in memory, and of several texts by their rates.

Comes before `pipeline`, which masks the chunks; `token_stream` has texts larger than memory.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from einops import rearrange
from numpy.typing import NDArray

from moe.errors import ConfigError, DataError

W = TypeVar("W")

WINDOW = 4096
"""Least number of examples whose sources are drawn together."""

_LARGEST_WINDOW = 1 << 22
_WHOLE = 1 << 48  # shares are integers of this: rounding stays exact for any number of steps


class Chunks(NamedTuple):
    """Chunks of C tokens, in the order of training.

    Attributes:
        at: Returns <int32>[C] the chunk at a position, counted over all epochs.
        num_examples: Chunks of an epoch; None where they are not counted.
    """

    at: Callable[[int], NDArray[np.int32]]
    num_examples: int | None


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
        fingerprint: The tokens themselves, to be hashed.
    """

    def __init__(self, tokens: NDArray[np.int32]) -> None:
        self.tokens = tokens
        self.fingerprint = np.ascontiguousarray(tokens).data

    def chunks(self, length: int, seed: int) -> Chunks:
        """Returns its chunks of C = `length` tokens; each epoch has each of them once.

        Raises:
            DataError: When the text is shorter than one chunk.
        """
        size = self.tokens.size // length
        if size == 0:
            raise DataError(
                f"The text has {self.tokens.size} tokens, less than one example of {length}. Give more text or a "
                "smaller inputs_length."
            )
        chunks = rearrange(self.tokens[: size * length], "(n c) -> n c", c=length)

        def at(position: int) -> NDArray[np.int32]:
            epoch, index = divmod(position, size)
            return chunks[epoch_order(seed, epoch, size)[index]]

        return Chunks(at, size)


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
        digests = [hashlib.sha256(text.fingerprint).digest() for text in texts]
        self.fingerprint = b"".join(digests) + repr(self._shares).encode()

    def chunks(self, length: int, seed: int) -> Chunks:
        """Returns the chunks of C = `length` tokens of all texts."""
        texts = [text.chunks(length, seed) for text in self._texts]
        interleaving = Interleaving(self._shares, seed)

        def at(position: int) -> NDArray[np.int32]:
            window, index = divmod(position, interleaving.window_size)
            sources = interleaving.sources(window)  # [W]
            source = int(sources[index])
            num_before = interleaving.num_before(window)[source]
            num_before += int((sources[:index] == source).sum())
            return texts[source].at(num_before)

        return Chunks(at, None)


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
        """Returns the source <int64>[W] of each example of a window."""
        counts = np.subtract(self.num_before(window + 1), self.num_before(window))
        rng = np.random.default_rng([self._seed, 2, window])
        return rng.permutation(np.repeat(np.arange(len(counts)), counts))


class Windows(Generic[W]):
    """The windows of a stream one after the other, and where each item of training is in them.

    Where an item is follows from the number of items in all windows before it. They are counted as
    the stream is read, and again, e.g. from the files of tokens, by a run that resumes.
    """

    def __init__(self, windows: Iterator[tuple[W, int]]) -> None:
        """Begins at the first of endlessly many windows, each with the number of its items."""
        self._next = windows
        self._windows: list[W] = []
        self._starts = [0]  # first item of each window, and the number of items so far

    def locate(self, position: int) -> tuple[W, int]:
        """Returns the window of an item and its index there.

        Args:
            position: Number of the item, counted over all epochs.
        """
        while self._starts[-1] <= position:
            window, size = next(self._next)
            self._windows.append(window)
            self._starts.append(self._starts[-1] + size)
        number = bisect_right(self._starts, position) - 1
        return self._windows[number], position - self._starts[number]
