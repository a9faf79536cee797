"""Runs schedules of `moe.network` on running ranks, point to point, over any backend.

A rank keeps its own rows of a schedule and sends, receives and adds step by step. There is no
barrier: a rank continues when its messages are sent and those for it have arrived. All data from one
rank to another in a step is one message.

Narrow floats are summed in float32, others in their own dtype. On a narrower wire (bfloat16) the rank
that sums a unit would keep more digits than it sends: units that several ranks end with are rounded
on all of them, so that replicas stay bit-equal.

Before: `moe.network`. Next: `gradient_reduction` sums the gradients of FSDP with it, `row_exchange`
exchanges rows of tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe.distributed.launch import first_line
from moe.errors import DistributedError
from moe.network.schedule import IntArray, Intervals, Schedule, bounds_of_pieces, expand, intervals

Placement = Callable[[IntArray], IntArray]
"""Returns the first element in a rank's buffer of each of some units."""


class Message(NamedTuple):
    """Data between this rank and another one in one step.

    Attributes:
        peer: The other rank's number in the group.
        spans: Elements of the buffer, one span after the other in the message.
    """

    peer: int
    spans: list[slice]

    @property
    def num_elements(self) -> int:
        """Elements of all spans."""
        return sum(span.stop - span.start for span in self.spans)


class Arrival(NamedTuple):
    """A row of the schedule that this rank receives.

    Attributes:
        message: Index of the message that brings it.
        part: Elements of the message.
        span: Elements of the buffer to which it is written.
        adds: Whether it is added to them instead of overwriting them.
    """

    message: int
    part: slice
    span: slice
    adds: bool


class RankStep(NamedTuple):
    """One step of one rank.

    Attributes:
        sends: A message for each rank that it sends to.
        receives: A message for each rank that it receives from.
        arrivals: Destinations of received data, in the order of the schedule's rows.
    """

    sends: list[Message]
    receives: list[Message]
    arrivals: list[Arrival]


class _Row(NamedTuple):
    """A row of the schedule that this rank takes part in, in elements."""

    step: int
    peer: int
    sends: bool
    span: slice
    adds: bool


class RankProgram:
    """The rows of a schedule that one rank of a group takes part in.

    Args:
        schedule: Schedule of all ranks.
        group: The running ranks; None for all.
        live_ranks: Rank in the schedule of each rank of the group, if the schedule avoids dead
            ranks; None if both have the same ranks.
    """

    def __init__(
        self,
        schedule: Schedule,
        group: ProcessGroup | None = None,
        *,
        live_ranks: Sequence[int] | IntArray | None = None,
    ) -> None:
        self.schedule = schedule
        self.group = group
        self.num_group_ranks = dist.get_world_size(group)
        self.group_ranks = _group_ranks(schedule, group, live_ranks)
        self.group_rank = dist.get_rank(group)
        self.rank = int(np.flatnonzero(self.group_ranks == self.group_rank)[0])
        """This rank's number in the schedule."""

        table = schedule.transfers
        self.rows = table.select((table.source == self.rank) | (table.destination == self.rank))

    def steps(self, place: Placement) -> list[RankStep]:
        """Returns the steps of this rank, without steps in which it does nothing.

        Args:
            place: Positions of units in this rank's buffer.
        """
        # Rows are sorted by step.
        rows = self._rows_in_elements(place)
        return [_rank_step(step_rows) for _, step_rows in groupby(rows, key=attrgetter("step"))]

    def shared_units(self) -> Intervals:
        """Returns the units that this rank and at least one other rank end with."""
        after = self.schedule.after
        bounds = bounds_of_pieces([after])
        row, piece = expand(after.low, after.high, bounds)

        # Pieces that this rank shares with others.
        num_holders = np.bincount(piece)
        is_own = after.rank[row] == self.rank
        shared = piece[is_own & (num_holders[piece] > 1)]
        return intervals(self.rank, bounds[shared], bounds[shared + 1])

    def _rows_in_elements(self, place: Placement) -> Iterable[_Row]:
        """Yields the rows that move at least one element."""
        rows = self.rows
        sends = rows.source == self.rank
        peers = self.group_ranks[np.where(sends, rows.destination, rows.source)]

        # Units may be narrower than an element.
        columns = (rows.step, peers, sends, place(rows.low), place(rows.high), rows.adds)
        lists = [column.tolist() for column in columns]
        for step, peer, is_sent, low, high, adds in zip(*lists, strict=True):
            if low < high:
                yield _Row(step, peer, is_sent, slice(low, high), adds)


