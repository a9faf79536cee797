"""All-to-alls on tori: closed forms, published speed-ups and bandwidth, failed links, hot experts.

The published simulations send one slice of the payload at a time along an axis. A stage, one slice
along one axis, is simulated here; stages follow each other as published: slices in turn take
(slices + axes - 1) stages, slices that begin with different axes take as many stages as there are
axes.

Payloads are the bytes that each rank has for all ranks, itself included.

Source: Optimizing All-to-All Collective Communication with Fault Tolerance on Torus Networks (MICRO
    2025, doi:10.1145/3725843.3756057), and the settings of its artefact,
    redbird-arch/micro2025-torus-ft-all2all-artifact@f49e224.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.network_rows import CLOSED_FORM, REPORTS, THIRD_PARTY, Claim, Row, published
from moe.network.all_to_all import along_axes, around, direct, even_counts
from moe.network.axis_hops import Detour, one_way_ring, two_way_ring
from moe.network.schedule import IntArray, Schedule
from moe.network.simulate import simulate
from moe.network.topology import Topology, grid

_UNITS_PER_PAIR = 600
"""Enough units for even slices, halves and shares."""


Seconds = Callable[[float], float]
"""Time of a schedule by the bytes that each rank has for all ranks."""


def _time(schedule: Schedule, topology: Topology, num_senders: int = 0) -> Seconds:
    """Returns the simulated time of a schedule by the bytes of each rank that sends."""
    num_ranks = num_senders or topology.num_ranks

    def seconds(num_bytes: float) -> float:
        return simulate(schedule, topology, num_bytes * num_ranks).seconds

    return seconds


def _without_cable(topology: Topology, one: int, other: int) -> Topology:
    return topology.without(links=[(one, other), (other, one)])


def _even(topology: Topology) -> IntArray:
    return even_counts(topology, _UNITS_PER_PAIR * topology.num_ranks**2)


@REPORTS.register("all_to_all_laws")
def law_rows() -> list[Row]:
    """Returns A1 and A2: time around a ring of N ranks, over a rank's payload divided by a link's bandwidth."""
    rows = []
    for size in (4, 5, 8, 9, 16):
        ring = grid((size,), wraps=True, bandwidth=1.0, latency=0.0)
        rows += _ring_rows(ring, size)
        broken = _without_cable(ring, size - 1, 0)
        rows += _broken_ring_rows(broken, size)
    return rows


def _ring_rows(topology: Topology, size: int) -> list[Row]:
    counts = _even(topology)
    whole = around(counts, range(size), ring=two_way_ring)
    half = around(counts, range(size))
    half_law = (size**2 - size % 2) / (8 * size)

    # Only the busiest link counts.
    what = f"ring of {size}, all the way around, both ways"
    seconds = _time(whole, topology)(1.0)
    rows = [_law("A1", what).close(seconds, (size - 1) / 4, 1e-9)]
    what = f"ring of {size}, the shorter way around"
    seconds = _time(half, topology)(1.0)
    rows.append(_law("A1", what).close(seconds, half_law, 1e-9))
    return rows


def _broken_ring_rows(topology: Topology, size: int) -> list[Row]:
    counts = _even(topology)
    folded = around(counts, range(size), ring=one_way_ring)
    detour = along_axes(counts, topology)
    least = (size**2 - size % 2) / (4 * size)

    # The folded ring is published by its load.
    simulation = simulate(folded, topology, float(size))
    busiest = float(simulation.link_busy_seconds.max())
    what = f"ring of {size} folded at a dead link: busiest link"
    rows = [_law("A2", what).close(busiest, (size - 1) / 2, 1e-9)]

    # No schedule can do with less than the load of the middle of the line.
    what = f"ring of {size} with a dead link, over what is left"
    seconds = _time(detour, topology)(1.0)
    rows.append(_law("A2", what).between(seconds, least * (1 - 1e-9), size / 4))
    return rows


def _claim(name: str, what: str, unit: str = "x") -> Claim:
    return Claim(name, what, unit, THIRD_PARTY)


def _law(name: str, what: str) -> Claim:
    return Claim(name, what, "S/B", CLOSED_FORM)


class _Setting:
    """The published setting on tori of one size: times of stages, by the bytes of a slice.

    Args:
        numbers: Section of the published numbers.
    """

    def __init__(self, numbers: Mapping[str, Any]) -> None:
        self.size = int(numbers["ranks_of_an_axis"])
        self.num_slices = int(numbers["slices"])
        self._link = partial(
            grid, wraps=True, bandwidth=numbers["bandwidth"], latency=numbers["latency"]
        )

        # Stages around one ring, whole and broken.
        ring = self._link((self.size,))
        broken = _without_cable(ring, self.size - 1, 0)
        counts = _even(ring)
        order = range(self.size)
        whole = around(counts, order, ring=two_way_ring)
        half = around(counts, order)
        folded = around(counts, order, ring=one_way_ring)
        self.whole_ring = _time(whole, ring)
        self.half_ring = _time(half, ring)
        self.folded_ring = _time(folded, broken)

    def helped_stage(self, num_axes: int) -> Seconds:
        """Returns the time of the stage in which neighbours carry a broken ring's blocks.

        As published, one neighbour on each other axis helps, shares are by the speeds of a half ring
        and of the folded one, and the other rings wait. A slice crosses to a neighbour while others
        go around and come back.
        """
        # Only the broken ring has something to send.
        torus = self._link((self.size,) * num_axes)
        ring = np.arange(self.size) * self.size ** (num_axes - 1)
        topology = _without_cable(torus, int(ring[-1]), int(ring[0]))
        counts = np.zeros((topology.num_ranks,) * 2, np.int64)
        counts[np.ix_(ring, ring)] = _UNITS_PER_PAIR

        # Loads of the busiest links say how fast both are.
        half_load = self.size**2 // 4 / (2 * self.size)
        folded_load = (self.size - 1) / 2
        folded_speed = half_load / folded_load
        kept = folded_speed / (num_axes - 1 + folded_speed)
        exchange = along_axes(
            counts,
            topology,
            num_slices=self.num_slices,
            rotates=False,
            detour=Detour(kept, sides=1),
        )
        return _time(exchange, topology, num_senders=self.size)

    def in_turn(self, first: Seconds, others: Seconds, num_axes: int) -> Seconds:
        """Returns the time of slices in turn, when the first axis is the slowest."""

        def seconds(num_bytes: float) -> float:
            part = num_bytes / self.num_slices
            return self.num_slices * first(part) + (num_axes - 1) * others(part)

        return seconds

    def rotated(self, stage: Seconds, num_axes: int) -> Seconds:
        """Returns the time of as many slices as axes, each of which begins with another one."""
        return lambda num_bytes: num_axes * stage(num_bytes / num_axes)


@REPORTS.register("all_to_all_speed_ups")
def speed_up_rows() -> list[Row]:
    """Returns A3: mean speed-ups over payloads and tori against whole rings in turn."""
    numbers = published("all_to_all")["tori"]
    setting = _Setting(numbers)
    payloads = [numbers["least_bytes"] * 4**power for power in range(numbers["payloads"])]

    # Mean over payloads, for each torus.
    by_name: dict[str, list[float]] = {}
    for num_axes in numbers["axes"]:
        times = _times(setting, num_axes)
        baseline = setting.in_turn(setting.whole_ring, setting.whole_ring, num_axes)
        for name, seconds in times.items():
            ratio = _mean_ratio(baseline, seconds, payloads)
            by_name.setdefault(name, []).append(ratio)

    # Mean over tori.
    rows = []
    for name, theirs in numbers["speed_ups"].items():
        claim = _claim("A3", f"all-to-all on tori, speed-up: {name}")
        rows.append(claim.close(float(np.mean(by_name[name])), theirs, 0.15))
    return rows


def _times(setting: _Setting, num_axes: int) -> dict[str, Seconds]:
    """Returns the times of the published algorithms on a torus."""
    helped = setting.helped_stage(num_axes)

    def half_ring_and_help(num_bytes: float) -> float:
        return setting.half_ring(num_bytes) + helped(num_bytes)

    half_ring = setting.half_ring
    return {
        "half rings in turn": setting.in_turn(half_ring, half_ring, num_axes),
        "whole rings, rotated": setting.rotated(setting.whole_ring, num_axes),
        "half rings, rotated": setting.rotated(half_ring, num_axes),
        "dead link, folded ring": setting.in_turn(setting.folded_ring, half_ring, num_axes),
        "dead link, other axes help": setting.rotated(half_ring_and_help, num_axes),
    }


def _mean_ratio(baseline: Seconds, seconds: Seconds, payloads: Sequence[float]) -> float:
    ratios = [baseline(payload) / seconds(payload) for payload in payloads]
    return float(np.mean(ratios))


def _cube() -> Topology:
    numbers = published("all_to_all")["tpu_v4"]
    return grid(
        numbers["shape"], wraps=True, bandwidth=numbers["bandwidth"], latency=numbers["latency"]
    )


@REPORTS.register("all_to_all_tpu_v4")
def cube_rows() -> list[Row]:
    """Returns A4 and A5: a TPU v4 of 4 x 4 x 4 chips, routed and along rotated axes."""
    numbers = published("all_to_all")["tpu_v4"]
    cube = _cube()
    largest = numbers["payloads"][-1]
    measured = numbers["measured"] / 1e9
    schedule = direct(_even(cube), cube)
    simulation = simulate(schedule, cube, largest * cube.num_ranks)

    claim = _claim("A4", "4 x 4 x 4 chips, routed: bandwidth of a chip", "GB/s")
    bandwidth = largest / simulation.seconds / 1e9
    rows = [claim.close(bandwidth, measured, 0.15)]

    # Were its busiest link never idle.
    claim = _claim("A4", "the same, by the load of the busiest link", "GB/s")
    busiest = float(simulation.link_busy_seconds.max())
    rows.append(claim.close(largest / busiest / 1e9, measured, 0.15))

    # Against half rings on rotated axes, whole and with a dead link on each axis.
    healthy = _geometric_mean_ratio(cube, numbers["payloads"])
    claim = _claim("A5", "4 x 4 x 4: rotated half rings against routed")
    rows.append(claim.close(healthy, numbers["healthy_speed_up"], 0.2))
    faulty = []
    for neighbour in (1, 4, 16):
        broken = _without_cable(cube, 0, neighbour)
        faulty.append(_geometric_mean_ratio(broken, numbers["payloads"][::4]))
    claim = _claim("A5", "the same with a dead link")
    rows.append(claim.close(float(np.mean(faulty)), numbers["faulty_speed_up"], 0.2))
    return rows


def _geometric_mean_ratio(topology: Topology, payloads: Sequence[float]) -> float:
    """Returns how much longer the routed all-to-all takes than the one along rotated axes."""
    counts = _even(topology)
    routed = _time(direct(counts, topology), topology)
    rotated = _time(along_axes(counts, topology, num_slices=3), topology)
    logs = [np.log(routed(payload) / rotated(payload)) for payload in payloads]
    return float(np.exp(np.mean(logs)))


@REPORTS.register("all_to_all_hot_experts")
def hot_expert_rows() -> list[Row]:
    """Returns A6: the remaining speed if some experts get more tokens than others.

    Every chip has one of the experts, and sends as much as all others. Loads of a layer are drawn,
    with exactly its published standard deviation; layers are spread evenly over those.
    """
    numbers = published("all_to_all")["hot_experts"]
    # Experts are placed side by side, repeatedly.
    cube = _cube()
    expert = np.arange(cube.num_ranks) % numbers["experts"]
    uniform = _rotated_time(np.ones(numbers["experts"]), expert, cube, numbers["bytes"])

    # Each layer has its own loads.
    shares = []
    generator = np.random.default_rng(0)
    least, most = numbers["deviations"]
    deviations = np.linspace(least, most, numbers["layers"])
    for deviation in deviations:
        load = generator.normal(size=numbers["experts"])
        load = 1 + deviation * (load - load.mean()) / load.std()
        load = np.maximum(load, 0.0)
        shares.append(uniform / _rotated_time(load, expert, cube, numbers["bytes"]))

    what = "hot experts, share of the uniform all-to-all's speed: mean, ±10 points"
    claim = _claim("A6", what, "%")
    mean = 100 * float(np.mean(shares))
    rows = [claim.close(mean, numbers["mean"], 10 / numbers["mean"])]
    extremes = (("lowest", min(shares)), ("highest", max(shares)))
    for (name, share), theirs in zip(extremes, numbers["range"], strict=True):
        claim = _claim("A6*", f"the same: {name} of {numbers['layers']} layers", "%")
        rows.append(claim.reported(100 * share, theirs, "±10 points"))
    return rows


def _rotated_time(
    load: NDArray[np.float64], expert: IntArray, topology: Topology, num_bytes: float
) -> float:
    """Returns the time if each expert gets the given load relative to the mean."""
    units = np.round(_UNITS_PER_PAIR * load[expert]).astype(np.int64)
    counts = np.broadcast_to(units, (topology.num_ranks,) * 2)
    schedule = along_axes(counts, topology, num_slices=3)
    return _time(schedule, topology)(num_bytes * load[expert].mean())
