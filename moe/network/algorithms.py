"""Algorithms by name: what builds a schedule for a network, or says why it cannot.

A planner tries all of a registry. A new algorithm is a builder in a file of its own and an entry
here.
"""

from collections.abc import Callable
from dataclasses import dataclass

from moe.network import all_reduces
from moe.network.all_reduces import Build, reason_against
from moe.network.all_to_all import (
    AllToAll,
    along_axes,
    around,
    around_both_ways,
    direct,
    even_counts,
    two_level,
    unfit_for_grid,
    unfit_for_levels,
)
from moe.network.ring_orders import survivor_order
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
        is_one_ring: Whether it is one ring of all n ranks, of 2 n (n - 1) transfers.
    """

    summary: str
    build: Build
    unfit: Callable[[Topology], str] = fits_all
    is_one_ring: bool = False


ALL_REDUCE: Registry[Algorithm] = Registry("all-reduce algorithm")
"""Ways to sum one payload over all live ranks."""

ALL_TO_ALL: Registry[Algorithm] = Registry("all-to-all algorithm")
"""Ways to send a part of every live rank's payload to every other one."""

_MOST_RANKS = 1024
"""Live ranks of an all-to-all; they have a million pairs."""


def _half_ring(counts: IntArray, topology: Topology) -> AllToAll:
    return around(counts, survivor_order(topology).tolist())


def _whole_ring(counts: IntArray, topology: Topology) -> AllToAll:
    return around_both_ways(counts, survivor_order(topology).tolist())


def _rotated_axes(counts: IntArray, topology: Topology) -> AllToAll:
    return along_axes(counts, topology, num_slices=len(topology.shape))


def _add_all_to_all(
    name: str,
    summary: str,
    build: Callable[[IntArray, Topology], AllToAll],
    unfit: Callable[[Topology], str] = fits_all,
) -> None:
    """Registers a builder for units that are split evenly among all pairs of live ranks."""

    def build_evenly(topology: Topology, num_units: int) -> Schedule:
        return build(even_counts(topology, num_units), topology).schedule

    def why_unfit(topology: Topology) -> str:
        num_live = len(topology.live_ranks)
        if num_live > _MOST_RANKS:
            return f"{num_live:,} live ranks; all-to-alls are built for {_MOST_RANKS:,} at most."
        return unfit(topology)

    ALL_TO_ALL.add(name, Algorithm(summary, build_evenly, why_unfit))


_add_all_to_all("direct", "every pair straight, over its own route", direct)
_add_all_to_all("ring", "one ring, half of the payload each way", _whole_ring)
_add_all_to_all("half_ring", "one ring, the shorter way around", _half_ring)
_add_all_to_all("axes", "half rings, one axis after the other", along_axes, unfit_for_grid)
_add_all_to_all(
    "rotated_axes", "half rings, each slice begins with another axis", _rotated_axes, unfit_for_grid
)
_add_all_to_all("two_level", "inside the nodes, then across", two_level, unfit_for_levels)


def _add_all_reduce(name: str, build: Build, summary: str, *, is_one_ring: bool = False) -> None:
    """Adds an all-reduce whose builder says itself what speaks against a network."""
    unfit = reason_against(build)
    ALL_REDUCE.add(name, Algorithm(summary, build, unfit, is_one_ring))


# One ring of all live ranks.
_add_all_reduce("ring", all_reduces.ring, "one ring, messages routed", is_one_ring=True)
_add_all_reduce(
    "two_way_ring",
    all_reduces.two_way_ring,
    "one ring, messages routed, both ways around",
    is_one_ring=True,
)
_add_all_reduce(
    "neighbour_ring",
    all_reduces.neighbours,
    "one ring of neighbours, both ways around",
    is_one_ring=True,
)

# Rings along the axes of a torus.
_add_all_reduce("torus", all_reduces.torus, "rings along one axis after the other")
_add_all_reduce("torus_all_axes", all_reduces.torus_on_all_axes, "rings along all axes at once")

# Pairs of lines, on a mesh that does not wrap.
_add_all_reduce("row_pairs", all_reduces.row_pairs, "rings of two rows, then across")
_add_all_reduce("column_pairs", all_reduces.column_pairs, "rings of two columns, then across")

# The same in finer chunks, and around holes.
_add_all_reduce("row_bands", all_reduces.row_bands, "rings of two rows, of four at a hole")
_add_all_reduce("column_bands", all_reduces.column_bands, "rings of two columns, of four at a hole")

# Around holes, for a few numbers of slices: which one is best depends on the payload.
for _num_slices in (1, 2, 4, 8):
    _add_all_reduce(
        f"row_pair_clients_{_num_slices}",
        all_reduces.row_pair_clients(_num_slices),
        f"rings of two rows, the rest as clients, slices: {_num_slices}",
    )


def multi_ring(*levels: int) -> Algorithm:
    """Returns the all-reduce in levels of the live ranks, the fastest level first."""
    build = all_reduces.multi_ring(*levels)
    sizes = " x ".join(str(size) for size in levels)
    unfit = reason_against(build)
    return Algorithm(f"rings in levels of {sizes}", build, unfit)