def _group_ranks(
    schedule: Schedule, group: ProcessGroup | None, live_ranks: Sequence[int] | IntArray | None
) -> IntArray:
    """Returns the <int64>[num_ranks] rank of the group for each rank of the schedule; -1 for none."""
    size = dist.get_world_size(group)
    if live_ranks is None:
        live_ranks = np.arange(schedule.num_ranks)

    # One rank of the schedule for each rank of the group.
    live = np.asarray(live_ranks, np.int64)
    assert len(live) == len(np.unique(live)) == size, f"{live} are no {size} different ranks"
    peers = np.full(schedule.num_ranks, -1, np.int64)
    peers[live] = np.arange(size)

    # Otherwise ranks would wait forever for one that is not running.
    table = schedule.transfers
    taking_part = np.unique(np.concatenate([table.source, table.destination]))
    assert (peers[taking_part] >= 0).all(), "the schedule is for a network with the same live ranks"
    return peers


def _rank_step(rows: Iterable[_Row]) -> RankStep:
    """Returns a step: rows between the same two ranks become one message."""
    sends: dict[int, Message] = {}
    receives: dict[int, Message] = {}
    arrivals: list[Arrival] = []
    for row in rows:
        # Both ranks put the rows of a message in the order of the schedule.
        messages = sends if row.sends else receives
        message = messages.setdefault(row.peer, Message(row.peer, []))
        if not row.sends:
            start = message.num_elements
            part = slice(start, start + row.span.stop - row.span.start)
            arrivals.append(Arrival(list(receives).index(row.peer), part, row.span, row.adds))

        # A span joins the last one where that ends.
        if message.spans and message.spans[-1].stop == row.span.start:
            message.spans[-1] = slice(message.spans[-1].start, row.span.stop)
        else:
            message.spans.append(row.span)
    return RankStep(list(sends.values()), list(receives.values()), arrivals)


# ---------------------------------------------------------------------------
# Steps on a buffer


class Execution:
    """Steps running on a buffer; the first is issued at once, the others by `wait`.

    Args:
        steps: Steps of this rank.
        buffer: <any>[N, ...] spans count its first dimension; it changes until `wait` returns.
        group: The ranks; None for all.
        wire: Dtype of messages; None uses the dtype of the buffer.
    """

    def __init__(
        self,
        steps: Sequence[RankStep],
        buffer: Tensor,
        group: ProcessGroup | None,
        wire: torch.dtype | None = None,
    ) -> None:
        self._steps = steps
        self._buffer = buffer
        self._group = group
        self._wire = wire or buffer.dtype
        self._works: list[Any] = []
        self._received: list[Tensor] = []
        self._sent: list[Tensor] = []
        if steps:
            self._issue(0)

    def wait(self) -> None:
        """Runs all steps to their end.

        Raises:
            DistributedError: If another rank is lost or does not respond before the group's timeout.
        """
        for index in range(len(self._steps)):
            if index > 0:
                self._issue(index)
            self._finish(index)

    def _issue(self, index: int) -> None:
        """Sends the messages of a step; the buffer is not written before `_finish`."""
        step = self._steps[index]
        shape = self._buffer.shape[1:]
        self._received = []
        self._sent = []

        # Messages arrive outside of the buffer, which this step still reads.
        operations: list[dist.P2POp] = []
        for message in step.receives:
            scratch = self._buffer.new_empty(message.num_elements, *shape, dtype=self._wire)
            self._received.append(scratch)
            operations.append(
                dist.P2POp(dist.irecv, scratch, group=self._group, group_peer=message.peer)
            )

        # Sent tensors must live until they are sent.
        for message in step.sends:
            # A view of the buffer where it is one span of the same dtype.
            parts = [self._buffer[span] for span in message.spans]
            content = parts[0] if len(parts) == 1 else torch.cat(parts)
            content = content.to(self._wire)
            self._sent.append(content)
            operations.append(
                dist.P2POp(dist.isend, content, group=self._group, group_peer=message.peer)
            )

        try:
            self._works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise self._lost_rank(index, error) from error

    def _finish(self, index: int) -> None:
        """Waits for the messages of a step, then writes them to the buffer."""
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise self._lost_rank(index, error) from error

        # In the order of the rows, so that sums are the same in every run.
        for arrival in self._steps[index].arrivals:
            target = self._buffer[arrival.span]
            content = self._received[arrival.message][arrival.part]
            if arrival.adds:
                target.add_(content)
            else:
                target.copy_(content)

    def _lost_rank(self, index: int, error: RuntimeError) -> DistributedError:
        """Returns an error that names the ranks with which this rank was exchanging data."""
        step = self._steps[index]
        peers = sorted({message.peer for message in (*step.sends, *step.receives)})
        if self._group:  # the group of all ranks numbers them as they are
            peers = [dist.get_global_rank(self._group, peer) for peer in peers]
        names = ", ".join(map(str, peers))
        return DistributedError(
            f"Rank {dist.get_rank()} lost a rank in step {index + 1} of {len(self._steps)} of a "
            f"schedule, in which it exchanges with ranks {names}: it ended, or did not "
            "come in time. The message of the rank that ended first says why; one without a "
            "message was killed. To continue without it, start the others with a schedule that "
            f"declares it dead. (torch: {first_line(error)})"
        )


