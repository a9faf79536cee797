"""The time of a schedule, one transfer and one unit at a time: slow, and obvious.

No pieces, no arrays, no turns: a dictionary of times for each unit of each rank, and one of queues
for each link, which messages join one after the other.
"""

import itertools
from collections import defaultdict
from dataclasses import dataclass, field

from moe.network.schedule import Schedule
from moe.network.topology import Topology


@dataclass
class Queue:
    """What a link has still to do.

    Attributes:
        end: When it has sent all.
        last_start: When the last message in it started.
        bytes: All that it carries.
    """

    end: float = 0.0
    last_start: float = 0.0
    bytes: float = 0.0


@dataclass
class Clock:
    """The times of a simulation, in seconds.

    Attributes:
        final: Of each (rank, unit): when its last write arrives.
        free: Of each (rank, unit): when its last read or write is done.
        queues: Of each link.
        start: Of each row of the table.
        finish: Of each row of the table.
    """

    final: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    free: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    queues: dict[int, Queue] = field(default_factory=lambda: defaultdict(Queue))
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
        for row in sorted(rows, key=lambda row: (round(ready[row] / 1e-12), row)):
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
    """Puts a message into the queues of its links; returns when its last byte has left."""
    table = schedule.transfers
    num_units = int(table.high[row] - table.low[row])
    num_bytes = num_units * (payload_bytes / schedule.num_units)
    route = topology.route(int(table.source[row]), int(table.destination[row]))
    bandwidths = [float(topology.links.bandwidth[link]) for link in route]
    flow = num_bytes / min(bandwidths)

    # It starts when every queue ends in time for its last byte, and in its turn.
    start = ready
    for link, bandwidth in zip(route, bandwidths, strict=True):
        queue = clock.queues[int(link)]
        start = max(start, queue.last_start, queue.end - (flow - num_bytes / bandwidth))
    for link, bandwidth in zip(route, bandwidths, strict=True):
        queue = clock.queues[int(link)]
        queue.end = max(queue.end, start) + num_bytes / bandwidth
        queue.last_start = start
        queue.bytes += num_bytes

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
