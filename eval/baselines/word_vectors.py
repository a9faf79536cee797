"""Word vectors from the co-occurrence counts of a corpus: pre-training for baselines.

A word's vector is a row of the positive pointwise mutual information of words that occur near each
other, reduced by a truncated singular value decomposition. It uses nothing but the text.

Source:
    Levy and Goldberg (NIPS 2014, "Neural word embedding as implicit matrix factorization"): PPMI and
    SVD, with their weights of the singular values (power 0.5), smoothing of contexts (0.75) and
    weights 1 / distance. Arora et al. (ICLR 2017, "A simple but tough-to-beat baseline for sentence
    embeddings"): a text is the mean of its words, weighted by a / (a + p). Differs: no common
    component is removed; the classifier does not need this.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe.data.corpus import load_corpus
from moe.errors import DataError

if TYPE_CHECKING:
    from scipy import sparse

MAX_CHARACTERS = 40_000_000
"""Most characters that are read; of a larger corpus, evenly spaced documents. 10 million take about 15 seconds."""

NUM_DIMENSIONS = 300
WINDOW = 10
MAX_WORDS = 30_000
MIN_COUNT = 3

_CONTEXT_SMOOTHING = 0.75
_FREQUENT = 1e-3  # a word of this share counts half
_WORD = re.compile(r"[^\W\d_]+|\d+")
_BLOCK = 1 << 20  # tokens that are counted at once


class WordVectors(NamedTuple):
    """Vectors of the frequent words of a text.

    Attributes:
        numbers: Number of each word, from 0 to V - 1.
        vectors: <float32>[V, D] of length 1.
        weights: <float32>[V] how much a word counts: frequent ones little.
        source: Description of the text.
    """

    numbers: dict[str, int]
    vectors: NDArray[np.float32]
    weights: NDArray[np.float32]
    source: str

    def mean(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Returns <float32>[N, D] weighted sums of the vectors, over the length of the weights.

        Texts without a known word have zeros. The length, not the sum of the weights, is divided
        by, so that the norm of a long text reflects the agreement of its words.
        """
        means = np.zeros((len(texts), self.vectors.shape[1]), np.float32)  # [N, D]
        for row, text in enumerate(texts):
            numbers = self._words(text)
            if numbers:
                weights = self.weights[numbers]
                means[row] = weights @ self.vectors[numbers] / np.linalg.norm(weights)
        return means

    def max(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Returns <float32>[N, D] the largest value of each dimension over the words of a text."""
        largest = np.zeros((len(texts), self.vectors.shape[1]), np.float32)  # [N, D]
        for row, text in enumerate(texts):
            numbers = self._words(text)
            if numbers:
                largest[row] = self.vectors[numbers].max(axis=0)
        return largest

    def _words(self, text: str) -> list[int]:
        return [self.numbers[word] for word in split_words(text) if word in self.numbers]


def split_words(text: str) -> list[str]:
    """Returns the words of a text in lower case; digits and letters form separate words."""
    return _WORD.findall(text.lower())


def read_word_vectors(corpus: Path) -> WordVectors:
    """Returns vectors of the words in the training documents of a corpus.

    Raises:
        DataError: When the folder holds no corpus, or its text has too few words.
    """
    texts: list[str] = list(load_corpus(corpus).train["text"])
    num_characters = sum(map(len, texts))

    # Large corpora are reduced to evenly spaced documents.
    step = -(-num_characters // MAX_CHARACTERS)
    chosen = texts[::step]
    amount = f"{sum(map(len, chosen)) / 1e6:,.1f}"
    if step > 1:
        amount += f" of {num_characters / 1e6:,.1f}"
    return build_word_vectors(chosen, f"{corpus} ({amount} million characters)")


def build_word_vectors(texts: Iterable[str], source: str) -> WordVectors:
    """Returns vectors of the words in texts; the same texts always give the same.

    Args:
        texts: Documents; words of different paragraphs never count as near.
        source: Description of the text.

    Raises:
        DataError: When fewer than two words are frequent enough.
    """
    # The words of each paragraph, and how often each occurs.
    paragraphs: list[list[str]] = []
    for text in texts:
        paragraphs += map(split_words, text.split("\n"))
    counts: Counter[str] = Counter()
    for words in paragraphs:
        counts.update(words)

    # The most frequent words; ties are broken alphabetically.
    frequent = [word for word, count in counts.items() if count >= MIN_COUNT]
    frequent.sort(key=lambda word: (-counts[word], word))
    numbers = {word: number for number, word in enumerate(frequent[:MAX_WORDS])}
    if len(numbers) < 2:
        raise DataError(
            f"The text of {source} has {len(numbers)} words that occur {MIN_COUNT} times; expected "
            "at least 2. Give a larger corpus."
        )

    # Words that occur together more often than by chance, and smaller weights for frequent words.
    association = _positive_mutual_information(_count_neighbours(paragraphs, numbers))
    if association.nnz == 0:
        raise DataError(
            f"No two words of {source} occur near each other more often than by chance. Give a larger corpus."
        )
    shares = np.array([counts[word] for word in numbers]) / counts.total()
    weights = (_FREQUENT / (_FREQUENT + shares)).astype(np.float32)
    return WordVectors(numbers, _reduce(association, len(numbers)), weights, source)


def _count_neighbours(
    paragraphs: Sequence[Sequence[str]], numbers: dict[str, int]
) -> "sparse.csr_matrix":
    """Returns <float64>[V, V] how often two words occur near each other, weighted by 1 / distance."""
    from scipy import sparse

    # All paragraphs in a row, with a gap between two that is as wide as the window.
    gap = [-1] * WINDOW
    tokens: list[int] = []
    for words in paragraphs:
        tokens += [numbers.get(word, -1) for word in words]
        tokens += gap
    ids = np.asarray(tokens, dtype=np.int32)  # [T]

    # Process blocks, each with the first words of the next one.
    size = len(numbers)
    counts = sparse.csr_matrix((size, size))
    for start in range(0, len(ids), _BLOCK):
        for distance in range(1, WINDOW + 1):
            right = ids[start + distance : start + _BLOCK + distance]
            left = ids[start : start + len(right)]
            known = (left >= 0) & (right >= 0)
            pairs = (left[known], right[known])
            values = np.full(len(pairs[0]), 1 / distance)
            counts += sparse.coo_matrix((values, pairs), (size, size)).tocsr()
    return counts + counts.T


def _positive_mutual_information(counts: "sparse.csr_matrix") -> "sparse.csr_matrix":
    """Returns <float32>[V, V] log p(word, context) / (p(word) p(context)) where it is above 0."""
    from scipy import sparse

    pairs = counts.tocoo()
    word_counts = np.asarray(counts.sum(axis=1)).ravel()  # [V]
    context_shares = word_counts**_CONTEXT_SMOOTHING
    context_shares /= max(context_shares.sum(), 1e-9)  # 0 if two words never co-occur

    # Expected co-occurrences by chance.
    expected = word_counts[pairs.row] * context_shares[pairs.col]
    information = np.log(pairs.data / expected)
    positive = information > 0
    places = (pairs.row[positive], pairs.col[positive])
    values = information[positive].astype(np.float32)
    return sparse.csr_matrix((values, places), counts.shape)


def _reduce(association: "sparse.csr_matrix", num_words: int) -> NDArray[np.float32]:
    """Returns <float32>[V, D] left singular vectors by the root of their values, of length 1."""
    from sklearn.decomposition import TruncatedSVD

    num_dimensions = min(NUM_DIMENSIONS, num_words - 1)
    decomposition = TruncatedSVD(num_dimensions, n_iter=4, random_state=0)
    scaled = decomposition.fit_transform(association)  # [V, D] vectors by their values

    # The square root of the singular values is kept. Words without neighbours have zeros.
    values = np.maximum(decomposition.singular_values_, 1e-9)
    vectors = scaled / np.sqrt(values)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.maximum(lengths, 1e-9)).astype(np.float32)
