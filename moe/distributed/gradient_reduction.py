"""The gradients of FSDP summed by a schedule: what its two plug points call.

FSDP hands over the gradients of a unit as one flat tensor with a chunk for each rank that shards
the unit. The reduce-scatter in the schedule's all-reduce leaves each rank its own chunk, which the
all-reduce then sums over replicas. Both are built once for each size of tensor.

Before: `scheduled` runs schedules, `schedule_choice` names them. Next: `sharding` attaches this.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from moe.distributed.schedule_choice import ScheduleChoice
from moe.distributed.scheduled import ScheduledCollective
from moe.network.pruning import reduce_scatter_of
from moe.network.schedule import Schedule


class GradientReduction:
    """Sums gradients by the schedule that a recipe names.

    Args:
        choice: The schedule.
    """

    def __init__(self, choice: ScheduleChoice) -> None:
        self._choice = choice
        self._collectives: dict[tuple[ProcessGroup, bool, int], ScheduledCollective] = {}

    def attach(
        self,
        unit: FSDPModule,
        shards: ProcessGroup,
        replicas: ProcessGroup,
    ) -> None:
        """Makes a unit of FSDP sum its gradients so.

        Args:
            unit: Sharded over `shards` alone; it sums gradients and divides them by nothing.
            shards: Ranks that hold its shards.
            replicas: Ranks that hold the same shard as this one.
        """
        if dist.get_world_size(shards) > 1:
            unit.set_custom_reduce_scatter(_ReduceScatter(self))  # pyright: ignore[reportArgumentType]
        if dist.get_world_size(replicas) > 1:
            unit.set_all_reduce_hook(self._all_reduce_over(replicas))

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

    def _all_reduce_over(self, group: ProcessGroup) -> Callable[[Tensor], None]:
        def sum_over_replicas(x: Tensor) -> None:
            self.all_reduce(x, group)

        return sum_over_replicas

    def _collective(
        self,
        group: ProcessGroup,
        num_elements: int,
        *,
        scatters: bool,
    ) -> ScheduledCollective:
        """Returns the collective for tensors of one size; builds it at the first call."""
        key = (group, scatters, num_elements)
        if key not in self._collectives:
            size = dist.get_world_size(group)
            live_ranks = self._choice.topology(size).live_ranks
            schedule: Schedule = self._choice.build(size, num_elements)
            if scatters:
                schedule = reduce_scatter_of(schedule, live_ranks)
            self._collectives[key] = ScheduledCollective(
                schedule,
                group,
                live_ranks=live_ranks,
                wire=torch.bfloat16 if self._choice.bfloat16 else None,
            )
        return self._collectives[key]


class _ReduceScatter:
    """What FSDP calls in the place of torch's reduce-scatter.

    Its base class in torch has no public name, and nothing asks for it.
    """

    def __init__(self, reduction: GradientReduction) -> None:
        self._reduction = reduction

    def allocate(
        self,
        size: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Returns memory for what FSDP hands over or takes back."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sums a chunk of the input for every rank of a group."""
        assert op == dist.ReduceOp.SUM, f"gradients are summed, not reduced by {op}"
        assert not async_op, "FSDP orders its work by streams"
        chunk = self._reduction.reduce_scatter(input_tensor, group)
        output_tensor.copy_(chunk)
