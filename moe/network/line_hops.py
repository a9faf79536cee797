"""Hops of an all-to-all along one line of ranks: who hands what to whom, and when.

On a line of n positions every position has a block for every other one. A block that is bound for
position j moves on with those bound for the positions behind it, so that a hop carries a run of
blocks. A run is counted in half blocks: block j is the halves 2 j and 2 j + 1. On a ring of an even
number of positions the opposite one is equally far both ways, and each way takes half its block.

Next: `all_to_all` makes schedules of these hops.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe.network.schedule import IntArray


class Hops(NamedTuple):
    """Hops along a line of n positions, a row each.

    Attributes:
        step: <int64>[H] from 0.
        source: <int64>[H] position that hands on.
        destination: <int64>[H] position that takes.
        origin: <int64>[H] position whose blocks these are.
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
    """Returns the hops of a line, or of a ring with a broken link, on which no block has a choice.

    Args:
        size: Positions.
        first: Position at which the line begins; the one before it is its end.
    """
    place = (np.arange(size) - first) % size
    return _runs(2 * (size - 1 - place))


def one_way_ring(size: int) -> Hops:
    """Returns the hops of a ring on which every block goes forwards."""
    return _runs(np.full(size, 2 * (size - 1)))


def two_way_ring(size: int) -> Hops:
    """Returns the hops of a ring around which half of every block goes each way."""
    origin = np.arange(size)[:, None, None]
    hop = np.arange(1, size)[None, :, None]
    distance = np.arange(1, size)[None, None, :]

    # A block is handed on as often as its target is far.
    is_bound_further = hop <= distance
    target = origin + distance
    forwards = _filled(
        step=hop - 1,
        source=origin + hop - 1,
        destination=origin + hop,
        origin=origin,
        low=2 * target,
        high=2 * target + is_bound_further,
    )

    # The second half of the block, likewise.
    target = origin - distance
    backwards = _filled(
        step=hop - 1,
        source=origin - hop + 1,
        destination=origin - hop,
        origin=origin,
        low=2 * target + 1,
        high=2 * target + 1 + is_bound_further,
    )
    return _wrapped(_joined([forwards, backwards]), size)


def straight(size: int) -> Hops:
    """Returns one hop for every block: in each step the position so much further on is served."""
    origin = np.arange(size)[:, None]
    distance = np.arange(1, size)[None, :]
    target = origin + distance
    hops = _filled(
        step=distance - 1,
        source=origin,
        destination=target,
        origin=origin,
        low=2 * target,
        high=2 * target + 2,
    )
    return _wrapped(hops, size)


def by_block(hops: Hops) -> Hops:
    """Returns the same hops with a row for every block, or half of one, that a run has."""
    # Runs one after the other, and the blocks of each.
    first = hops.low // 2
    num_blocks = (hops.high + 1) // 2 - first
    row = np.repeat(np.arange(len(first)), num_blocks)
    starts = np.cumsum(num_blocks) - num_blocks
    block = first[row] + np.arange(len(row)) - starts[row]

    # A run may begin or end in the middle of a block.
    each = _select(hops, row)
    low = np.maximum(each.low, 2 * block)
    high = np.minimum(each.high, 2 * block + 2)
    return each._replace(low=low, high=high)


def farthest_first(hops: Hops, size: int) -> Hops:
    """Returns single blocks in an order in which those that have the farthest to go come first.

    A block that has to cross the busiest link does not wait for one that stays near.
    """
    block = hops.low // 2
    goes_forwards = (hops.destination - hops.source) % size == 1
    distance = np.where(goes_forwards, block - hops.source, hops.source - block) % size
    return _select(hops, np.argsort(-distance, kind="stable"))


def _runs(forward: IntArray) -> Hops:
    """Returns the hops when each origin sends so many half blocks forwards, and the rest back."""
    size = len(forward)
    backward = 2 * (size - 1) - forward
    origin = np.arange(size)[:, None]
    hop = np.arange(1, max(size, 2))[None, :]

    # At hop h the run has lost the h - 1 blocks that have arrived.
    forwards = _filled(
        step=hop - 1,
        source=origin + hop - 1,
        destination=origin + hop,
        origin=origin,
        low=2 * (origin + hop),
        high=2 * (origin + 1) + forward[:, None],
    )

    # Backwards its far end is the low one.
    backwards = _filled(
        step=hop - 1,
        source=origin - hop + 1,
        destination=origin - hop,
        origin=origin,
        low=2 * origin - backward[:, None],
        high=2 * (origin - hop + 1),
    )
    return _wrapped(_joined([forwards, backwards]), size)


def _filled(
    *,
    step: ArrayLike,
    source: ArrayLike,
    destination: ArrayLike,
    origin: ArrayLike,
    low: ArrayLike,
    high: ArrayLike,
) -> Hops:
    """Returns the rows of broadcast columns that carry something."""
    columns = np.broadcast_arrays(step, source, destination, origin, low, high)
    flat = [np.asarray(column, np.int64).ravel() for column in columns]
    hops = Hops(*flat)
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

    # What is left of it begins at block 0.
    is_over = high > 2 * size
    rest = around._replace(low=np.zeros_like(low), high=high - 2 * size)
    return _joined([around, _select(rest, is_over)])


def _select(hops: Hops, rows: NDArray[Any]) -> Hops:
    return Hops(*(column[rows] for column in hops))


def _joined(parts: list[Hops]) -> Hops:
    columns = zip(*parts, strict=True)
    return Hops(*(np.concatenate(column) for column in columns))
