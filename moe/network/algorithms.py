"""Algorithms by name: each builds a schedule for a network, or reports why it cannot.

A planner tries all of a registry. A new all-reduce is a function with `@_all_reduce` here: it takes
a network and a number of units, and raises a ConfigError with the reason where the network does not
fit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from moe.checks import check, check_integer
from moe.errors import ConfigError
from moe.network.all_to_all import along_axes, around, around_both_ways, direct
from moe.network.ring_orders import fold, mesh_of, neighbour_ring, survivor_order, whole_grid_of
from moe.network.rings import grid_all_reduce, row_pair_all_reduce, torus_all_reduce
from moe.network.row_bands import find_bands, row_band_all_reduce
from moe.network.row_pair_clients import pair_rows_around_holes, row_pair_client_all_reduce
from moe.network.schedule import IntArray, Schedule
from moe.network.topology import Topology
from moe.registry import Registry

Build = Callable[[Topology, int], Schedule]
"""Builds a schedule for the live ranks of a network and a number of units."""

_LARGEST_RING = 2048
"""Ranks of the largest ring; its schedule has 8 million transfers."""


@dataclass(frozen=True)
class Algorithm:
    """An algorithm for a collective on a network.

    Attributes:
        build: Returns its schedule for the live ranks of a network and a number of units, or raises a
            ConfigError.
        is_one_ring: Whether it is one ring of all n ranks, with 2 n (n - 1) transfers.
    """

    build: Build
    is_one_ring: bool = False

    def unfit(self, topology: Topology) -> str:
        """Returns a sentence on why it cannot be built on a network; "" if it can."""
        # With a payload of zero units, building a schedule runs all checks and sends nothing.
        try:
            self.build(topology, 0)
        except ConfigError as error:
            return str(error)
        return ""


ALL_REDUCE: Registry[Algorithm] = Registry("all-reduce algorithm")
"""Ways to sum one payload over all live ranks."""

ALL_TO_ALL: Registry[Algorithm] = Registry("all-to-all algorithm")
"""Ways to send a part of every live rank's payload to every other one."""


# ---------------------------------------------------------------------------
# All-reduces


def _all_reduce(name: str, *, is_one_ring: bool = False) -> Callable[[Build], Build]:
    """Registers a builder."""

    def register(build: Build) -> Build:
        ALL_REDUCE.add(name, Algorithm(build, is_one_ring))
        return build

    return register


@_all_reduce("ring", is_one_ring=True)
def ring(topology: Topology, num_units: int) -> Schedule:
    """Returns the sum around one ring of all live ranks; messages are routed if necessary."""
    order = _ring_order(topology, survivor_order)
    return grid_all_reduce(order, num_units, num_ranks=topology.num_ranks)


@_all_reduce("two_way_ring", is_one_ring=True)
def two_way_ring(topology: Topology, num_units: int) -> Schedule:
    """Returns the sum around the same ring, half of the payload in each direction."""
    order = _ring_order(topology, survivor_order)
    return torus_all_reduce(order, num_units, num_ranks=topology.num_ranks)


@_all_reduce("neighbour_ring", is_one_ring=True)
def two_way_neighbour_ring(topology: Topology, num_units: int) -> Schedule:
    """Returns the sum around a ring of neighbours, half of the payload in each direction."""
    order = _ring_order(topology, neighbour_ring)
    return torus_all_reduce(order, num_units, num_ranks=topology.num_ranks)


@_all_reduce("torus")
def torus(topology: Topology, num_units: int) -> Schedule:
    """Returns the sum along one axis after the other, those that wrap first."""
    ranks = _folded_grid(topology)
    return torus_all_reduce(ranks, num_units, num_ranks=topology.num_ranks)


@_all_reduce("torus_all_axes")
def torus_all_axes(topology: Topology, num_units: int) -> Schedule:
    """Returns the sum along all axes at once, each the first one for its part of the payload."""
    ranks = _folded_grid(topology)
    return torus_all_reduce(ranks, num_units, rotates_axes=True, num_ranks=topology.num_ranks)


