"""Algorithms by name: what builds a schedule for a network, or says why it cannot.

A planner tries all of a registry. A new algorithm is a builder in a file of its own and an entry
here.
"""

from collections.abc import Callable
from dataclasses import dataclass

from moe.network.rings import ring_all_reduce, two_way_ring_all_reduce
from moe.network.schedule import Schedule
from moe.network.topology import Topology
from moe.registry import Registry


def fits_all(topology: Topology) -> str:
    """Returns "": nothing speaks against any network."""
    return ""


@dataclass(frozen=True)
class Algorithm:
    """A way to carry out a collective on a network.

    Attributes:
        summary: What it does, in a line for tables.
        build: Returns its schedule among the live ranks of a network, for a number of units.
        unfit: Returns why it cannot be built on a network, in a sentence; "" where it can.
    """

    summary: str
    build: Callable[[Topology, int], Schedule]
    unfit: Callable[[Topology], str] = fits_all


ALL_REDUCE: Registry[Algorithm] = Registry("all-reduce algorithm")
"""Ways to sum one payload over all live ranks."""

ALL_TO_ALL: Registry[Algorithm] = Registry("all-to-all algorithm")
"""Ways to send a part of every live rank's payload to every other one."""


def _ring(topology: Topology, num_units: int) -> Schedule:
    return ring_all_reduce(topology.live_ranks, num_units, num_ranks=topology.num_ranks)


def _two_way_ring(topology: Topology, num_units: int) -> Schedule:
    return two_way_ring_all_reduce(topology.live_ranks, num_units, num_ranks=topology.num_ranks)


ALL_REDUCE.add("ring", Algorithm("one ring, in the order of the ranks", _ring))
ALL_REDUCE.add(
    "two_way_ring",
    Algorithm("one ring, half of the payload each way around", _two_way_ring),
)
