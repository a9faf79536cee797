"""Row bands: a pair of rows with a hole and an adjacent whole pair form one ring.

Such a band of four rows has two lanes. One winds through the two rows with the hole and passes the
hole on the third row; the other one winds back through the rest. All live ranks of the band are
on one ring of neighbours, and nothing has to be handed over first: a band takes more steps than a
pair, but no more bytes. Bands and pairs split the payload into the same chunks, and the owners of a
chunk are in the same columns.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from moe.checks import check
from moe.network.ring_orders import BoolArray, fold
from moe.network.rings import ring_reduce_scatter, ring_reduce_to
from moe.network.row_pair_clients import find_dead_columns
from moe.network.schedule import IntArray, Schedule, beside, one_payload, split_evenly

_CHUNKS_OF_COLUMN = 2
"""Chunks of each lane, so that a band has about as many chunks as ranks."""


class Band(NamedTuple):
    """A ring of the live ranks of two or four rows.

    Attributes:
        ring: <int64>[p] ranks: out on one lane, back on the other.
        owners: <int64>[C] place in the ring of the rank that owns each chunk of the payload.
    """

    ring: IntArray
    owners: IntArray


def find_bands(ranks: ArrayLike, dead: Collection[int]) -> list[Band]:
    """Returns the bands of a mesh, from the first row to the last.

    Args:
        ranks: <int64>[Y, X] ranks of the mesh; both sizes must be even.
        dead: Ranks that have failed, in blocks of 2 x 2 counted from the corner.

    Raises:
        ConfigError: If a block is dead in part, or a broken pair of rows has no adjacent whole pair
            of its own.
    """
    grid = np.asarray(ranks, np.int64)
    is_dead = find_dead_columns(grid, dead)
    width = grid.shape[1]
    check(width % 2 == 0, "columns of a mesh", width, "an even number")

    # Two columns next to each other are both dead or both live.
    torn = np.argwhere(is_dead[:, ::2] != is_dead[:, 1::2])
    if len(torn):
        y, x = (2 * torn[0]).tolist()
        block = grid[y : y + 2, x : x + 2].ravel().tolist()
        expected = f"all of the block {block} or none"
        check(False, "dead ranks", sorted(dead), expected)

    # A pair that helps another one is not a separate band.
    helpers = _find_helpers(is_dead)
    bands = []
    for pair, holes in enumerate(is_dead):
        rows = grid[2 * pair : 2 * pair + 2]
        if pair in helpers:
            helper = grid[2 * helpers[pair] : 2 * helpers[pair] + 2]
            if helpers[pair] < pair:
                rows = rows[::-1]
                helper = helper[::-1]
            four = np.concatenate([rows, helper])
            bands.append(_two_lanes(four, holes))
        elif pair not in helpers.values() and not holes.any():
            out = rows[0].reshape(-1, 1).tolist()
            back = rows[1].reshape(-1, 1).tolist()
            bands.append(_band(out, back))
    return bands


def row_band_all_reduce(
    bands: Sequence[Band], num_units: int, *, num_ranks: int, wraps: bool = False
) -> Schedule:
    """Returns an all-reduce around bands of rows and then across them, half in each direction.

    Args:
        bands: Result of `find_bands`.
        num_units: Units of the payload.
        num_ranks: Ranks of the schedule, the dead ones included.
        wraps: Whether the last row is a neighbour of the first one.
    """
    turned = []
    for ring, owners in bands:
        turned.append(Band(ring[::-1], len(ring) - 1 - owners))
    middle = int(split_evenly(num_units, 2)[1])

    forwards = _one_way_all_reduce(bands, middle, num_ranks, wraps=wraps)
    backwards = _one_way_all_reduce(turned, num_units - middle, num_ranks, wraps=wraps)
    return one_payload([forwards, backwards])


def _one_way_all_reduce(
    bands: Sequence[Band], num_units: int, num_ranks: int, *, wraps: bool
) -> Schedule:
    # Around each band.
    bounds = split_evenly(num_units, len(bands[0].owners))
    around = []
    for ring, owners in bands:
        part = ring_reduce_to(
            ring[None], owners[None], bounds[None], num_ranks=num_ranks, num_units=num_units
        )
        around.append(part)

    # Across the bands, a ring for each chunk.  [C, bands]
    owners = np.stack([band.ring[band.owners] for band in bands], axis=1)
    across = ring_reduce_scatter(
        fold(owners, [True, wraps]),
        bounds[:-1],
        bounds[1:],
        num_ranks=num_ranks,
        num_units=num_units,
    )
    scatter = beside(around).then(across)
    return scatter.then(scatter.reversed())


def _find_helpers(is_dead: BoolArray) -> dict[int, int]:
    """Returns the whole pair of rows that helps each broken pair; a dead pair needs none."""
    is_broken = is_dead.any(axis=1)
    has_clients = is_broken & ~is_dead.all(axis=1)
    whole = set(np.flatnonzero(~is_broken).tolist())

    # Use the pair above unless it is taken; going from the top down helps the most pairs.
    helpers: dict[int, int] = {}
    for pair in np.flatnonzero(has_clients).tolist():
        free = whole.intersection((pair - 1, pair + 1))
        free -= set(helpers.values())
        lines = f"whole pairs beside lines {2 * pair} and {2 * pair + 1}"
        check(len(free) > 0, lines, 0, "one for each pair of lines with a hole")
        helpers[pair] = min(free)
    return helpers


def _two_lanes(rows: IntArray, is_dead: BoolArray) -> Band:
    """Returns the ring of four rows.

    Args:
        rows: <int64>[4, X] ranks; the first two have the holes, the other two have none.
        is_dead: <bool>[X] columns that are dead in the first two rows.
    """
    width = len(is_dead)
    out: list[list[int]] = []
    back: list[list[int]] = []
    for column in range(width):
        goes_up = column % 2 == 0
        beyond = column - 1 if goes_up else column + 1
        is_edge = 0 <= beyond < width and is_dead[beyond]

        # The third row is where the lane passes a hole, and steps down to it and up from it.
        ranks = rows[:, column].tolist()
        num_upper = 3 if is_dead[column] or is_edge else 2
        upper = ranks[2 if is_dead[column] else 0 : num_upper]
        lower = ranks[num_upper:]
        out.append(upper[::-1] if goes_up else upper)
        back.append(lower[::-1] if goes_up else lower)
    return _band(out, back)


def _band(out: list[list[int]], back: list[list[int]]) -> Band:
    """Returns a ring of two lanes.

    Args:
        out: Ranks of the first lane in each column, in the order in which it passes them.
        back: Ranks of the second lane, likewise, which passes the last column first.
    """
    # Columns in the order of the ring.
    columns = out + back[::-1]
    num_ranks = np.array([len(column) for column in columns])
    place = np.cumsum(num_ranks) - num_ranks

    # Each chunk of a column has its own rank, if there are enough.
    chunk = np.arange(_CHUNKS_OF_COLUMN)
    owners = place[:, None] + np.minimum(chunk, num_ranks[:, None] - 1)
    ring = np.concatenate(columns)
    return Band(ring, owners.ravel())