def _line_pairs(topology: Topology, num_units: int, *, columns: bool) -> Schedule:
    """Returns the sum around pairs of rows, or columns, of a mesh, and then across them."""
    mesh, wraps = _lines(topology, columns=columns)
    dead = sorted(topology.dead)
    check(not dead, "dead ranks", dead, "none; take bands around holes")
    return row_pair_all_reduce(mesh, num_units, wraps=wraps, num_ranks=topology.num_ranks)


def _line_bands(topology: Topology, num_units: int, *, columns: bool) -> Schedule:
    """Returns the sum around pairs of rows, or columns, four of them at a hole, and across them."""
    mesh, wraps = _lines(topology, columns=columns)
    bands = find_bands(mesh, topology.dead)
    return row_band_all_reduce(bands, num_units, num_ranks=topology.num_ranks, wraps=wraps)


for _name, _is_columns in (("row", False), ("column", True)):
    _all_reduce(f"{_name}_pairs")(partial(_line_pairs, columns=_is_columns))
    _all_reduce(f"{_name}_bands")(partial(_line_bands, columns=_is_columns))


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
    _all_reduce(f"row_pair_clients_{_num_slices}")(
        partial(_row_pair_clients, num_slices=_num_slices)
    )


def multi_ring(*levels: int) -> Algorithm:
    """Returns the all-reduce in levels of the live ranks, the fastest level first.

    Args:
        levels: Size of each level: (4, 8, 2) is 4 ranks a host, 8 hosts a rack and 2 racks.
    """

    def build(topology: Topology, num_units: int) -> Schedule:
        _check_connected(topology)
        ranks = topology.live_ranks
        expected = f"sizes whose product is {ranks.size}, the ranks"
        check(math.prod(levels) == ranks.size, "levels", levels, expected)
        grid = ranks.reshape(levels[::-1])
        return grid_all_reduce(grid, num_units, num_ranks=topology.num_ranks)

    return Algorithm(build)


def _folded_grid(topology: Topology) -> IntArray:
    """Returns the ranks of a grid, lines that do not wrap folded, axes that wrap last."""
    grid = whole_grid_of(topology)
    _check_connected(topology)

    # An axis that does not wrap carries each byte twice: it comes last, with the least bytes.
    axes = np.argsort(topology.wraps, kind="stable")
    return fold(grid, topology.wraps).transpose(axes)


def _lines(topology: Topology, *, columns: bool) -> tuple[IntArray, bool]:
    """Returns the ranks of a mesh, its rows or its columns in front, and whether those wrap."""
    mesh = mesh_of(topology)
    _check_connected(topology)
    if columns:
        return mesh.T, all(topology.wraps[1:])
    return mesh, all(topology.wraps[:-1])


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


def _ring(topology: Topology, num_units: int) -> Schedule:
    return around_both_ways(topology, num_units, survivor_order(topology))


def _half_ring(topology: Topology, num_units: int) -> Schedule:
    return around(topology, num_units, survivor_order(topology))


def _axes(topology: Topology, num_units: int, *, rotates_axes: bool) -> Schedule:
    check(not topology.switched, "network", topology.name, "a grid")
    num_slices = len(topology.shape) if rotates_axes else 1
    return along_axes(topology, num_units, num_slices=num_slices)


def _two_level(topology: Topology, num_units: int) -> Schedule:
    is_two_level = topology.switched and len(topology.shape) == 2
    check(is_two_level, "network", topology.name, "two levels of switches")
    return along_axes(topology, num_units)


for _name, _build in {
    "direct": direct,
    "ring": _ring,
    "half_ring": _half_ring,
    "axes": partial(_axes, rotates_axes=False),
    "rotated_axes": partial(_axes, rotates_axes=True),
    "two_level": _two_level,
}.items():
    ALL_TO_ALL.add(_name, Algorithm(_build))
