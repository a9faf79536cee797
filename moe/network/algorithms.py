"""Algorithms by name: each builds a schedule for a network, or reports why it cannot.

A planner tries all of a registry. A new all-reduce is a function with `@_all_reduce` here: it takes
a network and a number of units, and raises a ConfigError with the reason where the network does not
fit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from moe.checks import check, check_integer
from moe.errors import ConfigError
from moe.network.all_to_all import (
    along_axes,
    around,
    around_both_ways,
    direct,
    even_counts,
    two_level,
    unfit_for_grid,
    unfit_for_levels,
)
from moe.network.ring_orders import fold, mesh_of, neighbour_ring, survivor_order, whole_grid_of
from moe.network.rings import (
    multi_ring_all_reduce,
    ring_all_reduce,
    row_pair_all_reduce,
    torus_all_reduce,
    two_way_ring_all_reduce,
)
from moe.network.row_bands import find_bands, row_band_all_reduce
from moe.network.row_pair_clients import pair_rows_around_holes, row_pair_client_all_reduce
from moe.network.schedule import IntArray, Schedule
from moe.network.topology import Topology
from moe.registry import Registry

Build = Callable[[Topology, int], Schedule]
"""Builds a schedule for the live ranks of a network and a number of units."""

_LARGEST_RING = 2048
"""Ranks of the largest ring; its schedule has 8 million transfers."""

_MOST_RANKS = 1024
"""Live ranks of an all-to-all; they have a million pairs."""


def _no_reason(topology: Topology) -> str:
    return ""


@dataclass(frozen=True)
class Algorithm:
    """An algorithm for a collective on a network.

    Attributes:
        summary: What it does, in a line for tables.
        build: Returns its schedule for the live ranks of a network and a number of units.
        unfit: Returns a sentence on why it cannot be built on a network; "" if it can.
        is_one_ring: Whether it is one ring of all n ranks, with 2 n (n - 1) transfers.
    """

    summary: str
    build: Build
    unfit: Callable[[Topology], str] = _no_reason
    is_one_ring: bool = False


ALL_REDUCE: Registry[Algorithm] = Registry("all-reduce algorithm")
"""Ways to sum one payload over all live ranks."""

ALL_TO_ALL: Registry[Algorithm] = Registry("all-to-all algorithm")
"""Ways to send a part of every live rank's payload to every other one."""


# ---------------------------------------------------------------------------
# All-reduces


def _reason_against(build: Build, topology: Topology) -> str:
    # With a payload of zero units, building a schedule runs all checks and sends nothing.
    try:
        build(topology, 0)
    except ConfigError as error:
        return str(error)
    return ""


def _all_reduce(name: str, summary: str, *, is_one_ring: bool = False) -> Callable[[Build], Build]:
    """Registers a builder."""

    def register(build: Build) -> Build:
        unfit = partial(_reason_against, build)
        ALL_REDUCE.add(name, Algorithm(summary, build, unfit, is_one_ring))
        return build

    return register


@_all_reduce("ring", "one ring, messages routed", is_one_ring=True)
def ring(topology: Topology, num_units: int) -> Schedule:
    """Returns the sum around one ring of all live ranks; messages are routed if necessary."""
    order = _ring_order(topology, survivor_order)
    return ring_all_reduce(order, num_units, num_ranks=topology.num_ranks)


@_all_reduce("two_way_ring", "one ring, messages routed, both ways around", is_one_ring=True)
def two_way_ring(topology: Topology, num_units: int) -> Schedule:
    """Returns the sum around the same ring, half of the payload in each direction."""
    order = _ring_order(topology, survivor_order)
    return two_way_ring_all_reduce(order, num_units, num_ranks=topology.num_ranks)


@_all_reduce("neighbour_ring", "one ring of neighbours, both ways around", is_one_ring=True)
def two_way_neighbour_ring(topology: Topology, num_units: int) -> Schedule:
    """Returns the sum around a ring of neighbours, half of the payload in each direction."""
    order = _ring_order(topology, neighbour_ring)
    return two_way_ring_all_reduce(order, num_units, num_ranks=topology.num_ranks)


@_all_reduce("torus", "rings along one axis after the other")
def torus(topology: Topology, num_units: int) -> Schedule:
    """Returns the sum along one axis after the other, those that wrap first."""
    ranks = _folded_grid(topology)
    return torus_all_reduce(ranks, num_units, num_ranks=topology.num_ranks)


@_all_reduce("torus_all_axes", "rings along all axes at once")
def torus_all_axes(topology: Topology, num_units: int) -> Schedule:
    """Returns the sum along all axes at once, each the first one for its part of the payload."""
    ranks = _folded_grid(topology)
    return torus_all_reduce(ranks, num_units, rotates_axes=True, num_ranks=topology.num_ranks)


@_all_reduce("row_pairs", "rings of two rows, then across")
def row_pairs(topology: Topology, num_units: int) -> Schedule:
    """Returns the sum around pairs of rows of a mesh, and then across them."""
    mesh = mesh_of(topology)
    return _line_pairs(topology, num_units, mesh, wraps=all(topology.wraps[:-1]))


@_all_reduce("column_pairs", "rings of two columns, then across")
def column_pairs(topology: Topology, num_units: int) -> Schedule:
    """Returns the sum around pairs of columns of a mesh, and then across them."""
    mesh = mesh_of(topology)
    return _line_pairs(topology, num_units, mesh.T, wraps=all(topology.wraps[1:]))


