"""What chance alone would give: tokens whose experts are shuffled, so that a measure has a null.

Comes before specialization.py and coactivation.py, which count on shuffled tokens.
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
LEAST_DOCUMENTS = 6
"""Documents below which there are too few orders of them for a p-value of 1 %."""


class TokenPlaces(NamedTuple):
    """Where the N tokens of a stack stand.

    Attributes:
        position: <int64>[N] position of each token in its example, from 0.
        example: <int64>[N] number of its example.
        document: <int64>[N] number of its document; an example is of one document.
    """

    position: Tensor
    example: Tensor
    document: Tensor


def token_places(trace: Trace, stack: Stack) -> TokenPlaces:
    """Returns where the tokens of a stack stand, each <int64>[N]."""
    part = trace.stack(stack)
    example = part.example
    return TokenPlaces(
        position=part.position,
        example=example,
        document=trace.document.long()[example],
    )


class Shuffle(ABC):
    """A way to take the experts of tokens from other tokens, under which nothing but chance is left.

    A user's own null is a subclass: what a draw may exchange is what the test takes for exchangeable.
    """

    def __init__(self, places: TokenPlaces) -> None:
        self.places = places

    @abstractmethod
    def draw(self, generator: np.random.Generator) -> np.ndarray:
        """Returns <int64>[N]: for each token, the token whose expert it is given."""


class TokenShuffle(Shuffle):
    """Exchanges tokens within deciles of their position, whatever document they are of.

    Its null: given the decile, each token is routed for itself. Where documents differ in their
    classes and in their routing it calls that a relation, and its p-values are too small: in a
    simulation of 40 documents of 50 tokens, each with its own mix of classes and, independent of
    that, its own mix of experts, it gave p <= 0.05 in all of 200 draws without any relation;
    `DocumentShuffle` in 5 %.
    """

    def __init__(self, places: TokenPlaces) -> None:
        super().__init__(places)
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
    """Exchanges whole documents: a token is given the expert of the token at its place in another.

    Documents stand in a circle, in a new order each time, and each takes the experts of the next
    one; past the end of that, of the next one that is long enough. So tokens change within their
    position, and what follows each other in a document goes on following each other.

    Its null: a document's routing has nothing to do with that document's text. Within a document
    tokens may depend on each other as they like, and on their position. It needs a good number of
    documents: a dozen at least, and better a hundred. Where only one document is so long, its
    tokens stay, which makes p-values larger.
    """

    def __init__(self, places: TokenPlaces) -> None:
        super().__init__(places)
        _, document = np.unique(places.document.numpy(), return_inverse=True)  # without gaps
        self._num_documents = int(document.max(initial=-1)) + 1
        if self._num_documents < LEAST_DOCUMENTS:
            raise DataError(
                f"The tokens are of {self._num_documents} documents; shuffling whole documents needs {LEAST_DOCUMENTS} "
                "at least. Trace more documents, or take TokenShuffle, which takes tokens for independent."
            )

        # A place is an example of a document, counted from its first, and a position in it.
        length = int(places.position.max()) + 1
        place = _example_ranks(places.example.numpy(), document) * length + places.position.numpy()
        self._tokens = place.argsort(kind="stable")  # [N] place by place
        self._document = document[self._tokens]
        _, start, number = np.unique(
            place[self._tokens], return_index=True, return_inverse=True
        )  # where each place begins
        self._group = number * self._num_documents

        # Whose neighbour is the next in the list, but for the last of a place.
        self._next = np.arange(1, len(place) + 1)
        ends = np.append(start[1:], len(place)) - 1
        self._next[ends] = start

    def draw(self, generator: np.random.Generator) -> np.ndarray:
        """Returns <int64>[N]: for each token, the one at its place in another document."""
        rank = generator.permutation(self._num_documents)
        order = (self._group + rank[self._document]).argsort()
        tokens = self._tokens[order]  # place by place, in the order of the circle
        source = np.empty_like(tokens)
        source[tokens] = tokens[self._next]
        return source


def _example_ranks(example: np.ndarray, document: np.ndarray) -> np.ndarray:
    """Returns <int64>[N]: the number of each token's example within its document, from 0."""
    _, first, number = np.unique(example, return_index=True, return_inverse=True)
    document_of_example = document[first]
    order = document_of_example.argsort(kind="stable")
    num_examples = np.bincount(document_of_example)
    first_example = num_examples.cumsum() - num_examples

    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order)) - first_example[document_of_example[order]]
    return rank[number]


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
        shuffle: What is exchanged, in all layers alike.
        num_permutations: Shuffles.
        seed: Of the shuffles.

    Yields:
        <int64>[R, E] for each layer. Tokens without an expert are in no column.
    """
    columns = []
    for layer in layers:
        first = layer.first.numpy().astype(np.int64)
        columns.append(np.where(first < 0, layer.facts.num_experts, first))

    for source in _sources(shuffle, num_permutations, seed):
        tables = []
        for layer, column in zip(layers, columns, strict=True):
            # A last column is for tokens that chose no expert.
            width = layer.facts.num_experts + 1
            cells = rows * width + column[source]
            counts = np.bincount(cells, minlength=num_rows * width)
            table = torch.from_numpy(counts.reshape(num_rows, width))
            tables.append(table[:, :-1])
        yield tables


def _sources(shuffle: Shuffle, num_permutations: int, seed: int) -> Iterator[np.ndarray]:
    """Yields <int64>[N]: each token itself, and then each shuffle."""
    generator = np.random.default_rng(seed)
    yield np.arange(len(shuffle.places.position))
    for _ in range(num_permutations):
        yield shuffle.draw(generator)


def share_at_least(statistics: Tensor, values: Tensor) -> Tensor:
    """Returns the p-value of each value: the share of shuffles in which the statistic is as large.

    Args:
        statistics: <float64>[R] of the tokens as they are and of all shuffles.
        values: <float64>[...] of the tokens as they are.

    Returns:
        <float64>[...] at least 1 / R, where a value is among the statistics.
    """
    ascending = statistics.sort().values
    below = torch.searchsorted(ascending, values.contiguous())
    return (len(ascending) - below).double() / len(ascending)


def check_tokens(what: str, num_tokens: int, expected: int) -> None:
    """Raises a DataError unless two things are of the same tokens."""
    if num_tokens != expected:
        raise DataError(
            f"{what} are of {num_tokens:,} tokens; expected {expected:,}, those of the layer. Take both from the same "
            "stack of one trace."
        )
