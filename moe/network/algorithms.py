"""Algorithms by name: what builds a schedule for a network, or says why it cannot.

A planner tries all of a registry. A new algorithm is a builder in a file of its own and an entry
here.
"""

from collections.abc import Callable
from dataclasses import dataclass

from moe.network.all_to_all import (
    AllToAll,
    along_axes,
    around,
    direct,
    even_counts,
    two_level,
    unfit_for_grid,
    unfit_for_levels,
)
from moe.network.line_hops import two_way_ring
from moe.network.rings import ring_all_reduce, two_way_ring_all_reduce
from moe.network.schedule import IntArray, Schedule
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

_NUM_SLICES = 6
"""Of an all-to-all along one axis after the other."""


def _evenly(build: Callable[[IntArray, Topology], AllToAll]) -> Callable[[Topology, int], Schedule]:
    """Returns a builder for units that are split evenly among all pairs of live ranks."""

    def build_evenly(topology: Topology, num_units: int) -> Schedule:
        return build(even_counts(topology, num_units), topology).schedule

    return build_evenly


def _half_ring(counts: IntArray, topology: Topology) -> AllToAll:
    return around(counts, topology.live_ranks.tolist())


def _whole_ring(counts: IntArray, topology: Topology) -> AllToAll:
    return around(counts, topology.live_ranks.tolist(), ring=two_way_ring)


def _axes(counts: IntArray, topology: Topology) -> AllToAll:
    return along_axes(counts, topology, num_slices=_NUM_SLICES, rotates=False)


def _rotated_axes(counts: IntArray, topology: Topology) -> AllToAll:
    return along_axes(counts, topology, num_slices=len(topology.shape))


ALL_TO_ALL.add("direct", Algorithm("every pair straight, over its own route", _evenly(direct)))
ALL_TO_ALL.add("ring", Algorithm("one ring, half of every block each way", _evenly(_whole_ring)))
ALL_TO_ALL.add("half_ring", Algorithm("one ring, the shorter way around", _evenly(_half_ring)))
ALL_TO_ALL.add(
    "axes",
    Algorithm("half rings, axis after axis, in slices", _evenly(_axes), unfit_for_grid),
)
ALL_TO_ALL.add(
    "rotated_axes",
    Algorithm(
        "half rings, each slice begins with another axis",
        _evenly(_rotated_axes),
        unfit_for_grid,
    ),
)
ALL_TO_ALL.add(
    "two_level",
    Algorithm("inside the nodes, then across them", _evenly(two_level), unfit_for_levels),
)


def _ring(topology: Topology, num_units: int) -> Schedule:
    return ring_all_reduce(topology.live_ranks, num_units, num_ranks=topology.num_ranks)


def _two_way_ring(topology: Topology, num_units: int) -> Schedule:
    return two_way_ring_all_reduce(topology.live_ranks, num_units, num_ranks=topology.num_ranks)


ALL_REDUCE.add("ring", Algorithm("one ring, in the order of the ranks", _ring))
ALL_REDUCE.add(
    "two_way_ring",
    Algorithm("one ring, half of the payload each way around", _two_way_ring),
)
