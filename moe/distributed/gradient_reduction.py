"""Gradients summed by the schedule that a recipe names, in the place of torch's collectives.

FSDP hands over the gradients of a unit as one flat tensor with a chunk for each rank that shards
the unit. The reduce-scatter in the schedule's all-reduce leaves each rank its own chunk, which the
all-reduce then sums over replicas. Both are built once for each size of tensor.

Before: `scheduled` runs schedules, `schedule_choice` names them. Next: `fsdp_exchanges` calls this.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe.distributed.schedule_choice import ScheduleChoice
from moe.distributed.scheduled import ScheduledCollective
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

            # On a narrower wire only what travels is rounded, and what replicas share.
            self._collectives[key] = ScheduledCollective(
                schedule,
                group,
                live_ranks=live_ranks,
                wire=torch.bfloat16 if self._choice.bfloat16 else None,
            )
        return self._collectives[key]
