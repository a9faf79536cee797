"""When the units of every rank's buffer may be read and written, as a simulation proceeds.

A buffer is divided into pieces by the bounds of the intervals that touch this rank only: on a 2-D
torus a rank has the coarse chunks of the first axis and the fine ones of its own shard, not the
fine ones of all ranks. The pieces of all ranks are numbered one after the other.
"""

import numpy as np

from moe.network.schedule import IntArray, Schedule, expand_runs
from moe.network.topology import FloatArray


class Buffers:
    """The times of all pieces of all ranks, in seconds.

    Args:
        schedule: Schedule whose transfers read and write them.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._stride = schedule.num_units + 1
        self._bounds = _all_bounds(schedule)

        # When the last write to each piece is done, and when all reads and writes are.
        self.final: FloatArray = np.zeros(len(self._bounds))
        self.free: FloatArray = np.zeros(len(self._bounds))

    def pieces(self, rank: IntArray, low: IntArray, high: IntArray) -> "Pieces":
        """Returns the pieces of an interval of each of some ranks."""
        # Bounds are numbered over all ranks.
        start = rank * self._stride
        first = np.searchsorted(self._bounds, start + low)

        # Nearly all intervals are one piece; the ends of the others are searched.
        last = first + 1
        is_long = self._bounds[last] != start + high
        last[is_long] = np.searchsorted(self._bounds, (start + high)[is_long])
        return Pieces(first, last)


class Pieces:
    """The pieces of N intervals: those from `first` to before `last` of each.

    Args:
        first: <int64>[N] first piece.
        last: <int64>[N] piece after the last.
    """

    def __init__(self, first: IntArray, last: IntArray) -> None:
        num_pieces = last - first
        self._starts = np.cumsum(num_pieces) - num_pieces
        self._interval, self._piece = expand_runs(first, num_pieces)

    def largest(self, times: FloatArray) -> FloatArray:
        """Returns <float64>[N] the latest time of each interval's pieces."""
        return np.maximum.reduceat(times[self._piece], self._starts)

    def raise_to(self, times: FloatArray, until: FloatArray) -> None:
        """Sets the times of each interval's pieces to at least `until`, in place."""
        np.maximum.at(times, self._piece, until[self._interval])


def _all_bounds(schedule: Schedule) -> IntArray:
    """Returns the sorted bounds of each rank's pieces: `rank * (num_units + 1) + unit`.

    The end of a rank's last piece begins a piece that nothing touches.
    """
    table = schedule.transfers
    stride = schedule.num_units + 1
    ends = []
    for rank in (table.source, table.destination):
        ends += [rank * stride + table.low, rank * stride + table.high]
    return sorted_distinct(np.concatenate(ends))


def sorted_distinct(numbers: IntArray) -> IntArray:
    """Returns the distinct numbers, sorted; sorts them in place.

    numpy's `unique` hashes them, which takes ten times as long if most are distinct.
    """
    numbers.sort()
    is_first = np.ones(len(numbers), np.bool_)
    is_first[1:] = numbers[1:] != numbers[:-1]
    return numbers[is_first]
