"""Replica groups that can fail while a run continues.

A replica group is a separate launch: a mesh with one copy of the model and all its experts. The
groups meet before each step. The live groups share the batch and sum their gradients; the step
counts only if every sum succeeds. A group that has fallen behind receives the state of an
up-to-date group. Only tensors and ranks are handled: the caller defines the state.

`live_replica_groups` implements the interface by torchft, and is imported when a run asks for it.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pkgutil import resolve_name
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlparse

from torch import Tensor

from moe.distributed.launch import World
from moe.distributed.mesh import MeshConfig
from moe.errors import ConfigError

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
"""Variable with the address of the lighthouse, where groups meet."""

GROUP_ID = "REPLICA_GROUP_ID"
"""Variable with the number of a group, which orders the groups' shares of a batch."""

_LIVE_REPLICA_GROUPS = "moe.distributed.live_replica_groups:LiveReplicaGroups"


class LostStepError(Exception):
    """A group was lost during a step, which does not count and is repeated."""


class LiveGroups(NamedTuple):
    """The groups that take a step.

    Attributes:
        step: Number of the step, from 0.
        number: Number of this group among them.
        num_live: Number of groups.
    """

    step: int
    number: int
    num_live: int


class ReplicaSeconds(NamedTuple):
    """Cost of lost groups for this group.

    Attributes:
        live: Number of groups in the last step.
        meeting: Seconds of waiting for the others before steps, without healing.
        healing: Seconds of waiting before steps in which this group was healed.
        lost: Seconds in steps that were lost.
        lost_steps: Number of lost steps.
        healed: How often this group was healed.
    """

    live: int = 0
    meeting: float = 0.0
    healing: float = 0.0
    lost: float = 0.0
    lost_steps: int = 0
    healed: int = 0


class ReplicaGroups(Protocol):
    """The replica groups of a run, as seen by one rank of one of them.

    Attributes:
        num_groups: Number of groups when none is lost.
    """

    num_groups: int

    def joined(
        self, step: int, save: Callable[[], dict[str, Any]], load: Callable[[dict[str, Any]], None]
    ) -> AbstractContextManager[None]:
        """Keeps contact with the other groups inside the block.

        Args:
            step: Updates of this group so far.
            save: Returns the state after the updates so far, for a group that has fallen behind.
            load: Loads such a state.
        """
        ...

    def begin_step(self) -> LiveGroups:
        """Meets the other groups and returns the next step and its groups.

        Afterwards, a group that had fallen behind has the state of another group.

        Raises:
            LostStepError: When a group is lost meanwhile.
            DistributedError: When the lighthouse does not answer, or many consecutive steps are lost.
        """
        ...

    def shares(self, live: LiveGroups) -> list[int]:
        """Returns which shares of the batch, 0 to `num_groups` - 1, this group takes.

        A spare computes the share of a group that it could replace, but contributes zeros.
        """
        ...

    def sum_each(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Returns the sum of each tensor <any>[...] over the groups; values are not changed.

        Raises:
            LostStepError: When a group is lost meanwhile.
        """
        ...

    def sum_in_place(self, tensors: Sequence[Tensor]) -> None:
        """Replaces each <any>[...] by its sum over the groups, the same to the last bit in each.

        Raises:
            LostStepError: When a group is lost meanwhile; the tensors then hold no result.
        """
        ...

    def commit(self) -> None:
        """Returns when the ranks of this group agree that the step counts.

        Raises:
            LostStepError: When it does not count.
        """
        ...

    def take_seconds(self) -> ReplicaSeconds:
        """Returns the cost of losses since the last call, and resets it."""
        ...


def find_replica_groups(config: MeshConfig, world: World) -> ReplicaGroups | None:
    """Returns the replica groups of a mesh; None if no replica may be lost.

    Raises:
        ConfigError: When torchft is missing, or the address of the lighthouse.
    """
    if config.on_lost_replica is None:
        return None

    # Hide torchft's messages on every step; RUST_LOG=info shows them.
    os.environ.setdefault("RUST_LOG", "error")
    try:
        import torchft  # noqa: F401  only whether it is there
    except ImportError as error:
        raise ConfigError(
            f"mesh.on_lost_replica is {config.on_lost_replica}, which needs torchft. Install it "
            "with `pip install 'stmoe[ft]'`."
        ) from error

    address = os.environ.get(LIGHTHOUSE, "")
    if not urlparse(address).hostname:
        raise ConfigError(
            f"mesh.on_lost_replica is {config.on_lost_replica}, and {LIGHTHOUSE} is {address!r}; "
            "expected the address of the lighthouse of all replica groups, e.g. http://localhost:29510. "
            "Start torchft_lighthouse --min_replicas 1 there first."
        )

    # By name, since that module builds on this one.
    return resolve_name(_LIVE_REPLICA_GROUPS)(config, world, address)
