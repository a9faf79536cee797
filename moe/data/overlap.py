"""How much of a test set occurs in a text: n-grams, runs of n words, that both contain.

Comes after `documents`. Words are compared without case and punctuation. A text is read once, in
batches; memory grows with the test set only.

Source:
    GPT-3 (arXiv:2005.14165) appendix C, n-grams of 8 to 13 words; PaLM (arXiv:2204.02311) section
    8, of 8. Differs: an input of fewer than n words counts as one n-gram.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

NGRAM_SIZES = (8, 13)
SHORTEST = 5
"""Inputs of fewer words are not compared: any text may contain them."""

_BATCH = 4_000_000  # characters
_WORD = re.compile(r"[^\W_]+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no bit is lost
_FLAG_BITS = 22


class Overlap(NamedTuple):
    """How many n-grams of a test set occur in a text.

    Attributes:
        n: Words of an n-gram.
        is_shared: <bool>[N] whether an input shares an n-gram with the text.
        num_compared: Number of inputs that are long enough to be compared.
        num_ngrams: Number of different n-grams of the inputs.
        num_shared_ngrams: Number of these n-grams that occur in the text.
    """

    n: int
    is_shared: NDArray[np.bool_]
    num_compared: int
    num_ngrams: int
    num_shared_ngrams: int

    @property
    def num_inputs(self) -> int:
        """Number of inputs."""
        return len(self.is_shared)

    @property
    def num_shared(self) -> int:
        """Number of inputs that share an n-gram with the text."""
        return int(self.is_shared.sum())

    @property
    def share_of_inputs(self) -> float:
        """Share of the compared inputs that have an n-gram in common with the text."""
        return self.num_shared / max(1, self.num_compared)

    @property
    def share_of_ngrams(self) -> float:
        """Share of the n-grams that occur in the text."""
        return self.num_shared_ngrams / max(1, self.num_ngrams)


class SplitOverlap(NamedTuple):
    """How much of one split of a task occurs in a text: an `Overlap` in plain numbers."""

    task: str
    split: str
    n: int
    num_inputs: int
    num_compared: int
    num_shared: int
    share_of_inputs: float
    num_ngrams: int
    num_shared_ngrams: int
    share_of_ngrams: float

    @classmethod
    def of(cls, task: str, split: str, overlap: Overlap) -> "SplitOverlap":
        """Returns the numbers of an overlap."""
        numbers = {name: getattr(overlap, name) for name in cls._fields[2:]}
        return cls(task, split, **numbers)


def measure_overlap(
    inputs: Mapping[Any, Sequence[str]], texts: Iterable[str], sizes: Sequence[int] = NGRAM_SIZES
) -> dict[Any, list[Overlap]]:
    """Returns how much of each test set occurs in a text, for each size of n-grams.

    Args:
        inputs: Inputs by the name of their test set. A common prefix of all inputs is a prompt and is not compared.
        texts: The text, in parts of any length; n-grams do not cross from one to the next.
        sizes: Numbers of words n.
    """
    words: list[list[str]] = []
    for test_set in inputs.values():
        words += _words_of_inputs(test_set)

    # One pass over the text for all test sets.
    index = NgramIndex(words, sizes)
    is_found = np.zeros(index.num_ngrams, dtype=np.bool_)
    for batch in _batches(texts):
        is_found[index.find(batch)] = True

    # The inputs of a test set are concatenated.
    overlaps: dict[Any, list[Overlap]] = {}
    start = 0
    for name, test_set in inputs.items():
        end = start + len(test_set)
        overlaps[name] = [index.overlap(n, is_found, start, end) for n in sizes]
        start = end
    return overlaps


def _words_of_inputs(inputs: Sequence[str]) -> list[list[str]]:
    """Returns the words of each input, without the prefix that all inputs share."""
    words = list(map(_words, inputs))
    num_common = 0
    if len(words) > 1:
        shortest = min(words, key=len)
        while num_common < len(shortest):
            if any(each[num_common] != shortest[num_common] for each in words):
                break
            num_common += 1
    return [each[num_common:] for each in words]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yields lists of texts with few enough characters to be compared at once."""
    batch: list[str] = []
    num_characters = 0
    for text in texts:
        batch.append(text)
        num_characters += len(text)
        if num_characters >= _BATCH:
            yield batch
            batch = []
            num_characters = 0
    if batch:
        yield batch


