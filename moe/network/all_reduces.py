"""All-reduces on a network: which ranks stand in which row of a builder, or why none can.

Each function takes a network and a number of units. It raises a ConfigError with the reason where
the network does not fit.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from moe.checks import check, check_integer
from moe.errors import ConfigError
from moe.network.grids import multi_ring_all_reduce, row_pair_all_reduce, torus_all_reduce
from moe.network.ring_orders import fold, mesh_of, neighbour_ring, survivor_order, whole_grid_of
from moe.network.rings import ring_all_reduce, two_way_ring_all_reduce
from moe.network.row_bands import find_bands, row_band_all_reduce
from moe.network.row_pair_clients import pair_rows_around_holes, row_pair_client_all_reduce
from moe.network.schedule import IntArray, Schedule
from moe.network.topology import Topology

Build = Callable[[Topology, int], Schedule]
"""Makes a schedule among the live ranks of a network, for a number of units."""

_LARGEST_RING = 2048
"""Ranks; there the schedule of a ring has 8 million transfers."""


def ring(topology: Topology, num_units: int) -> Schedule:
    """Returns the sum around one ring of all live ranks, messages routed where they must be."""
    order = _ring_order(topology, survivor_order)
    return ring_all_reduce(order, num_units, num_ranks=topology.num_ranks)


def two_way_ring(topology: Topology, num_units: int) -> Schedule:
    """Returns the sum around the same ring, half of the payload in each direction."""
    order = _ring_order(topology, survivor_order)
    return two_way_ring_all_reduce(order, num_units, num_ranks=topology.num_ranks)


def neighbours(topology: Topology, num_units: int) -> Schedule:
    """Returns the sum around a ring of neighbours, half of the payload in each direction."""
    order = _ring_order(topology, neighbour_ring)
    return two_way_ring_all_reduce(order, num_units, num_ranks=topology.num_ranks)


def torus(topology: Topology, num_units: int) -> Schedule:
    """Returns the sum along one axis after the other, those that wrap first."""
    return _torus(topology, num_units, rotates_axes=False)


def torus_on_all_axes(topology: Topology, num_units: int) -> Schedule:
    """Returns the sum along all axes at once, each the first one for its part of the payload."""
    return _torus(topology, num_units, rotates_axes=True)


def multi_ring(*levels: int) -> Build:
    """Returns the builder of the sum in levels of the live ranks, the fastest level first."""

    def build(topology: Topology, num_units: int) -> Schedule:
        _check_connected(topology)
        return multi_ring_all_reduce(
            levels, num_units, ranks=topology.live_ranks, num_ranks=topology.num_ranks
        )

    return build


def row_pairs(topology: Topology, num_units: int) -> Schedule:
    """Returns the sum around pairs of rows, and then across them."""
    return _pairs(topology, num_units, _rows(topology))


def column_pairs(topology: Topology, num_units: int) -> Schedule:
    """Returns the sum around pairs of columns, and then across them."""
    return _pairs(topology, num_units, _columns(topology))


def row_bands(topology: Topology, num_units: int) -> Schedule:
    """Returns the sum around pairs of rows, four rows where there is a hole, and across them."""
    return _bands(topology, num_units, _rows(topology))


def column_bands(topology: Topology, num_units: int) -> Schedule:
    """Returns the sum around pairs of columns, four where there is a hole, and across them."""
    return _bands(topology, num_units, _columns(topology))


def row_pair_clients(num_slices: int) -> Build:
    """Returns the builder of the sum around pairs of rows with clients, in slices of the payload.

    The columns are paired where the rows cannot be.
    """

    def build(topology: Topology, num_units: int) -> Schedule:
        _check_connected(topology)
        grid = mesh_of(topology)
        dead = topology.dead
        expected = "some, whose neighbours become clients"
        check(bool(dead), "dead ranks", [], expected)

        # Rows, or else columns.
        wraps = topology.wraps
        try:
            rows = pair_rows_around_holes(grid, dead, wraps=wraps[0])
        except ConfigError:
            rows = pair_rows_around_holes(grid.T, dead, wraps=wraps[-1])
        return row_pair_client_all_reduce(
            rows, num_units, num_ranks=topology.num_ranks, num_slices=num_slices
        )

    return build


def reason_against(build: Build) -> Callable[[Topology], str]:
    """Returns the function that says why a builder does not fit a network; "" where it does."""

    # Without units a builder checks everything, and sends nothing.
    def unfit(topology: Topology) -> str:
        try:
            build(topology, 0)
        except ConfigError as error:
            return str(error)
        return ""

    return unfit


def _torus(topology: Topology, num_units: int, *, rotates_axes: bool) -> Schedule:
    grid = whole_grid_of(topology)
    _check_connected(topology)

    # An axis that does not wrap carries each byte twice: it comes last, with the least bytes.
    axes = np.argsort(topology.wraps, kind="stable")
    ranks = fold(grid, topology.wraps).transpose(axes)
    return torus_all_reduce(
        ranks, num_units, rotates_axes=rotates_axes, num_ranks=topology.num_ranks
    )


class _Lines(NamedTuple):
    """The lines of a mesh that are paired.

    Attributes:
        ranks: <int64>[lines, ranks of a line].
        wraps: Whether the last line is a neighbour of the first one.
    """

    ranks: IntArray
    wraps: bool


def _rows(topology: Topology) -> _Lines:
    return _Lines(mesh_of(topology), all(topology.wraps[:-1]))


def _columns(topology: Topology) -> _Lines:
    return _Lines(mesh_of(topology).T, all(topology.wraps[1:]))


def _pairs(topology: Topology, num_units: int, lines: _Lines) -> Schedule:
    dead = sorted(topology.dead)
    check(not dead, "dead ranks", dead, "none; take bands around holes")
    _check_connected(topology)
    return row_pair_all_reduce(
        lines.ranks, num_units, wraps=lines.wraps, num_ranks=topology.num_ranks
    )


def _bands(topology: Topology, num_units: int, lines: _Lines) -> Schedule:
    bands = find_bands(lines.ranks, topology.dead)
    _check_connected(topology)
    return row_band_all_reduce(bands, num_units, num_ranks=topology.num_ranks, wraps=lines.wraps)


def _ring_order(topology: Topology, find: Callable[[Topology], IntArray]) -> IntArray:
    """Returns the <int64>[p] ranks of a ring.

    Raises:
        ConfigError: When ranks are cut off, or the schedule of the ring would fill the memory.
    """
    _check_connected(topology)
    order = find(topology)
    check_integer(
        "ranks of a ring",
        len(order),
        least=1,
        most=_LARGEST_RING,
        reason="a ring has twice as many transfers as ranks squared",
    )
    return order


def _check_connected(topology: Topology) -> None:
    """Raises when the live ranks cannot all reach each other."""
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

    # Those on the smaller side are cut off.
    is_reached = reached[live]
    is_most = is_reached.mean() > 0.5
    lost = live[is_reached != is_most].tolist()
    expected = "none; declare them dead too, or repair their links"
    check(bool(is_reached.all()), "live ranks that are cut off", lost, expected)
