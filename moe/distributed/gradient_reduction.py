"""FSDP's all-gathers, reduce-scatters and sums over replicas, by torch or by a schedule.

FSDP hands over the gradients of a unit as one flat tensor with a chunk for each rank that shards
the unit. The reduce-scatter in the all-reduce of a recipe's schedule leaves each rank its own chunk,
which the all-reduce then sums over replicas. Both are built once for each size of tensor.

All exchanges are torch's own collectives, or sums by a schedule, and count what they wait. torch's
base classes for them have no public name and are not required.

Before: `scheduled` runs schedules, `schedule_choice` names them. Next: `sharding` makes modules units
of FSDP.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from moe.distributed.collectives import all_gather_flat, reduce_scatter_flat
from moe.distributed.schedule_choice import ScheduleChoice
from moe.distributed.scheduled import ScheduledCollective
from moe.distributed.wait_seconds import Mark, begin_wait, end_wait, waiting_for
from moe.network.reduce_scatter import reduce_scatter_of


class GradientReduction:
    """Sums gradients by the schedule that a recipe names.

    Args:
        choice: The schedule.
    """

    def __init__(self, choice: ScheduleChoice) -> None:
        self._choice = choice
        self._collectives: dict[tuple[ProcessGroup, bool, int], ScheduledCollective] = {}

    def reduce_scatter(self, x: Tensor, group: ProcessGroup) -> Tensor:
        """Returns this rank's chunk <float>[N / n] of the sum over a group of n ranks; a view.

        Args:
            x: <float>[N] this rank's part, a chunk for each rank; overwritten.
            group: The ranks.
        """
        self._collective(group, x.numel(), scatters=True).run(x)
        return x.chunk(dist.get_world_size(group))[dist.get_rank(group)]

    def all_reduce(self, x: Tensor, group: ProcessGroup) -> None:
        """Replaces <float>[N] by its sum over a group."""
        self._collective(group, x.numel(), scatters=False).run(x)

    def _collective(
        self, group: ProcessGroup, num_elements: int, *, scatters: bool
    ) -> ScheduledCollective:
        """Returns the collective for tensors of one size; builds it at the first call."""
        key = (group, scatters, num_elements)
        if key not in self._collectives:
            # A unit is an element: chunks are FSDP's to the last one.
            size = dist.get_world_size(group)
            live_ranks = self._choice.topology(size).live_ranks
            schedule = self._choice.build(size, num_elements)

            # FSDP wants one chunk on each rank, the i-th on the i-th.
            if scatters:
                schedule = reduce_scatter_of(schedule, live_ranks)

            # On a narrower wire, only messages and units shared by replicas are rounded.
            self._collectives[key] = ScheduledCollective(
                schedule,
                group,
                live_ranks=live_ranks,
                wire=torch.bfloat16 if self._choice.bfloat16 else None,
            )
        return self._collectives[key]


def attach_exchanges(
    unit: FSDPModule,
    shards: ProcessGroup,
    replicas: ProcessGroup,
    gradients: GradientReduction | None,
) -> None:
    """Sets the exchanges of a unit of FSDP.

    Args:
        unit: Sums gradients without dividing them; with `gradients` it is sharded over `shards`
            only.
        shards: Ranks that hold its shards.
        replicas: Ranks that hold the same shard as this one.
        gradients: Sums them by a schedule; None for torch's own collectives.
    """
    # Parameters, if more than one rank has a part of them.
    if dist.get_world_size(shards) > 1:
        unit.set_custom_all_gather(AllGather())  # pyright: ignore[reportArgumentType]

    # Gradients: chunks over shards, then each chunk over replicas.
    replica_sum = ReplicaSum(replicas, gradients)
    scatter = ReduceScatter(replica_sum, gradients)
    unit.set_custom_reduce_scatter(scatter)  # pyright: ignore[reportArgumentType]
    if dist.get_world_size(replicas) > 1:
        unit.set_all_reduce_hook(replica_sum)


class _Memory:
    """Allocates memory for the tensors that FSDP passes and receives."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns uninitialised memory."""
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(_Memory):
    """Gathers the shards of a unit's parameters."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Gathers a shard of every rank of a group."""
        with waiting_for(group, input_tensor.device):
            return all_gather_flat(output_tensor, input_tensor, group, async_op=async_op)


class ReplicaSum:
    """FSDP calls it when a shard of gradients is to be summed over replicas, or has been summed.

    Torch's own sum runs between the reduce-scatter and this call; a schedule's sum runs here.

    Args:
        group: The replicas.
        gradients: Sums gradients by a schedule; None if torch sums them.
    """

    def __init__(self, group: ProcessGroup, gradients: GradientReduction | None) -> None:
        self._group = group
        self._gradients = gradients
        self._mark: Mark | None = None

    def begin(self, device: torch.device) -> None:
        """Marks the start of torch's sum."""
        self._mark = begin_wait(self._group, device)

    def __call__(self, x: Tensor) -> None:
        """Replaces <float>[N] by its sum over the replicas."""
        # Torch has summed before this call.
        if self._gradients is None:
            end_wait(self._mark)
            return
        with waiting_for(self._group, x.device):
            self._gradients.all_reduce(x, self._group)


class ReduceScatter(_Memory):
    """Sums the gradients of a unit and leaves each rank its shard of them.

    Args:
        replica_sum: The next sum.
        gradients: Sums gradients by a schedule; None for torch's own reduce-scatter.
    """

    def __init__(self, replica_sum: ReplicaSum, gradients: GradientReduction | None) -> None:
        self._replica_sum = replica_sum
        self._gradients = gradients

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns memory; for a unit held by one rank, torch then sums over replicas."""
        # No other call marks the start of that sum; the last of two calls counts.
        memory = super().allocate(size, dtype=dtype, device=device)
        self._replica_sum.begin(device)
        return memory

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Sums a chunk of the input for every rank of a group."""
        assert op == dist.ReduceOp.SUM, f"gradients are summed, not reduced by {op}"
        assert not async_op, "FSDP orders its work by streams"
        with waiting_for(group, input_tensor.device):
            if self._gradients is None:
                reduce_scatter_flat(output_tensor, input_tensor, group)
            else:
                output_tensor.copy_(self._gradients.reduce_scatter(input_tensor, group))

        # Next, torch sums over replicas.
        self._replica_sum.begin(input_tensor.device)
