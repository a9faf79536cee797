"""Reduce-scatters cut from all-reduces.

Every all-reduce here sums each unit at one rank before that rank hands it out. Its sums alone are a
reduce-scatter in which the schedule chooses which rank ends with which units: the planner times this
one (`owned_reduce_scatter`). FSDP needs the i-th chunk at the i-th rank: training runs this one
(`reduce_scatter_of`), which also sends sums from the ranks that make them to those that need them.
On a 4 x 4 torus it takes 1.6 to 2 times as long as the first.
"""

from dataclasses import replace

import numpy as np

from moe.network.schedule import (
    IntArray,
    Intervals,
    Schedule,
    bounds_of_pieces,
    covered_pieces,
    expand,
    intervals,
    split_evenly,
    transfers,
)


def owned_reduce_scatter(all_reduce: Schedule) -> Schedule:
    """Returns the sums of an all-reduce: every rank ends with the units that nobody sends it."""
    table = all_reduce.transfers
    copies = table.select(~table.adds)
    begins = all_reduce.before
    bounds = bounds_of_pieces((begins, copies))

    # Pieces that a rank begins with, and never receives.
    shape = (all_reduce.num_ranks, max(len(bounds) - 1, 0))
    received = covered_pieces(Intervals(copies.destination, copies.low, copies.high), bounds, shape)
    rank, piece = np.nonzero(covered_pieces(begins, bounds, shape) & ~received)
    owned = intervals(rank, bounds[piece], bounds[piece + 1])
    return replace(all_reduce, transfers=table.select(table.adds), after=owned)


def reduce_scatter_of(all_reduce: Schedule, ranks: IntArray) -> Schedule:
    """Returns the reduce-scatter in an all-reduce: the i-th rank ends with the i-th chunk.

    Args:
        all_reduce: Every one of `ranks` ends with the sum.
        ranks: <int64>[n] ranks in the order of their chunks, which differ by at most one unit.
    """
    chunks = split_evenly(all_reduce.num_units, len(ranks))
    after = intervals(ranks, chunks[:-1], chunks[1:])

    # From the last step to the first, a transfer is kept if its result is needed later; its source is
    # then needed before it, and the overwritten units are not.
    table = all_reduce.transfers
    bounds = bounds_of_pieces((table, all_reduce.before, after))
    needed = covered_pieces(after, bounds, (all_reduce.num_ranks, max(len(bounds) - 1, 0)))

    kept_rows: list[IntArray] = []
    kept_pieces: list[IntArray] = []
    for step in reversed(range(all_reduce.num_steps)):
        # Rows of this step whose results are needed later.
        first = int(all_reduce.step_offsets[step])
        last = int(all_reduce.step_offsets[step + 1])
        row, piece = expand(table.low[first:last], table.high[first:last], bounds)
        row = row + first
        is_needed = needed[table.destination[row], piece]
        row = row[is_needed]
        piece = piece[is_needed]

        # Needed before this step: all sent units, but no overwritten ones.
        copied = ~table.adds[row]
        needed[table.destination[row[copied]], piece[copied]] = False
        needed[table.source[row], piece] = True
        kept_rows.append(row)
        kept_pieces.append(piece)

    if not kept_rows:
        return replace(all_reduce, after=after)

    # Neighbouring pieces of the same row are one interval.
    row = np.concatenate(kept_rows[::-1])
    piece = np.concatenate(kept_pieces[::-1])
    continues = (np.diff(row) == 0) & (np.diff(piece) == 1)
    ends = np.concatenate([~continues, np.ones(min(len(row), 1), np.bool_)])
    begins = np.roll(ends, 1)
    kept = table.select(row[begins])
    left = transfers(
        step=kept.step,
        source=kept.source,
        destination=kept.destination,
        low=bounds[piece[begins]],
        high=bounds[piece[ends] + 1],
        adds=kept.adds,
    )
    return replace(all_reduce, transfers=left, after=after)
