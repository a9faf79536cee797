"""What the bounds of intervals divide a payload into: no interval begins or ends inside a piece."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from moe.network.schedule import IntArray, Intervals, Transfers


def bounds_of_pieces(parts: Iterable[Intervals | Transfers]) -> IntArray:
    """Returns the sorted <int64>[pieces + 1] bounds of all intervals; none of no intervals."""
    bounds: list[IntArray] = []
    for part in parts:
        bounds += [part.low, part.high]
    return np.unique(np.concatenate(bounds))


def expand(low: IntArray, high: IntArray, bounds: IntArray) -> tuple[IntArray, IntArray]:
    """Returns a row for every piece of every interval: the interval's index and the piece's."""
    # Pieces of an interval are neighbours.
    first = np.searchsorted(bounds, low)
    num_pieces = np.searchsorted(bounds, high) - first
    row = np.repeat(np.arange(len(low)), num_pieces)

    # Each row counts on from the first piece of its interval.
    starts = np.cumsum(num_pieces) - num_pieces
    piece = np.arange(len(row)) - np.repeat(starts - first, num_pieces)
    return row, piece


def mask(part: Intervals, bounds: IntArray, shape: tuple[int, int]) -> NDArray[np.bool_]:
    """Returns <bool>[ranks, pieces]: what some intervals cover."""
    row, piece = expand(part.low, part.high, bounds)
    covered = np.zeros(shape, np.bool_)
    covered[part.rank[row], piece] = True
    return covered
