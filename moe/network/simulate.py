"""The time of a schedule on a network, simulated without any rank.

A transfer starts when its source interval is final (all that earlier steps write to it has
arrived), its destination interval is free (all reads and writes of earlier steps are done), and the
links of its route have a slot for it. It then takes the latency of all links of its route and its bytes over
the bandwidth of the slowest one. Steps are not barriers: a transfer waits only for its inputs.

Links serve the transfers of earlier steps first; within a step, those that are ready first, then by
row. Later transfers may use the gaps in between. See `link_slots`.

The bytes of a unit are the payload over the units of the schedule: for an all-to-all, whose units
are those of all pairs of ranks, the payload is the total that all ranks send.

Next: `critical_path` shows where the time goes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moe.network.buffers import Buffers
from moe.network.critical_path import CriticalPath, Timeline, find_critical_path
from moe.network.link_slots import Hops, LinkSlots, Messages
from moe.network.routes import Routes, find_routes, pair_keys
from moe.network.schedule import Schedule
from moe.network.topology import FloatArray, Topology


@dataclass(frozen=True, eq=False)
class Simulation:
    """The times of T transfers on L links.

    Attributes:
        schedule: The schedule.
        topology: The network.
        payload_bytes: Bytes of all units of a buffer.
        timeline: Start and end of each transfer, and what it waits for.
        link_bytes: <float64>[L] bytes that each link carries.
        link_busy_seconds: <float64>[L] transfer time of each link.
    """

    schedule: Schedule
    topology: Topology
    payload_bytes: float
    timeline: Timeline
    link_bytes: FloatArray
    link_busy_seconds: FloatArray

    @cached_property
    def seconds(self) -> float:
        """Time until everything has arrived."""
        return float(self.timeline.finish.max(initial=0.0))

    @cached_property
    def path(self) -> CriticalPath:
        """The transfers that determine the time, and how it divides."""
        return find_critical_path(self.schedule.transfers, self.timeline)


def simulate(schedule: Schedule, topology: Topology, payload_bytes: float) -> Simulation:
    """Returns when each transfer of a schedule starts and ends on a network.

    Args:
        schedule: The schedule.
        topology: The network, with the ranks of the schedule.
        payload_bytes: Bytes of a whole buffer; for an all-to-all what all ranks send together.

    Raises:
        ConfigError: If the network has no path between two ranks that exchange data.
    """
    assert topology.num_ranks == schedule.num_ranks, "the network has other ranks"
    table = schedule.transfers
    routes = find_routes(table, topology)
    buffers = Buffers(schedule)
    slots = LinkSlots(topology.links)

    # Filled step by step.
    num_rows = len(table.step)
    timeline = Timeline(
        start=np.empty(num_rows),
        released=np.empty(num_rows),
        finish=np.empty(num_rows),
        blocker=np.empty(num_rows, np.int64),
    )
    link_bytes = np.zeros(len(topology.links.source))
    for messages in _messages_by_step(schedule, routes, payload_bytes):
        low = table.low[messages.rows]
        high = table.high[messages.rows]
        sources = buffers.pieces(table.source[messages.rows], low, high)
        destinations = buffers.pieces(table.destination[messages.rows], low, high)
        ready = np.maximum(sources.largest(buffers.final), destinations.largest(buffers.free))

        # Slots on the links of the routes.
        hops = Hops(*routes.hops(messages.pair))
        start, blocker = slots.serve(messages, hops, ready)

        released = start + messages.flow
        finish = released + messages.latency
        sources.raise_to(buffers.free, released)
        destinations.raise_to(buffers.free, finish)
        destinations.raise_to(buffers.final, finish)

        timeline.start[messages.rows] = start
        timeline.released[messages.rows] = released
        timeline.finish[messages.rows] = finish
        timeline.blocker[messages.rows] = blocker
        np.add.at(link_bytes, hops.link, messages.bytes[hops.row])

    return Simulation(
        schedule=schedule,
        topology=topology,
        payload_bytes=payload_bytes,
        timeline=timeline,
        link_bytes=link_bytes,
        link_busy_seconds=link_bytes / topology.links.bandwidth,
    )


def _messages_by_step(
    schedule: Schedule, routes: Routes, payload_bytes: float
) -> Iterator[Messages]:
    """Yields the transfers of every step that is not empty."""
    table = schedule.transfers
    offsets = schedule.step_offsets
    for step in range(schedule.num_steps):
        rows = slice(int(offsets[step]), int(offsets[step + 1]))
        if rows.start == rows.stop:
            continue

        key = pair_keys(table.source[rows], table.destination[rows], routes.num_ranks)
        pair = np.searchsorted(routes.key, key)
        num_units = (table.high[rows] - table.low[rows]).astype(np.float64)
        num_bytes = num_units * np.float64(payload_bytes / schedule.num_units)
        yield Messages(
            rows=rows,
            pair=pair,
            bytes=num_bytes,
            flow=num_bytes / routes.bandwidth[pair],
            latency=routes.latency[pair],
        )
