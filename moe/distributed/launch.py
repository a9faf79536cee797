"""How ranks find each other and leave: torchrun's variables become a world, failures a message."""

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from moe.checks import check, check_number
from moe.errors import ConfigError, DistributedError, MoEError
from moe.kernels.torch_private import default_store

T = TypeVar("T")

DEFAULT_TIMEOUT = 600.0
"""Seconds that a rank waits for the others, at the start and in every exchange."""

_MAX_TIMEOUT = 1_000_000  # seconds
_SHUTDOWN_AFTER_FAILURE = 5.0  # seconds
_RETRY_INTERVAL = 0.1  # seconds
_TIMEOUT_SLACK = 2.0  # seconds by which torch's timeouts may be late
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_LOST_RANK = re.compile(r"gloo[/:]|NCCL|c10d|Connection (closed|reset) by peer|Broken pipe")


class World(NamedTuple):
    """The processes of a run, as one of them sees them.

    Attributes:
        rank: This one's number.
        size: How many there are; 1 when torchrun did not start this process.
        local_rank: This one's number on its machine; its GPU has the same.
        device_type: `cuda` or `cpu`, for `build_mesh`.
        timeout: Seconds that it waits for others.
    """

    rank: int
    size: int
    local_rank: int
    device_type: str
    timeout: float = DEFAULT_TIMEOUT

    def print_on_rank_zero(self, text: str) -> None:
        """Prints a line for people, once for all ranks."""
        if self.rank == 0:
            print(text, flush=True)  # noqa: T201


@contextlib.contextmanager
def launch(timeout: float = DEFAULT_TIMEOUT) -> Iterator[World]:
    """Joins the ranks that torchrun started and leaves them at the end; one process is a world of its own.

    On the CPU ranks talk over gloo, on GPUs over NCCL. Inside, every exchange that another rank
    never enters ends after `timeout`, also in groups that are made later. An error of this library
    or of the system that several ranks raise with one text is raised by the first of them only, so
    that it is printed once; the others exit with code 2.

    Args:
        timeout: Seconds to wait for other ranks; longer than the longest time that one may work
            while others wait.

    Yields:
        The world.

    Raises:
        ConfigError: When the timeout is not above 0, torchrun's variables are incomplete or no
            numbers, or there are more ranks on this machine than GPUs.
        DistributedError: When the ranks do not find each other, or one is lost on the way.
    """
    check_timeout(timeout)
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
            # A rank that lost another says so itself; what all ranks raise is said by one.
            if not isinstance(error, DistributedError) and _another_rank_raised(error):
                raise SystemExit(2) from error
            raise
        except RuntimeError as error:
            # torch has no class for a broken connection: its text tells it from other errors.
            if not isinstance(error, dist.DistError) and not _LOST_RANK.search(str(error)):
                raise
            raise DistributedError(
                f"Rank {world.rank} of {world.size} lost another rank during an exchange: it "
                f"ended, or did not come within {timeout:g} seconds. The message of the rank that "
                "ended first says why; one without a message was killed, perhaps for the memory "
                "that it used. If all ranks live and one is only slow, raise the timeout "
                f"(--timeout SECONDS). (torch: {_first_line(error)})"
            ) from error
        finally:
            _leave_ranks(world, timeout, failed=failed)


def backend_of(device_type: str) -> str:
    """Returns the backends of ranks on `cpu` or `cuda`, as torch names them."""
    return "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"


def check_timeout(timeout: float) -> None:
    """Raises a ConfigError unless ranks can wait for each other for so many seconds."""
    reason = "seconds; torch counts milliseconds in 32 bits"
    check_number("timeout", timeout, above=0, most=_MAX_TIMEOUT, reason=reason)


def _read_environment(device_type: str) -> World:
    """Returns the world that torchrun's variables describe."""
    missing = [name for name in _TORCHRUN_VARIABLES if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"RANK or WORLD_SIZE is set in the environment, but not {', '.join(missing)}. Start "
            "ranks with torchrun, which sets all of them, or unset both for one process."
        )

    size = _read_integer("WORLD_SIZE", least=1, most=2**31 - 1)
    rank = _read_integer("RANK", least=0, most=size - 1)
    local_rank = _read_integer("LOCAL_RANK", least=0, most=size - 1)
    _read_integer("MASTER_PORT", least=0, most=2**16 - 1)

    if device_type == "cuda" and local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"Rank {rank} is number {local_rank} on its machine, which has "
            f"{torch.cuda.device_count()} GPUs. Start at most as many ranks on a machine as it has "
            "GPUs, or hide those with CUDA_VISIBLE_DEVICES= to use the CPU."
        )
    return World(rank, size, local_rank, device_type)


def _read_integer(name: str, *, least: int, most: int) -> int:
    """Returns the integer in one of torchrun's variables."""
    text = os.environ[name]
    expected = (
        f"an integer from {least} to {most}; torchrun sets it, unset RANK and WORLD_SIZE for one "
        "process"
    )

    # Ten digits at most: Python refuses to read thousands of them.
    check(bool(re.fullmatch(r"\d{1,10}", text)), name, text, expected)
    check(least <= int(text) <= most, name, text, expected)
    return int(text)


