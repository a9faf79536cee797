"""Rings on rings: all-reduces along the axes of a grid of ranks, each on a part of the one before.

The ranks stand in an array. Rings along its last axis sum the whole payload, so that each rank has
a chunk of it; rings along the axis before sum that chunk, which is smaller by the size of the last
axis; and so on. Then all is gathered back, the first axis first. The array may be a torus, rows of
a mesh joined to rings, or levels of a cluster: hosts, racks and so on.

A colour is one such array with its own part of the payload. Several at once, each with another
order of axes or another direction, keep all links busy.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from moe.checks import check, check_integer
from moe.network.ring_orders import fold, pair_rows
from moe.network.rings import ring_bounds, ring_reduce_scatter
from moe.network.schedule import IntArray, Schedule, beside, split_evenly


def grid_reduce_scatter(
    ranks: ArrayLike, num_units: int, *, num_ranks: int | None = None
) -> Schedule:
    """Returns a reduce-scatter along the axes of an array of ranks, the last axis first.

    Run backwards, it is the all-gather of the same shards.

    Args:
        ranks: <int64>[p_k, ..., p_1] ranks; each line along an axis is a ring.
        num_units: Units of the payload.
        num_ranks: Ranks of the schedule; those of the array unless given.
    """
    grid = np.asarray(ranks, np.int64)
    check(grid.size > 0, "ranks of a grid", grid.shape, "at least one")
    grid = np.atleast_1d(grid)
    num_ranks = num_ranks or grid.size

    # The interval that each rank of the grid sums next.
    low = np.zeros(grid.shape, np.int64)
    high = np.full(grid.shape, num_units, np.int64)
    phases = []
    for axis in reversed(range(grid.ndim)):
        rings = _lines(grid, axis)
        first = _lines(low, axis)[:, 0]
        last = _lines(high, axis)[:, 0]
        phase = ring_reduce_scatter(rings, first, last, num_ranks=num_ranks, num_units=num_units)
        phases.append(phase)

        # A rank goes on with its chunk.
        bounds = ring_bounds(first, last, *rings.shape)
        low = _from_lines(bounds[:, :-1], grid.shape, axis)
        high = _from_lines(bounds[:, 1:], grid.shape, axis)

    # One axis after the other.
    schedule = phases[0]
    for phase in phases[1:]:
        schedule = schedule.then(phase)
    return schedule


def grid_all_reduce(ranks: ArrayLike, num_units: int, *, num_ranks: int | None = None) -> Schedule:
    """Returns an all-reduce along the axes of an array of ranks: 2 (p_1 - 1) + 2 (p_2 - 1) ... steps.

    Args:
        ranks: <int64>[p_k, ..., p_1] ranks; each line along an axis is a ring, the last axis first.
        num_units: Units of the payload.
        num_ranks: Ranks of the schedule; those of the array unless given.
    """
    scatter = grid_reduce_scatter(ranks, num_units, num_ranks=num_ranks)
    return scatter.then(scatter.reversed())


def coloured_all_reduce(
    colours: Sequence[ArrayLike], num_units: int, *, num_ranks: int | None = None
) -> Schedule:
    """Returns one all-reduce for each of several arrays of the same ranks, an equal part each.

    Args:
        colours: Arrays of ranks, as of `grid_all_reduce`.
        num_units: Units of the whole payload.
        num_ranks: Ranks of the schedule; those of an array unless given.
    """
    # Colours share links, and no units.
    bounds = split_evenly(num_units, len(colours))
    parts = []
    for colour, low, high in zip(colours, bounds[:-1], bounds[1:], strict=True):
        part = grid_all_reduce(colour, int(high - low), num_ranks=num_ranks)
        parts.append(part.at(int(low), num_units))
    return beside(parts)


def torus_all_reduce(
    ranks: ArrayLike, num_units: int, *, rotates_axes: bool = False, num_ranks: int | None = None
) -> Schedule:
    """Returns an all-reduce on a torus, half of the payload in each direction of the rings.

    Args:
        ranks: <int64>[p_k, ..., p_1] ranks of the torus, the axis to begin with last.
        num_units: Units of the payload.
        rotates_axes: Whether each axis is the first one for an equal part of the payload, so that
            the links of all axes are busy at once; else one axis is busy at a time.
        num_ranks: Ranks of the schedule; those of the torus unless given.

    Source:
        Image Classification at Supercomputer Scale (arXiv:1811.06992) §3, "2-D torus all-reduce".
        Differs: any number of axes.
    """
    grid = np.atleast_1d(np.asarray(ranks, np.int64))
    rotations = [grid]
    if rotates_axes:
        axes = np.arange(grid.ndim)
        rotations = [grid.transpose(np.roll(axes, shift)) for shift in range(grid.ndim)]

    # Both directions of each.
    colours = []
    for rotation in rotations:
        colours += [rotation, np.flip(rotation)]
    return coloured_all_reduce(colours, num_units, num_ranks=num_ranks)


def row_pair_all_reduce(
    ranks: ArrayLike, num_units: int, *, wraps: bool = False, num_ranks: int | None = None
) -> Schedule:
    """Returns an all-reduce on a mesh without wrap: around pairs of rows, then across the pairs.

    Two neighbouring rows are a ring of neighbours, out on one and back on the other. A ring on one
    row would cross the whole row from its end to its beginning, and load each link twice.

    Args:
        ranks: <int64>[..., Y, X] ranks of the mesh; Y must be even.
        num_units: Units of the payload.
        wraps: Whether the ends of all axes but the last are joined.
        num_ranks: Ranks of the schedule; those of the mesh unless given.

    Raises:
        ConfigError: When the rows cannot be paired.
    """
    pairs = pair_rows(np.asarray(ranks, np.int64))
    rings = fold(pairs, [wraps] * (pairs.ndim - 1) + [True])
    return torus_all_reduce(rings, num_units, num_ranks=num_ranks)


def multi_ring_all_reduce(
    levels: Sequence[int],
    num_units: int,
    *,
    ranks: ArrayLike | None = None,
    num_ranks: int | None = None,
) -> Schedule:
    """Returns an all-reduce on a cluster of levels: within hosts, then between near ones, then far.

    Args:
        levels: Size of each level, the fastest first: (4, 8, 2) is 4 ranks a host, 8 hosts a rack
            and 2 racks. Their product is the number of ranks. The payload of a level is smaller by
            the sizes of all levels before it.
        num_units: Units of the payload.
        ranks: <int64>[ranks] ranks so that those of the fastest level follow each other; 0, 1, 2
            and so on unless given.
        num_ranks: Ranks of the schedule; the product of the levels unless given.

    Raises:
        ConfigError: When the levels do not multiply to the number of ranks.
    Source:
        PowerAI DDL (arXiv:1708.02188), "multi-ring". Differs: any number of levels.
    """
    check(len(levels) > 0, "levels", levels, "at least one size")
    for size in levels:
        check_integer("size of a level", size, least=1)

    # Neighbours on the fastest level stand along the last axis.
    product = math.prod(levels)
    order: IntArray = np.arange(product) if ranks is None else np.asarray(ranks, np.int64)
    check(
        order.size == product, "levels", levels, f"sizes whose product is {order.size}, the ranks"
    )
    return grid_all_reduce(order.reshape(levels[::-1]), num_units, num_ranks=num_ranks)


def factorisations(num_ranks: int, num_levels: int) -> list[tuple[int, ...]]:
    """Returns all ways to write a number of ranks as a product of so many levels, ordered.

    Levels of one rank are included: (4, 1, 1) is a ring of 4.
    """
    check_integer("num_ranks", num_ranks, least=1)
    check_integer("num_levels", num_levels, least=1)
    if num_levels == 1:
        return [(num_ranks,)]

    # The first level, and all ways to go on.
    products = []
    for size in range(1, num_ranks + 1):
        if num_ranks % size == 0:
            rests = factorisations(num_ranks // size, num_levels - 1)
            products += [(size, *rest) for rest in rests]
    return products


def _lines(grid: IntArray, axis: int) -> IntArray:
    """Returns the <int64>[lines, p] lines of an array along an axis."""
    return np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis])


def _from_lines(lines: IntArray, shape: tuple[int, ...], axis: int) -> IntArray:
    """Returns the array of some shape whose lines along an axis are given."""
    size = shape[axis]
    others = shape[:axis] + shape[axis + 1 :]
    return np.moveaxis(lines.reshape(*others, size), -1, axis)
