"""Replica groups by torchft: quorum, sums and healing. Only `replica_groups` imports it, for a run that needs it."""

import logging
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch import Tensor

from moe.distributed.collectives import broadcast_from_rank_zero, sum_each
from moe.distributed.launch import World, first_line
from moe.distributed.mesh import MeshConfig
from moe.distributed.replica_groups import (
    GROUP_ID,
    LIGHTHOUSE,
    LiveGroups,
    LostStepError,
    ReplicaSeconds,
)
from moe.errors import DistributedError, MoEError

_DEFAULT_PORT = 29510
_MOST_LOST_IN_A_ROW = 50


# ---------------------------------------------------------------------------
# Shares of a batch


def deal_all_shares(live: LiveGroups, num_groups: int) -> list[int]:
    """Returns this group's shares of a batch; the remaining groups take all shares."""
    return list(range(live.number, num_groups, live.num_live))


def keep_one_share(live: LiveGroups, num_groups: int) -> list[int]:
    """Returns this group's one share of a batch; the shares of lost groups are left out."""
    return [live.number] if live.number < num_groups else []


_SHARES_BY_POLICY = {"constant_work": deal_all_shares, "shrink": keep_one_share}


# ---------------------------------------------------------------------------
# Groups


class LiveReplicaGroups:
    """The replica groups of a run by torchft, as seen by one rank of one of them: see `ReplicaGroups`.

    Args:
        config: Mesh of the whole run; `dp_replicate` is the number of groups.
        world: The ranks of this group.
        lighthouse: Address at which the groups meet.
    """

    def __init__(self, config: MeshConfig, world: World, lighthouse: str) -> None:
        self.num_groups = config.dp_replicate
        self._deal_shares = _SHARES_BY_POLICY[config.on_lost_replica or ""]
        self._world = world
        self._timeout = timedelta(seconds=world.timeout)
        self._lighthouse = lighthouse
        self._is_spare = False
        self._is_healed = False
        self._lost_in_a_row = 0
        self._started = 0.0
        self._seconds = ReplicaSeconds()

    @contextmanager
    def joined(
        self, step: int, save: Callable[[], dict[str, Any]], load: Callable[[dict[str, Any]], None]
    ) -> Iterator[None]:
        """Keeps contact with the other groups inside the block."""
        from torchft.manager import Manager

        # Hide its tracebacks for every lost group.
        logging.getLogger("torchft").setLevel(logging.CRITICAL)

        def load_healed(state: dict[str, Any]) -> None:
            load(state)
            self._is_healed = True

        # Address at which the ranks of this group meet and others find it.
        host = _address_towards(self._lighthouse)
        port = broadcast_from_rank_zero(lambda: self._open_store(host))
        self._group = _build_group(self._world.device_type, self._timeout)
        try:
            self._manager = Manager(
                pg=self._group,
                load_state_dict=load_healed,
                state_dict=save,
                min_replica_size=1,
                use_async_quorum=False,
                timeout=self._timeout,
                quorum_timeout=self._timeout,
                connect_timeout=self._timeout,
                rank=self._world.rank,
                world_size=self._world.size,
                store_addr=host,
                store_port=port,
                lighthouse_addr=self._lighthouse,
                replica_id=os.environ.get(GROUP_ID, ""),
                hostname=host,
                checkpoint_transport=_build_transport(host, self._timeout),
                # All groups draw the same initial weights.
                init_sync=False,
            )
        except (RuntimeError, TimeoutError) as error:
            raise self._did_not_meet(error) from error
        self._manager.load_state_dict({"step": step, "batches_committed": 0})
        try:
            yield
        finally:
            self._group.abort(errored=False)
            self._manager.shutdown(wait=False)

    def begin_step(self) -> LiveGroups:
        """Meets the other groups and returns the next step and its groups."""
        started = time.perf_counter()
        self._is_healed = False
        self._started = started
        try:
            self._manager.start_quorum()
        except MoEError:
            raise  # an error of the run about the state of another group
        except (RuntimeError, TimeoutError) as error:
            raise self._did_not_meet(error) from error
        self._refuse_errors()

        # Groups in this step.
        number = self._manager.participating_rank()
        assert number is not None, "every group takes part once it is healed"
        live = LiveGroups(self._manager.current_step(), number, self._manager.num_participants())
        self._is_spare = not self._deal_shares(live, self.num_groups)

        self._started = time.perf_counter()
        self._count_meeting(live.num_live, self._started - started)
        return live

    def shares(self, live: LiveGroups) -> list[int]:
        """Returns which shares of the batch, 0 to `num_groups` - 1, this group takes."""
        return self._deal_shares(live, self.num_groups) or [live.number % self.num_groups]

    def sum_each(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Returns the sum of each tensor <any>[...] over the groups; values are not changed."""
        return sum_each(values, self._sum_copy)

    def sum_in_place(self, tensors: Sequence[Tensor]) -> None:
        """Replaces each <any>[...] by its sum over the groups, the same to the last bit in each."""
        works = []
        for tensor in tensors:
            if self._is_spare:
                tensor.zero_()
            works.append(self._manager.allreduce(tensor, reduce_op=dist.ReduceOp.SUM))
        for work in works:
            work.wait()
        self._refuse_errors()

    def commit(self) -> None:
        """Returns when the ranks of this group agree that the step counts."""
        if not self._should_commit():
            self._lose_step()
        self._lost_in_a_row = 0

    def take_seconds(self) -> ReplicaSeconds:
        """Returns the cost of losses since the last call, and resets it."""
        seconds = self._seconds
        self._seconds = ReplicaSeconds(live=seconds.live)
        return seconds

    def _sum_copy(self, x: Tensor) -> Tensor:
        total = x.detach().clone()
        self.sum_in_place([total])
        return total

    def _refuse_errors(self) -> None:
        """Aborts the step if an exchange of any rank of this group has failed.

        The ranks agree first: they exchange with each other in a step, and must leave it together.
        """
        has_failed = self._manager.errored() is not None
        if self._world.size > 1:
            number = torch.tensor(int(has_failed))
            dist.all_reduce(number, op=dist.ReduceOp.MAX)
            has_failed = bool(number)
        if not has_failed:
            return

        # Groups that still wait for this one are informed at once, not after their timeout.
        self._group.abort()
        self._manager.report_error(RuntimeError("a rank of this group has lost another group"))
        self._should_commit()
        self._lose_step()

    def _should_commit(self) -> bool:
        try:
            return self._manager.should_commit()
        except (RuntimeError, TimeoutError) as error:
            raise DistributedError(
                f"Rank {self._world.rank} of {self._world.size} lost another rank of its replica "
                f"group. Start the group again with --resume. (torchft: {first_line(error)})"
            ) from error

    def _did_not_meet(self, error: Exception) -> DistributedError:
        return DistributedError(
            f"This replica group did not meet the others at {self._lighthouse} ({LIGHTHOUSE}) "
            f"within {self._world.timeout:g} seconds. Start torchft_lighthouse there, and as many "
            "groups as its --min_replicas; with --resume this one then joins them. (torchft: "
            f"{first_line(error)})"
        )

    def _lose_step(self) -> NoReturn:
        lost = time.perf_counter() - self._started
        seconds = self._seconds
        self._seconds = seconds._replace(
            lost=seconds.lost + lost, lost_steps=seconds.lost_steps + 1
        )

        # After many lost steps in a row, the groups cannot reach each other.
        self._lost_in_a_row += 1
        if self._lost_in_a_row == _MOST_LOST_IN_A_ROW:
            raise DistributedError(
                f"{_MOST_LOST_IN_A_ROW} steps in a row were lost: the replica groups coordinate through "
                f"{self._lighthouse} ({LIGHTHOUSE}), and exchanges among them fail. Check that their machines reach "
                "each other on all ports, and raise --timeout if one is slow."
            )
        raise LostStepError

    def _count_meeting(self, num_live: int, duration: float) -> None:
        seconds = self._seconds._replace(live=num_live)
        if self._is_healed:
            healing = seconds.healing + duration
            self._seconds = seconds._replace(healing=healing, healed=seconds.healed + 1)
        else:
            self._seconds = seconds._replace(meeting=seconds.meeting + duration)

    def _open_store(self, host: str) -> int:
        """Opens the store through which ranks and groups find each other, and returns its port."""
        self._store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            host, 0, is_master=True, wait_for_workers=False, timeout=self._timeout
        )
        return self._store.port


# ---------------------------------------------------------------------------
# Parts of torchft


def _build_group(device_type: str, timeout: timedelta) -> Any:
    """Returns the process group for sums over the groups, which is rebuilt at every change."""
    from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL

    group_types = {"cpu": ProcessGroupGloo, "cuda": ProcessGroupNCCL}
    return group_types[device_type](timeout=timeout)


def _build_transport(host: str, timeout: timedelta) -> Any:
    """Returns the transport of a state to a group that has fallen behind."""
    from torchft.checkpointing import HTTPTransport

    class Transport(HTTPTransport[Any]):
        """torchft's own, at an address that other machines know."""

        def address(self) -> str:
            port = urlparse(super().address()).port
            return f"http://{host}:{port}/checkpoint/"

        def recv_checkpoint(self, *arguments: Any, **options: Any) -> Any:
            # The received state is only read.
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The given buffer is not writable")
                return super().recv_checkpoint(*arguments, **options)

    transport = Transport(timeout=timeout, num_chunks=0)
    handler: Any = transport._server.RequestHandlerClass
    handler.log_message = _say_nothing
    return transport


def _say_nothing(*_: object) -> None:
    """Replaces the line that Python's server prints for every request."""


def _address_towards(lighthouse: str) -> str:
    """Returns the address of this machine in the network of the lighthouse.

    Host names are often unknown to other machines, e.g. in containers.

    Raises:
        DistributedError: When the name of the lighthouse is unknown.
    """
    parts = urlparse(lighthouse)
    try:
        addresses = socket.getaddrinfo(
            parts.hostname, parts.port or _DEFAULT_PORT, type=socket.SOCK_DGRAM
        )

        # Connecting a datagram socket sends nothing.
        family, kind, protocol, _, address = addresses[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise DistributedError(
            f"{LIGHTHOUSE} is {lighthouse}, which this machine cannot resolve ({error}). Give an address that all "
            "replica groups know."
        ) from error
