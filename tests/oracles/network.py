"""The time of a schedule, one transfer and one unit at a time, and the route of one message: slow, and obvious.

No pieces, no arrays, no turns: a dictionary of times for each unit of each rank, and a list of the
slots that each link has given to messages, one message after the other.
"""

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, field, replace

import numpy as np

from moe.network.schedule import Schedule
from moe.network.topology import Links, Topology

PICOSECOND = 1e-12


@dataclass
class Link:
    """What a link does, and when.

    Attributes:
        slots: (begin, end) of every message's time, sorted.
        bytes: All that it carries.
    """

    slots: list[tuple[float, float]] = field(default_factory=list)
    bytes: float = 0.0

    def slot(self, start: float, slack: float, work: float) -> float | None:
        """Returns when the slot of a message begins that starts at some time, if there is one.

        It begins no earlier than the message, and `slack` seconds later at most.
        """
        opens = 0.0
        for begin, end in [*sorted(self.slots), (math.inf, math.inf)]:
            slot = max(opens, start)
            if slot <= start + slack + PICOSECOND and slot + work <= begin + PICOSECOND:
                return slot
            opens = max(opens, end)
        return None


@dataclass
class Clock:
    """The times of a simulation, in seconds.

    Attributes:
        final: Of each (rank, unit): when its last write arrives.
        free: Of each (rank, unit): when its last read or write is done.
        links: Of each link.
        start: Of each row of the table.
        finish: Of each row of the table.
    """

    final: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    free: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    links: dict[int, Link] = field(default_factory=lambda: defaultdict(Link))
    start: dict[int, float] = field(default_factory=dict)
    finish: dict[int, float] = field(default_factory=dict)


def simulate_slowly(schedule: Schedule, topology: Topology, payload_bytes: float) -> Clock:
    """Returns when every transfer starts and ends."""
    clock = Clock()
    steps = schedule.transfers.step.tolist()
    for _, group in itertools.groupby(range(len(steps)), key=steps.__getitem__):
        rows = list(group)

        # What a step waits for was done by earlier steps.
        ready = {row: _ready(schedule, clock, row) for row in rows}
        released = {}
        for row in sorted(rows, key=lambda row: (round(ready[row] / PICOSECOND), row)):
            released[row] = _send(schedule, topology, payload_bytes, clock, row, ready[row])

        # And is waited for by later ones.
        for row in rows:
            _touch(schedule, clock, row, released[row])
    return clock


def _ready(schedule: Schedule, clock: Clock, row: int) -> float:
    table = schedule.transfers
    source = int(table.source[row])
    destination = int(table.destination[row])
    units = range(table.low[row], table.high[row])
    is_final = max(clock.final[source, unit] for unit in units)
    is_free = max(clock.free[destination, unit] for unit in units)
    return max(is_final, is_free)


def _send(
    schedule: Schedule,
    topology: Topology,
    payload_bytes: float,
    clock: Clock,
    row: int,
    ready: float,
) -> float:
    """Gives a message its slots on its links; returns when its last byte has left."""
    table = schedule.transfers
    num_units = int(table.high[row] - table.low[row])
    num_bytes = num_units * (payload_bytes / schedule.num_units)
    route = route_of(topology, int(table.source[row]), int(table.destination[row]))
    bandwidths = [float(topology.links.bandwidth[link]) for link in route]
    flow = num_bytes / min(bandwidths)

    # It may start when it is ready, or when a slot of another message ends in time.
    hops = []
    moments = [ready]
    for index, bandwidth in zip(route, bandwidths, strict=True):
        link = clock.links[int(index)]
        work = num_bytes / bandwidth
        slack = flow - work
        hops.append((link, slack, work))
        moments += [end - slack for _, end in link.slots if end - slack > ready]

    # It starts at the first of those moments at which every link has a slot.
    for start in sorted(moments):
        slots = [link.slot(start, slack, work) for link, slack, work in hops]
        if None not in slots:
            break
    for (link, _, work), slot in zip(hops, slots, strict=True):
        link.slots.append((slot, slot + work))
        link.bytes += num_bytes

    latency = 0.0
    for link in route:
        latency += float(topology.links.latency[link])
    clock.start[row] = start
    clock.finish[row] = start + flow + latency
    return start + flow


def _touch(schedule: Schedule, clock: Clock, row: int, released: float) -> None:
    """Records what a message reads until it has left, and writes until it has arrived."""
    table = schedule.transfers
    finish = clock.finish[row]
    for unit in range(table.low[row], table.high[row]):
        source = (int(table.source[row]), unit)
        destination = (int(table.destination[row]), unit)
        clock.free[source] = max(clock.free[source], released)
        clock.free[destination] = max(clock.free[destination], finish)
        clock.final[destination] = max(clock.final[destination], finish)


def route_of(topology: Topology, source: int, destination: int) -> list[int]:
    """Returns the links of a message: along the axes of a grid, the last first, or else a shortest path."""
    if topology.shape and not topology.switched:
        nodes = [source]
        for axis in reversed(range(len(topology.shape))):
            nodes += _along_axis(topology, nodes[-1], destination, axis)
        links = [int(topology.find_links(*ends)) for ends in itertools.pairwise(nodes)]
        if min(links, default=0) >= 0:
            return links
    return topology.shortest_path(source, destination).tolist()


def _along_axis(topology: Topology, source: int, destination: int, axis: int) -> list[int]:
    """Returns the ranks that a message passes on an axis; the shorter way, of two equal ones upwards."""
    size = topology.shape[axis]
    here = list(np.unravel_index(source, topology.shape))
    upwards = int(np.unravel_index(destination, topology.shape)[axis] - here[axis])
    if topology.wraps[axis]:
        upwards %= size
        if upwards > size / 2:
            upwards -= size
    ranks = []
    for _ in range(abs(upwards)):
        here[axis] = (here[axis] + (1 if upwards > 0 else -1)) % size
        ranks.append(int(np.ravel_multi_index(here, topology.shape)))
    return ranks


def without_link(topology: Topology, link: int) -> Topology:
    """Returns a network one of whose links has failed, so that messages go around it."""
    links = Links._make(np.delete(column, link) for column in topology.links)
    return replace(topology, links=links)
