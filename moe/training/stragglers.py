"""Which rank delays the others: seconds of work and of waiting of every rank, by axis.

Ranks that train together take equally long for a step: a slow rank works while the others wait.
Waiting is measured where a rank exchanges (moe/distributed/wait_seconds.py); the rest of its steps is
its own work, including batches. The ranks exchange a few numbers every log interval.

Source:
    PowerAI DDL (arXiv:1708.02188), whose product lists seconds by dimension and replaces a rank
    that was slow in three checks. Differs: only names it.
"""

import statistics
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from moe.distributed.collectives import all_gather_flat
from moe.distributed.mesh import Mesh
from moe.distributed.wait_seconds import Waits, group_name

WORK = "work"
OTHER_AXIS = "all"
"""Name under which waiting for all ranks, or all data ranks, is listed."""

NUM_TIMES = 3
"""Consecutive intervals in which a rank must be the slowest before it is named."""

_LEAST_SHARE = 0.1
"""Share of the interval that a slow rank must cost the others."""

_LEAST_SPREADS = 5.0
"""Multiple of the others' median distance from their median below which a delay is noise."""


class RankSeconds(NamedTuple):
    """Seconds of all ranks in a log interval.

    Attributes:
        columns: Seconds of each rank: of its own `work`, and of waiting, by mesh axis.
    """

    columns: dict[str, list[float]]

    @property
    def work(self) -> list[float]:
        """Seconds of work of each rank."""
        return self.columns[WORK]

    @property
    def total(self) -> float:
        """Seconds of the interval, by the rank that took longest."""
        return max(map(sum, zip(*self.columns.values(), strict=True)))

    @property
    def slowest(self) -> int:
        """The rank that worked longest."""
        return self.work.index(max(self.work))

    @property
    def median_of_others(self) -> float:
        """Median of the work of the others."""
        return statistics.median(self._others())

    @property
    def has_straggler(self) -> bool:
        """Whether the slowest rank works longer than the others by more than noise."""
        # Spread of the others.
        median = self.median_of_others
        distances = [abs(seconds - median) for seconds in self._others()]
        noise = _LEAST_SPREADS * statistics.median(distances)
        return max(self.work) - median > max(noise, _LEAST_SHARE * self.total)

    def _others(self) -> list[float]:
        others = list(self.work)
        others.pop(self.slowest)
        return others


class RankClock:
    """Measures the steps of this rank; every rank of a mesh has one.

    Args:
        mesh: The ranks.
        waits: Measures how long this rank waits.
    """

    def __init__(self, mesh: Mesh, waits: Waits) -> None:
        self._waits = waits
        self._axis_of_group = _axes_by_group(mesh)
        self._columns = [WORK, *dict.fromkeys(self._axis_of_group.values()), OTHER_AXIS]
        self._seconds = dict.fromkeys(self._columns, 0.0)
        self._started = time.perf_counter()

    def begin_step(self) -> None:
        """Starts to measure; waiting before is not part of the step."""
        self._waits.take()
        self._started = time.perf_counter()

    def end_step(self) -> None:
        """Counts the step: time without waiting is work."""
        total = time.perf_counter() - self._started
        waits = self._waits.take()
        self._seconds[WORK] += total - sum(waits.values())

        # Groups that are not an axis consist of all ranks, or all data ranks.
        for group, seconds in waits.items():
            axis = self._axis_of_group.get(group, OTHER_AXIS)
            self._seconds[axis] += seconds

    def gather(self) -> RankSeconds:
        """Returns the seconds of all ranks since the last call; every rank must call it."""
        here = torch.tensor(list(self._seconds.values()), dtype=torch.float64)
        self._seconds = dict.fromkeys(self._columns, 0.0)

        # A few numbers on the host, regardless of the model's device.
        everyone = here.new_empty(dist.get_world_size() * len(here))
        all_gather_flat(everyone, here, None)
        columns = everyone.view(-1, len(here)).T.tolist()
        return RankSeconds(dict(zip(self._columns, columns, strict=True)))


class StragglerWatch:
    """Names the rank that was slowest in several consecutive intervals."""

    def __init__(self) -> None:
        self._rank = -1
        self._times = 0

    def observe(self, seconds: RankSeconds) -> int | None:
        """Returns the rank that has been slow for several intervals; None for none."""
        # An interval without a straggler resets the count.
        if not seconds.has_straggler:
            self._times = 0
            return None

        # So does a different rank.
        if seconds.slowest != self._rank:
            self._times = 0
        self._rank = seconds.slowest
        self._times += 1
        return self._rank if self._times >= NUM_TIMES else None

    @property
    def is_news(self) -> bool:
        """Whether the last interval is the first for which the rank is named."""
        return self._times == NUM_TIMES


def straggler_text(seconds: RankSeconds, step: int) -> str:
    """Returns the warning that names the slowest rank."""
    # The axis with the longest waiting.
    rank = seconds.slowest
    waits = {}
    for axis, column in seconds.columns.items():
        if axis != WORK:
            waits[axis] = statistics.median(column)
    axis = max(waits, key=waits.__getitem__)
    return (
        f"step {step}: rank {rank} was the slowest {NUM_TIMES} times running. It worked "
        f"{seconds.work[rank]:.3g} s where the median of the others is "
        f"{seconds.median_of_others:.3g} s of {seconds.total:.3g} s; they wait for it, most of all "
        f"on {axis}. Look at its machine: what else runs there, its clock rate, its disk."
    )


def metric_values(seconds: RankSeconds, straggler: int | None) -> dict[str, float]:
    """Returns the numbers of an interval under their names in logs."""
    values = {
        "ranks/slowest": float(seconds.slowest),
        "ranks/slowest_work_seconds": max(seconds.work),
        "ranks/median_work_seconds": seconds.median_of_others,
    }
    if straggler is not None:
        values["ranks/straggler"] = float(straggler)
    return values


def _axes_by_group(mesh: Mesh) -> dict[str, str]:
    """Returns the axis of each group of ranks, by the group's name."""
    groups = {
        "dp_replicate": [mesh.dense.get_group(0)],
        "dp_shard": [mesh.experts.get_group(1)],
        "tp": [mesh.device_mesh["tp"].get_group()],
        "ep": [mesh.device_mesh["ep"].get_group()],
        "dp_shard x ep": [mesh.dense.get_group(1)],
    }

    # Two-level exchanges have separate groups.
    if mesh.ep is not None:
        nodes = (mesh.ep.intra_node, mesh.ep.inter_node)
        groups["ep"] += [group for group in nodes if group is not None]

    # If two axes are one group, the first gives the name.
    axes: dict[str, str] = {}
    for axis, axis_groups in groups.items():
        for group in axis_groups:
            if dist.get_world_size(group) > 1:
                axes.setdefault(group_name(group), axis)
    return axes
