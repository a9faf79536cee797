"""How ranks find each other and part: what torchrun started becomes a world, and its failures
become messages.
"""

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

_LONGEST_TIMEOUT = 1_000_000  # seconds
_PARTING = 5.0  # seconds
_RETRY = 0.1  # seconds
_ROUNDING = 2.0  # seconds by which torch's timeouts may be late
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_LOST = re.compile(r"gloo[/:]|NCCL|c10d|Connection (closed|reset) by peer|Broken pipe")


class World(NamedTuple):
    """The processes of a run, as one of them sees them.

    Attributes:
        rank: This one's number.
        size: How many there are; 1 when torchrun did not start this process.
        local_rank: This one's number on its machine; its GPU has the same.
        device_type: `cuda` or `cpu`, for `build_mesh`.
    """

    rank: int
    size: int
    local_rank: int
    device_type: str

    def say(self, text: str) -> None:
        """Prints a line for people, once for all ranks."""
        if self.rank == 0:
            print(text, flush=True)  # noqa: T201


@contextlib.contextmanager
def launch(timeout: float = DEFAULT_TIMEOUT) -> Iterator[World]:
    """Joins the ranks that torchrun started, and leaves them at the end; alone, without torchrun,
    it does nothing.

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
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        yield World(0, 1, 0, device_type)
        return
    world = _read_environment(device_type)
    with _default_timeout(timedelta(seconds=timeout)):
        _meet(world, timeout)
        failed = True
        try:
            yield world
            failed = False
        except (MoEError, OSError) as error:
            if not isinstance(error, DistributedError) and _was_said(error):
                raise SystemExit(2) from error
            raise
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and not _LOST.search(str(error)):
                raise
            raise DistributedError(
                f"Rank {world.rank} of {world.size} lost another rank during an exchange: it ended, or did not come "
                f"within {timeout:g} seconds. The message of the rank that ended first says why; one without a "
                "message was killed, perhaps for the memory that it used. If all ranks live and one is only slow, "
                f"raise the timeout (--timeout SECONDS). (torch: {_first_line(error)})"
            ) from error
        finally:
            _part(world, timeout, failed=failed)


def check_timeout(timeout: float) -> None:
    """Raises a ConfigError unless ranks can wait for each other for so many seconds."""
    reason = "seconds; torch counts milliseconds in 32 bits"
    check_number("timeout", timeout, above=0, most=_LONGEST_TIMEOUT, reason=reason)


def _read_environment(device_type: str) -> World:
    """Returns the world that torchrun's variables describe."""
    if missing := [name for name in _TORCHRUN if not os.environ.get(name)]:
        raise ConfigError(
            f"RANK or WORLD_SIZE is set in the environment, but not {', '.join(missing)}. Start ranks with torchrun, "
            "which sets all of them, or unset both for one process."
        )

    size = _read_number("WORLD_SIZE", least=1, most=2**31 - 1)
    rank = _read_number("RANK", least=0, most=size - 1)
    local_rank = _read_number("LOCAL_RANK", least=0, most=size - 1)
    _read_number("MASTER_PORT", least=0, most=2**16 - 1)
    if device_type == "cuda" and local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"Rank {rank} is number {local_rank} on its machine, which has {torch.cuda.device_count()} GPUs. Start at "
            "most as many ranks on a machine as it has GPUs, or hide those with CUDA_VISIBLE_DEVICES= to use the CPU."
        )
    return World(rank, size, local_rank, device_type)


def _read_number(name: str, *, least: int, most: int) -> int:
    """Returns the integer in a variable of torchrun's."""
    text = os.environ[name]
    expected = f"an integer from {least} to {most}; torchrun sets it, unset RANK and WORLD_SIZE for one process"
    check(bool(re.fullmatch(r"\d{1,10}", text)), name, text, expected)
    check(least <= int(text) <= most, name, text, expected)
    return int(text)


@contextlib.contextmanager
def _default_timeout(timeout: timedelta) -> Iterator[None]:
    """Makes `timeout` torch's default for groups: those that a DeviceMesh makes take no other."""
    names = ("default_pg_timeout", "default_pg_nccl_timeout")
    before = [getattr(distributed_c10d, name) for name in names]
    for name in names:
        setattr(distributed_c10d, name, timeout)
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(distributed_c10d, name, value)


