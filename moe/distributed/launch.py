"""Joins and leaves the ranks started by torchrun; failures become one message."""

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from moe.checks import check_number
from moe.errors import ConfigError, DistributedError, MoEError
from moe.kernels.torch_private import default_store

T = TypeVar("T")

DEFAULT_TIMEOUT = 600.0
"""Seconds that a rank waits for the others, at the start and in every exchange."""

_SHUTDOWN_AFTER_FAILURE = 5.0  # seconds
_TIMEOUT_SLACK = 2.0  # seconds by which torch's timeouts may be late
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_LOST_RANK = re.compile(r"gloo[/:]|NCCL|c10d|Connection (closed|reset) by peer|Broken pipe")


class World(NamedTuple):
    """The processes of a run, as seen by one of them.

    Attributes:
        rank: Number of this process.
        size: Number of processes; 1 if torchrun did not start this process.
        local_rank: Number of this process on its machine, and of its GPU.
        device_type: `cuda` or `cpu`, for `build_mesh`.
        timeout: Seconds that it waits for others.
    """

    rank: int
    size: int
    local_rank: int
    device_type: str
    timeout: float = DEFAULT_TIMEOUT

    def print_on_rank_zero(self, text: str) -> None:
        """Prints a line, once for all ranks."""
        if self.rank == 0:
            print(text, flush=True)  # noqa: T201


@contextlib.contextmanager
def launch(timeout: float = DEFAULT_TIMEOUT) -> Iterator[World]:
    """Joins the ranks that torchrun started and leaves them at the end; one process is its own world.

    Ranks communicate over gloo on CPUs and over NCCL on GPUs. Inside, every exchange that another
    rank never enters fails after `timeout`, also in groups that are created later. If several ranks
    raise the same error of this library or of the system, only the first raises it, so that it is
    printed once; the others exit with code 2.

    Args:
        timeout: Seconds to wait for other ranks; must exceed any work of one rank while others wait.

    Yields:
        The world.

    Raises:
        ConfigError: When the timeout is not above 0, torchrun's variables are incomplete or not
            numbers, or there are more ranks on this machine than GPUs.
        DistributedError: When the ranks do not find each other, or one is lost later.
    """
    check_number("timeout", timeout, above=0)
    device_type = "cuda" if torch.cuda.is_available() else "cpu"

    # One process that torchrun did not start.
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        had_ranks = dist.is_initialized()
        try:
            yield World(0, 1, 0, device_type, timeout)
        finally:
            if dist.is_initialized() and not had_ranks:  # by `build_mesh`
                dist.destroy_process_group()
        return

    world = _read_environment(device_type)._replace(timeout=timeout)
    with _default_group_timeout(timedelta(seconds=timeout)):
        _join_ranks(world, timeout)
        failed = True
        try:
            yield world
            failed = False
        except (MoEError, OSError) as error:
            # A rank that lost another reports it itself; an error of all ranks is reported once.
            if not isinstance(error, DistributedError) and _another_rank_raised(error):
                raise SystemExit(2) from error
            raise
        except RuntimeError as error:
            # torch has no class for a broken connection: only the text distinguishes it from other
            # errors.
            if not isinstance(error, dist.DistError) and not _LOST_RANK.search(str(error)):
                raise
            raise DistributedError(
                f"Rank {world.rank} of {world.size} lost another rank during an exchange: it "
                f"ended, or did not respond within {timeout:g} seconds. The rank that ended first "
                "says why; a rank without a message was killed, perhaps because it used too much "
                "memory. If all ranks are alive and one is only slow, raise the timeout "
                f"(--timeout SECONDS). (torch: {first_line(error)})"
            ) from error
        finally:
            _leave_ranks(world, timeout, failed=failed)


def backend_of(device_type: str) -> str:
    """Returns torch's names of the backends for ranks on `cpu` or `cuda`."""
    return "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"


def _read_environment(device_type: str) -> World:
    """Returns the world that torchrun's variables describe."""
    missing = [name for name in _TORCHRUN_VARIABLES if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"RANK or WORLD_SIZE is set in the environment, but not {', '.join(missing)}. Start "
            "ranks with torchrun, which sets all of them, or unset both for one process."
        )

    rank, size, local_rank = (int(os.environ[name]) for name in _TORCHRUN_VARIABLES[:3])
    if device_type == "cuda" and local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"Rank {rank} is number {local_rank} on its machine, which has "
            f"{torch.cuda.device_count()} GPUs. Start at most as many ranks on a machine as it has "
            "GPUs, or hide those with CUDA_VISIBLE_DEVICES= to use the CPU."
        )
    return World(rank, size, local_rank, device_type)


