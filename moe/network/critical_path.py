"""Which transfers set the time of a simulation, and where their time goes.

Read backwards from the transfer that ends last: each started at the very moment at which another
one let it, by its data, by leaving its destination free, or by leaving a link.
"""

from typing import NamedTuple

import numpy as np

from moe.network.schedule import IntArray, Transfers
from moe.network.topology import FloatArray


class Timeline(NamedTuple):
    """When T transfers take place, in seconds.

    Attributes:
        start: <float64>[T] first byte sent.
        released: <float64>[T] last byte sent.
        finish: <float64>[T] last byte received.
        blocker: <int64>[T] row that held a link for which the transfer waited; -1 where it started
            as soon as its intervals let it.
    """

    start: FloatArray
    released: FloatArray
    finish: FloatArray
    blocker: IntArray


class CriticalPath(NamedTuple):
    """The transfers that set the time, and where it goes; the parts sum to the time.

    Attributes:
        rows: <int64>[N] rows of the table, first to last.
        latency: Seconds that bytes of these transfers spend on the way.
        bandwidth: Seconds that their bytes flow.
        waiting: Seconds for which they wait for others to leave a link. Where links differ a slow
            message may start before a fast one that has its slot first; such time counts back.
    """

    rows: IntArray
    latency: float
    bandwidth: float
    waiting: float


def find_critical_path(table: Transfers, timeline: Timeline) -> CriticalPath:
    """Returns the transfers that set the time; nothing for an empty schedule."""
    if not len(table.step):
        return CriticalPath(np.empty(0, np.int64), latency=0.0, bandwidth=0.0, waiting=0.0)

    # The transfer that ends last counts in full.
    events = _Events(table, timeline)
    row = int(np.argmax(timeline.finish))
    rows = [row]
    latency = float(timeline.finish[row] - timeline.released[row])
    bandwidth = float(timeline.released[row] - timeline.start[row])
    waiting = 0.0

    # Step back to what let this row start, until a row that nothing held up.
    while timeline.start[row] > 0:
        started = float(timeline.start[row])
        if timeline.blocker[row] >= 0:
            row = int(timeline.blocker[row])
            waiting += started - float(timeline.start[row])
        else:
            row, by_arrival = events.cause(row)
            bandwidth += float(timeline.released[row] - timeline.start[row])
            latency += float(timeline.finish[row] - timeline.released[row]) * by_arrival
        rows.append(row)

    # Forwards in time.
    path = np.array(rows[::-1], np.int64)
    return CriticalPath(path, latency=latency, bandwidth=bandwidth, waiting=waiting)


class _Events:
    """The ends of all transfers in order of time, to look up what ended at a moment."""

    def __init__(self, table: Transfers, timeline: Timeline) -> None:
        self._table = table
        self._timeline = timeline

        # Two orders of the rows, and their times in those.
        self._by_finish = np.argsort(timeline.finish)
        self._by_release = np.argsort(timeline.released)
        self._finish = timeline.finish[self._by_finish]
        self._release = timeline.released[self._by_release]

    def cause(self, row: int) -> tuple[int, bool]:
        """Returns the row whose end let a row start, and whether it was its arrival.

        Else its last byte had left the interval that this row writes.
        """
        table = self._table
        moment = self._timeline.start[row]

        # What arrived then where this row reads or writes.
        arrived = _at(moment, self._finish, self._by_finish)
        touched = table.destination[arrived]
        is_mine = (touched == table.source[row]) | (touched == table.destination[row])
        rows = arrived[is_mine & self._came_before(arrived, row)]
        if len(rows):
            return int(rows[-1]), True

        # What was read until then where this row writes.
        left = _at(moment, self._release, self._by_release)
        is_mine = table.source[left] == table.destination[row]
        rows = left[is_mine & self._came_before(left, row)]
        return int(rows[-1]), False

    def _came_before(self, rows: IntArray, row: int) -> np.ndarray:
        """Returns <bool>[N] which rows share units with a row, and come in an earlier step."""
        table = self._table

        # Both touch a unit, one before the other.
        shares = (table.low[rows] < table.high[row]) & (table.high[rows] > table.low[row])
        return shares & (table.step[rows] < table.step[row])


def _at(moment: float, times: FloatArray, rows: IntArray) -> IntArray:
    """Returns the rows whose time is exactly a moment: times are copied, never computed twice."""
    first = np.searchsorted(times, moment, side="left")
    last = np.searchsorted(times, moment, side="right")
    return rows[first:last]
