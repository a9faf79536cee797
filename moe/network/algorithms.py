"""Algorithms by name: what builds a schedule for a network, or says why it cannot.

A planner tries all of a registry. A new algorithm is a builder in a file of its own and an entry
here.
"""

from collections.abc import Callable
from dataclasses import dataclass

from moe.network import all_reduces
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


def _add_all_reduce(name: str, summary: str, build: all_reduces.Build) -> None:
    ALL_REDUCE.add(name, Algorithm(summary, build, all_reduces.reason_against(build)))


_add_all_reduce("ring", "one ring, messages routed", all_reduces.ring)
_add_all_reduce("two_way_ring", "one ring, both ways around", all_reduces.two_way_ring)
_add_all_reduce("neighbour_ring", "one ring of neighbours, both ways", all_reduces.neighbours)
_add_all_reduce("torus", "rings along one axis after the other", all_reduces.torus)
_add_all_reduce("torus_all_axes", "rings along all axes at once", all_reduces.torus_on_all_axes)
_add_all_reduce("row_pairs", "rings of two rows, then across them", all_reduces.row_pairs)
_add_all_reduce("column_pairs", "rings of two columns, then across", all_reduces.column_pairs)
_add_all_reduce(
    "row_and_column_pairs",
    "rings of two rows and of two columns at once",
    all_reduces.in_halves(all_reduces.row_pairs, all_reduces.column_pairs),
)
_add_all_reduce(
    "row_bands", "row pairs in finer chunks, four rows at a hole", all_reduces.row_bands
)
_add_all_reduce("column_bands", "column pairs, four columns at a hole", all_reduces.column_bands)
_add_all_reduce(
    "row_and_column_bands",
    "row bands and column bands at once",
    all_reduces.in_halves(all_reduces.row_bands, all_reduces.column_bands),
)
for _num_slices in (1, 2, 4, 8):
    _add_all_reduce(
        f"row_pair_clients_{_num_slices}",
        f"row pairs, broken ones as clients, slices: {_num_slices}",
        all_reduces.row_pair_clients(_num_slices),
    )


def multi_ring(*levels: int) -> Algorithm:
    """Returns the all-reduce in levels of the live ranks, the fastest level first."""
    build = all_reduces.multi_ring(*levels)
    sizes = " x ".join(str(size) for size in levels)
    return Algorithm(f"rings in levels of {sizes}", build, all_reduces.reason_against(build))
