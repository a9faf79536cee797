"""Rings, and rings on rings: reduce-scatters and all-reduces along the axes of an array of ranks.

A ring is an order of ranks. Its payload is split into as many chunks as it has ranks; in each step
every rank sends a chunk of partial sums to the next rank, so that after p - 1 steps rank i of the
ring has the whole sum of chunk i.

Rings along the last axis of an array sum the whole payload, so that each rank has a chunk of it;
rings along the axis before sum that chunk, which is smaller by the size of the last axis; and so
on. Then all is gathered back, the first axis first. The array may be a torus, rows of a mesh joined
to rings, or levels of a cluster: hosts, racks and so on.

A colour is one such array with its own part of the payload. Several at once, each with another
order of axes or another direction, keep all links busy.
"""

from collections.abc import Sequence
from functools import reduce

import numpy as np
from numpy.typing import ArrayLike

from moe.network.ring_orders import fold, pair_rows
from moe.network.schedule import IntArray, Schedule, intervals, one_payload, split_evenly, transfers


def ring_reduce_scatter(
    orders: ArrayLike, low: ArrayLike, high: ArrayLike, *, num_ranks: int, num_units: int
) -> Schedule:
    """Returns a reduce-scatter around each of some rings of equal size.

    The i-th rank of a ring ends with the i-th chunk of its interval.

    Args:
        orders: <int64>[R, p] ranks in the order of each of R rings.
        low: <int64>[R] first unit of the interval that each ring sums; or a number for all.
        high: <int64>[R] unit after the last, likewise.
        num_ranks: Ranks of the schedule.
        num_units: Units of the schedule.
    """
    rings = np.atleast_2d(np.asarray(orders, np.int64))
    num_rings, size = rings.shape
    owners = np.broadcast_to(np.arange(size), rings.shape)
    bounds = ring_bounds(low, high, num_rings, size)
    return ring_reduce_to(rings, owners, bounds, num_ranks=num_ranks, num_units=num_units)


def ring_bounds(low: ArrayLike, high: ArrayLike, num_rings: int, size: int) -> IntArray:
    """Returns the <int64>[R, p + 1] bounds of the chunks of rings of p ranks.

    Args:
        low: <int64>[R] first unit of the interval of each ring; or a number for all.
        high: <int64>[R] unit after the last, likewise.
        num_rings: R.
        size: p.
    """
    # One interval for all rings, or one each.
    first = np.broadcast_to(np.asarray(low, np.int64), num_rings)
    last = np.broadcast_to(np.asarray(high, np.int64), num_rings)
    num_ring_units = (last - first)[:, None]
    return first[:, None] + np.arange(size + 1) * num_ring_units // size


def ring_reduce_to(
    rings: IntArray, owners: IntArray, bounds: IntArray, *, num_ranks: int, num_units: int
) -> Schedule:
    """Returns a reduce-scatter around rings whose ranks own any number of chunks each.

    A chunk starts at the rank after its owner and passes all others on its way there, so that every
    link of a ring carries all chunks but those of the rank after it.

    Args:
        rings: <int64>[R, p] ranks in the order of each of R rings.
        owners: <int64>[R, C] place in the ring of the rank that ends with each of C chunks.
        bounds: <int64>[R, C + 1] bounds of the chunks.
        num_ranks: Ranks of the schedule.
        num_units: Units of the schedule.
    """
    num_rings, size = rings.shape
    ring = np.arange(num_rings)[:, None]
    low = bounds[:, :-1]
    high = bounds[:, 1:]

    # In step t a chunk leaves the rank t + 1 places after its owner.  [p - 1, R, C]
    num_steps = size - 1 if (low < high).any() else 0
    step = np.arange(num_steps)[:, None, None]
    place = owners + 1 + step
    table = transfers(
        step=step,
        source=rings[ring, place % size],
        destination=rings[ring, (place + 1) % size],
        low=low,
        high=high,
        adds=True,
    )
    return Schedule(
        num_ranks=num_ranks,
        num_units=num_units,
        transfers=table,
        before=intervals(rings, bounds[:, :1], bounds[:, -1:]),
        after=intervals(rings[ring, owners], low, high),
    )


# ---------------------------------------------------------------------------
# Rings on rings


def grid_reduce_scatter(
    ranks: ArrayLike, num_units: int, *, num_ranks: int | None = None
) -> Schedule:
    """Returns a reduce-scatter along the axes of an array of ranks, the last axis first.

    Run backwards, it is the all-gather of the same shards.

    Args:
        ranks: <int64>[p_k, ..., p_1] ranks; each line along an axis is a ring.
        num_units: Units of the payload.
        num_ranks: Ranks of the schedule; defaults to those of the array.
    """
    grid = np.asarray(ranks, np.int64)
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

        # A rank continues with its chunk.
        bounds = ring_bounds(first, last, *rings.shape)
        low = _from_lines(bounds[:, :-1], grid.shape, axis)
        high = _from_lines(bounds[:, 1:], grid.shape, axis)

    # One axis after the other.
    return reduce(Schedule.then, phases)


def grid_all_reduce(ranks: ArrayLike, num_units: int, *, num_ranks: int | None = None) -> Schedule:
    """Returns an all-reduce along the axes of an array of ranks: 2 (p_1 - 1) + 2 (p_2 - 1) ... steps.

    An array of one axis is a ring, whose links carry 2 (p - 1) / p of the payload each. One of several
    levels is a cluster: within hosts, then between near ones, then far ones.

    Args:
        ranks: <int64>[p_k, ..., p_1] ranks; each line along an axis is a ring, the last axis first.
        num_units: Units of the payload.
        num_ranks: Ranks of the schedule; defaults to those of the array.

    Source:
        PowerAI DDL (arXiv:1708.02188), "multi-ring". Differs: any number of levels.
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
        num_ranks: Ranks of the schedule; defaults to those of an array.
    """
    # Colours share links, and no units.
    sizes = np.diff(split_evenly(num_units, len(colours))).tolist()
    parts = []
    for colour, size in zip(colours, sizes, strict=True):
        parts.append(grid_all_reduce(colour, size, num_ranks=num_ranks))
    return one_payload(parts)


def torus_all_reduce(
    ranks: ArrayLike, num_units: int, *, rotates_axes: bool = False, num_ranks: int | None = None
) -> Schedule:
    """Returns an all-reduce on a torus or a ring, half of the payload in each direction of the rings.

    Every link then carries data both ways: half the time where links are full duplex.

    Args:
        ranks: <int64>[p_k, ..., p_1] ranks of the torus, the axis to begin with last.
        num_units: Units of the payload.
        rotates_axes: Whether each axis is the first one for an equal part of the payload, so that
            the links of all axes are busy at once; else one axis is busy at a time.
        num_ranks: Ranks of the schedule; defaults to those of the torus.

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
        num_ranks: Ranks of the schedule; defaults to those of the mesh.

    Raises:
        ConfigError: If the rows cannot be paired.
    """
    pairs = pair_rows(np.asarray(ranks, np.int64))
    rings = fold(pairs, [wraps] * (pairs.ndim - 1) + [True])
    return torus_all_reduce(rings, num_units, num_ranks=num_ranks)


def factorisations(num_ranks: int, num_levels: int) -> list[tuple[int, ...]]:
    """Returns all ways to write a number of ranks as a product of so many levels, ordered.

    Levels of one rank are included: (4, 1, 1) is a ring of 4.
    """
    if num_levels == 1:
        return [(num_ranks,)]

    # The first level, and all ways to factorise the rest.
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
