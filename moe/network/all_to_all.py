"""All-to-alls: every rank has something else for every other one.

Straight, each over its own route, or along one axis of the network after the other: a rank first
hands over, along its line, all that is bound for other coordinates on that axis, whatever their
other coordinates are. Slices of the payload may begin with different axes (dimension rotation),
which keeps the links of all axes busy at once.

The units of an all-to-all are those of all pairs of ranks, one after the other. In each slice they
are ordered by origin and then by target, coordinates in the order in which the slice takes the
axes: so what travels together lies together, and a hop is few transfers.

Source: HalfRing, DimRotation: Optimizing All-to-All Collective Communication with Fault Tolerance
    on Torus Networks (MICRO 2025, doi:10.1145/3725843.3756057). Differs: what goes the long way
    around a broken link, and what its neighbours take over, is our own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe.checks import check, check_integer, check_number
from moe.errors import ConfigError
from moe.network.algorithms import ALL_TO_ALL, Algorithm
from moe.network.line_hops import (
    Hops,
    by_block,
    half_ring,
    line,
    straight,
    two_way_ring,
)
from moe.network.schedule import (
    IntArray,
    Intervals,
    Schedule,
    Transfers,
    beside,
    intervals,
    split_evenly,
    transfers,
)
from moe.network.topology import Topology


@dataclass(frozen=True, eq=False)
class AllToAll:
    """A schedule, and where the units of every pair of ranks lie.

    Attributes:
        schedule: What is sent. Reversed it brings everything back (combine).
        starts: <int64>[C, N, N] first unit of each slice of what each origin has for each target.
        counts: <int64>[C, N, N] units of that.
    """

    schedule: Schedule
    starts: IntArray
    counts: IntArray

    def sent(self, rank: int) -> Intervals:
        """Returns the units that a rank sends, those for rank 0 first."""
        return self._in_order(rank, self.starts[:, rank], self.counts[:, rank])

    def received(self, rank: int) -> Intervals:
        """Returns the units that a rank receives, those from rank 0 first."""
        return self._in_order(rank, self.starts[:, :, rank], self.counts[:, :, rank])

    def _in_order(self, rank: int, starts: IntArray, counts: IntArray) -> Intervals:
        low = starts.T
        return intervals(rank, low, low + counts.T)


def even_counts(topology: Topology, num_units: int) -> IntArray:
    """Returns <int64>[N, N]: units split evenly among all pairs of live ranks, a rank and itself too."""
    live = topology.live_ranks
    counts = np.zeros((topology.num_ranks, topology.num_ranks), np.int64)
    each = np.diff(split_evenly(num_units, len(live) ** 2))
    counts[np.ix_(live, live)] = each.reshape(len(live), len(live))
    return counts


def direct(counts: ArrayLike, topology: Topology) -> AllToAll:
    """Returns the all-to-all in which every rank sends straight to every other one.

    In each step all ranks send equally far: to the same offset on every axis of a grid, so that on
    a torus all links of an axis carry as much.

    Args:
        counts: <int64>[N, N] units that each origin has for each target.
        topology: Its routes lead around what is dead; counts of dead ranks must be 0.
    """
    table = _checked(counts, topology)
    num_ranks = topology.num_ranks
    shape = topology.shape or (num_ranks,)
    starts = _starts(table)

    # Each origin's target in each step, by the coordinates of both.
    rank = np.arange(num_ranks)
    offsets = np.array(np.unravel_index(rank, shape))  # [axes, steps]
    sums = offsets[:, None, :] + offsets[:, :, None]  # [axes, steps, N]
    target = np.ravel_multi_index(tuple(sums), shape, mode="wrap")
    origin = np.broadcast_to(rank, target.shape)

    low = starts[origin, target]
    high = low + table[origin, target]
    high[0] = low[0]
    rows = transfers(rank[:, None] - 1, origin, target, low, high, adds=False)
    schedule = _promised(rows, starts, table)
    return AllToAll(schedule, starts[None], table[None])


def around(
    counts: ArrayLike,
    order: Sequence[int],
    *,
    hops: Callable[[int], Hops] = half_ring,
) -> AllToAll:
    """Returns the all-to-all around one ring of ranks.

    Args:
        counts: <int64>[N, N] units that each origin has for each target; 0 for ranks that are not
            in the ring.
        order: Ranks in the order of the ring.
        hops: What is handed on around a ring of so many ranks.
    """
    table = np.asarray(counts, np.int64)
    names = np.asarray(order, np.int64)
    whole = np.zeros(1, np.int64)
    lane = Lane(whole, whole, whole, hops(len(names)))
    part = _exchange(table, names, (len(names),), [[lane]])
    return _assembled([part], [table], [0])


def along_axes(
    counts: ArrayLike,
    topology: Topology,
    *,
    hops: Callable[[int], Hops] = half_ring,
    num_slices: int = 1,
    rotates: bool = True,
    line_share: float | None = None,
) -> AllToAll:
    """Returns the all-to-all along one axis of a grid after the other, on slices of the payload.

    A line with one broken link, or without a link between its ends, carries everything over what
    is left of it; one that is broken twice is left to the routes of the network.

    Args:
        counts: <int64>[N, N] units that each origin has for each target.
        topology: A grid without dead ranks, or levels of switches.
        hops: Along a ring that is whole.
        num_slices: Slices of the payload; more keep the links of all axes busy, and cost latency.
        rotates: Whether each slice begins with the axis after that of the slice before it; else
            all begin with the last axis, one after the other.
        line_share: How much of what a broken ring has to carry stays on it; the rest crosses to
            the neighbouring rings of the other axes, and back. What loads all links equally,
            unless given; 1 asks no neighbour.

    Raises:
        ConfigError: When ranks are dead, or the network has no axes.
    """
    table = _checked(counts, topology)
    reason = _unfit_for_axes(topology)
    if reason:
        raise ConfigError(f"{topology.name} has no all-to-all along axes. {reason} Use `direct`.")
    check_integer("num_slices", num_slices, least=1)
    if line_share is not None:
        check_number("line_share", line_share, least=0, most=1)

    num_axes = len(topology.shape)
    parts = []
    slices = []
    delays = []
    delay = 0
    for index in range(num_slices):
        # The last axis first; its links are the shortest where axes are levels.
        first = num_axes - 1 - (index % num_axes if rotates else 0)
        order = tuple((first - axis) % num_axes for axis in range(num_axes))
        grid = _Grid(topology, order, hops, line_share)
        lanes = [grid.lanes(axis) for axis in range(num_axes)]
        shape = tuple(topology.shape[axis] for axis in order)

        part_of_pair = table * (index + 1) // num_slices - table * index // num_slices
        parts.append(_exchange(part_of_pair, grid.names, shape, lanes))
        slices.append(part_of_pair)

        # Slices that use the same axis at the same time would wait for each other in each step.
        delays.append(delay)
        num_steps = [_num_steps(stage) for stage in lanes]
        if not rotates:
            delay += max(num_steps)
        elif (index + 1) % num_axes == 0:
            delay += num_axes * max(num_steps)
    return _assembled(parts, slices, delays)


class Lane(NamedTuple):
    """Hops that some lines of an axis make.

    Attributes:
        lines: <int64>[L] lines whose blocks these are, numbered by their other coordinates.
        sources: <int64>[L] lines of the ranks that hand on.
        destinations: <int64>[L] lines of the ranks that take.
        hops: Along each line.
        share: Which part of every block, as two fractions of it.
    """

    lines: IntArray
    sources: IntArray
    destinations: IntArray
    hops: Hops
    share: tuple[float, float] = (0.0, 1.0)


class _Grid:
    """What each line of a grid does, with the axes in the order in which a slice takes them.

    Args:
        topology: The grid.
        order: Its axes.
        hops: Along a ring that is whole.
        line_share: See `along_axes`.
    """

    def __init__(
        self,
        topology: Topology,
        order: Sequence[int],
        hops: Callable[[int], Hops],
        line_share: float | None,
    ) -> None:
        ranks = np.arange(topology.num_ranks).reshape(topology.shape)
        self.names = ranks.transpose(order).ravel()
        self._shape = tuple(topology.shape[axis] for axis in order)
        self._wraps = tuple(topology.wraps[axis] for axis in order)
        self._hops = hops
        self._line_share = line_share
        self._switched = topology.switched
        pairs = topology.links.source * topology.num_nodes + topology.links.destination
        grid = self.names.reshape(self._shape)
        self._joined = [
            _joined(grid, axis, pairs, topology.num_nodes) for axis in range(len(order))
        ]

    def lanes(self, axis: int) -> list[Lane]:
        """Returns the hops of all lines of an axis."""
        size = self._shape[axis]
        joined = np.moveaxis(self._joined[axis], axis, -1).reshape(-1, size)
        num_breaks = np.sum(~joined, axis=1)
        if self._switched:
            num_breaks[:] = size

        lanes = []
        whole = np.flatnonzero(num_breaks == 0)
        lanes.append(Lane(whole, whole, whole, self._hops(size)))
        apart = np.flatnonzero(num_breaks > 1)
        lanes.append(Lane(apart, apart, apart, straight(size)))

        # Lines that are broken in the same place.
        broken = np.flatnonzero(num_breaks == 1)
        place = np.argmin(joined[broken], axis=1)
        for end in np.unique(place):
            lines = broken[place == end]
            lanes += self._detours(axis, lines, line(size, (int(end) + 1) % size), whole)
        return [lane for lane in lanes if len(lane.lines) and len(lane.hops.step)]

    def _detours(self, axis: int, lines: IntArray, hops: Hops, whole: IntArray) -> list[Lane]:
        """Returns what lines that are broken in one place do themselves, and by their neighbours.

        Args:
            axis: Axis of the lines.
            lines: <int64>[L] those that are broken.
            hops: Along what is left of them.
            whole: <int64>[W] lines that are not broken.
        """
        alone = Lane(lines, lines, lines, hops)
        if not self._wraps[axis] or self._shape[axis] < 3 or self._line_share == 1:
            return [alone]

        lanes = []
        for broken in lines:
            neighbours = np.intersect1d(self._neighbours(axis, int(broken)), whole)
            share = self._share_of_line(axis, len(neighbours))
            here = broken[None]
            lanes.append(Lane(here, here, here, by_block(hops), (0.0, share)))
            bounds = np.linspace(share, 1.0, len(neighbours) + 1)
            for index, neighbour in enumerate(neighbours):
                part = (float(bounds[index]), float(bounds[index + 1]))
                lanes += _by_neighbour(here, neighbour[None], self._shape[axis], part)
        return lanes

    def _neighbours(self, axis: int, broken: int) -> list[int]:
        """Returns the lines next to one, on the other axes, that all of its ranks have links to."""
        others = [other for other in range(len(self._shape)) if other != axis]
        shape = tuple(self._shape[other] for other in others)
        here = np.array(np.unravel_index(broken, shape), np.int64)

        neighbours = []
        for index, other in enumerate(others):
            joined = np.moveaxis(self._joined[other], axis, -1)
            for distance in (1, -1):
                there = here.copy()
                there[index] = (here[index] + distance) % shape[index]
                near = there if distance < 0 else here
                if joined[tuple(near)].all():
                    neighbours.append(int(np.ravel_multi_index(tuple(there), shape)))
        return neighbours

    def _share_of_line(self, axis: int, num_neighbours: int) -> float:
        """Returns which part of its blocks a broken ring keeps, beside so many neighbours."""
        if num_neighbours == 0:
            return 1.0
        if self._line_share is not None:
            return self._line_share

        # Loads of the busiest links by what each rank sends: of what is left of the ring, of a
        # neighbouring ring, and of the links between the two.
        size = self._shape[axis]
        on_line = _load(size, is_ring=False)
        on_ring = _load(size, is_ring=True)
        between = max(
            _load(self._shape[other], is_ring=self._wraps[other])
            for other in range(len(self._shape))
            if other != axis
        )
        by_ring = on_ring / num_neighbours
        by_link = (size - 1) / size / num_neighbours
        shares = [
            (on_ring + by_ring) / (on_line + by_ring),
            (between + by_link) / (on_line + by_link),
        ]
        return min(max(shares), 1.0)


def _load(size: int, *, is_ring: bool) -> float:
    """Returns how often the busiest link of a line carries what one of its ranks sends in all."""
    on_line = size**2 // 4 / size
    return on_line / 2 if is_ring and size > 2 else on_line


def _by_neighbour(
    broken: IntArray,
    neighbour: IntArray,
    size: int,
    share: tuple[float, float],
) -> list[Lane]:
    """Returns how a part of a broken ring's blocks goes over a neighbouring ring, and back."""
    origin, target = np.nonzero(~np.eye(size, dtype=np.bool_))
    distance = np.minimum((target - origin) % size, (origin - target) % size)
    there = Hops(
        step=np.zeros_like(origin),
        source=origin,
        destination=origin,
        origin=origin,
        low=2 * target,
        high=2 * target + 2,
    )
    around_it = by_block(half_ring(size))
    around_it = around_it._replace(step=around_it.step + 1)
    back = there._replace(step=distance + 1, source=target, destination=target)
    return [
        Lane(broken, broken, neighbour, there, share),
        Lane(broken, neighbour, neighbour, around_it, share),
        Lane(broken, neighbour, broken, back, share),
    ]


