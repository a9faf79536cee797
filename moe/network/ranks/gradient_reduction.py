"""FSDP's reduce-scatters and sums over replicas, by a schedule.

FSDP hands over the gradients of a unit as one flat tensor with a chunk for each rank that shards
the unit. The reduce-scatter in the all-reduce of a recipe's schedule leaves each rank its own chunk,
which the all-reduce then sums over replicas. Both are built once for each size of tensor.

torch's base class for a reduce-scatter has no public name and is not required.

Read `scheduled` first, which runs schedules, and `schedule_choice`, which names them;
`moe.distributed.sharding` comes next and makes modules units of FSDP.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from moe.network.algorithms import ALL_REDUCE
from moe.network.ranks.schedule_choice import parse_schedule
from moe.network.ranks.scheduled import ScheduledCollective
from moe.network.reduce_scatter import reduce_scatter_of


class ScheduledReduction:
    """Sums gradients by the schedule that a recipe names: a `GradientReduction` of a mesh.

    Args:
        text: Value of mesh.gradient_reduction; see `schedule_choice`.

    Raises:
        ConfigError: If the text names no schedule.
    """

    def __init__(self, text: str) -> None:
        self._choice = parse_schedule("mesh.gradient_reduction", text, ALL_REDUCE)
        self.check_group = self._choice.check_group
        self._collectives: dict[tuple[ProcessGroup, bool, int], ScheduledCollective] = {}

    def attach(self, unit: FSDPModule, replicas: ProcessGroup) -> None:
        """Lets a unit of FSDP sum its gradients; see `GradientReduction.attach`."""
        # Chunks over shards, then each chunk over replicas.
        unit.set_custom_reduce_scatter(ReduceScatter(self))  # pyright: ignore[reportArgumentType]
        if dist.get_world_size(replicas) > 1:
            unit.set_all_reduce_hook(partial(self.all_reduce, group=replicas))

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


class ReduceScatter:
    """Sums the gradients of a unit by a schedule and leaves each rank its shard of them."""

    def __init__(self, gradients: ScheduledReduction) -> None:
        self._gradients = gradients

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns uninitialised memory for the tensors that FSDP passes and receives."""
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
        output_tensor.copy_(self._gradients.reduce_scatter(input_tensor, group))
