"""The time of an update's collectives on a network, each with the schedule that is best for it.

For every collective of the plan the algorithms of `moe.network.algorithms` are built on the ranks of
a group, as they lie on the network. Each has a bound, what its busiest link carries, and an estimate,
as if its steps were barriers. Those of the lowest estimates are simulated; left out is also what
cannot win by its bound, or is far behind by its estimate.

A schedule is simulated for the least and the largest of payloads that are within a factor of 16 of
each other; those between are interpolated: nearly all of the time is latency, or in proportion to
the bytes. An all-gather is a reduce-scatter run backwards and takes as long.

Next: `network_table` shows it, `network_search` compares meshes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from moe.errors import ConfigError
from moe.network.algorithms import ALL_REDUCE as ALL_REDUCE_ALGORITHMS
from moe.network.algorithms import ALL_TO_ALL as ALL_TO_ALL_ALGORITHMS
from moe.network.algorithms import Algorithm, multi_ring
from moe.network.grids import factorisations
from moe.network.halves import owned_reduce_scatter
from moe.network.schedule import IntArray, Schedule
from moe.network.simulate import Simulation, simulate
from moe.network.topology import Topology
from moe.network.topology_file import Network
from moe.planning.network_placement import Groups, Placement
from moe.planning.network_shares import Instance, SharedLinks, share_links
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

_FAR_BEHIND = 2.0
"""Times the best time from which an estimate is not simulated: barriers overstate by less."""

_MOST_SIMULATED = 5
"""Algorithms that are simulated for a payload, those of the lowest estimates."""

_PAYLOAD_RANGE = 16.0
"""Factor within which payloads are interpolated."""

_MOST_FACTORISATIONS = 4
"""Of a group's ranks into levels that are tried."""

_MOST_TRANSFERS = 1_000_000
"""Transfers of all groups that are simulated; a schedule of more is left out where another fits."""


class Method(NamedTuple):
    """How a kind of collective is made of the algorithms of a registry.

    Attributes:
        algorithms: Builders.
        part: Returns what is carried out of what they build.
        units_of_size: Returns the units of a payload for a group of so many ranks.
        explored: Returns further algorithms for the network of a group, by name.
    """

    algorithms: Registry[Algorithm]
    part: Callable[[Schedule], Schedule]
    units_of_size: Callable[[int], int]
    explored: Callable[[Topology], dict[str, Algorithm]]

    def algorithms_on(self, layout: Topology) -> dict[str, Algorithm]:
        """Returns all algorithms to try on the network of a group, by name."""
        registered = {name: self.algorithms.get(name) for name in self.algorithms.names()}
        return {**registered, **self.explored(layout)}


def _whole(schedule: Schedule) -> Schedule:
    return schedule


def _units_of_reduction(size: int) -> int:
    return size * _UNITS_PER_RANK


def _units_of_exchange(size: int) -> int:
    return size * size * _UNITS_PER_RANK


# An all-gather is the same backwards.
def _levels(layout: Topology) -> dict[str, Algorithm]:
    """Returns rings in levels, those of the fewest steps: at switches all factorisations do.

    Source:
        PowerAI DDL (arXiv:1708.02188): X x Y x Z as a knob, and a mode that explores it.
    """
    if not layout.switched:
        return {}
    size = layout.num_ranks
    levels = [*factorisations(size, 2), *factorisations(size, 3)]
    levels = [sizes for sizes in levels if min(sizes) > 1]
    levels.sort(key=sum)

    algorithms = {}
    for sizes in levels[:_MOST_FACTORISATIONS]:
        name = "x".join(str(extent) for extent in sizes)
        algorithms[f"multi_ring {name}"] = multi_ring(*sizes)
    return algorithms


def _nothing_more(layout: Topology) -> dict[str, Algorithm]:
    return {}


_HALF = Method(ALL_REDUCE_ALGORITHMS, owned_reduce_scatter, _units_of_reduction, _levels)

METHODS: dict[Kind, Method] = {
    ALL_REDUCE: Method(ALL_REDUCE_ALGORITHMS, _whole, _units_of_reduction, _levels),
    REDUCE_SCATTER: _HALF,
    ALL_GATHER: _HALF,
    ALL_TO_ALL: Method(ALL_TO_ALL_ALGORITHMS, _whole, _units_of_exchange, _nothing_more),
}
"""How each kind is made."""


class Timing(NamedTuple):
    """The time of a call, and where it goes along the critical path.

    Attributes:
        seconds: All of it.
        bandwidth: Bytes flow.
        latency: Bytes are on the way.
        waiting: Others hold the links.
    """

    seconds: float
    bandwidth: float
    latency: float
    waiting: float