def _joined(grid: IntArray, axis: int, pairs: IntArray, num_nodes: int) -> NDArray[np.bool_]:
    """Returns <bool>[shape] whether each rank has links with the next one on an axis, both ways."""
    following = np.roll(grid, -1, axis)
    forwards = np.isin(grid * num_nodes + following, pairs)
    backwards = np.isin(following * num_nodes + grid, pairs)
    joined = forwards & backwards

    # Two ranks have one link, which is not also that around the end.
    if grid.shape[axis] <= 2:
        end = [slice(None)] * grid.ndim
        end[axis] = slice(-1, None)
        joined[tuple(end)] = False
    return joined


def _exchange(
    counts: IntArray,
    names: IntArray,
    shape: tuple[int, ...],
    lanes_of_axis: Sequence[Sequence[Lane]],
) -> tuple[Schedule, IntArray]:
    """Returns the exchange along axis after axis, and the <int64>[N, N] starts of its pairs.

    Args:
        counts: <int64>[N, N] units of each pair.
        names: <int64>[M] rank at each place of the grid.
        shape: Sizes of the axes, in the order in which they are taken.
        lanes_of_axis: Hops along each axis.
    """
    num_places = len(names)
    table = counts[np.ix_(names, names)]
    starts = _starts(table)
    bounds = np.append(starts.ravel(), table.sum())

    # Axis after axis; the steps of one begin when those of the one before it end.
    columns: list[tuple[IntArray, ...]] = []
    step = 0
    for axis, lanes in enumerate(lanes_of_axis):
        for lane in lanes:
            columns.append(_rows(bounds, shape, axis, lane, step))
        step += _num_steps(lanes)
    flat = [np.concatenate(column) for column in zip(*columns, strict=True)]
    if not columns:
        flat = [np.zeros(0, np.int64)] * 5

    rows = transfers(*flat, adds=False)
    places = _promised(rows, starts, table)
    starts_by_rank = np.zeros_like(counts)
    starts_by_rank[np.ix_(names, names)] = starts
    assert places.num_ranks == num_places, "every place of the grid has a rank"
    return places.among(names.tolist(), len(counts)), starts_by_rank