@contextlib.contextmanager
def _default_group_timeout(timeout: timedelta) -> Iterator[None]:
    """Makes `timeout` torch's default for new groups: a DeviceMesh accepts no timeout for its own."""
    groups: Any = distributed_c10d  # torch does not export the timeout of NCCL
    gloo_timeout = groups.default_pg_timeout
    nccl_timeout = groups.default_pg_nccl_timeout
    groups.default_pg_timeout = timeout
    groups.default_pg_nccl_timeout = timeout
    try:
        yield
    finally:
        groups.default_pg_timeout = gloo_timeout
        groups.default_pg_nccl_timeout = nccl_timeout


def _join_ranks(world: World, timeout: float) -> None:
    """Joins the other ranks.

    Raises:
        DistributedError: When they do not find each other in time.
    """
    if world.device_type == "cuda":
        torch.cuda.set_device(world.local_rank)

    duration = timedelta(seconds=timeout)
    try:
        _call_with_timeout(
            partial(_init_process_group, backend_of(world.device_type), duration), timeout
        )
    except RuntimeError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        if "EADDRINUSE" in str(error):
            raise DistributedError(
                f"Rank {world.rank} of {world.size} cannot listen on {address}: the port is in "
                "use, perhaps by a run that did not end. End that process, or choose another port: "
                "torchrun --master-port PORT, or torchrun --standalone, which finds a free one."
            ) from error
        raise DistributedError(
            f"Rank {world.rank} of {world.size} could not connect to the others at {address} within {timeout:g} "
            "seconds. If a rank ended, its message says why. Otherwise start the ranks of all nodes with the same "
            "address, a free port, and the same numbers of nodes and ranks; if they need longer to start, raise the "
            f"timeout (--timeout SECONDS). (Reason: {first_line(error)})"
        ) from error


def _init_process_group(backend: str, timeout: timedelta) -> None:
    """Creates the group of all ranks."""
    store, rank, size = next(rendezvous("env://", timeout=timeout))

    # torchrun keeps its store when it restarts ranks, with the addresses of the ranks that are
    # gone: every start has its own prefix. A store of the first rank is new, and a node that returns
    # would count its starts from 0.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"moe/start/{restart}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)

    # No rank continues before all are connected: if one failed now, it would close connections that
    # others are still opening.
    if store.add("moe/connected", 1) == size:
        store.set("moe/all_connected", "1")
    store.wait(["moe/all_connected"], timeout)


def _call_with_timeout(function: Callable[[], T], timeout: float) -> T:
    """Returns the result of a function, or abandons it in a thread when it takes too long.

    torch waits twice as long where nothing listens, and forever for a listener that accepts the
    connection and never responds.

    Raises:
        RuntimeError: When it does not return within about `timeout` seconds.
    """
    result: Future[T] = Future()

    def call() -> None:
        try:
            result.set_result(function())
        except Exception as error:
            result.set_exception(error)

    # A daemon thread does not keep the process alive if the call never returns.
    threading.Thread(target=call, daemon=True).start()
    try:
        return result.result(timeout + _TIMEOUT_SLACK)
    except TimeoutError as error:
        raise RuntimeError("no rank answered there") from error


def _another_rank_raised(error: Exception) -> bool:
    """Returns whether another rank has already raised an error with the same text."""
    try:
        return default_store().add(f"moe/error/{error}", 1) > 1
    except (RuntimeError, ValueError):  # the rank that keeps the store is gone
        return False


def _leave_ranks(world: World, timeout: float, *, failed: bool) -> None:
    """Leaves the other ranks.

    Connections are closed when all ranks are done, or one failed: closing earlier would break the
    exchange that another rank still reads.
    """
    with contextlib.suppress(RuntimeError):  # the rank that keeps the store is gone
        store = default_store()
        if failed or store.add("moe/parting", 1) == world.size:
            store.set("moe/parted", "1")
        store.wait(["moe/parted"], timedelta(seconds=timeout))

    # After a failure a running exchange may never end, so it gets a few seconds.
    shutdown = threading.Thread(target=dist.destroy_process_group, daemon=True)
    shutdown.start()
    shutdown.join(_SHUTDOWN_AFTER_FAILURE if failed else None)


def first_line(error: Exception) -> str:
    """Returns the first line of torch's message, without the C++ trace."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
