"""All-to-all exchange of token rows between the ranks that share the experts of a layer.

An exchange of rows is two autograd nodes: the first issues the all-to-all, the second waits for it.
Work of the forward pass between the two overlaps with the transfer. The backward pass does the
reverse exchange in the same way.

If the expert axis spans several nodes, an exchange has two steps: every row goes to the rank in its
own node with the destination's local index, then directly to the destination's node. If a recipe
names a schedule, it replaces torch's all-to-all.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from einops import rearrange, reduce
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.profiler import record_function

from moe.distributed.exchanges import PendingCounts, Route, Transfer
from moe.distributed.mesh import ExpertAxis


class _Transfer(NamedTuple):
    """An all-to-all under way.

    Attributes:
        sent: <any>[M, ...] rows that leave: the sending thread reads them until `wait`, so they must
            not be freed before (pytorch/pytorch issue 75529).
        buffer: <any>[N, ...] rows that arrive; not to be read before `wait`.
        work: torch's handle of the collective.
        group: The ranks.
        order: <int64>[N] position of each arriving row, for rows that come back; None for the order
            of arrival.
    """

    sent: Tensor
    buffer: Tensor
    work: Any
    group: ProcessGroup
    order: Tensor | None = None

    def wait(self) -> Tensor:
        """Returns <any>[N, ...] the rows, when all are there."""
        self.work.wait()
        if self.order is None:
            return self.buffer
        return torch.empty_like(self.buffer).index_copy_(0, self.order, self.buffer)


class AllToAllStep(NamedTuple):
    """One all-to-all of torch.

    Attributes:
        group: Ranks that take part.
        send_order: <int64>[N] row to send as the n-th; None for the given order.
        send_splits: Rows for each rank of the group; None when all ranks get equally many.
        receive_splits: Rows from each rank of the group; None likewise.
    """

    group: ProcessGroup
    send_order: Tensor | None = None
    send_splits: list[int] | None = None
    receive_splits: list[int] | None = None

    def issue(self, x: Tensor, *, reverse: bool) -> _Transfer:
        """Sends rows <any>[N, ...]; see `Step.issue`."""
        send_splits = self.send_splits
        receive_splits = self.receive_splits
        if reverse:
            send_splits, receive_splits = receive_splits, send_splits
        elif self.send_order is not None:
            x = x.index_select(0, self.send_order)

        # Equal splits bring as many rows as leave.
        num_received = x.shape[0]
        if receive_splits is not None:
            num_received = sum(receive_splits)
        buffer = x.new_empty(num_received, *x.shape[1:])

        sent = x.contiguous()
        work = dist.all_to_all_single(
            buffer,
            sent,
            output_split_sizes=receive_splits,
            input_split_sizes=send_splits,
            group=self.group,
            async_op=True,
        )
        order = self.send_order if reverse else None
        return _Transfer(sent, buffer, work, self.group, order)


class DirectCounts(NamedTuple):
    """Numbers of rows in transit to the ranks that will receive those rows.

    Attributes:
        axis: The ranks.
        sent: <int64>[ep, E / ep] rows that this rank sends, by destination and expert there.
        relayed: <int64>[ep, E / ep] rows that pass through this rank between the two steps, by the
            rank of this node that they are from, then by the node that they go to. None for an
            exchange of one step.
        transfer: The last all-to-all, still running.
    """

    axis: ExpertAxis
    sent: Tensor
    relayed: Tensor | None
    transfer: Transfer

    def wait(self) -> tuple[Tensor, Route]:
        """Returns the rows that arrive and their route; see `PendingCounts.wait`."""
        with record_function("moe.counts.wait"):
            received = self.transfer.wait()  # [ep, E / ep]

            if self.relayed is not None:
                return received, self._two_step_route(self.relayed, received)

            # The splits must be on the host: one copy for both, since each waits for the device.
            sent_rows = self.sent.sum(dim=1)  # [ep]
            received_rows = received.sum(dim=1)  # [ep]
            splits = torch.stack([sent_rows, received_rows]).tolist()
            step = AllToAllStep(
                group=self.axis.group, send_splits=splits[0], receive_splits=splits[1]
            )
            return received, (step,)

    def _two_step_route(self, relayed: Tensor, received: Tensor) -> Route:
        """Returns the route inside the node and then across nodes."""
        intra_node = self.axis.intra_node
        inter_node = self.axis.inter_node
        assert intra_node is not None and inter_node is not None, "counts went the same two steps"
        num_nodes = dist.get_world_size(inter_node)
        ranks_per_node = self.axis.size // num_nodes

        # Rows in each block, summed over experts. A block has one origin and one destination.
        sent_rows = self.sent.sum(dim=1)  # [node x local]
        relayed_rows = relayed.sum(dim=1)  # [local x node]
        received_rows = received.sum(dim=1)  # [node x local]

        # Within the node, a rank sends each neighbour all rows for that neighbour's local index on
        # any node; then it sends each node all rows that it holds for it.
        to_local = reduce(sent_rows, "(node local) -> local", "sum", node=num_nodes)
        from_local = reduce(relayed_rows, "(local node) -> local", "sum", node=num_nodes)
        to_node = reduce(relayed_rows, "(local node) -> node", "sum", node=num_nodes)
        from_node = reduce(received_rows, "(node local) -> node", "sum", node=num_nodes)

        # One copy to the host for all four, since each waits for the device.
        splits = torch.cat([to_local, from_local, to_node, from_node]).tolist()
        intra_splits = splits[: 2 * ranks_per_node]
        inter_splits = splits[2 * ranks_per_node :]

        inside = AllToAllStep(
            group=intra_node,
            send_order=_transpose_blocks(sent_rows, num_nodes),
            send_splits=intra_splits[:ranks_per_node],
            receive_splits=intra_splits[ranks_per_node:],
        )
        across = AllToAllStep(
            group=inter_node,
            send_order=_transpose_blocks(relayed_rows, ranks_per_node),
            send_splits=inter_splits[:num_nodes],
            receive_splits=inter_splits[num_nodes:],
        )
        return inside, across


def send_counts(counts: Tensor, axis: ExpertAxis) -> PendingCounts:
    """Tells every rank how many rows it will receive; issues the exchange without waiting for it.

    Args:
        counts: <int64>[E] rows for each expert; the first E / ep experts live on the first rank.
        axis: The ranks.
    """
    sent = rearrange(counts, "(p e) -> p e", p=axis.size).contiguous()  # [ep, E / ep]

    with record_function("moe.counts"):
        if axis.exchange is not None:
            return axis.exchange.send_counts(sent, axis.group)

        # Every rank sends one row of counts to every other: splits are known.
        steps = equal_route(axis, axis.size, counts.device)
        transfer = steps[0].issue(sent, reverse=False)
        if len(steps) == 1:
            return DirectCounts(axis, sent, None, transfer)

        relayed = transfer.wait()  # [ep, E / ep]
        transfer = steps[1].issue(relayed, reverse=False)
        return DirectCounts(axis, sent, relayed, transfer)


def equal_route(axis: ExpertAxis, num_rows: int, device: torch.device) -> Route:
    """Returns the route of rows of which every rank gets an equal share; does not wait.

    Args:
        axis: The ranks.
        num_rows: Rows in all; a multiple of the ranks.
        device: Device of the rows.
    """
    if axis.exchange is not None:
        return axis.exchange.equal_route(num_rows, axis.group)
    if axis.intra_node is None or axis.inter_node is None:
        return (AllToAllStep(axis.group),)

    num_nodes = dist.get_world_size(axis.inter_node)
    sizes = {"node": num_nodes, "local": axis.size // num_nodes}

    # First sorted by the destination's index in its node, then by its node.
    rows = torch.arange(num_rows, device=device)
    by_local_index = rearrange(rows, "(node local n) -> (local node n)", **sizes)
    by_node = rearrange(rows, "(local node n) -> (node local n)", **sizes)
    inside = AllToAllStep(axis.intra_node, by_local_index)
    across = AllToAllStep(axis.inter_node, by_node)
    return inside, across


def _transpose_blocks(lengths: Tensor, num_rows: int) -> Tensor:
    """Returns the order <int64>[N] that reads blocks, stored row by row, column by column.

    Args:
        lengths: <int64>[R * C] elements of each block of an R x C matrix of blocks.
        num_rows: R.
    """
    # Blocks in their new order.
    device = lengths.device
    blocks = torch.arange(lengths.numel(), device=device)
    blocks = rearrange(blocks, "(r c) -> (c r)", r=num_rows)  # [C * R]

    # Offset of each block: from its current start to its start in the new order.
    old_starts = (lengths.cumsum(0) - lengths)[blocks]
    new_lengths = lengths[blocks]
    new_starts = new_lengths.cumsum(0) - new_lengths
    shift = (old_starts - new_starts).repeat_interleave(new_lengths)  # [N]

    return torch.arange(shift.numel(), device=device) + shift


class _OneWay:
    """Rows along a route, or back along it; the last step runs until `wait`."""

    def __init__(self, route: Route, *, reverse: bool) -> None:
        self._steps = route[::-1] if reverse else route
        self._reverse = reverse
        self._transfer: Transfer | None = None

    def issue(self, x: Tensor) -> None:
        """Sends rows <any>[N, ...]."""
        # Only the last step can overlap with other work: each needs the rows of the one before.
        for step in self._steps[:-1]:
            x = step.issue(x, reverse=self._reverse).wait()
        self._transfer = self._steps[-1].issue(x, reverse=self._reverse)

    def wait(self) -> Tensor:
        """Returns the rows <any>[M, ...] that were sent here."""
        assert self._transfer is not None, "issue comes first"
        arrived = self._transfer.wait()
        self._transfer = None
        return arrived


class _Exchange(NamedTuple):
    """Rows one way, and their gradients the other way.

    Attributes:
        rows: In the forward pass.
        gradients: In the backward pass.
        name: Name of the profiler's ranges.
    """

    rows: _OneWay
    gradients: _OneWay
    name: str


class _Issue(torch.autograd.Function):
    """Sends rows; returns an empty tensor that ties `_Await` to this node in the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        with record_function(f"moe.{exchange.name}"):
            exchange.rows.issue(x)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        # The end of this exchange in the backward pass: gradients of the rows have arrived.
        with record_function(f"moe.{ctx.exchange.name}.backward.wait"):
            return ctx.exchange.gradients.wait(), None


