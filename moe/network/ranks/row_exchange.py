"""All-to-alls of token rows by a schedule: blocks of any size, including empty ones.

The units of a schedule of `moe.network` belong to pairs of ranks. A block of rows uses the units of
its pair, and a rank's buffer holds only rows that the rank sends, receives or passes on, never the
blocks of all pairs.

Read `scheduled` first, which runs the steps; `moe.distributed.all_to_all` comes next and ties an exchange
to autograd.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.profiler import record_function

from moe.checks import check
from moe.distributed.collectives import all_gather_flat
from moe.distributed.exchanges import Route
from moe.network.algorithms import ALL_TO_ALL
from moe.network.ranks.schedule_choice import parse_schedule
from moe.network.ranks.scheduled import Execution, RankProgram, RankStep
from moe.network.schedule import IntArray, Intervals, Schedule, bounds_of_pieces, expand

_UNITS_OF_PAIR = 2520
"""Units of a block of rows, divisible by 2 to 10, so that schedules can split blocks evenly."""


class PendingBlocks(NamedTuple):
    """Blocks of rows under way.

    Attributes:
        execution: The steps.
        buffer: <any>[N, ...] all rows that pass through this rank.
        arriving: Rows of the buffer for this rank, sorted by their origin rank.
    """

    execution: Execution
    buffer: Tensor
    arriving: tuple[slice, ...]

    def wait(self) -> Tensor:
        """Returns the rows <any>[M, ...] that arrive here, sorted by their origin rank."""
        self.execution.wait()
        if len(self.arriving) == 1:
            return self.buffer[self.arriving[0]]
        return torch.cat([self.buffer[span] for span in self.arriving] or [self.buffer[:0]])


class BlockRoute(NamedTuple):
    """An exchange of blocks of given sizes, as seen by one rank.

    Attributes:
        group: The ranks.
        steps: Steps of this rank.
        num_rows: Rows of its buffer.
        leaving: Rows of the buffer that it sends, sorted by their destination rank.
        arriving: Rows of the buffer that it receives, sorted by their origin rank.
    """

    group: ProcessGroup | None
    steps: list[RankStep]
    num_rows: int
    leaving: tuple[slice, ...]
    arriving: tuple[slice, ...]

    def issue(self, x: Tensor) -> PendingBlocks:
        """Sends rows <any>[N, ...], sorted by their destination rank.

        Steps after the first run in `wait`, since each needs the rows of the one before.
        """
        # Copy this rank's rows into the buffer.
        buffer = x.new_empty(self.num_rows, *x.shape[1:])
        num_rows = [span.stop - span.start for span in self.leaving]
        assert sum(num_rows) == len(x), f"{len(x)} rows for a route of {sum(num_rows)}"
        for span, rows in zip(self.leaving, x.split(num_rows), strict=True):
            buffer[span] = rows

        # The first step is sent at once.
        execution = Execution(self.steps, buffer, self.group)
        return PendingBlocks(execution, buffer, self.arriving)


class ScheduledStep(NamedTuple):
    """One all-to-all of a schedule.

    Attributes:
        there: Route of the rows.
        back: Route back.
    """

    there: BlockRoute
    back: BlockRoute

    def issue(self, x: Tensor, *, reverse: bool) -> PendingBlocks:
        """Sends rows <any>[N, ...]; see `Step.issue`."""
        route = self.back if reverse else self.there
        return route.issue(x)


class ScheduledCounts(NamedTuple):
    """The counts of all ranks, sent to all: ranks that forward rows must know their number.

    Attributes:
        exchange: The all-to-all of the rows.
        group: The ranks.
        sent: <int64>[ep, E / ep] rows that this rank sends; must live until `work` is done.
        counts: <int64>[ep, ep, E / ep] rows by origin, destination and expert there; not to be
            read before `work` is done.
        work: torch's handle of the collective.
    """

    exchange: "ScheduledAllToAll"
    group: ProcessGroup
    sent: Tensor
    counts: Tensor
    work: Any

    def wait(self) -> tuple[Tensor, Route]:
        """Returns the rows that arrive and their route; see `PendingCounts.wait`."""
        with record_function("moe.counts.wait"):
            self.work.wait()
            received = self.counts[:, dist.get_rank(self.group)]  # [ep, E / ep]
            rows_of_blocks = self.counts.sum(dim=2)  # [ep, ep]
            return received, self.exchange.route(rows_of_blocks.cpu().numpy())


class ScheduledExchange:
    """Exchanges rows by the schedule that a recipe names: an `ExpertExchange` of a mesh.

    Args:
        text: Value of mesh.expert_exchange; see `schedule_choice`.

    Raises:
        ConfigError: If the text names no schedule, or a wire.
    """

    def __init__(self, text: str) -> None:
        name = "mesh.expert_exchange"
        self._choice = parse_schedule(name, text, ALL_TO_ALL)
        expected = "no wire: rows travel in the dtype that they have"
        check(not self._choice.bfloat16, name, text, expected)
        self.check_group = self._choice.check_group
        self._exchanges: dict[ProcessGroup, ScheduledAllToAll] = {}

    def send_counts(self, sent: Tensor, group: ProcessGroup) -> ScheduledCounts:
        """Tells every rank how many rows it will receive; see `ExpertExchange.send_counts`."""
        size = len(sent)
        everyone = sent.new_empty(size * size, sent.shape[1])
        work = all_gather_flat(everyone, sent, group, async_op=True)
        counts = everyone.view(size, *sent.shape)  # [ep, ep, E / ep]
        return ScheduledCounts(self._exchange(group), group, sent, counts, work)

    def equal_route(self, num_rows: int, group: ProcessGroup) -> Route:
        """Returns the route of rows of which every rank gets an equal share."""
        size = dist.get_world_size(group)
        return self._exchange(group).route(np.full((size, size), num_rows // size))

    def _exchange(self, group: ProcessGroup) -> "ScheduledAllToAll":
        """Returns the all-to-all over a group; builds it at the first call."""
        if group not in self._exchanges:
            size = dist.get_world_size(group)
            network = self._choice.topology(size)
            schedule = self._choice.build(size, network.num_ranks**2 * _UNITS_OF_PAIR)
            exchange = ScheduledAllToAll(schedule, group, live_ranks=network.live_ranks)
            self._exchanges[group] = exchange
        return self._exchanges[group]


class ScheduledAllToAll:
    """An all-to-all schedule that is ready to exchange blocks of rows of any sizes.

    Args:
        schedule: An all-to-all: every unit starts at one rank and ends at one.
        group: The running ranks; None for all.
        live_ranks: See `RankProgram`.
    """

    def __init__(
        self,
        schedule: Schedule,
        group: ProcessGroup | None = None,
        *,
        live_ranks: Sequence[int] | IntArray | None = None,
    ) -> None:
        self._there = _OneWay(RankProgram(schedule, group, live_ranks=live_ranks))
        self._back = _OneWay(RankProgram(schedule.reversed(), group, live_ranks=live_ranks))

    def route(self, counts: IntArray) -> tuple[ScheduledStep]:
        """Returns the route of blocks of some sizes, and back to their origin.

        Args:
            counts: <int64>[n, n] rows that each rank of the group sends to each other; the same on
                all ranks.
        """
        return (ScheduledStep(self._there.route(counts), self._back.route(counts.T)),)


class _OneWay:
    """One direction of an all-to-all: the positions of the units of each pair.

    Args:
        program: This rank's rows of the schedule.
    """

    def __init__(self, program: RankProgram) -> None:
        self._program = program
        schedule = program.schedule
        rows = program.rows

        # Pieces that are not divided by any interval of this rank or any block.
        self._bounds = bounds_of_pieces((rows, schedule.before, schedule.after))
        self._source = self._owners(schedule.before)
        self._destination = self._owners(schedule.after)

        # Pieces that this rank sends, receives or passes on.
        me = program.group_rank
        self._is_touched = (self._source == me) | (self._destination == me)
        self._is_touched[expand(rows.low, rows.high, self._bounds)[1]] = True

        # Units of ranks that are dead belong to no pair.
        self._pieces = np.flatnonzero(self._source >= 0)
        is_whole = (self._source < 0) == (self._destination < 0)
        assert is_whole.all(), "every unit of an all-to-all begins at one rank and ends at one"

        # Units of the pair before and after each piece, and in total.
        source = self._source[self._pieces]
        pair = source * program.num_group_ranks + self._destination[self._pieces]
        num_units = np.diff(self._bounds)[self._pieces]
        units_of_pair = np.zeros(program.num_group_ranks**2, np.int64)
        np.add.at(units_of_pair, pair, num_units)
        assert units_of_pair.all(), "rows can go from every rank to every one, also to itself"

        # Pieces of a pair follow each other in the order of their units.
        order = np.argsort(pair, kind="stable")
        starts_of_pairs = np.cumsum(units_of_pair) - units_of_pair
        starts = np.cumsum(num_units[order]) - num_units[order] - starts_of_pairs[pair[order]]
        self._start_in_pair = np.empty_like(num_units)
        self._start_in_pair[order] = starts
        self._end_in_pair = self._start_in_pair + num_units
        self._pair_units = units_of_pair[pair]

    def route(self, counts: IntArray) -> BlockRoute:
        """Returns the exchange of blocks of <int64>[n, n] rows."""
        # The rows of a block are spread evenly over the units of its pair.
        block = counts[self._source[self._pieces], self._destination[self._pieces]]
        first = block * self._start_in_pair // self._pair_units
        last = block * self._end_in_pair // self._pair_units

        # Only pieces that this rank touches have a place in its buffer.
        num_rows = np.zeros(len(self._bounds) - 1, np.int64)
        num_rows[self._pieces] = last - first
        num_rows[~self._is_touched] = 0
        position = np.concatenate([[0], np.cumsum(num_rows)])

        def place(units: IntArray) -> IntArray:
            return position[np.searchsorted(self._bounds, units)]

        me = self._program.group_rank
        return BlockRoute(
            group=self._program.group,
            steps=self._program.steps(place),
            num_rows=int(position[-1]),
            leaving=_spans(position, self._source == me, self._destination),
            arriving=_spans(position, self._destination == me, self._source),
        )

    def _owners(self, part: Intervals) -> IntArray:
        """Returns the rank of the group at which each piece starts or ends; -1 for none."""
        row, piece = expand(part.low, part.high, self._bounds)
        num_owners = np.bincount(piece, minlength=len(self._bounds) - 1)
        assert (num_owners <= 1).all(), "a unit of an all-to-all begins and ends at one rank each"

        # Ranks in the numbers of the group.
        owners = np.full(len(num_owners), -1, np.int64)
        owners[piece] = self._program.group_ranks[part.rank[row]]
        return owners


def _spans(position: IntArray, is_own: NDArray[np.bool_], peer: IntArray) -> tuple[slice, ...]:
    """Returns the positions of this rank's pieces in the buffer, sorted by the other rank of their pair."""
    pieces = np.flatnonzero(is_own)
    pieces = pieces[np.argsort(peer[pieces], kind="stable")]

    # Neighbours in the buffer become one span.
    spans: list[slice] = []
    for piece in pieces.tolist():
        start = int(position[piece])
        stop = int(position[piece + 1])
        if spans and spans[-1].stop == start:
            spans[-1] = slice(spans[-1].start, stop)
        elif start < stop:
            spans.append(slice(start, stop))
    return tuple(spans)
