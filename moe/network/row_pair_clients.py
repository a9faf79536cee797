"""Row pairs around holes: the live ranks of a broken pair of rows are clients of a whole pair.

The live ranks on one side of a hole are a fragment. Its ranks reduce among themselves, so that each
has a piece of the payload, and hand the piece to the facing rank of the nearest whole pair, which
adds it to its own gradients before they go around. In the end the piece comes back as the sum, and
the fragment gathers all pieces. The links of fragments idle while the pairs sum, and the other way
around; slices of the payload keep both busy.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from moe.checks import check
from moe.network.ring_orders import BoolArray, check_paired, fold, pair_rows
from moe.network.rings import grid_all_reduce, ring_bounds, ring_reduce_scatter
from moe.network.schedule import IntArray, Schedule, beside, intervals, split_evenly, transfers


class Fragment(NamedTuple):
    """Adjacent live ranks of a broken pair of rows.

    Attributes:
        ring: <int64>[2 m] ranks in the order of a ring.
        hosts: <int64>[2 m] rank of a whole pair that faces each of them.
    """

    ring: IntArray
    hosts: IntArray


class PairedRows(NamedTuple):
    """The rows of a mesh with holes.

    Attributes:
        whole: <int64>[P, 2 X] rings of the pairs of rows without a dead rank.
        fragments: Live ranks of the other pairs.
    """

    whole: IntArray
    fragments: list[Fragment]


def pair_rows_around_holes(
    ranks: ArrayLike, dead: Collection[int], *, wraps: bool = False
) -> PairedRows:
    """Returns the rings of whole pairs of rows, and the fragments of those with holes.

    Args:
        ranks: <int64>[Y, X] ranks of the mesh; Y must be even.
        dead: Ranks that have failed: in each pair of rows both ranks of a column, or none.
        wraps: Whether the last row is a neighbour of the first one.

    Raises:
        ConfigError: If no pair of rows is whole, or a column of a pair is dead in part.
    """
    grid = np.asarray(ranks, np.int64)
    is_dead = find_dead_columns(grid, dead)
    rings = pair_rows(grid)

    is_whole = np.asarray(~is_dead.any(axis=1), np.bool_)
    check(bool(is_whole.any()), "whole pairs of rows", 0, "at least one, without a dead rank")

    # Each run of live columns of a broken pair is a fragment.
    hosts = grid[_facing_rows(is_whole, wraps=wraps)]
    fragments = []
    for pair in np.flatnonzero(~is_whole):
        for first, last in _runs(~is_dead[pair]):
            block = (slice(2 * pair, 2 * pair + 2), slice(first, last))
            ring = pair_rows(grid[block])[0]
            facing = pair_rows(hosts[block])[0]
            fragments.append(Fragment(ring, facing))
    whole = fold(rings[is_whole], [wraps, True])
    return PairedRows(whole, fragments)


def find_dead_columns(grid: IntArray, dead: Collection[int]) -> BoolArray:
    """Returns <bool>[Y / 2, X] whether both ranks of a column of a pair of rows are dead.

    Args:
        grid: <int64>[Y, X] ranks of a mesh.
        dead: Ranks that have failed.

    Raises:
        ConfigError: If Y is odd, or only one rank of a pair is dead.
    """
    check(grid.ndim == 2, "shape of a mesh with holes", grid.shape, "two axes")
    check_paired(len(grid))
    is_dead = np.isin(grid, list(dead))
    upper = is_dead[::2]

    # A column of a pair of rows may not be dead in part.
    torn = np.argwhere(upper != is_dead[1::2])
    if len(torn):
        pair, column = torn[0]
        both = grid[2 * pair : 2 * pair + 2, column].tolist()
        check(False, "dead ranks", sorted(dead), f"both of {both} or none, to pair rows")
    return upper


def row_pair_client_all_reduce(
    rows: PairedRows, num_units: int, *, num_ranks: int, num_slices: int = 1
) -> Schedule:
    """Returns an all-reduce around pairs of rows, in which fragments are clients of whole pairs.

    Half of the payload goes around in each direction.

    Args:
        rows: Result of `pair_rows_around_holes`.
        num_units: Units of the payload.
        num_ranks: Ranks of the schedule, the dead ones included.
        num_slices: Slices of the payload, each starting one turn of a ring after the previous one;
            more cost latency, fewer leave links idle.

    Source:
        Highly Available Data Parallel ML training on Mesh Networks (arXiv:2011.03605). Differs:
        pieces go one hop straight to the facing rank; the payload is sliced.
    """
    flipped = PairedRows(
        whole=np.flip(rows.whole),
        fragments=[Fragment(ring[::-1], hosts[::-1]) for ring, hosts in rows.fragments],
    )

    # Each slice in both directions, each starting one turn of a ring after the previous one.
    bounds = split_evenly(num_units, 2 * num_slices)
    parts = []
    for index, direction in enumerate([rows, flipped] * num_slices):
        low = int(bounds[index])
        size = int(bounds[index + 1]) - low
        part = _one_way_all_reduce(direction, size, num_ranks).at(low, num_units)
        parts.append(part.delayed(index // 2 * rows.whole.shape[1]))
    return beside(parts)


def _one_way_all_reduce(rows: PairedRows, num_units: int, num_ranks: int) -> Schedule:
    schedule = grid_all_reduce(rows.whole, num_units, num_ranks=num_ranks)
    if not rows.fragments:
        return schedule

    # Pieces are handed over, the pairs sum, and the pieces come back.
    clients = [_handed_over(fragment, num_units, num_ranks) for fragment in rows.fragments]
    handover = beside(clients)
    whole = handover.then(schedule).then(handover.reversed())

    # All ranks begin and end with all units.
    everyone = np.concatenate([rows.whole.ravel(), handover.before.rank])
    payload = intervals(everyone, 0, num_units)
    return replace(whole, before=payload, after=payload)


def _handed_over(fragment: Fragment, num_units: int, num_ranks: int) -> Schedule:
    """Returns a fragment's reduce-scatter, and its pieces on their way to the hosts."""
    ring, hosts = fragment
    size = len(ring)
    scatter = ring_reduce_scatter(ring, 0, num_units, num_ranks=num_ranks, num_units=num_units)

    # A hop for each piece.
    bounds = ring_bounds(0, num_units, 1, size)[0]
    pieces = transfers(0, ring, hosts, bounds[:-1], bounds[1:], adds=True)
    handover = replace(scatter, transfers=pieces, after=intervals(hosts, bounds[:-1], bounds[1:]))
    return scatter.then(handover)


def _facing_rows(is_whole: BoolArray, *, wraps: bool) -> IntArray:
    """Returns the <int64>[Y] rows of whole pairs that are nearest to each row.

    Args:
        is_whole: <bool>[Y / 2] whether each pair has no dead rank.
        wraps: Whether the last row is a neighbour of the first one.
    """
    num_rows = 2 * len(is_whole)
    rows = np.arange(num_rows)

    # Distance of each row from the rows of whole pairs.  [Y, rows]
    candidates = rows[np.repeat(is_whole, 2)]
    distance = np.abs(rows[:, None] - candidates)
    if wraps:
        distance = np.minimum(distance, num_rows - distance)
    return candidates[np.argmin(distance, axis=1)]


def _runs(is_live: BoolArray) -> list[tuple[int, int]]:
    """Returns the first and the last column, exclusive, of each run of live columns."""
    # Rows where live changes to dead, and back.
    padded = np.concatenate([[False], is_live, [False]])
    edges = np.flatnonzero(padded[1:] != padded[:-1])
    return [(int(low), int(high)) for low, high in edges.reshape(-1, 2)]
