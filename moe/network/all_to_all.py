"""All-to-alls: every rank has a different block for every other rank.

Blocks go straight, each over its own route, or along one axis of the network after the other: a rank first sends along
its line everything that is bound for other coordinates on that axis, for any other coordinates. Slices of the payload
may begin with different axes (dimension rotation), which keeps the links of all axes busy at once.

The units of an all-to-all are those of all pairs of ranks, in order. In each slice they are ordered
by origin and then by target, with coordinates in the slice's order of the axes: blocks that travel
together are contiguous, so a hop needs few transfers.

Source: HalfRing, DimRotation: Optimizing All-to-All Collective Communication with Fault Tolerance
    on Torus Networks (MICRO 2025, doi:10.1145/3725843.3756057). Differs: no broken links. Shares of a
    broken ring that went over its neighbours, at commit b2961961, cut the load of its links on 5 x 5 from
    1.2 to 0.75.
"""

from collections.abc import Sequence

import numpy as np

from moe.checks import check, check_integer
from moe.network.axis_hops import Hops, half_ring, line, one_way_ring, straight
from moe.network.schedule import (
    IntArray,
    Schedule,
    Transfers,
    intervals,
    one_payload,
    split_evenly,
    transfers,
)
from moe.network.topology import Topology

_MOST_RANKS = 1024


def even_counts(topology: Topology, num_units: int) -> IntArray:
    """Returns <int64>[N, N] units split evenly among all pairs of live ranks, a rank and itself
    being a pair too.

    Slices and halves of blocks are even where each pair has a multiple of twice the slices.

    Raises:
        ConfigError: If the network has too many live ranks.
    """
    live = topology.live_ranks
    reason = "an all-to-all has a schedule for each pair of ranks"
    check_integer("live ranks", len(live), most=_MOST_RANKS, reason=reason)

    # Dead ranks have nothing to send.
    counts = np.zeros((topology.num_ranks, topology.num_ranks), np.int64)
    each = np.diff(split_evenly(num_units, len(live) ** 2))
    counts[np.ix_(live, live)] = each.reshape(len(live), len(live))
    return counts


def direct(topology: Topology, num_units: int) -> Schedule:
    """Returns the all-to-all in which every live rank sends straight to every other one.

    In each step all ranks send equally far: to the same offset on every axis of a grid, so that on
    a torus all links of an axis carry equal loads.

    Args:
        topology: The network.
        num_units: Units of all pairs together.
    """
    table = even_counts(topology, num_units)
    num_ranks = topology.num_ranks
    shape = topology.shape or (num_ranks,)
    starts = _starts(table)

    # Each origin's target in each step, by the coordinates of both.
    rank = np.arange(num_ranks)
    offsets = np.array(np.unravel_index(rank, shape))  # [axes, steps]
    sums = offsets[:, None, :] + offsets[:, :, None]  # [axes, steps, N]
    target = np.ravel_multi_index(tuple(sums), shape, mode="wrap")
    origin = np.broadcast_to(rank, target.shape)

    # Offset 0 is the rank itself, which sends itself nothing.
    low = starts[origin, target]
    high = low + table[origin, target]
    high[0] = low[0]
    rows = transfers(rank[:, None] - 1, origin, target, low, high, adds=False)
    return _promised(rows, starts, table)


def around(topology: Topology, num_units: int, order: IntArray) -> Schedule:
    """Returns the all-to-all around one ring of the live ranks, each block the shorter way.

    Args:
        topology: The network.
        num_units: Units of all pairs together.
        order: <int64>[live] ranks in the order of the ring.
    """
    return _exchange(even_counts(topology, num_units), order, [half_ring(len(order))])


