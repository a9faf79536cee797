"""Dispatch to experts on other ranks: inputs go out over the ep axis, and outputs come back.

The forms of `Dispatcher` (dispatch.py) when every rank of the axis holds E / ep of the experts.
Sending and combining stay with the rank that the tokens are on; the combine weights never leave.

    RowExchange   sends the accepted rows, after their counts
    SlotExchange  sends every slot, empty or not, and never waits for a device

"""

from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from moe.distributed.all_to_all import (
    AllToAllStep,
    PendingRows,
    equal_route,
    send_counts,
    send_rows,
)
from moe.distributed.exchanges import Route
from moe.distributed.mesh import ExpertAxis
from moe.kernels.expert_rows import ExpertRows, combine_rows, gather_rows
from moe.sparse.dispatch import (
    Dispatcher,
    ExpertInputs,
    InFlight,
    SlotDispatcher,
    Slots,
    row_dispatcher,
)

# ---- rows ----


class RowExchange(Dispatcher):
    """Two dispatches, one after the other: tokens to rows that leave, and received rows to the experts here.

        dispatch   tokens [T, D] -> rows [N, D] -> all-to-all -> received rows [M, D] -> experts
        combine    outputs -> [M, D] in the order of arrival -> all-to-all -> [N, D] -> tokens [T, D]

    Args:
        rows: Rows of this rank's tokens, sorted by the experts of all ranks; their counts are sent.
        axis: The ranks.
    """

    def __init__(self, rows: ExpertRows, axis: ExpertAxis) -> None:
        self._rows = rows
        self._counts = send_counts(rows.counts, axis)

    def dispatch(self, tokens: Tensor) -> InFlight:
        """Sends a row for each choice of the tokens <float>[T, D]."""
        leaving = gather_rows(tokens, self._rows)  # [N, D], while the counts travel
        return RowsInFlight(send_rows(leaving, self._route, "dispatch"), self)

    def combine(self, outputs: Tensor) -> Tensor:
        """Returns the tokens <float>[T, D] from the outputs of the experts here."""
        # Back to the order of arrival, to the ranks that they came from, and to their tokens.
        outputs = self.local_dispatcher.combine(outputs)  # [M, D]
        returned = send_rows(outputs, self._route, "combine", reverse=True).wait()  # [N, D]
        return combine_rows(returned, self._rows)

    @cached_property
    def _received(self) -> tuple[Tensor, Route]:
        """Rows from each rank for each expert here <int64>[ep, E / ep], and the route of the rows."""
        return self._counts.wait()

    @property
    def _route(self) -> Route:
        return self._received[1]

    @cached_property
    def local_dispatcher(self) -> Dispatcher:
        """The dispatcher of the received rows to the experts of this rank."""
        return row_dispatcher(sort_received(self._received[0]))


class RowsInFlight(NamedTuple):
    """Rows on their way to this rank.

    Attributes:
        pending: <float>[M, D] rows in the order of arrival, when they are there.
        exchange: The dispatcher that sent this rank's rows.
    """

    pending: PendingRows
    exchange: RowExchange

    def wait(self) -> ExpertInputs:
        """Returns the received rows as the experts here take them."""
        # Sorted by rank now; a second dispatch sorts them by expert.
        received = self.pending.wait()
        return self.exchange.local_dispatcher.dispatch(received).wait()


def sort_received(counts: Tensor) -> ExpertRows:
    """Returns the received row of each row of each expert here.

    All have weight 1, since the rank that sent them keeps their weights. Tried on a CPU, and no
    faster: experts that write the rows in the order of arrival and without a weight, and a gradient
    of the combination in pieces that fit the cache (a layer took 47.4 ms of CPU time either way).

    Args:
        counts: <int64>[ep, E / ep] rows from each rank for each expert; they arrive in this order.
    """
    # The expert of each row, in the order of arrival.
    expert = torch.arange(counts.shape[1], device=counts.device)
    expert = expert.expand_as(counts).flatten()  # [ep * E / ep]
    expert = expert.repeat_interleave(counts.flatten())  # [M]

    # A received row is one row of one expert: it acts as a token.
    token = expert.argsort(stable=True)  # [M]
    row = torch.arange(token.numel(), device=token.device)
    return ExpertRows(
        counts=counts.sum(dim=0),  # [E / ep]
        token=token,
        weight=torch.ones(token.numel(), device=token.device),
        by_token=torch.empty_like(token).scatter(0, token, row),  # the inverse of `token`
        token_start=row,
    )


