"""The part of a schedule that some ranks need: a reduce-scatter out of any all-reduce.

From the last step to the first, a transfer stays where it writes what is needed after it; then its
source is needed before it, and what it copies over is not. What is left is as exact as the whole.
"""

from dataclasses import replace

import numpy as np

from moe.network.pieces import bounds_of_pieces, expand, mask
from moe.network.schedule import IntArray, Intervals, Schedule, intervals, split_evenly, transfers


def prune(schedule: Schedule, after: Intervals) -> Schedule:
    """Returns what is left of a schedule when ranks need only some of what it ends with.

    Args:
        schedule: Promises at least `after`.
        after: Units that ranks are to end with.
    """
    table = schedule.transfers
    bounds = bounds_of_pieces((table, schedule.before, after))
    needed = mask(after, bounds, (schedule.num_ranks, max(len(bounds) - 1, 0)))

    kept_rows: list[IntArray] = []
    kept_pieces: list[IntArray] = []
    for step in reversed(range(schedule.num_steps)):
        # Rows of this step that write what is needed after it.
        first = int(schedule.step_offsets[step])
        last = int(schedule.step_offsets[step + 1])
        row, piece = expand(table.low[first:last], table.high[first:last], bounds)
        row = row + first
        is_needed = needed[table.destination[row], piece]
        row = row[is_needed]
        piece = piece[is_needed]

        # Before this step: no longer what is copied over, but all that is sent.
        copied = ~table.adds[row]
        needed[table.destination[row[copied]], piece[copied]] = False
        needed[table.source[row], piece] = True
        kept_rows.append(row)
        kept_pieces.append(piece)

    if not kept_rows:
        return replace(schedule, after=after)

    # Pieces that lie side by side in the same row are one interval.
    row = np.concatenate(kept_rows[::-1])
    piece = np.concatenate(kept_pieces[::-1])
    goes_on = (np.diff(row) == 0) & (np.diff(piece) == 1)
    outside = np.ones(min(len(row), 1), np.bool_)
    begins = np.concatenate([outside, ~goes_on])
    ends = np.concatenate([~goes_on, outside])
    kept = table.select(row[begins])
    left = transfers(
        step=kept.step,
        source=kept.source,
        destination=kept.destination,
        low=bounds[piece[begins]],
        high=bounds[piece[ends] + 1],
        adds=kept.adds,
    )
    return replace(schedule, transfers=left, after=after)


def reduce_scatter_of(all_reduce: Schedule, ranks: IntArray) -> Schedule:
    """Returns the reduce-scatter in an all-reduce: the i-th rank ends with the i-th chunk.

    Args:
        all_reduce: Every one of `ranks` ends with the sum.
        ranks: <int64>[n] ranks in the order of their chunks, which differ by at most one unit.
    """
    bounds = split_evenly(all_reduce.num_units, len(ranks))
    return prune(all_reduce, intervals(ranks, bounds[:-1], bounds[1:]))
