"""Packing: several encoder-decoder examples in one row, distinguished by segment numbers."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Tokens = Sequence[int] | NDArray[np.int32]
Example = tuple[Tokens, Tokens]


def pack_rows(
    examples: Sequence[Example], inputs_length: int, targets_length: int
) -> list[list[int]]:
    """Returns the indices of the examples in each row, in order.

    An example that does not fit on one of the two sides starts a new row.

    Args:
        examples: Input and target tokens of each example, none longer than a row.
        inputs_length: Maximum number of input tokens of a row.
        targets_length: Maximum number of target tokens of a row.

    Source:
        seqio `EncDecFeatureConverter(pack=True)` at b898b9f: sequential packing, both sides
        together. Differs: no.
    """
    rows: list[list[int]] = []
    inputs_room = -1
    targets_room = -1
    for index, (inputs, targets) in enumerate(examples):
        # The first example that does not fit starts the next row.
        if len(inputs) > inputs_room or len(targets) > targets_room:
            rows.append([])
            inputs_room = inputs_length
            targets_room = targets_length

        rows[-1].append(index)
        inputs_room -= len(inputs)
        targets_room -= len(targets)
    return rows


def example_rows(
    examples: Sequence[Example], lengths: tuple[int, int] | None
) -> list[list[Example]]:
    """Returns rows of one example each, or of as many as fit into rows of these lengths; see `pack_rows`."""
    if lengths is None:
        return [[example] for example in examples]
    rows = []
    for packed in pack_rows(examples, *lengths):
        rows.append([examples[index] for index in packed])
    return rows


def fill_row(
    parts: Sequence[Tokens], length: int, padding: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns a row of tokens <int64>[length] and its segment numbers <int64>[length].

    Segments count from 1; 0 is padding.
    """
    tokens = np.full(length, padding, dtype=np.int64)
    segments = np.zeros(length, dtype=np.int64)

    start = 0
    for number, part in enumerate(parts, start=1):
        end = start + len(part)
        tokens[start:end] = part
        segments[start:end] = number
        start = end
    return tokens, segments
