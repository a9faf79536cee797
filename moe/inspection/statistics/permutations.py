"""Null distributions: a measure on tokens with shuffled experts, to compare it with chance.

Comes before specialization.py, which counts on shuffled tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe.checks import check_integer
from moe.errors import DataError
from moe.sparse.editing import Stack
from moe.tracing.trace import LayerTrace, Trace

NUM_DECILES = 10
_CIRCLE = 10  # documents

LEAST_DOCUMENTS = 6
"""Documents below which there are too few orders of them for a p-value of 1 %."""


class TokenPlaces(NamedTuple):
    """Positions of the N tokens of a stack.

    Attributes:
        position: <int64>[N] position of each token in its example, from 0.
        example: <int64>[N] number of its example.
        document: <int64>[N] number of its document; an example belongs to one document.
    """

    position: Tensor
    example: Tensor
    document: Tensor


def token_places(trace: Trace, stack: Stack) -> TokenPlaces:
    """Returns the positions of the tokens of a stack, each <int64>[N]."""
    part = trace.stack(stack)
    example = part.example
    return TokenPlaces(
        position=part.position, example=example, document=trace.document.long()[example]
    )


class Shuffle(ABC):
    """A way to give tokens the experts of other tokens, so that only chance relates them.

    Subclass it for another null hypothesis: under it, the values that a draw exchanges must be
    exchangeable.
    """

    def __init__(self, places: TokenPlaces) -> None:
        self.places = places

    @abstractmethod
    def draw(self, generator: np.random.Generator) -> np.ndarray:
        """Returns <int64>[N]: for each token, the token whose expert it gets."""


class TokenShuffle(Shuffle):
    """Exchanges tokens within deciles of their position, regardless of their documents.

    Null hypothesis: given the decile, tokens are routed independently. If tokens of a document are
    more alike than others, in class and in routing, it mistakes that for a relation, and its
    p-values are too small. In 200 simulated traces of 40 documents of 50 tokens without any relation it gave
    p <= 0.05 in 60 % where each document had its own mix of classes and its own of experts, in 76 %
    where tokens followed their neighbours; `DocumentShuffle` in 5 % of both.
    """

    def __init__(self, places: TokenPlaces) -> None:
        super().__init__(places)

        # The tokens of each decile.
        deciles = position_deciles(places.position.numpy())
        order = deciles.argsort(kind="stable")
        ends = np.bincount(deciles, minlength=NUM_DECILES).cumsum()
        self._members = np.split(order, ends[:-1])

    def draw(self, generator: np.random.Generator) -> np.ndarray:
        """Returns <int64>[N]: for each token, another of its decile."""
        source = np.empty(self.places.position.numel(), dtype=np.int64)
        for members in self._members:
            source[members] = generator.permutation(members)
        return source


class DocumentShuffle(Shuffle):
    """Exchanges whole documents: a token gets the expert of the token at the same place in another.

    Ten to twenty documents of similar length are permuted at random. If the document assigned to a
    document is too short, the document assigned to that one follows, and so on: tokens keep their
    position, and neighbours in a document stay neighbours.

    Null hypothesis: a document's routing does not depend on its text. Within a document, tokens may
    depend on each other and on their position. With 40 documents its p-values are right; with 12 of
    unequal lengths, up to 12 % were at 0.05 or below. A class that has the same positions in all
    documents, such as the end of texts truncated to one length, has p = 1: experts for the class
    cannot be distinguished from experts for its position.
    """

    def __init__(self, places: TokenPlaces) -> None:
        super().__init__(places)

        # Documents as 0, 1, ...
        document = places.document.numpy()
        _, self._document = np.unique(document, return_inverse=True)  # [N]
        num_documents = int(self._document.max(initial=-1)) + 1
        if num_documents < LEAST_DOCUMENTS:
            raise DataError(
                f"The tokens come from {num_documents} documents; shuffling whole documents needs {LEAST_DOCUMENTS} "
                "at least. Trace more documents, or use TokenShuffle, which treats tokens as independent."
            )

        # Examples in the order of their documents: first token and length.
        _, first_token, example, length = np.unique(
            places.example.numpy(), return_index=True, return_inverse=True, return_counts=True
        )
        document_of_example = self._document[first_token]
        by_document = document_of_example.argsort(kind="stable")
        self._first_token = first_token[by_document]
        self._length = length[by_document]

        # Start and number of the examples of each document in that order.
        self._num_examples = np.bincount(document_of_example)
        self._first_example = self._num_examples.cumsum() - self._num_examples

        # The place of a token: the example within its document, and the position in that.
        place = np.empty_like(by_document)
        place[by_document] = np.arange(len(place))
        self._example = place[example] - self._first_example[self._document]
        self._position = np.arange(len(example)) - first_token[example]

        # Documents circle by circle.
        self._circle = _circles(self._document)
        self._by_circle = self._circle.argsort(kind="stable")

    def draw(self, generator: np.random.Generator) -> np.ndarray:
        """Returns <int64>[N]: for each token, the one at the same place in another document."""
        # Documents change places within their circle.
        key = generator.random(len(self._circle))
        shuffled = np.lexsort((key, self._circle))
        given = np.empty_like(shuffled)
        given[self._by_circle] = shuffled  # [D] the document whose experts each gets

        # If it is too short, the document assigned to it follows, and so on; in the end, the document itself.
        source = np.empty_like(self._document)
        tokens = np.arange(len(source))
        other = given[self._document]
        while len(tokens):
            example = self._first_example[other] + self._example[tokens]
            has_place = self._example[tokens] < self._num_examples[other]
            example[~has_place] = 0
            has_place &= self._position[tokens] < self._length[example]
            placed = tokens[has_place]
            source[placed] = self._first_token[example[has_place]] + self._position[placed]

            tokens = tokens[~has_place]
            other = given[other[~has_place]]
        return source


def _circles(document: np.ndarray) -> np.ndarray:
    """Returns <int64>[D]: the circle of each document, which holds documents of about the same length."""
    lengths = np.bincount(document)
    num_circles = max(1, len(lengths) // _CIRCLE)
    rank = lengths.argsort(kind="stable").argsort()
    return rank * num_circles // len(lengths)


def position_deciles(position: np.ndarray) -> np.ndarray:
    """Returns <int64>[N]: the decile of each position <int64>[N]; equal ones are in the same."""
    if not len(position):
        return np.empty(0, dtype=np.int64)
    smaller = np.searchsorted(np.sort(position), position)  # tokens before it
    return NUM_DECILES * smaller // len(position)


def check_permutations(num_permutations: int, seed: int) -> None:
    """Raises a ConfigError unless a test has as many permutations as it can use, and a seed."""
    check_integer(
        "num_permutations",
        num_permutations,
        least=19,
        most=1_000_000,
        reason="19 are the fewest that can give p = 0.05",
    )
    check_integer("seed", seed, least=0)


# ---------------------------------------------------------------------------
# Tables of shuffled tokens


def shuffled_tables(
    rows: np.ndarray,
    num_rows: int,
    layers: Sequence[LayerTrace],
    shuffle: Shuffle,
    num_permutations: int,
    seed: int,
) -> Iterator[list[Tensor]]:
    """Yields tables of counts, one for each layer: first of the tokens as they are, then shuffled.

    Args:
        rows: <int64>[N] row that each token counts in.
        num_rows: R.
        layers: Layers of one stack; their first choices are the columns.
        shuffle: The null hypothesis; all layers are shuffled alike.
        num_permutations: Number of shuffles.
        seed: Seed of the shuffles.

    Yields:
        <int64>[R, E] for each layer. Tokens without an expert are in no column.
    """
    # A last column is for tokens that chose no expert.
    columns = []
    for layer in layers:
        first = layer.first.numpy().astype(np.int64)
        last = layer.facts.num_experts
        columns.append(np.where(first < 0, last, first))

    # First each token itself, then the shuffles; a shuffle costs only the counting of cells.
    generator = np.random.default_rng(seed)
    for number in range(num_permutations + 1):
        source = shuffle.draw(generator) if number else np.arange(len(rows))
        tables = []
        for layer, column in zip(layers, columns, strict=True):
            width = layer.facts.num_experts + 1
            cells = rows * width + column[source]
            counts = np.bincount(cells, minlength=num_rows * width)
            table = torch.from_numpy(counts.reshape(num_rows, width))
            tables.append(table[:, :-1])
        yield tables


def share_at_least(statistics: Tensor, values: Tensor) -> Tensor:
    """Returns the p-value of each value: the share of shuffles in which the statistic is as large.

    Args:
        statistics: <float64>[R] of the original tokens and of all shuffles.
        values: <float64>[...] of the tokens as they are.

    Returns:
        <float64>[...] at least 1 / R, where a value is among the statistics.
    """
    ascending = statistics.sort().values
    below = torch.searchsorted(ascending, values.contiguous())
    return (len(ascending) - below).double() / len(ascending)


def check_tokens(what: str, num_tokens: int, expected: int) -> None:
    """Raises a DataError unless two things belong to the same tokens."""
    if num_tokens != expected:
        raise DataError(
            f"{what} cover {num_tokens:,} tokens; expected {expected:,}, those of the layer. Take both from the same "
            "stack of one trace."
        )