def _num_steps(lanes: Sequence[Lane]) -> int:
    return max((lane.hops.num_steps for lane in lanes), default=0)


def _rows(
    bounds: IntArray,
    shape: tuple[int, ...],
    axis: int,
    lane: Lane,
    first_step: int,
) -> tuple[IntArray, ...]:
    """Returns columns of the transfers that a lane makes: step, source, destination, low, high.

    What lies at a place when an axis is begun is, of every origin that differs from it on axes
    before only, all that is bound for its own coordinates on those.
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

    # Only what is sent is spelled out: ragged counts may leave most of it empty.
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
    is_middle = half % 2 == 1
    block = half // 2 - np.where(is_middle | (not is_end), 0, 1)
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


def _assembled(
    parts: Sequence[tuple[Schedule, IntArray]],
    counts: Sequence[IntArray],
    delays: Sequence[int],
) -> AllToAll:
    """Returns slices, one after the other in the units, as one all-to-all."""
    num_units = sum(schedule.num_units for schedule, _ in parts)
    schedules = []
    starts = []
    first = 0
    for (schedule, start), delay in zip(parts, delays, strict=True):
        schedules.append(schedule.delayed(delay).at(first, num_units))
        starts.append(start + first)
        first += schedule.num_units
    return AllToAll(beside(schedules), np.stack(starts), np.stack(counts))


def _checked(counts: ArrayLike, topology: Topology) -> IntArray:
    """Returns counts as integers, when they are those of the network's live ranks."""
    table = np.asarray(counts)
    num_ranks = topology.num_ranks
    check(
        table.shape == (num_ranks, num_ranks),
        "shape of counts",
        table.shape,
        f"({num_ranks}, {num_ranks}): a row for each origin, a column for each target",
    )
    is_whole = np.issubdtype(table.dtype, np.integer)
    check(is_whole, "type of counts", str(table.dtype), "an integer type")
    least = int(table.min())
    check(least >= 0, "counts", least, "0 or more units for every pair")

    dead = sorted(topology.dead)
    num_lost = int(table[dead].sum() + table[:, dead].sum())
    check(num_lost == 0, "units from or for dead ranks", num_lost, "0")
    return table.astype(np.int64)


