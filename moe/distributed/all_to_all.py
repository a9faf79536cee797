"""All-to-all exchanges of rows between ranks: to the experts and back.

An exchange of rows is two autograd nodes, the first of which issues it and the second awaits it, so
that whatever stands between the two in the forward pass runs meanwhile; the backward pass does the
reverse exchange likewise.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.profiler import record_function

from moe.distributed.mesh import ExpertAxis

T = TypeVar("T")


class Hop(NamedTuple):
    """One all-to-all of a route.

    Attributes:
        group: Who takes part.
        order: <int64>[N] rows in the order in which they leave; None for the order that they have.
        sent: Rows for each rank of the group; None when all ranks get equally many.
        received: Rows from each rank; None likewise.
    """

    group: ProcessGroup
    order: Tensor | None = None
    sent: list[int] | None = None
    received: list[int] | None = None


class Route(NamedTuple):
    """How rows that are sorted by the rank they go to get there; on arrival they are sorted by the
    rank they are from.

    Attributes:
        hops: One all-to-all, or two: inside the node, then across.
    """

    hops: tuple[Hop, ...]


class CountExchange:
    """Tells every rank how many rows it will get, and makes the ragged route; issued when made.

    Args:
        counts: <int64>[E] rows for each expert, the first E / ep of which live on the first rank.
        axis: The ranks.
    """

    def __init__(self, counts: Tensor, axis: ExpertAxis) -> None:
        self._axis = axis
        self._sent = rearrange(counts, "(p e) -> p e", p=axis.size).contiguous()
        with record_function("moe.counts"):
            self._hops = equal_route(axis, axis.size, counts.device).hops
            self._inside = (
                _all_to_all(self._sent, self._hops[0]).wait() if len(self._hops) == 2 else None
            )
            last = self._sent if self._inside is None else self._inside
            self._running = _all_to_all(last, self._hops[-1])

    def wait(self) -> tuple[Tensor, Route]:
        """Returns the rows <int64>[ep, E / ep] that come from each rank for each expert here, and
        the route.
        """
        with record_function("moe.counts.wait"):
            received = self._running.wait()
            if self._inside is None:
                both = torch.stack([self._sent.sum(dim=1), received.sum(dim=1)]).tolist()
                return received, Route((Hop(self._axis.group, None, *both),))
            return received, self._two_level(self._inside, received)

    def _two_level(self, inside: Tensor, received: Tensor) -> Route:
        """Returns the route in two hops.

        Args:
            inside: <int64>[ep, E / ep] rows that arrive over the first hop, by neighbour, then by
                the node they go to.
            received: <int64>[ep, E / ep] rows that arrive in the end, by node, then by place in it.
        """
        first, second = self._hops
        nodes = dist.get_world_size(second.group)
        places = self._axis.size // nodes
        rows = torch.stack([x.sum(dim=1) for x in (self._sent, inside, received)])
        sent, between, arrived = rows.tolist()
        to_neighbours = [sum(sent[place::places]) for place in range(places)]
        from_neighbours = [
            sum(between[place * nodes : (place + 1) * nodes]) for place in range(places)
        ]
        to_nodes = [sum(between[node::nodes]) for node in range(nodes)]
        from_nodes = [sum(arrived[node * places : (node + 1) * places]) for node in range(nodes)]
        return Route(
            (
                Hop(first.group, _blocks_by_column(rows[0], nodes), to_neighbours, from_neighbours),
                Hop(second.group, _blocks_by_column(rows[1], places), to_nodes, from_nodes),
            )
        )


def equal_route(axis: ExpertAxis, num_rows: int, device: torch.device) -> Route:
    """Returns the route of `num_rows` rows, an equal share of which goes to each rank; waits for
    nothing.

    Args:
        axis: The ranks.
        num_rows: Rows in all; a multiple of the ranks.
        device: Of the rows.
    """
    if axis.inside is None or axis.across is None:
        return Route((Hop(axis.group),))
    nodes = dist.get_world_size(axis.across)
    rows = torch.arange(num_rows, device=device)
    first = rearrange(rows, "(o i n) -> (i o n)", o=nodes, i=axis.size // nodes)
    second = rearrange(rows, "(i o n) -> (o i n)", o=nodes, i=axis.size // nodes)
    return Route((Hop(axis.inside, first), Hop(axis.across, second)))


def _blocks_by_column(lengths: Tensor, num_rows: int) -> Tensor:
    """Returns the order <int64>[N] that brings blocks, which stand row by row in a matrix, into
    order by columns.

    Args:
        lengths: <int64>[R * C] rows of data in each block.
        num_rows: R.
    """
    start = lengths.cumsum(0) - lengths
    blocks = rearrange(
        torch.arange(lengths.numel(), device=lengths.device), "(r c) -> (c r)", r=num_rows
    )
    sizes = lengths[blocks]
    before = sizes.cumsum(0) - sizes
    shift = (start[blocks] - before).repeat_interleave(sizes)
    return torch.arange(shift.numel(), device=lengths.device) + shift


class _Running(NamedTuple):
    """An all-to-all under way.

    Attributes:
        buffer: <any>[N, ...] what arrives; not to be read before `wait`.
        work: What to wait for.
    """

    buffer: Tensor
    work: Any

    def wait(self) -> Tensor:
        """Returns <any>[N, ...]: the buffer when all is there."""
        self.work.wait()
        return self.buffer


def _all_to_all(x: Tensor, hop: Hop, *, reverse: bool = False) -> _Running:
    """Returns the running exchange of <any>[N, ...]; in reverse, rows are sent to where they came
    from.
    """
    sent, received = (hop.received, hop.sent) if reverse else (hop.sent, hop.received)
    if hop.order is not None and not reverse:
        x = x.index_select(0, hop.order)
    buffer = x.new_empty(x.shape[0] if received is None else sum(received), *x.shape[1:])
    work = dist.all_to_all_single(
        buffer, x.contiguous(), received, sent, group=hop.group, async_op=True
    )
    return _Running(buffer, work)


class _Journey:
    """One exchange of rows along a route, forward or in reverse, whose last hop runs until it is
    awaited.
    """

    def __init__(self, route: Route, *, reverse: bool) -> None:
        self._hops = tuple(reversed(route.hops)) if reverse else route.hops
        self._reverse = reverse
        self._running: _Running | None = None

    def issue(self, x: Tensor) -> None:
        """Sends rows <any>[N, ...]."""
        for hop in self._hops[:-1]:
            x = self._put_back(_all_to_all(x, hop, reverse=self._reverse).wait(), hop)
        self._running = _all_to_all(x, self._hops[-1], reverse=self._reverse)

    def arrive(self) -> Tensor:
        """Returns the rows <any>[M, ...] that were sent here."""
        assert self._running is not None, "issue comes first"
        rows, self._running = self._put_back(self._running.wait(), self._hops[-1]), None
        return rows

    def _put_back(self, x: Tensor, hop: Hop) -> Tensor:
        """Returns rows <any>[N, ...] in the order that they had before the hop, when they come back
        over it.
        """
        if not self._reverse or hop.order is None:
            return x
        return torch.empty_like(x).index_copy_(0, hop.order, x)


class _Issue(torch.autograd.Function):
    """Sends rows and gives a token without content, which ties the graph to `_Await`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: _Journey, back: _Journey, name: str) -> Tensor:
        ctx.back, ctx.name = back, name
        with record_function(f"moe.{name}"):
            there.issue(x)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        with record_function(f"moe.{ctx.name}.backward.wait"):
            return ctx.back.arrive(), None, None, None


class _Await(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, there: _Journey, back: _Journey, name: str) -> Tensor:
        ctx.back, ctx.name = back, name
        with record_function(f"moe.{name}.wait"):
            return there.arrive()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        with record_function(f"moe.{ctx.name}.backward"):
            ctx.back.issue(grad_outputs[0].contiguous())
        return grad_outputs[0].new_empty(0), None, None, None


def send_rows(x: Tensor, route: Route, name: str, *, reverse: bool = False) -> Callable[[], Tensor]:
    """Issues the exchange of rows <float>[N, D] and returns a function that awaits it and gives
    them <float>[M, D].

    The function must be called once: it is the second node of the graph.

    Args:
        x: Rows in the order of the route.
        route: Where they go.
        name: Of the profiler's ranges: `moe.{name}` issues, `moe.{name}.wait` awaits, `.backward`
            the same backwards.
        reverse: Sends rows back to where the route brought them from.
    """
    there, back = _Journey(route, reverse=reverse), _Journey(route, reverse=not reverse)
    token = _Issue.apply(x, there, back, name)
    return lambda: _Await.apply(token, there, back, name)
