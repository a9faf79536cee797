"""The first half of an all-reduce: its sums are a reduce-scatter.

Every all-reduce here sums each unit at one rank before that rank hands it out. The rank that ends
with a unit is that which nobody sends a copy of it: which one, the schedule chooses. `pruning` has
the reduce-scatter whose i-th chunk ends at the i-th rank, which may take more transfers.
"""

from dataclasses import replace

import numpy as np

from moe.network.schedule import Intervals, Schedule, intervals


def owned_reduce_scatter(all_reduce: Schedule) -> Schedule:
    """Returns the sums of an all-reduce: every rank ends with the units that it owns."""
    table = all_reduce.transfers
    return replace(all_reduce, transfers=table.select(table.adds), after=_owned(all_reduce))


def _owned(all_reduce: Schedule) -> Intervals:
    """Returns the units of each rank of which no copy is sent to it."""
    table = all_reduce.transfers
    copies = table.select(~table.adds)
    begins = all_reduce.before
    bounds = np.unique(np.concatenate([begins.low, begins.high, copies.low, copies.high]))

    # Pieces that a rank begins with, and never receives.  [ranks, pieces + 1]
    shape = (all_reduce.num_ranks, len(bounds))
    has = _coverage(shape, begins.rank, np.searchsorted(bounds, [begins.low, begins.high]))
    gets = _coverage(shape, copies.destination, np.searchsorted(bounds, [copies.low, copies.high]))
    rank, piece = np.nonzero((has > 0) & (gets == 0))
    return intervals(rank, bounds[piece], bounds[np.minimum(piece + 1, len(bounds) - 1)])


def _coverage(shape: tuple[int, int], rank: np.ndarray, pieces: np.ndarray) -> np.ndarray:
    """Returns how many of some intervals, given by their first piece and the one after the last,
    cover each piece of each rank.
    """
    change = np.zeros(shape, np.int64)
    np.add.at(change, (rank, pieces[0]), 1)
    np.add.at(change, (rank, pieces[1]), -1)
    return change.cumsum(axis=1)
