"""Seconds that this rank waits for others, by process group.

Ranks that train together take equally long for a step: the slowest waits least. The exchanges of this library mark the
start and end of waiting; nothing is counted outside of `measured_waits`. On a GPU, events of its streams are compared,
which costs the host little; the time of transfers counts as waiting, too.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


class Mark(NamedTuple):
    """When a wait began.

    Attributes:
        group: Name of the group of ranks.
        device: Device of the exchange.
        time: Seconds, or an event of a GPU's stream.
    """

    group: str
    device: torch.device
    time: Any


class Waits:
    """Sums the waiting time of this rank."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, Any, Any]] = []

    def add(self, mark: Mark) -> None:
        """Counts a wait that ends now."""
        # Events of a GPU are compared when they have happened.
        now = _now(mark.device)
        if mark.device.type == "cuda":
            self._events.append((mark.group, mark.time, now))
        else:
            self._add_seconds(mark.group, now - mark.time)

    def take(self) -> dict[str, float]:
        """Returns the seconds by name of the group since the last call, and resets them."""
        for group, start, end in self._events:
            end.synchronize()
            self._add_seconds(group, start.elapsed_time(end) / 1000)

        seconds = self._seconds
        self._seconds = {}
        self._events = []
        return seconds

    def _add_seconds(self, group: str, seconds: float) -> None:
        self._seconds[group] = self._seconds.get(group, 0.0) + seconds


_waits: Waits | None = None
"""Counts at present; None outside of `measured_waits`."""


@contextmanager
def measured_waits() -> Iterator[Waits]:
    """Counts the waiting of this process inside the block."""
    # An outer block continues afterwards.
    global _waits
    earlier = _waits
    _waits = Waits()
    try:
        yield _waits
    finally:
        _waits = earlier


def begin_wait(group: ProcessGroup | None, device: torch.device) -> Mark | None:
    """Returns the mark of a wait that begins now; None when nothing is counted."""
    if _waits is None:
        return None
    return Mark(group_name(group), device, _now(device))


def end_wait(mark: Mark | None) -> None:
    """Counts the wait that began at a mark."""
    if _waits is not None and mark is not None:
        _waits.add(mark)


class waiting_for:  # noqa: N801  used as a function
    """Counts a block as waiting for the ranks of a group.

    It is a class, since a generator's context costs twice as much, and a step has dozens of them.

    Args:
        group: The ranks; None for all.
        device: Device of the exchange.
    """

    __slots__ = ("_device", "_group", "_mark")

    def __init__(self, group: ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._mark: Mark | None = None

    def __enter__(self) -> None:
        self._mark = begin_wait(self._group, self._device)

    def __exit__(self, *_: object) -> None:
        end_wait(self._mark)


def group_name(group: ProcessGroup | None) -> str:
    """Returns the name by which waits for a group are counted."""
    return (group or dist.group.WORLD).group_name  # pyright: ignore[reportOptionalMemberAccess]


def _now(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
