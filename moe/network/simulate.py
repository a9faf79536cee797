"""The time of a schedule on a network, found without a rank.

A transfer starts when its source interval is final (all that earlier steps write to it has
arrived), its destination interval is free (all reads and writes of earlier steps are done), and the
links of its route take it. It then takes the latency of all links of its route and its bytes over
the bandwidth of the slowest one. Steps are no barriers: nothing waits for what it does not need.

A link serves messages in the order of their steps; in a step whoever is ready first, then by row.
A message takes bytes / bandwidth seconds of each link, and starts when the queue of each link ends
in time for its last byte. So a link at the speed of its messages carries one after the other, and a
link eight times as fast carries eight at once.

The bytes of a unit are the payload over the units of the schedule: for an all-to-all, whose units
are those of all pairs of ranks, the payload is what all ranks send together.

Next: `critical_path` says where the time goes, `chrome_trace` shows it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from moe.checks import check, check_number
from moe.network.buffers import Buffers, Pieces
from moe.network.critical_path import CriticalPath, Timeline, find_critical_path
from moe.network.routes import Routes, find_routes, pair_keys
from moe.network.schedule import IntArray, Schedule
from moe.network.topology import FloatArray, Topology

_TIE_SECONDS = 1e-12
"""Messages that are ready within the same picosecond are served by row, whatever was rounded."""


@dataclass(frozen=True, eq=False)
class Simulation:
    """What happens when, on T transfers and L links.

    Attributes:
        schedule: What is sent.
        topology: Over which links.
        payload_bytes: Bytes of all units of a buffer.
        timeline: When each transfer starts and ends, and what it waits for.
        link_bytes: <float64>[L] bytes that each link carries.
        link_busy_seconds: <float64>[L] how long each link takes for them.
    """

    schedule: Schedule
    topology: Topology
    payload_bytes: float
    timeline: Timeline
    link_bytes: FloatArray
    link_busy_seconds: FloatArray

    @property
    def start(self) -> FloatArray:
        """<float64>[T] when the first byte of each transfer is sent."""
        return self.timeline.start

    @property
    def finish(self) -> FloatArray:
        """<float64>[T] when the last byte of each transfer has arrived."""
        return self.timeline.finish

    @cached_property
    def seconds(self) -> float:
        """Time until everything has arrived."""
        return float(self.finish.max(initial=0.0))

    @cached_property
    def path(self) -> CriticalPath:
        """The transfers that set the time, and where theirs goes."""
        return find_critical_path(self.schedule.transfers, self.timeline)

    @property
    def critical_path(self) -> IntArray:
        """<int64>[N] rows of the transfers that set the time, first to last."""
        return self.path.rows


def simulate(schedule: Schedule, topology: Topology, payload_bytes: float) -> Simulation:
    """Returns when each transfer of a schedule starts and ends on a network.

    Args:
        schedule: What is sent.
        topology: Its ranks are those of the schedule.
        payload_bytes: Bytes of a whole buffer; for an all-to-all what all ranks send together.

    Raises:
        ConfigError: When the network has other ranks, or no path between two that exchange data.
    """
    _check(schedule, topology, payload_bytes)
    routes = find_routes(schedule.transfers, topology)
    buffers = Buffers(schedule)
    queues = _Queues(topology)

    # Filled step by step.
    num_rows = len(schedule.transfers.step)
    timeline = Timeline(
        start=np.empty(num_rows),
        released=np.empty(num_rows),
        finish=np.empty(num_rows),
        blocker=np.empty(num_rows, np.int64),
    )
    link_bytes = np.zeros(len(topology.links.source))
    for messages in _messages_by_step(schedule, routes, payload_bytes):
        sources, destinations = _touched_pieces(buffers, schedule, messages.rows)
        ready = np.maximum(buffers.final(sources), buffers.free(destinations))
        hop_row, hop_link = routes.hops(messages.pair)
        hops = _Hops(row=hop_row, link=hop_link)
        start, blocker = queues.serve(messages, hops, ready)

        released = start + messages.flow
        finish = released + messages.latency
        buffers.read(sources, released)
        buffers.write(destinations, finish)

        timeline.start[messages.rows] = start
        timeline.released[messages.rows] = released
        timeline.finish[messages.rows] = finish
        timeline.blocker[messages.rows] = blocker
        np.add.at(link_bytes, hop_link, messages.bytes[hop_row])

    return Simulation(
        schedule=schedule,
        topology=topology,
        payload_bytes=payload_bytes,
        timeline=timeline,
        link_bytes=link_bytes,
        link_busy_seconds=link_bytes / topology.links.bandwidth,
    )


def lower_bound(schedule: Schedule, topology: Topology, payload_bytes: float) -> float:
    """Returns seconds that no order of the messages on the links can beat; for search.

    It is the larger of two times. The first is that of the longest chain of transfers that need
    each other, were every link free. The second is that of the link with the most to do: from the
    earliest moment at which something can be sent over it, all its bytes one after the other, and
    the latency of the last ones.

    Args:
        schedule: What is sent.
        topology: Its ranks are those of the schedule.
        payload_bytes: As of `simulate`.

    Raises:
        ConfigError: As `simulate`.
    """
    _check(schedule, topology, payload_bytes)
    routes = find_routes(schedule.transfers, topology)
    buffers = Buffers(schedule)
    num_links = len(topology.links.source)
    link_bytes = np.zeros(num_links)
    first_start = np.full(num_links, np.inf)
    least_latency = np.full(num_links, np.inf)
    chain_seconds = 0.0

    for messages in _messages_by_step(schedule, routes, payload_bytes):
        # Every message starts as soon as its intervals allow.
        sources, destinations = _touched_pieces(buffers, schedule, messages.rows)
        start = np.maximum(buffers.final(sources), buffers.free(destinations))
        released = start + messages.flow
        finish = released + messages.latency
        buffers.read(sources, released)
        buffers.write(destinations, finish)
        chain_seconds = max(chain_seconds, float(finish.max()))

        row, link = routes.hops(messages.pair)
        np.add.at(link_bytes, link, messages.bytes[row])
        np.minimum.at(first_start, link, start[row])
        np.minimum.at(least_latency, link, messages.latency[row])

    is_used = link_bytes > 0
    busy = link_bytes[is_used] / topology.links.bandwidth[is_used]
    link_seconds = first_start[is_used] + busy + least_latency[is_used]
    return max(chain_seconds, float(link_seconds.max(initial=0.0)))


def _check(schedule: Schedule, topology: Topology, payload_bytes: float) -> None:
    check_number("payload_bytes", payload_bytes, least=0)
    expected = f"the {schedule.num_ranks} of the schedule"
    check(
        topology.num_ranks == schedule.num_ranks,
        "ranks of the network",
        topology.num_ranks,
        expected,
    )


class _Messages(NamedTuple):
    """The transfers of one step, N rows.

    Attributes:
        rows: Where they stand in the table.
        pair: <int64>[N] route of each.
        bytes: <float64>[N] bytes of each.
        flow: <float64>[N] seconds from the first byte sent to the last one.
        latency: <float64>[N] seconds from the last byte sent to the last one received.
    """

    rows: slice
    pair: IntArray
    bytes: FloatArray
    flow: FloatArray
    latency: FloatArray


class _Hops(NamedTuple):
    """The links that messages cross, a row each, in the order of messages.

    Attributes:
        row: <int64>[H] which message.
        link: <int64>[H] which link.
    """

    row: IntArray
    link: IntArray


def _messages_by_step(
    schedule: Schedule,
    routes: Routes,
    payload_bytes: float,
) -> Iterator[_Messages]:
    """Yields the transfers of every step that has any."""
    table = schedule.transfers
    offsets = schedule.step_offsets
    for step in range(schedule.num_steps):
        rows = slice(int(offsets[step]), int(offsets[step + 1]))
        if rows.start == rows.stop:
            continue
        key = pair_keys(table.source[rows], table.destination[rows], routes.num_ranks)
        pair = np.searchsorted(routes.key, key)
        num_bytes = (table.high[rows] - table.low[rows]) * (payload_bytes / schedule.num_units)
        yield _Messages(
            rows=rows,
            pair=pair,
            bytes=num_bytes,
            flow=num_bytes / routes.bandwidth[pair],
            latency=routes.latency[pair],
        )


def _touched_pieces(buffers: Buffers, schedule: Schedule, rows: slice) -> tuple[Pieces, Pieces]:
    """Returns the pieces that transfers read, and those that they write."""
    table = schedule.transfers
    low = table.low[rows]
    high = table.high[rows]
    sources = buffers.pieces(table.source[rows], low, high)
    return sources, buffers.pieces(table.destination[rows], low, high)


class _Queues:
    """What every link has still to do.

    Args:
        topology: Whose links.
    """

    def __init__(self, topology: Topology) -> None:
        self._bandwidth = topology.links.bandwidth
        num_links = len(self._bandwidth)

        # When the queue of a link ends, when its last message started, and the row of that one.
        self._end = np.zeros(num_links)
        self._last_start = np.zeros(num_links)
        self._last_row = np.full(num_links, -1)

    def serve(
        self,
        messages: _Messages,
        hops: _Hops,
        ready: FloatArray,
    ) -> tuple[FloatArray, IntArray]:
        """Returns when each message of a step starts, and for which row of the table it waits.

        Args:
            messages: The step's.
            hops: Their routes.
            ready: <float64>[N] when each could start, were all links free.
        Returns:
            <float64>[N] seconds, and <int64>[N] the row that holds a link; -1 for none.
        """
        start = ready.copy()
        blocker = np.full(len(ready), -1)
        for turn in _turns(hops, ready, len(self._end)):
            self._serve_turn(messages, turn, start, blocker)
        return start, blocker

    def _serve_turn(
        self,
        messages: _Messages,
        hops: _Hops,
        start: FloatArray,
        blocker: IntArray,
    ) -> None:
        """Serves messages that share no link: moves their starts, in place, and the queues."""
        row, link = hops
        first_hops = np.flatnonzero(np.diff(row, prepend=-1))
        message = row[first_hops]

        # A link takes a message when its queue ends in time for the message's last byte.
        work = messages.bytes[row] / self._bandwidth[link]
        in_time = self._end[link] - (messages.flow[row] - work)
        opening = np.maximum(in_time, self._last_start[link])
        latest = np.maximum.reduceat(opening, first_hops)

        # Of the links that open last, the first on the route names who holds it.
        is_late = latest > start[message]
        start[message] = np.maximum(start[message], latest)
        holds = opening == start[row]
        holds &= np.repeat(is_late, np.diff(first_hops, append=len(row)))
        holding = np.flatnonzero(holds)[::-1]
        blocker[row[holding]] = self._last_row[link[holding]]

        self._end[link] = np.maximum(self._end[link], start[row]) + work
        self._last_start[link] = start[row]
        self._last_row[link] = messages.rows.start + row


def _turns(hops: _Hops, ready: FloatArray, num_links: int) -> Iterator[_Hops]:
    """Yields the hops of messages turn by turn; no two messages of a turn share a link.

    A message has its turn when it is the first in line at all of its links. The line is that of
    who is ready first, then of the rows.
    """
    load = np.bincount(hops.link, minlength=num_links)
    if load.max(initial=0) <= 1:
        yield hops
        return

    # The line of each link, one after the other.
    order = np.argsort(np.round(ready / _TIE_SECONDS), kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    line = hops.row[np.lexsort((place[hops.row], hops.link))]
    line_end = np.cumsum(load)
    head = line_end - load

    # Count for each message the links at which it is first.
    num_hops = np.bincount(hops.row, minlength=len(ready))
    first_hop = np.cumsum(num_hops) - num_hops
    num_first = np.bincount(line[head[load > 0]], minlength=len(ready))
    message = np.flatnonzero(num_first == num_hops)
    while len(message):
        turn = _expand(first_hop[message], num_hops[message])
        link = hops.link[turn]
        yield _Hops(row=hops.row[turn], link=link)

        # They leave their lines.
        head[link] += 1
        waiting = link[head[link] < line_end[link]]
        following = line[head[waiting]]
        np.add.at(num_first, following, 1)
        message = np.unique(following[num_first[following] == num_hops[following]])


def _expand(first: IntArray, count: IntArray) -> IntArray:
    """Returns `first[i], first[i] + 1, ...`, `count[i]` of them, for each i."""
    ends = np.cumsum(count)
    return np.arange(ends[-1]) + np.repeat(first - ends + count, count)