def _meet(world: World, timeout: float) -> None:
    """Joins the other ranks.

    Raises:
        DistributedError: When they do not find each other in time.
    """
    backend = "gloo"
    if world.device_type == "cuda":
        torch.cuda.set_device(world.local_rank)
        backend = "cpu:gloo,cuda:nccl"

    deadline = time.monotonic() + timeout
    try:
        if (
            world.rank or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        ):  # else this rank listens itself
            _await_listener(deadline)
        remaining = max(_RETRY, deadline - time.monotonic())
        _in_time(
            partial(_join, backend, timedelta(seconds=remaining), timedelta(seconds=timeout)),
            remaining,
        )
    except RuntimeError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        if "EADDRINUSE" in str(error):
            raise DistributedError(
                f"Rank {world.rank} of {world.size} cannot listen on {address}: the port is in use, by another run or "
                "the rest of one. End that, or give another: torchrun --master-port PORT, or torchrun --standalone, "
                "which finds a free one."
            ) from error
        raise DistributedError(
            f"Rank {world.rank} of {world.size} did not meet the others at {address} within {timeout:g} seconds. The "
            "message of a rank that ended says why; if none did, start the ranks of all nodes with the same address "
            "and port, at which nothing else listens, and the same number of nodes and ranks; if they need longer to "
            f"start, raise the timeout (--timeout SECONDS). (Reason: {_first_line(error)})"
        ) from error


def _await_listener(deadline: float) -> None:
    """Waits until somebody listens where ranks meet; torch's own retries go on for up to twice its
    timeout.

    Raises:
        RuntimeError: When nobody does by then.
    """
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    while True:
        try:
            with socket.create_connection(
                address, timeout=max(_RETRY, deadline - time.monotonic())
            ):
                return
        except (OSError, UnicodeError) as error:  # the latter for a name that no host can have
            if time.monotonic() + _RETRY > deadline:
                raise RuntimeError(f"nobody listens there: {error}") from error
        time.sleep(_RETRY)


def _join(backend: str, remaining: timedelta, timeout: timedelta) -> None:
    """Makes the group of all ranks, whose exchanges wait for `timeout`."""
    store, rank, size = next(rendezvous("env://", timeout=remaining))

    # torchrun keeps its store when it starts ranks again, and with it the addresses of those that
    # are gone
    store = PrefixStore(f"moe/start/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)

    if (
        store.add("moe/connected", 1) == size
    ):  # who fails now must not take away what another connects to
        store.set("moe/all_connected", "1")
    store.wait(["moe/all_connected"], remaining)


def _in_time(function: Callable[[], T], timeout: float) -> T:
    """Returns what a function returns, or leaves it behind in a thread of its own when that takes
    longer.

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

    threading.Thread(target=call, daemon=True).start()
    try:
        return result.result(timeout + _ROUNDING)
    except TimeoutError as error:
        raise RuntimeError("who listens there gives no answer") from error


def _was_said(error: Exception) -> bool:
    """Returns whether another rank has raised an error of the same text; only one of them is told
    False.
    """
    try:
        return default_store().add(f"moe/error/{error}", 1) > 1
    except (RuntimeError, ValueError):  # the rank that keeps the store is gone
        return False


def _part(world: World, timeout: float, *, failed: bool) -> None:
    """Leaves the other ranks.

    Connections are closed when all ranks are at their end, or one failed: who closes his while
    another still reads the last of an exchange ends that one. After a failure, exchanges under way
    may never end; they are waited for shortly.
    """
    with contextlib.suppress(RuntimeError):  # the rank that keeps the store is gone
        store = default_store()
        if failed or store.add("moe/parting", 1) == world.size:
            store.set("moe/parted", "1")
        store.wait(["moe/parted"], timedelta(seconds=timeout))
    leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
    leaving.start()
    leaving.join(_PARTING if failed else None)


def _first_line(error: Exception) -> str:
    """Returns the first line of torch's message; a trace of C++ calls follows it."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
