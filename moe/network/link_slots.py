"""Divides the time of each link into slots for messages.

A message occupies every link of its route for bytes / bandwidth seconds: its slot on that link. It
starts as soon as every link has a free slot that ends no later than the message's last byte is sent.
So a link at the speed of its messages carries one after the other, and a link eight times as fast
carries eight at once.

Messages get slots in order. A message may get a slot in a gap before the slots of earlier messages: a link does not
idle while it waits for a message. A link remembers its last gaps.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from moe.network.schedule import IntArray, expand_runs
from moe.network.topology import FloatArray, Links

PICOSECOND = 1e-12
"""Times that differ by less than this rounding error are equal."""

NUM_GAPS = 16
"""Gaps between slots that a link remembers; older ones are forgotten and stay idle."""


class Messages(NamedTuple):
    """The transfers of one step, N rows.

    Attributes:
        rows: Their rows in the table of transfers.
        pair: <int64>[N] pair of ranks, an index into `Routes`.
        bytes: <float64>[N] size.
        flow: <float64>[N] seconds from the first byte sent to the last byte sent.
        latency: <float64>[N] seconds from the last byte sent to the last byte received.
    """

    rows: slice
    pair: IntArray
    bytes: FloatArray
    flow: FloatArray
    latency: FloatArray


class Hops(NamedTuple):
    """The links that messages cross, sorted by message.

    Attributes:
        row: <int64>[H] message, an index into `Messages`.
        link: <int64>[H] link.
    """

    row: IntArray
    link: IntArray


class LinkSlots:
    """The occupied slots of all links, and the gaps between them.

    Args:
        links: Links of the network.
    """

    def __init__(self, links: Links) -> None:
        self._bandwidth = links.bandwidth
        num_links = len(links.bandwidth)

        # End of the last slot of each link, and the transfer that has the slot.
        self._end = np.zeros(num_links)
        self._last_row = np.full(num_links, -1)

        # Gaps between slots, and the transfer before each gap; unused entries end at -inf.
        self._gap_begin = np.zeros((num_links, NUM_GAPS))
        self._gap_end = np.full((num_links, NUM_GAPS), -np.inf)
        self._gap_row = np.full((num_links, NUM_GAPS), -1)
        self._next_gap = np.zeros(num_links, np.int64)

    def serve(
        self, messages: Messages, hops: Hops, ready: FloatArray
    ) -> tuple[FloatArray, IntArray]:
        """Gives every message of a step a slot on each link of its route.

        Args:
            messages: Messages of the step.
            hops: Links of their routes.
            ready: <float64>[N] when each message could start if all links were free.

        Returns:
            <float64>[N] when each message starts, and <int64>[N] the transfer that it waits for to
            leave a link; -1 if it does not wait.
        """
        start = ready.copy()
        blocker = np.full(len(ready), -1)

        # Messages that share a link take turns. The hops of a message are contiguous.
        for row, link in _turns(hops, ready, len(self._end)):
            first_hops = np.flatnonzero(np.diff(row, prepend=-1))
            num_hops = np.diff(first_hops, append=len(row))
            message = row[first_hops]

            # The slowest link of a route has no slack.
            work = messages.bytes[row] / self._bandwidth[link]
            slack = messages.flow[row] - work

            # Delay messages until all links of a route have a slot for the same start.
            slot_start, begin, gap = self._choose(link, start[row], work, slack)
            latest = np.maximum.reduceat(slot_start, first_hops)
            while (latest > start[message]).any():
                is_last = slot_start == np.repeat(latest, num_hops)
                is_last &= slot_start > start[row]

                # The first of the links that become free last identifies the preceding transfer.
                held = np.flatnonzero(is_last)[::-1]
                row_before_gap = self._gap_row[link[held], gap[held]]
                last_row = self._last_row[link[held]]
                blocker[row[held]] = np.where(gap[held] >= 0, row_before_gap, last_row)
                start[message] = latest
                slot_start, begin, gap = self._choose(link, start[row], work, slack)
                latest = np.maximum.reduceat(slot_start, first_hops)
            self._take(link, begin, gap, begin + work, messages.rows.start + row)
        return start, blocker

    def _choose(
        self, link: IntArray, earliest: FloatArray, work: FloatArray, slack: FloatArray
    ) -> tuple[FloatArray, FloatArray, IntArray]:
        """Returns the first free slot of each link for a message that may start at `earliest`.

        Args:
            link: <int64>[H] links.
            earliest: <float64>[H] earliest start of the message.
            work: <float64>[H] length of the slot in seconds.
            slack: <float64>[H] seconds by which the slot may begin after the message starts.

        Returns:
            <float64>[H] earliest start of the message that the slot allows, <float64>[H] when the
            slot begins, and <int64>[H] gap of the link in which it is; -1 for the time after all slots.
        """
        end = self._end[link]
        start = np.maximum(earliest, end - slack)
        begin = np.maximum(start, end)
        gap = np.full(len(link), -1)

        # Messages that would have to wait for the last slot may fit into a gap.
        late = np.flatnonzero(end > earliest)
        if len(late):
            opens = self._gap_begin[link[late]]  # [late, gaps]
            closes = self._gap_end[link[late]]
            gap_start = np.maximum(earliest[late, None], opens - slack[late, None])
            gap_slot = np.maximum(gap_start, opens)
            fits = gap_slot + work[late, None] <= closes + PICOSECOND
            gap_start[~fits] = np.inf

            # The earliest start, and the first gap that allows it.
            best = gap_start.min(axis=1)
            gap_slot[gap_start > best[:, None]] = np.inf
            place = gap_slot.argmin(axis=1)
            slot = gap_slot[np.arange(len(late)), place]
            is_better = best <= start[late]

            late = late[is_better]
            start[late] = best[is_better]
            begin[late] = slot[is_better]
            gap[late] = place[is_better]
        return start, begin, gap

    def _take(
        self, link: IntArray, begin: FloatArray, gap: IntArray, end: FloatArray, table_row: IntArray
    ) -> None:
        """Gives slots, from begin to end, to transfers; no link is chosen twice."""
        in_gap = gap >= 0

        # After all slots: the time before the new slot is a gap.
        tail = link[~in_gap]
        self._remember(tail, self._end[tail], begin[~in_gap], self._last_row[tail])
        self._end[tail] = end[~in_gap]
        self._last_row[tail] = table_row[~in_gap]

        # In a gap: the part before the slot replaces the gap, the part after it is a new gap.
        inner = link[in_gap]
        place = gap[in_gap]
        closes = self._gap_end[inner, place]
        self._gap_end[inner, place] = begin[in_gap]
        self._remember(inner, end[in_gap], closes, table_row[in_gap])

    def _remember(
        self, link: IntArray, begin: FloatArray, end: FloatArray, row_before: IntArray
    ) -> None:
        """Adds gaps of different links, unless they are empty."""
        is_gap = end - begin > PICOSECOND

        # The new gap replaces the oldest one.
        link = link[is_gap]
        place = self._next_gap[link] % NUM_GAPS
        self._gap_begin[link, place] = begin[is_gap]
        self._gap_end[link, place] = end[is_gap]
        self._gap_row[link, place] = row_before[is_gap]
        self._next_gap[link] += 1


def _turns(hops: Hops, ready: FloatArray, num_links: int) -> Iterator[Hops]:
    """Yields the hops of messages turn by turn; no two messages of a turn share a link.

    Messages queue at each link by the time at which they are ready, then by row. A message has its
    turn when it is first in the queues of all its links.
    """
    # In most steps of most schedules no messages share a link.
    load = np.bincount(hops.link, minlength=num_links)
    if load.max(initial=0) <= 1:
        yield hops
        return

    # The queues of all links, one after the other.
    order = np.argsort(np.round(ready / PICOSECOND), kind="stable")
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
        _, turn = expand_runs(first_hop[message], num_hops[message])
        link = hops.link[turn]
        yield Hops(row=hops.row[turn], link=link)

        # These messages leave their queues.
        head[link] += 1
        waiting = link[head[link] < line_end[link]]
        following = line[head[waiting]]
        np.add.at(num_first, following, 1)
        message = np.unique(following[num_first[following] == num_hops[following]])