# ---------------------------------------------------------------------------
# Collectives on one tensor


class ScheduledCollective:
    """A schedule that is ready to run on tensors of any size.

    Build it once: it keeps this rank's rows, and the steps for each size of tensor so far. The
    elements of a tensor are spread evenly over the schedule's units.

    Args:
        schedule: Schedule of all ranks.
        group: The running ranks; None for all.
        live_ranks: See `RankProgram`.
        wire: Dtype of the messages, e.g. torch.bfloat16; None for the dtype of the sums. Units that
            several ranks end with are rounded to it on all of them.

    Source:
        2-D gradient summation (arXiv:1811.06992, 1909.09756) and its ways around failed chips
        (arXiv:2011.03605), as tables of transfers. Differs: float32 sums on a bfloat16 wire.
    """

    def __init__(
        self,
        schedule: Schedule,
        group: ProcessGroup | None = None,
        *,
        live_ranks: Sequence[int] | IntArray | None = None,
        wire: torch.dtype | None = None,
    ) -> None:
        assert wire is None or wire.is_floating_point, f"the wire is {wire}"
        self._program = RankProgram(schedule, group, live_ranks=live_ranks)
        self._wire = wire
        self._shared = self._program.shared_units()
        self._steps_by_size: dict[int, list[RankStep]] = {}

    @torch.no_grad()
    def run(self, x: Tensor) -> None:
        """Executes the schedule in place.

        Args:
            x: <number>[...] this rank's buffer, contiguous. Afterwards, the units that this rank
                ends with hold the sums; the others are undefined.

        Raises:
            DistributedError: If another rank is lost.
        """
        assert x.is_contiguous() and x.dtype != torch.bool, "a buffer of numbers, in place"
        assert self._wire is None or x.is_floating_point(), f"the wire is {self._wire}"

        # Narrow floats are summed in float32.
        flat = x.view(-1)
        sum_dtype = x.dtype
        if x.is_floating_point():
            sum_dtype = torch.promote_types(x.dtype, torch.float32)
        buffer = flat.to(sum_dtype)

        num_elements = flat.numel()
        if num_elements not in self._steps_by_size:
            steps = self._program.steps(self._placement(num_elements))
            self._steps_by_size[num_elements] = steps
        Execution(self._steps_by_size[num_elements], buffer, self._program.group, self._wire).wait()

        # The rank that made a sum gets it in the precision of the others.
        if self._wire is not None and self._wire != buffer.dtype:
            self._round_shared(buffer)
        if buffer.dtype != x.dtype:
            flat.copy_(buffer)

    def _round_shared(self, buffer: Tensor) -> None:
        """Rounds units that other ranks also end with to the wire's dtype."""
        place = self._placement(buffer.numel())
        low = place(self._shared.low).tolist()
        high = place(self._shared.high).tolist()
        for start, stop in zip(low, high, strict=True):
            part = buffer[start:stop]
            part.copy_(part.to(self._wire))

    def _placement(self, num_elements: int) -> Placement:
        """Returns the first element of each unit; units are spread evenly over the tensor."""
        num_units = max(self._program.schedule.num_units, 1)
        whole, rest = divmod(num_elements, num_units)

        # units * num_elements // num_units, which may exceed 64 bits.
        def place(units: IntArray) -> IntArray:
            return units * whole + units * rest // num_units

        return place