@_all_reduce("row_bands", "rings of two rows, of four at a hole")
def row_bands(topology: Topology, num_units: int) -> Schedule:
    """Returns the sum around pairs of rows, four rows at a hole, and across them."""
    mesh = mesh_of(topology)
    return _line_bands(topology, num_units, mesh, wraps=all(topology.wraps[:-1]))


@_all_reduce("column_bands", "rings of two columns, of four at a hole")
def column_bands(topology: Topology, num_units: int) -> Schedule:
    """Returns the sum around pairs of columns, four columns at a hole, and across them."""
    mesh = mesh_of(topology)
    return _line_bands(topology, num_units, mesh.T, wraps=all(topology.wraps[1:]))


def _row_pair_clients(topology: Topology, num_units: int, *, num_slices: int) -> Schedule:
    """Returns the sum around pairs of rows with clients; pairs columns if rows cannot be paired."""
    _check_connected(topology)
    mesh = mesh_of(topology)
    dead = topology.dead
    check(bool(dead), "dead ranks", [], "some, whose neighbours become clients")

    try:
        rows = pair_rows_around_holes(mesh, dead, wraps=topology.wraps[0])
    except ConfigError:
        rows = pair_rows_around_holes(mesh.T, dead, wraps=topology.wraps[-1])
    return row_pair_client_all_reduce(
        rows, num_units, num_ranks=topology.num_ranks, num_slices=num_slices
    )


# The best number of slices depends on the payload.
for _num_slices in (1, 2, 4, 8):
    _build = partial(_row_pair_clients, num_slices=_num_slices)
    _summary = f"rings of two rows, the rest as clients, slices: {_num_slices}"
    _unfit = partial(_reason_against, _build)
    ALL_REDUCE.add(f"row_pair_clients_{_num_slices}", Algorithm(_summary, _build, _unfit))


def multi_ring(*levels: int) -> Algorithm:
    """Returns the all-reduce in levels of the live ranks, the fastest level first."""

    def build(topology: Topology, num_units: int) -> Schedule:
        _check_connected(topology)
        return multi_ring_all_reduce(
            levels, num_units, ranks=topology.live_ranks, num_ranks=topology.num_ranks
        )

    sizes = " x ".join(str(size) for size in levels)
    return Algorithm(f"rings in levels of {sizes}", build, partial(_reason_against, build))


def _folded_grid(topology: Topology) -> IntArray:
    """Returns the ranks of a grid, lines that do not wrap folded, axes that wrap last."""
    grid = whole_grid_of(topology)
    _check_connected(topology)

    # An axis that does not wrap carries each byte twice: it comes last, with the least bytes.
    axes = np.argsort(topology.wraps, kind="stable")
    return fold(grid, topology.wraps).transpose(axes)


def _line_pairs(topology: Topology, num_units: int, mesh: IntArray, *, wraps: bool) -> Schedule:
    dead = sorted(topology.dead)
    check(not dead, "dead ranks", dead, "none; take bands around holes")
    _check_connected(topology)
    return row_pair_all_reduce(mesh, num_units, wraps=wraps, num_ranks=topology.num_ranks)


def _line_bands(topology: Topology, num_units: int, mesh: IntArray, *, wraps: bool) -> Schedule:
    bands = find_bands(mesh, topology.dead)
    _check_connected(topology)
    return row_band_all_reduce(bands, num_units, num_ranks=topology.num_ranks, wraps=wraps)


def _ring_order(topology: Topology, find: Callable[[Topology], IntArray]) -> IntArray:
    """Returns the <int64>[p] ranks of a ring.

    Raises:
        ConfigError: If ranks are cut off, or the schedule of the ring would fill the memory.
    """
    _check_connected(topology)
    order = find(topology)
    reason = "a ring has twice as many transfers as ranks squared"
    check_integer("ranks of a ring", len(order), least=1, most=_LARGEST_RING, reason=reason)
    return order


def _check_connected(topology: Topology) -> None:
    """Raises unless all live ranks can reach each other."""
    live = topology.live_ranks
    check(bool(live.size), "live ranks", [], "at least one")

    # Nodes that a message from the first live rank reaches, one link further each time.
    links = topology.links
    reached = np.zeros(topology.num_nodes, np.bool_)
    reached[live[0]] = True
    num_reached = 0
    while num_reached < reached.sum():
        num_reached = int(reached.sum())
        is_next = reached[links.source]
        reached[links.destination[is_next]] = True

    # Ranks on the smaller side are cut off.
    is_reached = reached[live]
    is_most = is_reached.mean() > 0.5
    lost = live[is_reached != is_most].tolist()
    expected = "none; declare them dead too, or repair their links"
    check(bool(is_reached.all()), "live ranks that are cut off", lost, expected)


# ---------------------------------------------------------------------------
# All-to-alls


def _half_ring(counts: IntArray, topology: Topology) -> Schedule:
    return around(counts, survivor_order(topology).tolist())


def _whole_ring(counts: IntArray, topology: Topology) -> Schedule:
    return around_both_ways(counts, survivor_order(topology).tolist())


def _rotated_axes(counts: IntArray, topology: Topology) -> Schedule:
    return along_axes(counts, topology, num_slices=len(topology.shape))


def _add_all_to_all(
    name: str,
    summary: str,
    build: Callable[[IntArray, Topology], Schedule],
    unfit: Callable[[Topology], str] = _no_reason,
) -> None:
    """Registers a builder for units that are split evenly among all pairs of live ranks."""

    def build_evenly(topology: Topology, num_units: int) -> Schedule:
        return build(even_counts(topology, num_units), topology)

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