class Candidate(NamedTuple):
    """An algorithm that was compared.

    Attributes:
        name: In its registry.
        steps: Steps of its schedule.
        bound: Seconds of its busiest link, which it needs at least.
        estimate: Seconds with a barrier after each step, more or less.
        timing: Of its simulation; None where it lost before.
    """

    name: str
    steps: int
    bound: float
    estimate: float
    timing: Timing | None = None


@dataclass(frozen=True)
class TimedCollective:
    """A collective, the algorithm chosen for it, and its time.

    Attributes:
        collective: What is exchanged, and how often.
        groups: The groups that do it at the same time.
        num_simulated: Groups that were simulated: one of those that are alike, the slowest few.
        candidates: What was compared, the best first.
        unfit: Why others were not, by name.
        timing: Of the best one, for a call.
    """

    collective: Collective
    groups: Groups
    num_simulated: int
    candidates: tuple[Candidate, ...]
    unfit: dict[str, str]
    timing: Timing

    @property
    def algorithm(self) -> str:
        """Name of the best algorithm."""
        return self.candidates[0].name

    @property
    def seconds(self) -> float:
        """Seconds of all calls of an update, one after the other."""
        return self.timing.seconds * self.collective.num_calls


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


class _Built(NamedTuple):
    """The algorithms on the groups of an axis.

    Attributes:
        algorithms: What the groups do, by name of the algorithm.
        unfit: Why others are left out, by name.
    """

    algorithms: dict[str, SharedLinks]
    unfit: dict[str, str]


class Question(NamedTuple):
    """What the time of a call depends on, on one network.

    Attributes:
        ranks: Bytes of the ranks of all groups, in order.
        layout: How a group lies.
        method: How the collective is carried out.
        payload_bytes: Of a call.
        payload_range: Payloads between which it is interpolated; None for no range.
    """

    ranks: bytes
    layout: str
    method: Method
    payload_bytes: float
    payload_range: tuple[float, float] | None


