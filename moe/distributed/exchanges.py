"""Interfaces of what sums gradients and exchanges rows, and what a mesh may name in place of torch's collectives.

A class in `_PROVIDERS` is imported when a mesh names it: nothing here depends on it.

Next: `mesh` keeps the chosen ones, `sharding` and `all_to_all` call them.
"""

from pkgutil import resolve_name
from typing import Protocol, TypeAlias

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

_PROVIDERS = {
    "gradient_reduction": "moe.network.ranks.gradient_reduction:ScheduledReduction",
    "expert_exchange": "moe.network.ranks.row_exchange:ScheduledExchange",
}
"""Class of each setting of a mesh, made from the text of the setting."""


class Transfer(Protocol):
    """Rows under way."""

    def wait(self) -> Tensor:
        """Returns <any>[N, ...] the rows, when all are there."""
        ...


class Step(Protocol):
    """One all-to-all of rows."""

    def issue(self, x: Tensor, *, reverse: bool) -> Transfer:
        """Sends rows and does not wait for those that arrive.

        Args:
            x: <any>[N, ...] rows, sorted by the rank that they go to.
            reverse: Whether to send rows back to their origin.
        """
        ...


Route: TypeAlias = tuple[Step, ...]
"""How rows get from rank to rank: one step, or two, inside the node first.

Rows leave sorted by their destination rank, and arrive sorted by their origin rank.
"""


class PendingCounts(Protocol):
    """Numbers of rows in transit to the ranks that will receive those rows."""

    def wait(self) -> tuple[Tensor, Route]:
        """Returns how many rows come from each rank, and their route.

        Returns:
            <int64>[ep, E / ep] rows that arrive here, by origin and expert; and the route.
        """
        ...


class GradientReduction(Protocol):
    """Sums the gradients of FSDP's units."""

    def check_group(self, size: int, what: str) -> None:
        """Raises a ConfigError unless gradients can be summed over a group of ranks.

        Args:
            size: Ranks of the group.
            what: Name of the group, used in messages.
        """
        ...

    def attach(self, unit: FSDPModule, replicas: ProcessGroup) -> None:
        """Lets a unit of FSDP sum its gradients.

        Args:
            unit: Sharded over the ranks that hold its shards only; sums gradients without dividing them.
            replicas: Ranks that hold the same shard as this one.
        """
        ...


class ExpertExchange(Protocol):
    """Exchanges rows over the ranks that share the experts of a layer."""

    def check_group(self, size: int, what: str) -> None:
        """See `GradientReduction.check_group`."""
        ...

    def send_counts(self, sent: Tensor, group: ProcessGroup) -> PendingCounts:
        """Tells every rank how many rows it will receive; does not wait.

        Args:
            sent: <int64>[ep, E / ep] rows that this rank sends, by destination and expert there.
            group: The ranks.
        """
        ...

    def equal_route(self, num_rows: int, group: ProcessGroup) -> Route:
        """Returns the route of rows of which every rank gets an equal share; does not wait."""
        ...


def load_gradient_reduction(text: str) -> GradientReduction:
    """Returns what a value of mesh.gradient_reduction names.

    Raises:
        ConfigError: If it names nothing.
    """
    return resolve_name(_PROVIDERS["gradient_reduction"])(text)


def load_expert_exchange(text: str) -> ExpertExchange:
    """Returns what a value of mesh.expert_exchange names.

    Raises:
        ConfigError: If it names nothing.
    """
    return resolve_name(_PROVIDERS["expert_exchange"])(text)