# ---- slots ----


def exchange_slots(slots: Slots, axis: ExpertAxis) -> "SlotExchange":
    """Returns the dispatcher of slots over the ep axis.

    The batches of ranks may have different shapes: empty slots are added until every rank has as
    many as the rank with the most.

    Args:
        slots: Slots of the experts of all ranks, filled with this rank's tokens.
        axis: The ranks.
    """
    num_slots = slots.token.shape[1]
    num_empty = _most_slots(num_slots, axis) - num_slots
    if num_empty:
        slots = slots._replace(
            token=F.pad(slots.token, (0, num_empty), value=slots.num_tokens),
            weight=F.pad(slots.weight, (0, num_empty)),
        )
    return SlotExchange(slots, axis)


def _most_slots(num_slots: int, axis: ExpertAxis) -> int:
    """Returns the most slots of an expert that any rank has.

    Every layer asks anew: a rank with a known shape cannot know that another's is new. Numbers on
    hosts travel directly and wait for no device; one process on 2 cores took 0.3 ms for it. A group
    without a backend for CPUs must have equal shapes on all ranks.
    """
    if "cpu" not in dist.get_backend_config(axis.group):
        return num_slots
    numbers = torch.full((axis.size,), num_slots, device="cpu")
    return int(AllToAllStep(axis.group).issue(numbers, reverse=False).wait().max())


class SlotExchange(Dispatcher):
    """Fixed slots over the ep axis; every rank must have as many of them.

        dispatch   tokens [T, D] -> slots [E, n, D] -> all-to-all -> [E / ep, ep * n, D] -> experts
        combine    the same way back, n = G * C slots of an expert on each rank

    Args:
        slots: Slots of the experts of all ranks, filled with this rank's tokens.
        axis: The ranks.
    """

    def __init__(self, slots: Slots, axis: ExpertAxis) -> None:
        # Every rank sends as many rows to every other: the route is known without communication.
        num_experts = slots.token.shape[0]
        self._local = SlotDispatcher(slots)
        self._num_experts = num_experts
        self._sizes = {"p": axis.size, "e": num_experts // axis.size}
        self._route = equal_route(axis, slots.token.numel(), slots.token.device)

    def dispatch(self, tokens: Tensor) -> InFlight:
        """Sends the slots of all experts for tokens <float>[T, D]."""
        slots = rearrange(self._local.fill(tokens), "e n d -> (e n) d")
        return SlotsInFlight(send_rows(slots, self._route, "dispatch"), self._sizes)

    def combine(self, outputs: Tensor) -> Tensor:
        """Combines the slots <float>[E / ep, ep * n, D] into the tokens <float>[T, D]."""
        # Sorted by rank again, so that every rank gets its own rows back.
        outputs = rearrange(outputs, "e (p n) d -> (p e n) d", **self._sizes)
        returned = send_rows(outputs, self._route, "combine", reverse=True).wait()
        returned = rearrange(returned, "(e n) d -> e n d", e=self._num_experts)
        return self._local.combine(returned)


class SlotsInFlight(NamedTuple):
    """Slots on their way to this rank.

    Attributes:
        pending: <float>[E * n, D] slots, sorted by the rank that they are from, when they are there.
        sizes: Ranks `p` of the axis, and experts `e` of each.
    """

    pending: PendingRows
    sizes: dict[str, int]

    def wait(self) -> ExpertInputs:
        """Returns the slots <float>[E / ep, ep * n, D] of the experts here."""
        return rearrange(self.pending.wait(), "(p e n) d -> e (p n) d", **self.sizes)
