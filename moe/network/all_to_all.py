"""All-to-alls: every rank has a different block for every other rank.

Blocks go straight, each over its own route, or along one axis of the network after the other: a rank first sends along
its line everything that is bound for other coordinates on that axis, for any other coordinates. Slices of the payload
may begin with different axes (dimension rotation), which keeps the links of all axes busy at once.

The units of an all-to-all are those of all pairs of ranks, in order. In each slice they are ordered
by origin and then by target, with coordinates in the slice's order of the axes: blocks that travel
together are contiguous, so a hop needs few transfers.

Source: HalfRing, DimRotation: Optimizing All-to-All Collective Communication with Fault Tolerance
    on Torus Networks (MICRO 2025, doi:10.1145/3725843.3756057). Differs: the shares that take the
    long way around a broken link, or go over its neighbours, are our own.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from moe.checks import check, check_integer, check_number
from moe.errors import ConfigError
from moe.network.axis_hops import (
    BALANCED,
    Detour,
    Grid,
    Lane,
    Order,
    grid_of,
    half_ring,
    lanes_of_axis,
    num_steps,
    one_way_ring,
    ring_of,
)
from moe.network.schedule import (
    IntArray,
    Schedule,
    Transfers,
    beside,
    intervals,
    split_evenly,
    transfers,
)
from moe.network.topology import Topology


def even_counts(topology: Topology, num_units: int) -> IntArray:
    """Returns <int64>[N, N] units split evenly among all pairs of live ranks, a rank and itself
    being a pair too.

    Slices and halves of blocks are even where each pair has a multiple of twice the slices.
    """
    check_integer("num_units", num_units, least=0)

    # Dead ranks have nothing to send.
    live = topology.live_ranks
    counts = np.zeros((topology.num_ranks, topology.num_ranks), np.int64)
    each = np.diff(split_evenly(num_units, len(live) ** 2))
    counts[np.ix_(live, live)] = each.reshape(len(live), len(live))
    return counts


def direct(counts: ArrayLike, topology: Topology) -> Schedule:
    """Returns the all-to-all in which every rank sends straight to every other one.

    In each step all ranks send equally far: to the same offset on every axis of a grid, so that on
    a torus all links of an axis carry equal loads.

    Args:
        counts: <int64>[N, N] units that each origin has for each target.
        topology: The network; counts of its dead ranks must be 0.
    """
    table = _checked(counts, topology.num_ranks)
    _check_none(table, sorted(topology.dead), "dead ranks")
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


def around(counts: ArrayLike, order: Sequence[int], *, ring: Order = half_ring) -> Schedule:
    """Returns the all-to-all around one ring of ranks.

    Args:
        counts: <int64>[N, N] units that each origin has for each target; 0 for ranks that are not
            in the ring.
        order: Ranks in the order of the ring.
        ring: Hops around it.
    """
    table = _checked(counts, len(np.asarray(counts)))
    is_distinct = 0 < len(set(order)) == len(order)
    is_known = all(0 <= rank < len(table) for rank in order)
    expected = f"different ranks from 0 to {len(table) - 1}"
    check(is_distinct and is_known, "order of the ring", list(order), expected)

    grid = ring_of(order)
    outside = np.setdiff1d(np.arange(len(table)), grid.names)
    _check_none(table, outside, "ranks outside the ring")
    return _exchange(table, grid, [lanes_of_axis(grid, 0, ring)])


def around_both_ways(counts: ArrayLike, order: Sequence[int]) -> Schedule:
    """Returns the all-to-all around a ring of ranks, half of the payload forwards, half backwards.

    Args:
        counts: See `around`.
        order: Ranks in the order of the ring.
    """
    # Each half is a separate all-to-all.
    table = _checked(counts, len(np.asarray(counts)))
    forwards = around(table // 2, order, ring=one_way_ring)
    backwards = around(table - table // 2, order[::-1], ring=one_way_ring)
    return _assembled([forwards, backwards])


def along_axes(
    counts: ArrayLike,
    topology: Topology,
    *,
    ring: Order = half_ring,
    num_slices: int = 1,
    rotates: bool = True,
    detour: Detour = BALANCED,
) -> Schedule:
    """Returns the all-to-all along one axis of a grid after the other, on slices of the payload.

    A line with one broken link, or without a link between its ends, carries everything over its
    remaining links; one that is broken twice uses the routes of the network.

    Args:
        counts: <int64>[N, N] units that each origin has for each target.
        topology: A grid without dead ranks, or levels of switches.
        ring: Hops around a ring that is whole.
        num_slices: Slices of the payload; more keep the links of all axes busy, and cost latency.
        rotates: Whether each slice begins with the next axis after the previous slice's; otherwise
            all begin with the last axis.
        detour: How a ring with a broken link sends its blocks.

    Raises:
        ConfigError: If ranks are dead, or the network has no axes.
    """
    table = _checked(counts, topology.num_ranks)
    _check_none(table, sorted(topology.dead), "dead ranks")
    reason = unfit_for_axes(topology)
    if reason:
        raise ConfigError(f"{topology.name} has no all-to-all along axes. {reason} Use `direct`.")
    check_integer("num_slices", num_slices, least=1)
    check_integer("detour.sides", detour.sides, least=1, most=2)
    if detour.kept is not None:
        check_number("detour.kept", detour.kept, least=0, most=1)

    # Slice by slice, each with its own order of the axes.
    slices = []
    delay = 0
    num_axes = len(topology.shape)
    for index in range(num_slices):
        grid = grid_of(topology, _axes_of_slice(num_axes, index if rotates else 0))
        stages = [lanes_of_axis(grid, axis, ring, detour) for axis in range(num_axes)]
        end = table * (index + 1) // num_slices
        part = _exchange(end - table * index // num_slices, grid, stages)
        slices.append(part.delayed(delay))

        # Links serve step by step: slices that use an axis in the same stage come one by one.
        longest = max(num_steps(stage) for stage in stages)
        if not rotates:
            delay += longest
        elif (index + 1) % num_axes == 0:
            delay += num_axes * longest
    return _assembled(slices)


def two_level(counts: ArrayLike, topology: Topology) -> Schedule:
    """Returns the all-to-all inside the nodes first, then across them.

    Everything goes to the rank of its own node that has the target's index there, then straight to
    the target's node: fewer and larger messages between nodes than with `direct`.

    Args:
        counts: <int64>[N, N] units that each origin has for each target.
        topology: Two levels of switches, without dead ranks.

    Raises:
        ConfigError: If the network has no two levels of switches, or ranks are dead.
    """
    reason = unfit_for_levels(topology)
    if reason:
        raise ConfigError(f"{topology.name} has no two-level all-to-all. {reason} Use `direct`.")
    return along_axes(counts, topology, rotates=False)


def unfit_for_axes(topology: Topology) -> str:
    """Returns why an all-to-all cannot go along the axes of a network; "" if it can."""
    if not topology.shape:
        return "The network has no axes."
    if topology.dead:
        return f"Ranks {sorted(topology.dead)} are dead, and lines with gaps are not supported."
    return ""


def unfit_for_grid(topology: Topology) -> str:
    """Returns why a network is not a grid without dead ranks; "" if it is."""
    if topology.switched:
        return "The network is not a grid."
    return unfit_for_axes(topology)


def unfit_for_levels(topology: Topology) -> str:
    """Returns why an all-to-all cannot go in two levels on a network; "" if it can."""
    if not topology.switched or len(topology.shape) != 2:
        return "The network has no two levels of switches."
    return unfit_for_axes(topology)


def _axes_of_slice(num_axes: int, index: int) -> tuple[int, ...]:
    """Returns the axes in the order in which a slice takes them: backwards, from another one."""
    first = num_axes - 1 - index % num_axes
    return tuple((first - axis) % num_axes for axis in range(num_axes))


def _exchange(counts: IntArray, grid: Grid, stages: Sequence[Sequence[Lane]]) -> Schedule:
    """Returns the exchange along axis after axis.

    Args:
        counts: <int64>[N, N] units of each pair.
        grid: Ranks at their places.
        stages: Hops along each axis.
    """
    # Pairs in the order of places, so that runs of targets are adjacent.
    table = counts[np.ix_(grid.names, grid.names)]
    starts = _starts(table)
    bounds = np.append(starts.ravel(), table.sum())

    # The steps of an axis begin when the previous axis has finished.
    parts = []
    step = 0
    for axis, lanes in enumerate(stages):
        parts += [_rows(bounds, grid.shape, axis, lane, step) for lane in lanes]
        step += num_steps(lanes)
    columns = zip(*parts, strict=True)
    table_of_rows = transfers(*(np.concatenate(column) for column in columns), adds=False)

    # From places to ranks.
    return _promised(table_of_rows, starts, table).among(grid.names, len(counts))


def _rows(
    bounds: IntArray, shape: tuple[int, ...], axis: int, lane: Lane, first_step: int
) -> tuple[IntArray, ...]:
    """Returns columns of the transfers that a lane makes: step, source, destination, low, high.

    Before an axis starts, a place holds blocks of all origins that differ from it only on earlier axes:
    the blocks whose destination has the place's coordinates on those axes.
    """
    size = shape[axis]
    before = int(np.prod(shape[:axis], dtype=np.int64))
    after = int(np.prod(shape[axis + 1 :], dtype=np.int64))
    num_places = before * size * after
    hops = lane.hops

    # A row for each hop, line, and coordinates of the origin on the axes before.  [H, L, P]
    hop = np.arange(len(hops.step))[:, None, None]
    which = np.arange(len(lane.lines))[None, :, None]
    prefix = np.arange(before)[None, None, :]
    done, rest = np.divmod(lane.lines[which], after)

    # The first block of the origin for this line's ranks, as an index of pairs.
    origin = (prefix * size + hops.origin[hop]) * after + rest
    first_pair = origin * num_places + done * size * after
    low = _unit(bounds, first_pair, hops.low[hop], after, lane.share, is_end=False)
    high = _unit(bounds, first_pair, hops.high[hop], after, lane.share, is_end=True)

    # Ragged counts may leave most rows empty.
    hop, which, prefix = np.nonzero(low < high)
    source = _place(lane.sources[which], hops.source[hop], size, after)
    destination = _place(lane.destinations[which], hops.destination[hop], size, after)
    sent = (hop, which, prefix)
    return first_step + hops.step[hop], source, destination, low[sent], high[sent]


def _unit(
    bounds: IntArray,
    first_pair: IntArray,
    half: IntArray,
    pairs_per_block: int,
    share: tuple[float, float],
    *,
    is_end: bool,
) -> IntArray:
    """Returns the unit at a half block: where a block's share begins, or ends, or its middle."""
    # The block that the half belongs to, or that ends before it.
    is_middle = half % 2 == 1
    block = half // 2 - np.where(is_middle | (not is_end), 0, 1)

    # Its share of the block's units.
    pair = first_pair + block * pairs_per_block
    begin = bounds[pair]
    length = bounds[pair + pairs_per_block] - begin
    low = begin + (length * share[0]).astype(np.int64)
    high = begin + (length * share[1]).astype(np.int64)
    outer = high if is_end else low
    return np.where(is_middle, (low + high) // 2, outer)


def _place(lines: IntArray, position: IntArray, size: int, after: int) -> IntArray:
    """Returns the place of a position on a line."""
    done, rest = np.divmod(lines, after)
    return (done * size + position) * after + rest


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


def _assembled(parts: Sequence[Schedule]) -> Schedule:
    """Returns schedules that run at the same time, on consecutive ranges of units."""
    num_units = sum(part.num_units for part in parts)
    moved = []
    first = 0
    for part in parts:
        moved.append(part.at(first, num_units))
        first += part.num_units
    return beside(moved)


def _checked(counts: ArrayLike, num_ranks: int) -> IntArray:
    """Returns counts as integers; raises unless there is one for each pair of ranks."""
    table = np.asarray(counts)
    check(
        table.shape == (num_ranks, num_ranks),
        "shape of counts",
        table.shape,
        f"({num_ranks}, {num_ranks}): a row for each origin, a column for each target",
    )
    is_whole = np.issubdtype(table.dtype, np.integer)
    check(is_whole, "type of counts", str(table.dtype), "an integer type")
    least = int(table.min(initial=0))
    check(least >= 0, "counts", least, "0 or more units for every pair")
    return table.astype(np.int64)


def _check_none(counts: IntArray, ranks: Sequence[int] | IntArray, whose: str) -> None:
    """Raises if some ranks have something to send or to receive."""
    others = np.setdiff1d(np.arange(len(counts)), ranks)
    num_units = int(counts.sum() - counts[np.ix_(others, others)].sum())
    check(num_units == 0, f"units from or for {whose}", num_units, "0")
