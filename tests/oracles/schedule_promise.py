"""Checks the promise of a schedule with exact integers.

Every rank begins with random 64-bit integers in its units. The transfers are carried out modulo
2^64; then every unit that a rank must end with is compared with the sum over the ranks that began
with it. A unit that is lost, counted twice, or read before it arrives changes a sum in all but one
case of 2^64. Units that no rank began with hold other random integers, so that reading them shows.
"""

import numpy as np
from numpy.typing import NDArray

from moe.errors import MoEError
from moe.network.schedule import IntArray, Schedule, bounds_of_pieces, covered_pieces, expand

_SEED = 20220217
"""Of the integers; any would do."""


class ScheduleError(MoEError, AssertionError):
    """A schedule does not do what it promises."""


def verify(schedule: Schedule) -> None:
    """Raises unless every rank ends with exactly what the schedule promises.

    Time and memory grow with ranks x pieces, the pieces being what the bounds of all intervals
    divide the payload into.

    Raises:
        ScheduleError: With the step or the rank, the units, and what is wrong.
    """
    pieces = bounds_of_pieces((schedule.transfers, schedule.before, schedule.after))
    num_pieces = max(len(pieces) - 1, 0)
    generator = np.random.default_rng(_SEED)
    shape = (schedule.num_ranks, num_pieces)
    buffers = generator.integers(0, 2**64, shape, dtype=np.uint64)

    # What every unit must sum to, if a rank must end with it.
    begins = covered_pieces(schedule.before, pieces, shape)
    ends = covered_pieces(schedule.after, pieces, shape)
    totals = np.where(begins, buffers, np.uint64(0)).sum(axis=0, dtype=np.uint64)
    _require_sources(begins, ends, pieces)

    for step in range(schedule.num_steps):
        _run_step(schedule, step, pieces, buffers)

    is_wrong = ends & (buffers != totals)
    if is_wrong.any():
        rank, piece = np.argwhere(is_wrong)[0]
        raise ScheduleError(
            f"{_units(pieces, int(piece))} of rank {rank} are not the sum over the ranks that began with "
            f"them, and {int(is_wrong.sum()) - 1} other pieces are wrong. The schedule loses a term, "
            "counts one twice, or sends units before they have arrived."
        )


def _run_step(schedule: Schedule, step: int, pieces: IntArray, buffers: NDArray[np.uint64]) -> None:
    """Carries out one step in place: all reads, then all writes."""
    rows = slice(schedule.step_offsets[step], schedule.step_offsets[step + 1])
    table = schedule.transfers
    row, piece = expand(table.low[rows], table.high[rows], pieces)

    # All reads of a step are made before its writes.
    values = buffers[table.source[rows][row], piece]
    destination = table.destination[rows][row]
    adds = table.adds[rows][row]

    # Units that are copied may not be written by anything else in the same step.
    target = destination * buffers.shape[1] + piece
    num_writes = np.bincount(np.unique(target, return_inverse=True)[1])
    written_twice = np.unique(target)[num_writes > 1]
    clash = np.isin(target[~adds], written_twice)
    if clash.any():
        index = np.flatnonzero(~adds)[clash][0]
        raise ScheduleError(
            f"In step {step} {_units(pieces, int(piece[index]))} of rank {destination[index]} are copied "
            "from one rank and written by another one too."
        )

    np.add.at(buffers, (destination[adds], piece[adds]), values[adds])
    buffers[destination[~adds], piece[~adds]] = values[~adds]


def _require_sources(begins: NDArray[np.bool_], ends: NDArray[np.bool_], pieces: IntArray) -> None:
    """Raises when a rank must end with units that no rank began with."""
    is_missing = ends & ~np.any(begins, axis=0)
    if is_missing.any():
        rank, piece = np.argwhere(is_missing)[0]
        raise ScheduleError(
            f"{_units(pieces, int(piece))} must end at rank {rank}, and no rank begins with them."
        )


def _units(pieces: IntArray, piece: int) -> str:
    return f"Units {pieces[piece]} to {pieces[piece + 1] - 1}"