class NgramIndex:
    """The n-grams of inputs, by hashes of 64 bits, ready to be found in texts."""

    def __init__(self, inputs: Sequence[Sequence[str]], sizes: Sequence[int]):
        """Indexes the n-grams of all sizes.

        Args:
            inputs: Words of each input.
            sizes: Numbers of words n.
        """
        # Words of the inputs are numbered from 1, all others are 0; each number has a random hash.
        vocabulary = dict.fromkeys(chain.from_iterable(inputs))
        self._ids = {word: number for number, word in enumerate(vocabulary, start=1)}
        rng = np.random.default_rng(0)
        count = len(self._ids) + 1
        self._hashes = rng.integers(2**64, size=count, dtype=np.uint64)  # [V + 1]

        # Numbers of n-grams by n and hash. For each n, pairs (n-gram, input that contains it),
        # <int64>[P, 2].
        numbers: dict[int, dict[int, int]] = {}
        self.num_ngrams = 0
        self._incidences: dict[int, NDArray[np.int64]] = {}
        for n in sizes:
            pairs: list[tuple[int, int]] = []
            for number, words in enumerate(inputs):
                # A short input is compared as a whole, a very short one not at all.
                size = min(n, len(words))
                if size < min(n, SHORTEST):
                    continue
                ids = [self._ids[word] for word in words]
                *_, windows = _rolling_hashes(self._hashes[ids], size)
                number_by_hash = numbers.setdefault(size, {})
                for value in set(windows.tolist()):
                    if value not in number_by_hash:
                        number_by_hash[value] = self.num_ngrams
                        self.num_ngrams += 1
                    pairs.append((number_by_hash[value], number))
            self._incidences[n] = np.asarray(pairs, dtype=np.int64).reshape(-1, 2)

        self._tables = {size: _Table(of_size) for size, of_size in numbers.items()}

    def find(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """Returns <int64>[M] the numbers of the n-grams that occur in the texts, with repetitions."""
        # An unknown word between two texts, so that no n-gram spans both.
        ids: list[int] = []
        number_of = self._ids.get
        for text in texts:
            ids += [number_of(word, 0) for word in _words(text)]
            ids.append(0)
        hashes = self._hashes[np.asarray(ids, dtype=np.int64)]  # [W]

        # One size of n-grams after the other.
        found = [np.empty(0, dtype=np.int64)]
        longest = max(self._tables, default=0)
        for size, windows in enumerate(_rolling_hashes(hashes, longest), start=1):
            if size in self._tables:
                found.append(self._tables[size].find(windows))
        return np.concatenate(found)

    def overlap(self, n: int, is_found: NDArray[np.bool_], start: int, end: int) -> Overlap:
        """Returns how much of the inputs from `start` to `end` was found.

        Args:
            n: Words of an n-gram.
            is_found: <bool>[num_ngrams] whether the text has each n-gram.
            start: Number of the first input.
            end: One past the last position.
        """
        ngrams, inputs = self._incidences[n].T
        is_in_set = (start <= inputs) & (inputs < end)
        ngrams = ngrams[is_in_set]
        inputs = inputs[is_in_set] - start

        # An input is shared when one of its n-grams is.
        is_shared = np.zeros(end - start, dtype=np.bool_)
        is_shared[inputs[is_found[ngrams]]] = True
        different = np.unique(ngrams)
        return Overlap(
            n=n,
            is_shared=is_shared,
            num_compared=len(np.unique(inputs)),
            num_ngrams=len(different),
            num_shared_ngrams=int(is_found[different].sum()),
        )


class _Table:
    """The n-grams of one size: their hashes in order, and their numbers."""

    def __init__(self, number_by_hash: Mapping[int, int]):
        pairs = sorted(number_by_hash.items())
        hashes = np.asarray([value for value, _ in pairs], dtype=np.uint64)
        self._hashes = hashes
        self._numbers = np.asarray([number for _, number in pairs])

        # Most windows of a text are ruled out by the upper bits of their hash.
        self._shift = np.uint64(64 - _FLAG_BITS)
        self._flags = np.zeros(2**_FLAG_BITS, dtype=np.bool_)
        self._flags[hashes >> self._shift] = True

    def find(self, windows: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Returns the numbers of the windows that are n-grams."""
        candidates = np.flatnonzero(self._flags[windows >> self._shift])
        values = windows[candidates]

        # The others are looked up among the sorted hashes.
        places = np.searchsorted(self._hashes, values)
        places = np.minimum(places, len(self._hashes) - 1)
        is_equal = self._hashes[places] == values
        return self._numbers[places[is_equal]]


def _rolling_hashes(hashes: NDArray[np.uint64], longest: int) -> Iterator[NDArray[np.uint64]]:
    """Yields the hashes of all runs of 1, 2, ... words.

    Args:
        hashes: <uint64>[W] hash of each word.
        longest: Words of the last runs.
    """
    windows = hashes[:0]
    for size in range(1, min(longest, len(hashes)) + 1):
        # The hash of a run is a polynomial in the hashes of its words, modulo 2 ** 64.
        last_words = hashes[size - 1 :]
        windows = last_words if size == 1 else windows[:-1] * _MULTIPLIER + last_words
        yield windows
