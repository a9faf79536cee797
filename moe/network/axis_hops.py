"""Hops of an all-to-all along a line of positions: sources, destinations, blocks and steps.

On a line of n positions every position has a block for every other one. A block for position j
travels with the blocks for the positions after it, so that a hop carries a run of blocks. A run is
counted in half blocks: block j is the halves 2 j and 2 j + 1. On a ring of an even number of
positions the opposite position is equally far both ways, and half of its block goes each way.

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


def line(size: int) -> Hops:
    """Returns the hops of a line, on which every block has one way."""
    return _runs(2 * (size - 1 - np.arange(size)))


def one_way_ring(size: int) -> Hops:
    """Returns the hops of a ring on which every block goes forwards."""
    return _runs(np.full(size, 2 * (size - 1)))


def straight(size: int) -> Hops:
    """Returns one hop for every block: in each step the position so much further on is served."""
    origin = np.arange(size)[:, None]
    distance = np.arange(1, size)[None, :]
    target = origin + distance
    return _wrapped(_filled(distance - 1, origin, target, origin, 2 * target, 2 * target + 2), size)


def _runs(forward: IntArray) -> Hops:
    """Returns the hops if each origin sends so many half blocks forwards, and the rest backwards.

    Args:
        forward: <int64>[n] half blocks of each origin that go forwards.
    """
    size = len(forward)
    hop = np.arange(1, max(size, 2))[None, :]

    def run(origin: IntArray, num_halves: IntArray) -> Hops:
        # At hop h, h - 1 blocks have reached their destinations and travel no further.
        here = origin + hop
        return _filled(hop - 1, here - 1, here, origin, 2 * here, 2 * (origin + 1) + num_halves)

    # Backwards as in a mirror: position p becomes -p, and the halves of a block swap.
    origin = np.arange(size)[:, None]
    forwards = run(origin, forward[:, None])
    mirrored = run(-origin, 2 * (size - 1) - forward[:, None])
    backwards = Hops(
        mirrored.step,
        source=-mirrored.source,
        destination=-mirrored.destination,
        origin=-mirrored.origin,
        low=2 - mirrored.high,
        high=2 - mirrored.low,
    )
    return _wrapped(_joined([forwards, backwards]), size)


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
