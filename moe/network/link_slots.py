"""The time of links, given to messages slot by slot.

A message takes bytes / bandwidth seconds of every link of its route: its slot. It starts at the
first moment at which each link has a slot for it that ends no later than its last byte is sent. So
a link at the speed of its messages carries one after the other, and a link eight times as fast
carries eight at once.

Messages are served in order, and a message may have a slot before those of messages that were
served earlier: links do not idle for what has not come yet. A link remembers its last gaps.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from moe.network.schedule import IntArray, expand_runs
from moe.network.topology import FloatArray, Links

PICOSECOND = 1e-12
"""Times that differ by less are the same, whatever was rounded."""

NUM_GAPS = 16
"""Gaps between its slots that a link remembers; of more the oldest is forgotten, and stays idle."""


class Messages(NamedTuple):
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


class Hops(NamedTuple):
    """The links that messages cross, a row each, in the order of messages.

    Attributes:
        row: <int64>[H] which message.
        link: <int64>[H] which link.
    """

    row: IntArray
    link: IntArray


class Choice(NamedTuple):
    """The slots that links have for messages, a row for each hop.

    Attributes:
        start: <float64>[H] when the message can start.
        begin: <float64>[H] when its slot begins.
        gap: <int64>[H] gap of the link that the slot is in; -1 for the time after all slots.
    """

    start: FloatArray
    begin: FloatArray
    gap: IntArray


class LinkSlots:
    """The slots of all links.

    Args:
        links: Of the network.
    """

    def __init__(self, links: Links) -> None:
        self._bandwidth = links.bandwidth
        num_links = len(links.bandwidth)

        # When the last slot of a link ends, and the row that has it.
        self._end = np.zeros(num_links)
        self._last_row = np.full(num_links, -1)

        # The gaps between slots, and the row before each. A gap without end is none.
        self._gap_begin = np.zeros((num_links, NUM_GAPS))
        self._gap_end = np.full((num_links, NUM_GAPS), -np.inf)
        self._gap_row = np.full((num_links, NUM_GAPS), -1)
        self._next_gap = np.zeros(num_links, np.int64)

    def serve(
        self, messages: Messages, hops: Hops, ready: FloatArray
    ) -> tuple[FloatArray, IntArray]:
        """Gives slots to the messages of a step.

        Args:
            messages: The step's.
            hops: Their routes.
            ready: <float64>[N] when each could start, were all links free.

        Returns:
            <float64>[N] when each starts, and <int64>[N] the row for which it waits to leave a
            link; -1 for none.
        """
        # Messages that share a link take turns; all others are served at once.
        start = ready.copy()
        blocker = np.full(len(ready), -1)
        for turn in _turns(hops, ready, len(self._end)):
            self._serve_turn(messages, turn, start, blocker)
        return start, blocker

    def _serve_turn(
        self, messages: Messages, hops: Hops, start: FloatArray, blocker: IntArray
    ) -> None:
        """Gives slots to messages that share no link; moves their starts, in place."""
        # A route is a run of rows. Its slowest link has no slack.
        row, link = hops
        first_hops = np.flatnonzero(np.diff(row, prepend=-1))
        message = row[first_hops]
        work = messages.bytes[row] / self._bandwidth[link]
        slack = messages.flow[row] - work

        # Until all links of a route have a slot for the same start, messages start later.
        choice = self._choose(link, start[row], work, slack)
        num_hops = np.diff(first_hops, append=len(row))
        latest = np.maximum.reduceat(choice.start, first_hops)
        while (latest > start[message]).any():
            is_last = choice.start == np.repeat(latest, num_hops)
            is_last &= choice.start > start[row]

            # The first of the links that open last names who holds it.
            held = np.flatnonzero(is_last)[::-1]
            blocker[row[held]] = self._rows_before(link[held], choice.gap[held])
            start[message] = latest
            choice = self._choose(link, start[row], work, slack)
            latest = np.maximum.reduceat(choice.start, first_hops)

        self._take(link, choice, work, messages.rows.start + row)

    def _rows_before(self, link: IntArray, gap: IntArray) -> IntArray:
        """Returns the row whose slot is before a gap of a link; before its end for -1."""
        return np.where(gap >= 0, self._gap_row[link, gap], self._last_row[link])

    def _choose(
        self, link: IntArray, earliest: FloatArray, work: FloatArray, slack: FloatArray
    ) -> Choice:
        """Returns the first slot of each link for a message that may start at `earliest`."""
        end = self._end[link]
        start = np.maximum(earliest, end - slack)
        begin = np.maximum(start, end)

        # No gap is chosen yet.
        gap = np.full(len(link), -1)

        # Gaps matter to those who would have to wait for the last slot.
        late = np.flatnonzero(end > earliest)
        if len(late):
            opens = self._gap_begin[link[late]]  # [late, gaps]
            closes = self._gap_end[link[late]]
            gap_start = np.maximum(earliest[late, None], opens - slack[late, None])
            gap_slot = np.maximum(gap_start, opens)
            fits = gap_slot + work[late, None] <= closes + PICOSECOND
            gap_start[~fits] = np.inf

            # The earliest start, and the first slot of those that allow it.
            best = gap_start.min(axis=1)
            gap_slot[gap_start > best[:, None]] = np.inf
            place = gap_slot.argmin(axis=1)
            slot = gap_slot[np.arange(len(late)), place]
            is_better = best <= start[late]

            # What does not fit into a gap stays after all slots.
            late = late[is_better]
            start[late] = best[is_better]
            begin[late] = slot[is_better]
            gap[late] = place[is_better]
        return Choice(start=start, begin=begin, gap=gap)

    def _take(self, link: IntArray, choice: Choice, work: FloatArray, table_row: IntArray) -> None:
        """Gives the chosen slots to rows of the table; no link is chosen twice."""
        # A slot is in a gap or after all others.
        over = choice.begin + work
        in_gap = choice.gap >= 0

        # After all slots: the time before the new one is a gap.
        tail = link[~in_gap]
        begin = choice.begin[~in_gap]
        self._remember(tail, self._end[tail], begin, self._last_row[tail])
        self._end[tail] = over[~in_gap]
        self._last_row[tail] = table_row[~in_gap]

        # In a gap: what is before the slot stays in its place, what is after it is a new gap.
        inner = link[in_gap]
        place = choice.gap[in_gap]
        closes = self._gap_end[inner, place]
        self._gap_end[inner, place] = choice.begin[in_gap]
        self._remember(inner, over[in_gap], closes, table_row[in_gap])

    def _remember(
        self, link: IntArray, begin: FloatArray, end: FloatArray, row_before: IntArray
    ) -> None:
        """Adds gaps of different links, unless they are empty."""
        is_gap = end - begin > PICOSECOND

        # The new gap takes the place of the oldest one.
        link = link[is_gap]
        place = self._next_gap[link] % NUM_GAPS
        self._gap_begin[link, place] = begin[is_gap]
        self._gap_end[link, place] = end[is_gap]
        self._gap_row[link, place] = row_before[is_gap]
        self._next_gap[link] += 1


def _turns(hops: Hops, ready: FloatArray, num_links: int) -> Iterator[Hops]:
    """Yields the hops of messages turn by turn; no two messages of a turn share a link.

    A message has its turn when it is the first in line at all of its links. The line is that of
    who is ready first, then of the rows.
    """
    # Most steps of most schedules share no link.
    load = np.bincount(hops.link, minlength=num_links)
    if load.max(initial=0) <= 1:
        yield hops
        return

    # The line of each link, one after the other.
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

        # They leave their lines.
        head[link] += 1
        waiting = link[head[link] < line_end[link]]
        following = line[head[waiting]]
        np.add.at(num_first, following, 1)
        message = np.unique(following[num_first[following] == num_hops[following]])
