"""Rings: a reduce-scatter around each of several rings at once, and what follows from it.

A ring is an order of ranks. Its payload is split into as many chunks as it has ranks; in each step
every rank sends a chunk of partial sums to the next rank, so that after p - 1 steps rank i of the
ring has the whole sum of chunk i. All other all-reduces of this package are rings on rings.
"""

import numpy as np
from numpy.typing import ArrayLike

from moe.checks import check
from moe.network.schedule import IntArray, Schedule, beside, intervals, split_evenly, transfers


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
    check(rings.size > 0, "orders of rings", rings.shape, "at least one rank")
    num_rings, size = rings.shape

    # Each rank owns the chunk of its own place.
    bounds = ring_bounds(low, high, num_rings, size)

    return ring_reduce_to(
        rings,
        np.broadcast_to(np.arange(size), rings.shape),
        bounds,
        num_ranks=num_ranks,
        num_units=num_units,
    )


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

    A chunk starts at the rank behind its owner and passes all others on its way there, so that
    every link of a ring carries all chunks but those of the rank behind it.

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

    # In step t a chunk leaves the rank t + 1 places behind its owner.  [p - 1, R, C]
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


def ring_all_reduce(order: ArrayLike, num_units: int, *, num_ranks: int | None = None) -> Schedule:
    """Returns an all-reduce around one ring: 2 (p - 1) steps, 2 (p - 1) / p of the payload a link.

    Args:
        order: <int64>[p] ranks in the order of the ring.
        num_units: Units of the payload.
        num_ranks: Ranks of the schedule; those of the ring unless given.
    """
    ranks = np.asarray(order, np.int64)
    num_ranks = num_ranks or len(ranks)
    scatter = ring_reduce_scatter(ranks, 0, num_units, num_ranks=num_ranks, num_units=num_units)
    return scatter.then(scatter.reversed())


def two_way_ring_all_reduce(
    order: ArrayLike, num_units: int, *, num_ranks: int | None = None
) -> Schedule:
    """Returns an all-reduce of one half of the payload around a ring, the other half backwards.

    Every link of the ring then carries data both ways: half the time where links are full duplex.
    """
    ranks = np.asarray(order, np.int64)
    # The second half goes against the first.
    middle = int(split_evenly(num_units, 2)[1])

    forwards = ring_all_reduce(ranks, middle, num_ranks=num_ranks)
    backwards = ring_all_reduce(ranks[::-1], num_units - middle, num_ranks=num_ranks)
    return beside([forwards.at(0, num_units), backwards.at(middle, num_units)])