@contextlib.contextmanager
def _default_group_timeout(timeout: timedelta) -> Iterator[None]:
    """Makes `timeout` torch's default for new groups: those that a DeviceMesh makes take no other."""
    names = ("default_pg_timeout", "default_pg_nccl_timeout")
    defaults = {name: getattr(distributed_c10d, name) for name in names}
    for name in names:
        setattr(distributed_c10d, name, timeout)
    try:
        yield
    finally:
        for name, default in defaults.items():
            setattr(distributed_c10d, name, default)


def _join_ranks(world: World, timeout: float) -> None:
    """Joins the other ranks.

    Raises:
        DistributedError: When they do not find each other in time.
    """
    if world.device_type == "cuda":
        torch.cuda.set_device(world.local_rank)

    deadline = time.monotonic() + timeout
    try:
        # The store is kept by torchrun's agent where it says so, else by rank 0.
        agent_keeps_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if world.rank != 0 or agent_keeps_store:
            _wait_for_listener(deadline)

        # A connection that is made and then stays silent is given up too.
        remaining = max(_RETRY_INTERVAL, deadline - time.monotonic())
        init = partial(
            _init_process_group,
            backend_of(world.device_type),
            rendezvous_timeout=timedelta(seconds=remaining),
            exchange_timeout=timedelta(seconds=timeout),
        )
        _call_with_timeout(init, remaining)
    except RuntimeError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        if "EADDRINUSE" in str(error):
            raise DistributedError(
                f"Rank {world.rank} of {world.size} cannot listen on {address}: the port is in "
                "use, by another run or the rest of one. End that, or give another: torchrun "
                "--master-port PORT, or torchrun --standalone, which finds a free one."
            ) from error
        raise DistributedError(
            f"Rank {world.rank} of {world.size} did not meet the others at {address} within "
            f"{timeout:g} seconds. The message of a rank that ended says why; if none did, start "
            "the ranks of all nodes with the same address and port, at which nothing else "
            "listens, and the same number of nodes and ranks; if they need longer to start, raise "
            f"the timeout (--timeout SECONDS). (Reason: {_first_line(error)})"
        ) from error


def _wait_for_listener(deadline: float) -> None:
    """Waits until somebody listens at the address of the store.

    torch's own retries go on for up to twice its timeout.

    Raises:
        RuntimeError: When nobody listens at the deadline.
    """
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    while True:
        remaining = max(_RETRY_INTERVAL, deadline - time.monotonic())
        try:
            with socket.create_connection((host, port), timeout=remaining):
                return
        except (OSError, UnicodeError) as error:  # the latter for a name that no host can have
            if time.monotonic() + _RETRY_INTERVAL > deadline:
                raise RuntimeError(f"nobody listens there: {error}") from error
        time.sleep(_RETRY_INTERVAL)


def _init_process_group(
    backend: str, *, rendezvous_timeout: timedelta, exchange_timeout: timedelta
) -> None:
    """Makes the group of all ranks."""
    store, rank, size = next(rendezvous("env://", timeout=rendezvous_timeout))

    # torchrun keeps its store when it starts ranks again, and in it the addresses of those that
    # are gone: every start has a prefix of its own.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"moe/start/{restart}", store)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=exchange_timeout
    )

    # Nobody goes on before all are connected: a rank that failed now would take away what another
    # still connects to.
    if store.add("moe/connected", 1) == size:
        store.set("moe/all_connected", "1")
    store.wait(["moe/all_connected"], rendezvous_timeout)


def _call_with_timeout(function: Callable[[], T], timeout: float) -> T:
    """Returns the result of a function, or abandons it in a thread when it takes too long.

    It is for what torch has no timeout for: a listener that takes the connection and never answers.

    Raises:
        RuntimeError: When it does not return within about `timeout` seconds.
    """
    result: Future[T] = Future()

    def call() -> None:
        try:
            result.set_result(function())
        except Exception as error:
            result.set_exception(error)

    # A daemon does not keep the process alive when the call never returns.
    threading.Thread(target=call, daemon=True).start()
    try:
        return result.result(timeout + _TIMEOUT_SLACK)
    except TimeoutError as error:
        raise RuntimeError("who listens there gives no answer") from error


def _another_rank_raised(error: Exception) -> bool:
    """Returns whether another rank has raised an error of the same text; False for the first one."""
    try:
        return default_store().add(f"moe/error/{error}", 1) > 1
    except (RuntimeError, ValueError):  # the rank that keeps the store is gone
        return False


def _leave_ranks(world: World, timeout: float, *, failed: bool) -> None:
    """Leaves the other ranks.

    Connections are closed when all ranks are at their end, or one failed: a rank that closes its
    own while another still reads the last of an exchange ends that one too.
    """
    with contextlib.suppress(RuntimeError):  # the rank that keeps the store is gone
        store = default_store()
        if failed or store.add("moe/parting", 1) == world.size:
            store.set("moe/parted", "1")
        store.wait(["moe/parted"], timedelta(seconds=timeout))

    # After a failure exchanges under way may never end: they get a few seconds.
    shutdown = threading.Thread(target=dist.destroy_process_group, daemon=True)
    shutdown.start()
    shutdown.join(_SHUTDOWN_AFTER_FAILURE if failed else None)


def _first_line(error: Exception) -> str:
    """Returns the first line of torch's message; a trace of C++ calls follows it."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
