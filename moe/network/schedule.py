"""A collective as a value: a table of transfers between ranks, and the units at the start and the
end.

Every rank has a buffer of the same units; a unit is an element of the payload. A transfer sends an
interval of one rank's buffer to the same interval of another rank's, where it is copied or added.
An all-to-all fits too: its units are those of all pairs of ranks, in order; a rank starts with the
units that it sends and ends with those that it receives.

One promise covers all collectives: a unit that a rank ends with is the sum of that unit over all
ranks that began with it. In an all-reduce all ranks begin and end with all units; in a
reduce-scatter each ends with its shard; in an all-gather each begins with it; in an all-to-all a
unit begins at one rank and ends at another, so that the sum has one term.

Next: `rings` builds schedules.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

IntArray = NDArray[np.int64]


class Intervals(NamedTuple):
    """Intervals of ranks' buffers, a row each.

    Attributes:
        rank: <int64>[I] whose buffer.
        low: <int64>[I] first unit.
        high: <int64>[I] unit after the last.
    """

    rank: IntArray
    low: IntArray
    high: IntArray


class Transfers(NamedTuple):
    """Transfers, a row each, sorted by step.

    All that is sent in a step is read before anything that arrives in it is written, and arriving
    units are added in the order of the rows. Steps group messages and order reads and writes of the
    same units; they are not barriers: a rank continues as soon as the data that it sends has
    arrived.

    Attributes:
        step: <int64>[T] from 0.
        source: <int64>[T] rank that sends.
        destination: <int64>[T] rank that receives.
        low: <int64>[T] first unit.
        high: <int64>[T] unit after the last.
        adds: <bool>[T] whether the units are added to those of the destination; else they overwrite
            them.
    """

    step: IntArray
    source: IntArray
    destination: IntArray
    low: IntArray
    high: IntArray
    adds: NDArray[np.bool_]

    def select(self, rows: NDArray[Any]) -> "Transfers":
        """Returns some rows: a mask, or indices."""
        return Transfers._make(column[rows] for column in self)


def intervals(rank: ArrayLike, low: ArrayLike, high: ArrayLike) -> Intervals:
    """Returns intervals from columns of equal or broadcastable shapes; empty ones are dropped."""
    columns = np.broadcast_arrays(*(np.asarray(column, np.int64) for column in (rank, low, high)))
    flat = [column.ravel() for column in columns]
    is_filled = flat[1] < flat[2]
    return Intervals(*(column[is_filled] for column in flat))


def transfers(
    step: ArrayLike,
    source: ArrayLike,
    destination: ArrayLike,
    low: ArrayLike,
    high: ArrayLike,
    *,
    adds: ArrayLike,
) -> Transfers:
    """Returns transfers from columns of equal or broadcastable shapes, sorted by step.

    Transfers of no units are dropped, so that any payload can be split among any number of ranks.
    """
    columns = (step, source, destination, low, high)
    arrays = [np.asarray(column, np.int64) for column in columns]
    *numbers, added = np.broadcast_arrays(*arrays, np.asarray(adds, np.bool_))
    flat = [column.ravel() for column in numbers]
    table = Transfers(*flat, adds=added.ravel())

    is_filled = table.low < table.high
    if not is_filled.all():
        table = table.select(is_filled)

    # Rows of the same step keep their order. Tables of millions of rows are mostly sorted already.
    if (table.step[1:] < table.step[:-1]).any():
        table = table.select(np.argsort(table.step, kind="stable"))
    return table


@dataclass(frozen=True, eq=False)
class Schedule:
    """Messages between ranks, and the final units of every rank. See the module.

    Attributes:
        num_ranks: Ranks, numbered from 0; some may take no part, e.g. dead ones.
        num_units: Units of every buffer.
        transfers: Transfers in the order of their steps.
        before: Units that ranks begin with.
        after: Units that ranks end with: each the sum over all ranks that began with it.
    """

    num_ranks: int
    num_units: int
    transfers: Transfers
    before: Intervals
    after: Intervals

    def __post_init__(self) -> None:
        table = self.transfers
        for ranks in (table.source, table.destination, self.before.rank, self.after.rank):
            assert _are_within(ranks, self.num_ranks - 1), "ranks of the schedule"
        for part in (table, self.before, self.after):
            is_inside = _are_within(part.low, self.num_units)
            assert is_inside and _are_within(part.high, self.num_units), "units of the schedule"
        assert (table.source != table.destination).all(), "a transfer is between two ranks"

    @cached_property
    def num_steps(self) -> int:
        """Number of steps; a rank skips those in which it takes no part."""
        steps = self.transfers.step
        return int(steps[-1]) + 1 if len(steps) else 0

    @cached_property
    def step_offsets(self) -> IntArray:
        """<int64>[steps + 1] row at which each step begins."""
        return np.searchsorted(self.transfers.step, np.arange(self.num_steps + 1))

    def then(self, following: "Schedule") -> "Schedule":
        """Returns this schedule followed by another one, which begins with what this one ends with.

        A reduce-scatter and then an all-gather of the same shards is an all-reduce.
        """
        assert following.buffers == self.buffers, "another number of ranks or units"
        later = following.transfers
        later = later._replace(step=later.step + self.num_steps)
        joined = _concatenate_transfers([self.transfers, later])
        return replace(self, transfers=joined, after=following.after)

    def reversed(self) -> "Schedule":
        """Returns the schedule run backwards, with copies instead of sums.

        The reverse of a reduce-scatter is an all-gather, and the reverse of a dispatch (all-to-all)
        is its combine.
        """
        table = self.transfers
        backwards = transfers(
            step=self.num_steps - 1 - table.step,
            source=table.destination,
            destination=table.source,
            low=table.low,
            high=table.high,
            adds=False,
        )
        return replace(self, transfers=backwards, before=self.after, after=self.before)

    def at(self, low: int, num_units: int) -> "Schedule":
        """Returns the schedule on the units from `low` on, of a buffer of `num_units` units."""
        table = self.transfers
        moved = table._replace(low=table.low + low, high=table.high + low)
        return replace(
            self,
            num_units=num_units,
            transfers=moved,
            before=_moved(self.before, low),
            after=_moved(self.after, low),
        )

    def among(self, ranks: Sequence[int] | IntArray, num_ranks: int) -> "Schedule":
        """Returns the schedule with its i-th rank renamed to `ranks[i]`, one of `num_ranks` ranks."""
        names = np.asarray(ranks, np.int64)
        table = self.transfers
        renamed = table._replace(source=names[table.source], destination=names[table.destination])
        return replace(
            self,
            num_ranks=num_ranks,
            transfers=renamed,
            before=self.before._replace(rank=names[self.before.rank]),
            after=self.after._replace(rank=names[self.after.rank]),
        )

    def delayed(self, num_steps: int) -> "Schedule":
        """Returns the schedule starting `num_steps` steps later."""
        later = self.transfers._replace(step=self.transfers.step + num_steps)
        return replace(self, transfers=later)

    @property
    def buffers(self) -> tuple[int, int]:
        """Numbers of ranks and units."""
        return self.num_ranks, self.num_units


def beside(schedules: Sequence[Schedule]) -> Schedule:
    """Returns schedules that run at the same time, on different ranks or on different units."""
    first = schedules[0]
    assert all(schedule.buffers == first.buffers for schedule in schedules), "other buffers"
    joined = _concatenate_transfers([schedule.transfers for schedule in schedules])
    return replace(
        first,
        transfers=joined,
        before=_concatenate_intervals([schedule.before for schedule in schedules]),
        after=_concatenate_intervals([schedule.after for schedule in schedules]),
    )


def one_payload(parts: Sequence[Schedule]) -> Schedule:
    """Returns schedules that run at the same time, on consecutive ranges of the units of one payload."""
    num_units = sum(part.num_units for part in parts)
    moved = []
    first = 0
    for part in parts:
        moved.append(part.at(first, num_units))
        first += part.num_units
    return beside(moved)


def split_evenly(num_units: int, num_parts: int) -> IntArray:
    """Returns the <int64>[num_parts + 1] bounds of parts whose sizes differ by at most one."""
    return np.arange(num_parts + 1, dtype=np.int64) * num_units // num_parts


def bounds_of_pieces(parts: Iterable[Intervals | Transfers]) -> IntArray:
    """Returns the sorted <int64>[pieces + 1] bounds of all intervals; empty for no intervals.

    They divide the payload into pieces: no interval begins or ends inside a piece.
    """
    bounds: list[IntArray] = []
    for part in parts:
        bounds += [part.low, part.high]
    return np.unique(np.concatenate(bounds))


def expand(low: IntArray, high: IntArray, bounds: IntArray) -> tuple[IntArray, IntArray]:
    """Returns a row for every piece of every interval: the interval's index and the piece's."""
    first = np.searchsorted(bounds, low)
    return expand_runs(first, np.searchsorted(bounds, high) - first)


def expand_runs(first: IntArray, count: IntArray) -> tuple[IntArray, IntArray]:
    """Returns a row for every number of every run `first, first + 1, ...`: the run's index, and the
    number.
    """
    run = np.repeat(np.arange(len(first)), count)
    starts = np.cumsum(count) - count
    return run, np.arange(len(run)) + np.repeat(first - starts, count)


def covered_pieces(part: Intervals, bounds: IntArray, shape: tuple[int, int]) -> NDArray[np.bool_]:
    """Returns <bool>[ranks, pieces]: what some intervals cover."""
    row, piece = expand(part.low, part.high, bounds)
    covered = np.zeros(shape, np.bool_)
    covered[part.rank[row], piece] = True
    return covered


def _moved(old: Intervals, low: int) -> Intervals:
    return old._replace(low=old.low + low, high=old.high + low)


def _concatenate_intervals(parts: Sequence[Intervals]) -> Intervals:
    return Intervals(*[np.concatenate(column) for column in zip(*parts, strict=True)])


def _concatenate_transfers(parts: Sequence[Transfers]) -> Transfers:
    *columns, adds = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return transfers(*columns, adds=adds)


def _are_within(numbers: IntArray, most: int) -> bool:
    return bool(((numbers >= 0) & (numbers <= most)).all())