class _Await(torch.autograd.Function):
    """Waits for the rows; the backward pass starts here and sends their gradients."""

    @staticmethod
    def forward(ctx: Any, issued: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        with record_function(f"moe.{exchange.name}.wait"):
            return exchange.rows.wait()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        gradient = grad_outputs[0].contiguous()
        with record_function(f"moe.{ctx.exchange.name}.backward"):
            ctx.exchange.gradients.issue(gradient)
        return gradient.new_empty(0), None


class PendingRows(NamedTuple):
    """Rows on their way to other ranks.

    Attributes:
        issued: <float>[0] output of the node that sent them.
        exchange: The exchange that runs.
    """

    issued: Tensor
    exchange: _Exchange

    def wait(self) -> Tensor:
        """Returns the rows <float>[M, D] that arrive here; must be called once, as a graph node."""
        return _Await.apply(self.issued, self.exchange)


def send_rows(x: Tensor, route: Route, name: str, *, reverse: bool = False) -> PendingRows:
    """Issues an exchange of rows; `wait` on the result returns the received rows.

    Args:
        x: <float>[N, D] rows in the order of the route.
        route: Their route.
        name: Name of the profiler's ranges: `moe.{name}` issues, `moe.{name}.wait` waits,
            `.backward` the same backwards.
        reverse: Whether to send rows back to their origin.
    """
    exchange = _Exchange(
        rows=_OneWay(route, reverse=reverse),
        gradients=_OneWay(route, reverse=not reverse),
        name=name,
    )
    issued = _Issue.apply(x, exchange)
    return PendingRows(issued, exchange)
