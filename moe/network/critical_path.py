"""The transfers that determine the time of a simulation, and how their time divides.

Found backwards from the transfer that ends last: each one started exactly when another one delivered
its data, freed its destination, or left a link.
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
        blocker: <int64>[T] row that held a link for which the transfer waited; -1 if it started as
            soon as its intervals were ready.
    """

    start: FloatArray
    released: FloatArray
    finish: FloatArray
    blocker: IntArray


class CriticalPath(NamedTuple):
    """The transfers that determine the time, and the parts of it, which sum to the time.

    Attributes:
        rows: <int64>[N] rows of the table, first to last.
        latency: Seconds between bytes sent and bytes received.
        bandwidth: Seconds in which bytes are sent.
        waiting: Seconds of waiting for others to leave a link. If links differ, a slow message may
            start before a fast one that got its slot first; such time is subtracted.
    """

    rows: IntArray
    latency: float
    bandwidth: float
    waiting: float


def find_critical_path(table: Transfers, timeline: Timeline) -> CriticalPath:
    """Returns the transfers that determine the time; none for an empty schedule."""
    if not len(table.step):
        return CriticalPath(np.empty(0, np.int64), latency=0.0, bandwidth=0.0, waiting=0.0)

    # The transfer that ends last counts in full.
    by_finish = np.argsort(timeline.finish)
    by_release = np.argsort(timeline.released)
    row = int(np.argmax(timeline.finish))
    rows = [row]
    latency = float(timeline.finish[row] - timeline.released[row])
    bandwidth = float(timeline.released[row] - timeline.start[row])
    waiting = 0.0

    # Step back to the transfer that this one waited for, until one that did not wait.
    while timeline.start[row] > 0:
        started = float(timeline.start[row])
        if timeline.blocker[row] >= 0:
            row = int(timeline.blocker[row])
            waiting += started - float(timeline.start[row])
        else:
            row, by_arrival = _cause(row, table, timeline, by_finish, by_release)
            bandwidth += float(timeline.released[row] - timeline.start[row])
            latency += float(timeline.finish[row] - timeline.released[row]) * by_arrival
        rows.append(row)

    # Forwards in time.
    path = np.array(rows[::-1], np.int64)
    return CriticalPath(path, latency=latency, bandwidth=bandwidth, waiting=waiting)


def _cause(
    row: int, table: Transfers, timeline: Timeline, by_finish: IntArray, by_release: IntArray
) -> tuple[int, bool]:
    """Returns the row that a row waited for, and whether it waited for its arrival.

    Otherwise it waited until the interval that it writes had been sent.

    Args:
        row: Row of the table.
        table: All transfers.
        timeline: Their times.
        by_finish: <int64>[T] rows in the order of `timeline.finish`.
        by_release: <int64>[T] rows in the order of `timeline.released`.
    """
    moment = timeline.start[row]

    # Transfers that arrived then where this row reads or writes.
    arrived = _at(moment, timeline.finish, by_finish)
    touched = table.destination[arrived]
    is_mine = (touched == table.source[row]) | (touched == table.destination[row])
    rows = arrived[is_mine & _came_before(arrived, row, table)]
    if len(rows):
        return int(rows[-1]), True

    # Transfers that were sent until then from where this row writes.
    left = _at(moment, timeline.released, by_release)
    is_mine = table.source[left] == table.destination[row]
    rows = left[is_mine & _came_before(left, row, table)]
    return int(rows[-1]), False


def _came_before(rows: IntArray, row: int, table: Transfers) -> np.ndarray:
    """Returns <bool>[N] which rows share units with a row and are in an earlier step."""
    # Both touch a unit, one before the other.
    shares = (table.low[rows] < table.high[row]) & (table.high[rows] > table.low[row])
    return shares & (table.step[rows] < table.step[row])


def _at(moment: float, times: FloatArray, order: IntArray) -> IntArray:
    """Returns the rows whose time is exactly a moment: times are copied, never computed twice."""
    first = np.searchsorted(times, moment, side="left", sorter=order)
    last = np.searchsorted(times, moment, side="right", sorter=order)
    return order[first:last]