def around_both_ways(topology: Topology, num_units: int, order: IntArray) -> Schedule:
    """Returns the all-to-all around a ring, half of the payload forwards, half backwards; see `around`."""
    table = even_counts(topology, num_units)
    ring = one_way_ring(len(order))
    forwards = _exchange(table // 2, order, [ring])
    backwards = _exchange(table - table // 2, order[::-1], [ring])
    return one_payload([forwards, backwards])


def along_axes(topology: Topology, num_units: int, *, num_slices: int = 1) -> Schedule:
    """Returns the all-to-all along one axis of a grid after the other, on slices of the payload.

    On levels of switches, everything goes to the rank of its own node that has the target's index
    there, then straight to the target's node: fewer and larger messages between nodes than with
    `direct`.

    Args:
        topology: A grid without dead ranks, or levels of switches.
        num_units: Units of all pairs together.
        num_slices: Slices of the payload, each of which begins with the next axis after the previous
            slice's; as many as axes keep the links of all busy.

    Raises:
        ConfigError: If ranks are dead, or the network has no axes.
    """
    check(bool(topology.shape), "network", topology.name, "one with axes")
    check(not topology.dead, "dead ranks", sorted(topology.dead), "none along axes")
    table = even_counts(topology, num_units)

    # Slice by slice, each with its own order of the axes.
    slices = []
    num_axes = len(topology.shape)
    for index in range(num_slices):
        axes = [(num_axes - 1 - index - axis) % num_axes for axis in range(num_axes)]
        ranks = np.arange(topology.num_ranks).reshape(topology.shape).transpose(axes)
        stages = [_hops_of_axis(topology, axis) for axis in axes]
        end = table * (index + 1) // num_slices
        slices.append(_exchange(end - table * index // num_slices, ranks, stages))
    return one_payload(slices)


def _hops_of_axis(topology: Topology, axis: int) -> Hops:
    """Returns the hops along every line of an axis."""
    size = topology.shape[axis]
    if topology.switched:
        return straight(size)
    return half_ring(size) if topology.wraps[axis] and size > 2 else line(size)


def _exchange(counts: IntArray, ranks: IntArray, stages: Sequence[Hops]) -> Schedule:
    """Returns the exchange along axis after axis.

    Args:
        counts: <int64>[N, N] units of each pair.
        ranks: <int64>[p_1, ..., p_k] rank at each place.
        stages: Hops along the lines of each axis.
    """
    # Pairs in the order of places, so that runs of targets are adjacent.
    names = ranks.ravel()
    table = counts[np.ix_(names, names)]
    starts = _starts(table)
    bounds = np.append(starts.ravel(), table.sum())

    # The steps of an axis begin when the previous axis has finished.
    parts = []
    step = 0
    for axis, hops in enumerate(stages):
        parts.append(_rows(bounds, ranks.shape, axis, hops, step))
        step += hops.num_steps
    columns = zip(*parts, strict=True)
    table_of_rows = transfers(*(np.concatenate(column) for column in columns), adds=False)

    # From places to ranks.
    return _promised(table_of_rows, starts, table).among(names, len(counts))


def _rows(
    bounds: IntArray, shape: tuple[int, ...], axis: int, hops: Hops, first_step: int
) -> tuple[IntArray, ...]:
    """Returns columns of the transfers along an axis: step, source, destination, low, high.

    Before an axis starts, a place holds blocks of all origins that differ from it only on earlier axes:
    the blocks whose destination has the place's coordinates on those axes.
    """
    size = shape[axis]
    before = int(np.prod(shape[:axis], dtype=np.int64))
    after = int(np.prod(shape[axis + 1 :], dtype=np.int64))
    num_places = before * size * after

    # A row for each hop, line, and coordinates of the origin on the axes before.  [H, L, P]
    hop = np.arange(len(hops.step))[:, None, None]
    lines = np.arange(before * after)[None, :, None]
    prefix = np.arange(before)[None, None, :]
    done, rest = np.divmod(lines, after)

    # The first block of the origin for this line's ranks, as an index of pairs.
    origin = (prefix * size + hops.origin[hop]) * after + rest
    first_pair = origin * num_places + done * size * after
    low = _unit(bounds, first_pair, hops.low[hop], after)
    high = _unit(bounds, first_pair, hops.high[hop], after)

    # Few units may leave most rows empty.
    hop, lines, prefix = np.nonzero(low < high)
    done, rest = np.divmod(lines, after)
    source = (done * size + hops.source[hop]) * after + rest
    destination = (done * size + hops.destination[hop]) * after + rest
    sent = (hop, lines, prefix)
    return first_step + hops.step[hop], source, destination, low[sent], high[sent]


def _unit(bounds: IntArray, first_pair: IntArray, half: IntArray, pairs_per_block: int) -> IntArray:
    """Returns the unit at a half block: the beginning of its block, or the middle."""
    pair = first_pair + half // 2 * pairs_per_block
    begin = bounds[pair]
    end = bounds[np.minimum(pair + pairs_per_block, len(bounds) - 1)]
    return np.where(half % 2 == 1, (begin + end) // 2, begin)


def _starts(counts: IntArray) -> IntArray:
    """Returns <int64>[N, N] where the units of each pair begin."""
    ends = np.cumsum(counts.ravel())
    return (ends - counts.ravel()).reshape(counts.shape)


def _promised(rows: Transfers, starts: IntArray, counts: IntArray) -> Schedule:
    """Returns the schedule in which every pair's units begin at its origin and end at its target."""
    num_ranks = len(counts)
    rank = np.arange(num_ranks)
    ends = starts + counts
    return Schedule(
        num_ranks=num_ranks,
        num_units=int(counts.sum()),
        transfers=rows,
        before=intervals(rank, starts[:, 0], ends[:, -1]),
        after=intervals(rank, starts, ends),
    )