class NetworkTimer:
    """Times collectives on a network; equal questions are answered once.

    Args:
        network: Where.
        placement: How the mesh stands on it.
        dead: Ranks of the network that have failed.
        known: Answers that timers of other placements share, on the same network with the same
            ranks dead.
    """

    def __init__(
        self,
        network: Network,
        placement: Placement,
        dead: Iterable[int] = (),
        known: dict[Question, TimedCollective] | None = None,
    ) -> None:
        self.network = network
        self._known = {} if known is None else known
        self.placement = placement
        self.dead = frozenset(dead)
        self.topology = network.topology.without(self.dead) if self.dead else network.topology
        self._groups: dict[str, Groups] = {}
        self._built: dict[tuple[str, Method], _Built] = {}
        self._simulated: dict[tuple[str, Method, str, float], Timing] = {}
        self._ranges: dict[tuple[str, Method], list[tuple[float, float]]] = {}

    def plan(self, collectives: Sequence[Collective]) -> NetworkPlan:
        """Returns the time of all collectives of an update."""
        parts = tuple(self.parts(collectives))
        return NetworkPlan(self.network, self.placement, self.dead, parts)

    def parts(self, collectives: Sequence[Collective]) -> Iterator[TimedCollective]:
        """Yields the collectives of an update with their times; each is simulated when it is due."""
        # Payloads of equal groups and methods lie in common ranges.
        payloads: dict[tuple[str, Method], list[float]] = {}
        for collective in collectives:
            key = (collective.axis, METHODS[collective.kind])
            payloads.setdefault(key, []).append(collective.payload_bytes)
        self._ranges = {key: _payload_ranges(sizes) for key, sizes in payloads.items()}

        # Each by itself: they follow each other.
        for collective in collectives:
            yield self.time(collective)

    def groups(self, axis: str) -> Groups:
        """Returns the groups of an axis."""
        if axis not in self._groups:
            self._groups[axis] = self.placement.groups(axis)
        return self._groups[axis]

    def time(self, collective: Collective) -> TimedCollective:
        """Returns a collective with the best algorithm and its time.

        Raises:
            ConfigError: When no algorithm fits, or the network has no path left.
        """
        question = self._question(collective)
        if question not in self._known:
            self._known[question] = self._best(collective)
        groups = self.groups(collective.axis)
        return replace(self._known[question], collective=collective, groups=groups)

    def _question(self, collective: Collective) -> Question:
        """Returns what the time of a call depends on."""
        groups = self.groups(collective.axis)
        method = METHODS[collective.kind]
        payload = collective.payload_bytes
        ranges = self._ranges.get((collective.axis, method), [])
        return Question(
            ranks=groups.ranks[np.argsort(groups.ranks[:, 0])].tobytes(),
            layout=groups.description,
            method=method,
            payload_bytes=payload,
            payload_range=next((ends for ends in ranges if ends[0] <= payload <= ends[1]), None),
        )

    def _best(self, collective: Collective) -> TimedCollective:
        """Returns a collective with the best algorithm and its time."""
        # The lowest estimates first, until nothing may win.
        best: Timing | None = None
        compared = []
        for index, candidate in enumerate(self.candidates(collective)):
            is_likely = index < _MOST_SIMULATED
            if best is None or (is_likely and _may_win(candidate, best.seconds)):
                timing = self._timing(collective, candidate.name)
                candidate = candidate._replace(timing=timing)
                if best is None or timing.seconds < best.seconds:
                    best = timing
            compared.append(candidate)

        assert best is not None, "candidates raises when there is none"

        # What was simulated comes first, the fastest of all at the head.
        compared.sort(key=_by_time)
        built = self._build(collective)
        return TimedCollective(
            collective=collective,
            groups=self.groups(collective.axis),
            num_simulated=len(built.algorithms[compared[0].name].slowest(collective.payload_bytes)),
            candidates=tuple(compared),
            unfit=built.unfit,
            timing=best,
        )

    def candidates(self, collective: Collective) -> list[Candidate]:
        """Returns every algorithm that fits before it is simulated, the lowest estimate first.

        Raises:
            ConfigError: When none fits.
        """
        built = self._build(collective)
        if not built.algorithms:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in built.unfit.items())
            raise ConfigError(
                f"No {collective.kind.name} can be built over {collective.axis}. {reasons} "
                "Declare whole rows or nodes dead, or choose another mesh."
            )

        # Bounds and estimates are of all groups at once.
        candidates = []
        for name, shared in built.algorithms.items():
            bound = shared.bound(collective.payload_bytes)
            estimate = shared.estimate(collective.payload_bytes)
            candidates.append(Candidate(name, shared.steps, bound, estimate))
        return sorted(candidates, key=_by_estimate)

    def simulate(self, collective: Collective, name: str) -> Simulation:
        """Returns the simulation of one call with an algorithm: of the group that takes longest."""
        payload = collective.payload_bytes

        # Every group on its share of the links; the call ends with the last one.
        simulations = []
        for group in self._build(collective).algorithms[name].slowest(payload):
            simulations.append(simulate(group.schedule, group.topology, payload))
        return max(simulations, key=_seconds)

    def _timing(self, collective: Collective, name: str) -> Timing:
        """Returns the time of a call with an algorithm, interpolated inside a range of payloads."""
        # A payload between the ends of a range lies on the line between them.
        key = (collective.axis, METHODS[collective.kind])
        payload = collective.payload_bytes
        for low, high in self._ranges.get(key, []):
            if low < payload < high:
                share = (payload - low) / (high - low)
                least = self._simulated_timing(collective._replace(payload_bytes=low), name)
                most = self._simulated_timing(collective._replace(payload_bytes=high), name)
                pairs = zip(least, most, strict=True)
                return Timing(*(few + share * (many - few) for few, many in pairs))
        return self._simulated_timing(collective, name)

    def _simulated_timing(self, collective: Collective, name: str) -> Timing:
        # Equal questions are asked once.
        method = METHODS[collective.kind]
        key = (collective.axis, method, name, collective.payload_bytes)
        if key not in self._simulated:
            simulation = self.simulate(collective, name)
            path = simulation.path
            self._simulated[key] = Timing(
                seconds=simulation.seconds,
                bandwidth=path.bandwidth,
                latency=path.latency,
                waiting=path.waiting,
            )
        return self._simulated[key]

    def _build(self, collective: Collective) -> _Built:
        """Returns all algorithms that fit on the groups of a collective's axis."""
        method = METHODS[collective.kind]
        key = (collective.axis, method)
        if key in self._built:
            return self._built[key]

        # What all groups do, as far as there are not too many transfers.
        algorithms_by_name = method.algorithms_on(self.groups(collective.axis).layout)
        unfit = self._unfit_long_rings(collective.axis, algorithms_by_name)
        tried = {name: one for name, one in algorithms_by_name.items() if name not in unfit}
        unfit |= self._unfit(collective.axis, tried)

        # Long rings are tried after all where nothing else is left.
        if len(unfit) == len(algorithms_by_name):
            unfit = self._unfit(collective.axis, algorithms_by_name)
        instances: dict[str, list[Instance]] = {}
        sizes: dict[str, int] = {}
        for name, algorithm in algorithms_by_name.items():
            if name in unfit:
                continue
            every = self._instances(collective.axis, method, algorithm)
            sizes[name] = sum(len(one.schedule.transfers.step) for one in every)
            if sizes[name] <= max(_MOST_TRANSFERS, min(sizes.values())):
                instances[name] = every

        # The smallest stays even when it is too large.
        algorithms = {}
        for name, size in sizes.items():
            if size <= max(_MOST_TRANSFERS, min(sizes.values())):
                algorithms[name] = share_links(instances[name], self.topology)
            else:
                unfit[name] = f"{size:,} transfers, which take too long to simulate."
        self._built[key] = _Built(algorithms, unfit)
        return self._built[key]

    def _unfit_long_rings(self, axis: str, algorithms: dict[str, Algorithm]) -> dict[str, str]:
        """Returns why rings of all ranks of a group take too long to simulate, by their name."""
        num_groups, size = self.groups(axis).ranks.shape
        num_transfers = 2 * num_groups * size * (size - 1)
        if num_transfers <= _MOST_TRANSFERS:
            return {}
        reason = f"{num_transfers:,} transfers, which take too long to simulate."
        return {name: reason for name, one in algorithms.items() if one.is_one_ring}

    def _unfit(self, axis: str, algorithms: dict[str, Algorithm]) -> dict[str, str]:
        """Returns why algorithms cannot be built on the groups of an axis, by their name."""
        # A reason against one group is one against all of the axis.
        reasons = {}
        layouts = self._layouts(axis)
        for name, algorithm in algorithms.items():
            for layout in layouts:
                reason = algorithm.unfit(layout)
                if reason:
                    reasons[name] = reason
        return reasons

    def _layouts(self, axis: str) -> list[Topology]:
        """Returns the different networks that groups of an axis see: whole, and with their dead."""
        # Groups differ by which of their members are dead.
        groups = self.groups(axis)
        patterns = {self._dead_members(ranks) for ranks in groups.ranks}
        layouts = []
        for pattern in sorted(patterns, key=sorted):
            if groups.layout.num_ranks - len(pattern) > 1:
                layouts.append(groups.layout.without(pattern))
        if not layouts:
            raise ConfigError(
                f"No group over {axis} has two live ranks left that could exchange anything. Declare "
                "fewer ranks dead, or choose another mesh."
            )
        return layouts

    def _dead_members(self, ranks: IntArray) -> frozenset[int]:
        if not self.dead:
            return frozenset()
        return frozenset(np.flatnonzero(np.isin(ranks, list(self.dead))).tolist())

    def _instances(self, axis: str, method: Method, algorithm: Algorithm) -> list[Instance]:
        """Returns what each group does: the same, but for groups with dead ranks."""
        groups = self.groups(axis)
        num_units = method.units_of_size(groups.layout.num_ranks)

        # One schedule for all groups with the same members dead.
        schedules: dict[frozenset[int], Schedule] = {}
        instances = []
        for ranks in groups.ranks:
            dead = self._dead_members(ranks)

            # A single survivor has nobody to send to.
            if len(ranks) - len(dead) < 2:
                continue
            if dead not in schedules:
                built = algorithm.build(groups.layout.without(dead), num_units)
                schedules[dead] = method.part(built)
            instances.append(Instance(ranks, schedules[dead]))
        return instances


def _payload_ranges(payloads: Iterable[float]) -> list[tuple[float, float]]:
    """Returns the least and the largest payload of ranges that cover all, none wider than allowed."""
    ranges: list[tuple[float, float]] = []
    for payload in sorted(payloads):
        if ranges and payload <= _PAYLOAD_RANGE * ranges[-1][0]:
            ranges[-1] = (ranges[-1][0], payload)
        else:
            ranges.append((payload, payload))
    return ranges


def _may_win(candidate: Candidate, best_seconds: float) -> bool:
    is_possible = candidate.bound < best_seconds
    return is_possible and candidate.estimate < _FAR_BEHIND * best_seconds


def _by_estimate(candidate: Candidate) -> float:
    return candidate.estimate


def _by_time(candidate: Candidate) -> tuple[bool, float]:
    """Orders candidates by simulated time; then those that were not simulated."""
    if candidate.timing is None:
        return True, candidate.estimate
    return False, candidate.timing.seconds


def _seconds(simulation: Simulation) -> float:
    return simulation.seconds