def _unfit_for_axes(topology: Topology) -> str:
    """Returns why an all-to-all along axes cannot be built on a network; "" where it can."""
    if not topology.shape:
        return "The network has no axes."
    if topology.dead:
        return f"Ranks {sorted(topology.dead)} are dead, and lines with holes are not supported."
    return ""


def _even(build: Callable[[IntArray, Topology], AllToAll]) -> Callable[[Topology, int], Schedule]:
    """Returns a builder for units that are split evenly among all pairs of live ranks."""

    def build_even(topology: Topology, num_units: int) -> Schedule:
        return build(even_counts(topology, num_units), topology).schedule

    return build_even


def two_level(counts: ArrayLike, topology: Topology) -> AllToAll:
    """Returns the all-to-all inside the nodes first, then across them.

    Everything goes to the rank of its own node that has the target's index there, then straight to
    the target's node: fewer and larger messages between nodes than `direct`.

    Args:
        counts: <int64>[N, N] units that each origin has for each target.
        topology: Two levels of switches, without dead ranks.
    """
    return along_axes(counts, topology, rotates=False)


def _unfit_for_levels(topology: Topology) -> str:
    if not topology.switched or len(topology.shape) != 2:
        return "The network has no two levels of switches."
    return _unfit_for_axes(topology)


