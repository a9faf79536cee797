"""The time of an update's collectives on a network, each with the schedule that is best for it.

For every collective of the plan the algorithms of `moe.network.algorithms` are built on the ranks of
a group, as they lie on the network. Each has a bound, what its busiest link carries, and an estimate,
as if its steps were barriers. They are simulated, the lowest estimate first; left out is what cannot
win by its bound, or is far behind by its estimate. All groups of an axis run at once: groups that
share links are simulated together, and of parts of the network that are alike one is.

Next: `network_table` shows it, `network_search` compares meshes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from moe.errors import ConfigError
from moe.network.algorithms import ALL_REDUCE as ALL_REDUCE_ALGORITHMS
from moe.network.algorithms import ALL_TO_ALL as ALL_TO_ALL_ALGORITHMS
from moe.network.algorithms import Algorithm
from moe.network.critical_path import CriticalPath
from moe.network.halves import all_gather_of, reduce_scatter_of
from moe.network.routes import find_routes
from moe.network.schedule import IntArray, Intervals, Schedule, Transfers
from moe.network.simulate import Simulation, simulate
from moe.network.topology import Topology
from moe.network.topology_file import Network
from moe.planning.network_placement import Groups, Placement
from moe.planning.traffic import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    Collective,
    Kind,
)
from moe.registry import Registry

_UNITS_PER_RANK = 720
"""Units of a payload for each rank of a group: even shares for 1 to 6 colours and 16 slices."""

_FAR_BEHIND = 3.0
"""Times the best time from which an estimate is not simulated: barriers overstate by less."""

_DIGITS = 9
"""Decimal digits to which times of two parts of a network agree that are alike."""


class Recipe(NamedTuple):
    """How a kind of collective is made of the algorithms of a registry.

    Attributes:
        algorithms: Builders.
        part: Returns what is carried out of what they build.
        units_of_size: Returns the units of a payload for a group of so many ranks.
    """

    algorithms: Registry[Algorithm]
    part: Callable[[Schedule], Schedule]
    units_of_size: Callable[[int], int]


def _whole(schedule: Schedule) -> Schedule:
    return schedule


def _units_of_reduction(size: int) -> int:
    return size * _UNITS_PER_RANK


def _units_of_exchange(size: int) -> int:
    return size * size * _UNITS_PER_RANK


RECIPES: dict[Kind, Recipe] = {
    ALL_REDUCE: Recipe(ALL_REDUCE_ALGORITHMS, _whole, _units_of_reduction),
    REDUCE_SCATTER: Recipe(ALL_REDUCE_ALGORITHMS, reduce_scatter_of, _units_of_reduction),
    ALL_GATHER: Recipe(ALL_REDUCE_ALGORITHMS, all_gather_of, _units_of_reduction),
    ALL_TO_ALL: Recipe(ALL_TO_ALL_ALGORITHMS, _whole, _units_of_exchange),
}
"""How each kind is made."""


class Candidate(NamedTuple):
    """An algorithm that was compared.

    Attributes:
        name: In its registry.
        steps: Steps of its schedule.
        bound: Seconds of its busiest link, which it needs at least.
        estimate: Seconds with a barrier after each step, more or less.
        seconds: Simulated seconds; None where it lost before.
    """

    name: str
    steps: int
    bound: float
    estimate: float
    seconds: float | None = None


@dataclass(frozen=True)
class TimedCollective:
    """A collective, the algorithm chosen for it, and its time.

    Attributes:
        collective: What is exchanged, and how often.
        groups: The groups that do it at the same time.
        num_simulated: Groups that were simulated for all of them.
        candidates: What was compared, the best first.
        unfit: Why others could not be built, by name.
        simulation: That of the best one.
    """

    collective: Collective
    groups: Groups
    num_simulated: int
    candidates: tuple[Candidate, ...]
    unfit: dict[str, str]
    simulation: Simulation

    @property
    def algorithm(self) -> str:
        """Name of the best algorithm."""
        return self.candidates[0].name

    @property
    def seconds_per_call(self) -> float:
        """Simulated seconds of one call."""
        return self.simulation.seconds

    @property
    def seconds(self) -> float:
        """Seconds of all calls of an update, one after the other."""
        return self.seconds_per_call * self.collective.num_calls

    @cached_property
    def path(self) -> CriticalPath:
        """Where the time of a call goes."""
        return self.simulation.path


@dataclass(frozen=True)
class NetworkPlan:
    """The collectives of an update on a network.

    Attributes:
        network: Links, and what is said of them.
        placement: Where the ranks stand.
        dead: Ranks of the network that have failed.
        parts: The collectives, in the order of the plan.
    """

    network: Network
    placement: Placement
    dead: frozenset[int]
    parts: tuple[TimedCollective, ...]

    @property
    def seconds(self) -> float:
        """Seconds of all collectives, one after the other."""
        return sum(part.seconds for part in self.parts)


class _Instance(NamedTuple):
    """What one group does.

    Attributes:
        ranks: <int64>[size] its ranks of the network.
        schedule: Of ranks 0 to size - 1.
    """

    ranks: IntArray
    schedule: Schedule


class _Built(NamedTuple):
    """What all groups do, reduced to parts of the network that differ.

    Attributes:
        parts: A schedule for each part, of ranks of the network.
        num_groups: Groups in them.
        steps: Steps of the longest.
        load: Units that the busiest link carries, over its bandwidth.
        latency: Mean seconds of a message on the way.
    """

    parts: tuple[Schedule, ...]
    num_groups: int
    steps: int
    load: float
    latency: float

    def candidate(self, name: str, payload_bytes: float) -> Candidate:
        """Returns the algorithm before it is simulated."""
        bound = self.load * payload_bytes / self.parts[0].num_units
        estimate = bound + self.steps * self.latency
        return Candidate(name, self.steps, bound, estimate)


class NetworkTimer:
    """Times collectives on a network; equal questions are answered once.

    Args:
        network: Where.
        placement: How the mesh stands on it.
        dead: Ranks of the network that have failed.
    """

    def __init__(
        self,
        network: Network,
        placement: Placement,
        dead: Iterable[int] = (),
    ) -> None:
        self.network = network
        self.placement = placement
        self.dead = frozenset(dead)
        self.topology = network.topology.without(self.dead) if self.dead else network.topology
        self._groups: dict[str, Groups] = {}
        self._built: dict[tuple[str, Kind, str], _Built] = {}
        self._timed: dict[tuple[str, Kind, float], TimedCollective] = {}

    def plan(self, collectives: Sequence[Collective]) -> NetworkPlan:
        """Returns the time of all collectives of an update."""
        parts = tuple(self.time(collective) for collective in collectives)
        return NetworkPlan(self.network, self.placement, self.dead, parts)

    def groups(self, axis: str) -> Groups:
        """Returns the groups of an axis."""
        if axis not in self._groups:
            self._groups[axis] = self.placement.groups(axis)
        return self._groups[axis]

    def unfit(self, collective: Collective) -> dict[str, str]:
        """Returns why algorithms cannot be built for a collective, by their name."""
        algorithms = RECIPES[collective.kind].algorithms
        reasons = {}
        for name in algorithms.names():
            for layout in self._layouts(collective.axis):
                reason = algorithms.get(name).unfit(layout)
                if reason:
                    reasons[name] = reason
        return reasons

    def candidates(self, collective: Collective) -> list[Candidate]:
        """Returns every algorithm that fits with its bound, the lowest estimate first.

        Raises:
            ConfigError: When none fits.
        """
        unfit = self.unfit(collective)
        candidates = []
        for name in RECIPES[collective.kind].algorithms.names():
            if name not in unfit:
                built = self._build(collective, name)
                candidates.append(built.candidate(name, collective.payload_bytes))
        if not candidates:
            reasons = "; ".join(f"{name} {reason}" for name, reason in unfit.items())
            raise ConfigError(
                f"No {collective.kind.name} can be built over {collective.axis}: {reasons}. "
                "Declare whole rows or nodes dead, or choose another mesh."
            )
        return sorted(candidates, key=_by_estimate)

    def time(self, collective: Collective) -> TimedCollective:
        """Returns a collective with the best algorithm and its time.

        Raises:
            ConfigError: When no algorithm fits, or the network has no path left.
        """
        key = (collective.axis, collective.kind, collective.payload_bytes)
        if key not in self._timed:
            self._timed[key] = self._choose(collective)
        timed = self._timed[key]
        return TimedCollective(**{**vars(timed), "collective": collective})

    def _choose(self, collective: Collective) -> TimedCollective:
        """Returns the best algorithm, and what it was compared with."""
        best: Simulation | None = None
        compared = []
        for candidate in self.candidates(collective):
            if best is None or _may_win(candidate, best.seconds):
                built = self._build(collective, candidate.name)
                simulation = self._simulate(built, collective.payload_bytes)
                candidate = candidate._replace(seconds=simulation.seconds)
                if best is None or simulation.seconds < best.seconds:
                    best = simulation
            compared.append(candidate)

        assert best is not None, "candidates raises when there is none"
        compared.sort(key=_by_time)
        return TimedCollective(
            collective=collective,
            groups=self.groups(collective.axis),
            num_simulated=self._build(collective, compared[0].name).num_groups,
            candidates=tuple(compared),
            unfit=self.unfit(collective),
            simulation=best,
        )

    def _simulate(self, built: _Built, payload_bytes: float) -> Simulation:
        """Returns the simulation of the part that takes longest."""
        simulations = [simulate(part, self.topology, payload_bytes) for part in built.parts]
        return max(simulations, key=_seconds)

    def _layouts(self, axis: str) -> list[Topology]:
        """Returns the different networks that groups of an axis see: whole, and with their dead."""
        groups = self.groups(axis)
        patterns = {self._dead_members(ranks) for ranks in groups.ranks}
        layouts = []
        for pattern in sorted(patterns, key=sorted):
            if groups.layout.num_ranks - len(pattern) > 1:
                layouts.append(groups.layout.without(pattern))
        return layouts

    def _dead_members(self, ranks: IntArray) -> frozenset[int]:
        if not self.dead:
            return frozenset()
        return frozenset(np.flatnonzero(np.isin(ranks, list(self.dead))).tolist())

    def _build(self, collective: Collective, name: str) -> _Built:
        """Returns what all groups do with an algorithm."""
        key = (collective.axis, collective.kind, name)
        if key not in self._built:
            instances = self._instances(collective, name)
            self._built[key] = _differing_parts(instances, self.topology)
        return self._built[key]

    def _instances(self, collective: Collective, name: str) -> list[_Instance]:
        """Returns what each group does: the same, but for groups with dead ranks."""
        groups = self.groups(collective.axis)
        recipe = RECIPES[collective.kind]
        algorithm = recipe.algorithms.get(name)
        num_units = recipe.units_of_size(groups.layout.num_ranks)

        schedules: dict[frozenset[int], Schedule] = {}
        instances = []
        for ranks in groups.ranks:
            dead = self._dead_members(ranks)
            if len(ranks) - len(dead) < 2:
                continue
            if dead not in schedules:
                built = algorithm.build(groups.layout.without(dead), num_units)
                schedules[dead] = recipe.part(built)
            instances.append(_Instance(ranks, schedules[dead]))
        return instances


def _may_win(candidate: Candidate, best_seconds: float) -> bool:
    is_possible = candidate.bound < best_seconds
    return is_possible and candidate.estimate < _FAR_BEHIND * best_seconds


def _by_estimate(candidate: Candidate) -> float:
    return candidate.estimate


def _by_time(candidate: Candidate) -> tuple[bool, float]:
    """Orders candidates by simulated time; then those that were not simulated."""
    if candidate.seconds is None:
        return True, candidate.estimate
    return False, candidate.seconds


def _seconds(simulation: Simulation) -> float:
    return simulation.seconds


# ---------------------------------------------------------------------------
# Groups that share links, and parts of the network that are alike


class _Hops(NamedTuple):
    """The links that groups use, a row for each group and link.

    Attributes:
        group: <int64>[H] index of the group.
        link: <int64>[H] link.
        load: <float64>[H] units over the link's bandwidth.
        latency: <float64>[H] seconds of the routes that cross it.
    """

    group: IntArray
    link: IntArray
    load: np.ndarray
    latency: np.ndarray


def _differing_parts(instances: list[_Instance], topology: Topology) -> _Built:
    """Returns one schedule for each part of the network that differs from the others.

    A part are groups that share links, directly or by others. Two parts are alike when the loads
    of their links and the latencies of their routes are the same numbers.
    """
    hops = _hops(instances, topology)
    part_of_group = _connected(hops, len(instances), len(topology.links.source))

    # The numbers of each part, sorted, tell it from others.
    parts: dict[bytes, IntArray] = {}
    for part in np.unique(part_of_group):
        members = np.flatnonzero(part_of_group == part)
        is_mine = part_of_group[hops.group] == part
        load = np.bincount(hops.link[is_mine], hops.load[is_mine])
        load = np.sort(load[load > 0])
        latency = np.sort(hops.latency[is_mine])
        numbers = np.concatenate([[len(members)], _rounded(load), _rounded(latency)])
        parts.setdefault(numbers.tobytes(), members)

    schedules = []
    num_groups = 0
    for members in parts.values():
        num_groups += len(members)
        schedules.append(_side_by_side([instances[index] for index in members], topology))
    return _Built(
        parts=tuple(schedules),
        num_groups=num_groups,
        steps=max(schedule.num_steps for schedule in schedules),
        load=float(np.bincount(hops.link, hops.load).max()),
        latency=float(hops.latency.mean()),
    )


def _hops(instances: list[_Instance], topology: Topology) -> _Hops:
    """Returns the links that each group uses."""
    columns: list[_Hops] = []
    for index, instance in enumerate(instances):
        table = _renamed(instance)
        routes = find_routes(table, topology)
        key = table.source * topology.num_ranks + table.destination
        pair = np.searchsorted(routes.key, key)
        units = np.bincount(pair, table.high - table.low, minlength=len(routes.key))
        row, link = routes.hops(np.arange(len(routes.key)))
        columns.append(
            _Hops(
                group=np.full(len(link), index),
                link=link,
                load=units[row] / topology.links.bandwidth[link],
                latency=routes.latency[row],
            )
        )
    return _Hops(*(np.concatenate(parts) for parts in zip(*columns, strict=True)))


def _connected(hops: _Hops, num_groups: int, num_links: int) -> IntArray:
    """Returns <int64>[groups] the part of each group: the least group that it is joined to."""
    part = np.arange(num_groups)
    while True:
        # A link takes the least part of its groups, a group the least one of its links.
        of_link = np.full(num_links, num_groups)
        np.minimum.at(of_link, hops.link, part[hops.group])
        joined = part.copy()
        np.minimum.at(joined, hops.group, of_link[hops.link])
        if np.array_equal(joined, part):
            return part
        part = joined


def _side_by_side(instances: list[_Instance], topology: Topology) -> Schedule:
    """Returns one schedule of what several groups do at the same time."""
    tables = [_renamed(instance) for instance in instances]
    table = Transfers(*(np.concatenate(columns) for columns in zip(*tables, strict=True)))
    table = table.select(np.argsort(table.step, kind="stable"))

    before = [_renamed_intervals(instance.schedule.before, instance) for instance in instances]
    after = [_renamed_intervals(instance.schedule.after, instance) for instance in instances]
    return Schedule(
        num_ranks=topology.num_ranks,
        num_units=instances[0].schedule.num_units,
        transfers=table,
        before=Intervals(*(np.concatenate(columns) for columns in zip(*before, strict=True))),
        after=Intervals(*(np.concatenate(columns) for columns in zip(*after, strict=True))),
    )


def _renamed(instance: _Instance) -> Transfers:
    """Returns the transfers of a group between ranks of the network."""
    table = instance.schedule.transfers
    return table._replace(
        source=instance.ranks[table.source],
        destination=instance.ranks[table.destination],
    )


def _renamed_intervals(part: Intervals, instance: _Instance) -> Intervals:
    return part._replace(rank=instance.ranks[part.rank])


def _rounded(numbers: np.ndarray) -> np.ndarray:
    """Returns numbers above 0 with so many digits that equal sums in another order are equal."""
    scale = 10.0 ** (np.floor(np.log10(np.maximum(numbers, 1e-300))) - _DIGITS)
    return np.round(numbers / scale) * scale
