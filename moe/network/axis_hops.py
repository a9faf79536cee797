"""Hops of an all-to-all along the lines of an axis: sources, destinations, blocks and steps.

On a line of n positions every position has a block for every other one. A block for position j
travels with the blocks for the positions after it, so that a hop carries a run of blocks. A run is
counted in half blocks: block j is the halves 2 j and 2 j + 1. On a ring of an even number of
positions the opposite position is equally far both ways, and half of its block goes each way.

A line with one broken link, or without a link between its ends, carries everything over its
remaining links. A broken ring has help: a part of every block crosses to the neighbouring rings of
the other axes, goes around there, and comes back. A line that is broken twice leaves each block to
the routes of the network, and so do levels of switches, which have no neighbours.

Next: `all_to_all` makes schedules of these hops.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe.network.schedule import IntArray, expand_runs
from moe.network.topology import Topology


class Hops(NamedTuple):
    """Hops along a line of n positions, a row each.

    Attributes:
        step: <int64>[H] from 0.
        source: <int64>[H] position that sends.
        destination: <int64>[H] position that receives.
        origin: <int64>[H] position at which the blocks began.
        low: <int64>[H] first half block, of 2 n.
        high: <int64>[H] half block after the last.
    """

    step: IntArray
    source: IntArray
    destination: IntArray
    origin: IntArray
    low: IntArray
    high: IntArray

    @property
    def num_steps(self) -> int:
        """Steps of the longest way."""
        return int(self.step.max(initial=-1)) + 1


def half_ring(size: int) -> Hops:
    """Returns the hops of a ring on which every block goes the shorter way around."""
    return _runs(np.full(size, size - 1))


def line(size: int, first: int = 0) -> Hops:
    """Returns the hops of a line, or of a ring with a broken link, on which every block has one way.

    Args:
        size: Positions.
        first: Position at which the line begins; the one before it is its end.
    """
    place = (np.arange(size) - first) % size
    return _runs(2 * (size - 1 - place))


def one_way_ring(size: int) -> Hops:
    """Returns the hops of a ring on which every block goes forwards."""
    return _runs(np.full(size, 2 * (size - 1)))


def straight(size: int) -> Hops:
    """Returns one hop for every block: in each step the position so much further on is served."""
    origin = np.arange(size)[:, None]
    distance = np.arange(1, size)[None, :]
    target = origin + distance
    return _wrapped(_filled(distance - 1, origin, target, origin, 2 * target, 2 * target + 2), size)


def by_block(hops: Hops) -> Hops:
    """Returns the same hops with a row for every block, or half a block, of a run."""
    first = hops.low // 2
    row, block = expand_runs(first, (hops.high + 1) // 2 - first)

    # A run may begin or end in the middle of a block.
    each = _select(hops, row)
    low = np.maximum(each.low, 2 * block)
    high = np.minimum(each.high, 2 * block + 2)
    return each._replace(low=low, high=high)


def farthest_first(hops: Hops, size: int) -> Hops:
    """Returns single blocks, those with the longest way first.

    A block that has to cross the busiest link does not wait for one with a short way.
    """
    block = hops.low // 2
    goes_forwards = (hops.destination - hops.source) % size == 1
    distance = np.where(goes_forwards, block - hops.source, hops.source - block) % size
    return _select(hops, np.argsort(-distance, kind="stable"))


def _runs(forward: IntArray) -> Hops:
    """Returns the hops if each origin sends so many half blocks forwards, and the rest backwards.

    Args:
        forward: <int64>[n] half blocks of each origin that go forwards.
    """
    size = len(forward)
    hop = np.arange(1, max(size, 2))[None, :]

    def run(origin: IntArray, num_halves: IntArray) -> Hops:
        # At hop h the run has lost the h - 1 blocks that have arrived.
        here = origin + hop
        return _filled(hop - 1, here - 1, here, origin, 2 * here, 2 * (origin + 1) + num_halves)

    origin = np.arange(size)[:, None]
    backward = 2 * (size - 1) - forward
    forwards = run(origin, forward[:, None])
    backwards = _mirrored(run(-origin, backward[:, None]))
    return _wrapped(_joined([forwards, backwards]), size)


def _mirrored(hops: Hops) -> Hops:
    """Returns hops the other way around: position p becomes -p, and the halves of a block swap."""
    source, destination, origin = (-hops.source, -hops.destination, -hops.origin)
    return Hops(hops.step, source, destination, origin, low=2 - hops.high, high=2 - hops.low)


def _filled(*columns: ArrayLike) -> Hops:
    """Returns the rows of broadcast columns, those of `Hops` in order, that carry something."""
    broadcast = np.broadcast_arrays(*columns)
    hops = Hops(*(np.asarray(column, np.int64).ravel() for column in broadcast))
    return _select(hops, hops.low < hops.high)


def _wrapped(hops: Hops, size: int) -> Hops:
    """Returns rows with positions modulo `size`; a run over the end becomes two."""
    low = hops.low % (2 * size)
    high = low + hops.high - hops.low
    around = hops._replace(
        source=hops.source % size,
        destination=hops.destination % size,
        low=low,
        high=np.minimum(high, 2 * size),
    )

    # The rest of the run begins at block 0.
    is_over = high > 2 * size
    rest = around._replace(low=np.zeros_like(low), high=high - 2 * size)
    return _joined([around, _select(rest, is_over)])


def _select(hops: Hops, rows: NDArray[Any]) -> Hops:
    return Hops(*(column[rows] for column in hops))


def _joined(parts: list[Hops]) -> Hops:
    columns = zip(*parts, strict=True)
    return Hops(*(np.concatenate(column) for column in columns))


# ---------------------------------------------------------------------------
# Lines of a grid

Order = Callable[[int], Hops]
"""Makes the hops around a whole ring of so many ranks."""


class Lane(NamedTuple):
    """Hops for the blocks of some lines of an axis.

    Attributes:
        lines: <int64>[L] lines that own the blocks, numbered by their other coordinates.
        sources: <int64>[L] lines of the ranks that send.
        destinations: <int64>[L] lines of the ranks that receive.
        hops: Hops along each line.
        share: Part of every block that is sent, as two fractions of the block.
    """

    lines: IntArray
    sources: IntArray
    destinations: IntArray
    hops: Hops
    share: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True, eq=False)
class Grid:
    """Ranks at their places, with the axes in the order in which they are taken.

    Attributes:
        ranks: <int64>[shape] rank at each place.
        joined: For each axis <bool>[shape]: whether the links with the next rank work both ways.
        wraps: For each axis: whether its ends are meant to be joined.
    """

    ranks: IntArray
    joined: tuple[NDArray[np.bool_], ...]
    wraps: tuple[bool, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return self.ranks.shape

    @property
    def names(self) -> IntArray:
        """<int64>[N] rank at each place, the last axis varying fastest."""
        return self.ranks.ravel()


def ring_of(ranks: IntArray) -> Grid:
    """Returns a grid of one axis: ranks around a ring, regardless of the links."""
    return Grid(ranks, (np.ones(len(ranks), np.bool_),), (True,))


def grid_of(topology: Topology, axes: Sequence[int]) -> Grid:
    """Returns the grid of a network, its axes in some order."""
    shape = tuple(topology.shape[axis] for axis in axes)
    ranks = np.arange(topology.num_ranks).reshape(topology.shape).transpose(axes)
    if topology.switched:
        joined = [np.zeros(shape, np.bool_) for _ in axes]
    else:
        joined = [_linked(ranks, axis, topology) for axis in range(len(axes))]
    return Grid(ranks, tuple(joined), tuple(topology.wraps[axis] for axis in axes))


def _linked(ranks: IntArray, axis: int, topology: Topology) -> NDArray[np.bool_]:
    """Returns <bool>[shape] whether each rank has links with the next one on an axis, both ways."""
    following = np.roll(ranks, -1, axis)
    forwards = topology.find_links(ranks, following)
    backwards = topology.find_links(following, ranks)
    joined = (forwards >= 0) & (backwards >= 0)

    # Two ranks have one link, which must not also count as the link around the end.
    if ranks.shape[axis] <= 2:
        np.moveaxis(joined, axis, 0)[-1] = False
    return joined


def num_steps(lanes: Sequence[Lane]) -> int:
    """Returns the steps of the longest of some lanes."""
    return max(lane.hops.num_steps for lane in lanes)


def lanes_of_axis(grid: Grid, axis: int, ring: Order) -> list[Lane]:
    """Returns the hops of all lines of an axis.

    Args:
        grid: The ranks.
        axis: An axis of the grid.
        ring: Hops around a ring that is whole.
    """
    size = grid.shape[axis]
    # Breaks of each line.  [lines, size]
    joined = np.moveaxis(grid.joined[axis], axis, -1).reshape(-1, size)
    num_breaks = np.sum(~joined, axis=1)

    # Whole rings, and lines in several pieces.
    whole = np.flatnonzero(num_breaks == 0)
    apart = np.flatnonzero(num_breaks > 1)
    lanes = [
        Lane(whole, whole, whole, ring(size if len(whole) else 1)),
        Lane(apart, apart, apart, straight(size if len(apart) else 1)),
    ]

    # Lines that are broken in the same place.
    broken = np.flatnonzero(num_breaks == 1)
    place = np.argmin(joined[broken], axis=1)
    for end in np.unique(place):
        lines = broken[place == end]
        hops = line(size, (int(end) + 1) % size)
        if not grid.wraps[axis] or size < 3:
            lanes.append(Lane(lines, lines, lines, hops))
            continue

        # Distant ranks keep the middle of a broken ring busy from the start.
        hops = farthest_first(by_block(hops), size)
        for number in lines.tolist():
            helpers = np.intersect1d(_neighbours(grid, axis, number), whole)
            kept = _part_kept(grid, axis, len(helpers))
            lanes += _shared_lanes(size, number, hops, helpers, kept)
    return lanes


def _neighbours(grid: Grid, axis: int, number: int) -> IntArray:
    """Returns the lines next to one, on the other axes, that all of its ranks have links with."""
    # Lines are numbered by their coordinates on the other axes.
    others = [other for other in range(len(grid.shape)) if other != axis]
    shape = tuple(grid.shape[other] for other in others)
    here = np.array(np.unravel_index(number, shape), np.int64)

    neighbours = []
    for index, other in enumerate(others):
        joined = np.moveaxis(grid.joined[other], axis, -1)
        for distance in (1, -1):
            there = here.copy()
            there[index] = (here[index] + distance) % shape[index]
            nearer_to_start = here if distance > 0 else there
            if joined[tuple(nearer_to_start)].all():
                neighbours.append(int(np.ravel_multi_index(tuple(there), shape)))
    return np.array(neighbours, np.int64)


def _shared_lanes(size: int, number: int, hops: Hops, helpers: IntArray, kept: float) -> list[Lane]:
    """Returns the hops of a broken ring and of the neighbours that help it.

    Args:
        size: Ranks of the ring.
        number: Number of the line on its axis.
        hops: Hops of its blocks along its other links.
        helpers: <int64>[K] neighbouring rings.
        kept: Part of every block that it keeps.
    """
    broken = np.array([number], np.int64)
    lanes = [Lane(broken, broken, broken, hops, (0.0, kept))]

    # Across, around, and back: a block arrives after as many steps as it is far.
    origin, target = np.nonzero(~np.eye(size, dtype=np.bool_))
    distance = np.minimum((target - origin) % size, (origin - target) % size)
    across = Hops(np.zeros_like(origin), origin, origin, origin, 2 * target, 2 * target + 2)
    ring = by_block(half_ring(size))
    around = ring._replace(step=ring.step + 1)
    back = across._replace(step=distance + 1, source=target, destination=target)

    # Each neighbour takes as much.
    bounds = np.linspace(kept, 1.0, len(helpers) + 1).tolist()
    for index in range(len(helpers)):
        helper = helpers[index : index + 1]
        share = (bounds[index], bounds[index + 1])
        lanes.append(Lane(broken, broken, helper, across, share))
        lanes.append(Lane(broken, helper, helper, around, share))
        lanes.append(Lane(broken, helper, broken, back, share))
    return lanes


def _part_kept(grid: Grid, axis: int, num_helpers: int) -> float:
    """Returns the part of its blocks that a broken ring keeps, so that all links are equally loaded.

    Loads are those of the busiest link of a line, divided by the total that each of its ranks
    sends.
    """
    if num_helpers == 0:
        return 1.0

    size = grid.shape[axis]
    on_line = _load(size, is_ring=False)
    on_ring = _load(size, is_ring=True)
    between = 0.0
    for other, other_size in enumerate(grid.shape):
        if other != axis:
            between = max(between, _load(other_size, is_ring=grid.wraps[other]))

    # The load of a neighbouring ring, and of the links to it, for each part that it takes.
    by_ring = on_ring / num_helpers
    by_link = (size - 1) / size / num_helpers
    shares = ((on_ring + by_ring) / (on_line + by_ring), (between + by_link) / (on_line + by_link))
    return min(max(shares), 1.0)


def _load(size: int, *, is_ring: bool) -> float:
    on_line = size**2 // 4 / size
    return on_line / 2 if is_ring and size > 2 else on_line