def _unfit_for_grid(topology: Topology) -> str:
    if topology.switched:
        return "The network is no grid."
    return _unfit_for_axes(topology)


def _around_live_ranks(counts: IntArray, topology: Topology) -> AllToAll:
    return around(counts, topology.live_ranks.tolist())


def _around_two_ways(counts: IntArray, topology: Topology) -> AllToAll:
    return around(counts, topology.live_ranks.tolist(), hops=two_way_ring)


def _along_axes_in_turn(counts: IntArray, topology: Topology) -> AllToAll:
    return along_axes(counts, topology, num_slices=6, rotates=False)


def _along_rotated_axes(counts: IntArray, topology: Topology) -> AllToAll:
    # The first multiple of the axes from six on: each axis is begun with equally often.
    num_axes = len(topology.shape)
    num_slices = -(-6 // num_axes) * num_axes
    return along_axes(counts, topology, num_slices=num_slices)


ALL_TO_ALL.add("direct", Algorithm("every pair straight, over its own route", _even(direct)))
ALL_TO_ALL.add("ring", Algorithm("one ring, half of the payload each way", _even(_around_two_ways)))
ALL_TO_ALL.add(
    "half_ring",
    Algorithm("one ring, everything the shorter way around", _even(_around_live_ranks)),
)
ALL_TO_ALL.add(
    "axes",
    Algorithm(
        "half rings along one axis after the other, six slices",
        _even(_along_axes_in_turn),
        _unfit_for_grid,
    ),
)
ALL_TO_ALL.add(
    "rotated_axes",
    Algorithm(
        "half rings along the axes, each slice begins with another axis",
        _even(_along_rotated_axes),
        _unfit_for_grid,
    ),
)
ALL_TO_ALL.add(
    "two_level",
    Algorithm("inside the nodes, then across them", _even(two_level), _unfit_for_levels),
)
