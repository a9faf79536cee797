"""The time of an update's collectives on a network, each with its best schedule.

For every collective of the plan, the algorithms of `moe.network.algorithms` are built on the ranks
of a group, in their position on the network. Each has a bound, the time of its busiest link, and an
estimate, as if its steps were barriers. Only those with the lowest estimates are simulated, and
only if bound and estimate allow them to win.

Payloads within a factor of 16 of each other share simulations: the smallest and the largest are
simulated, and those between are interpolated, since nearly all of the time is latency or
proportional to the bytes.

Next: `network_table` shows it, `network_search` compares meshes.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from moe.errors import ConfigError
from moe.network.algorithms import ALL_REDUCE, ALL_TO_ALL, Algorithm, multi_ring
from moe.network.planner.placement import Groups, Placement
from moe.network.planner.shares import Instance, SharedLinks, share_links
from moe.network.reduce_scatter import owned_reduce_scatter
from moe.network.rings import factorisations
from moe.network.schedule import IntArray, Schedule
from moe.network.simulate import Simulation, simulate
from moe.network.topology import Topology
from moe.network.topology_file import Network
from moe.planning.traffic import Collective, Kind

_UNITS_PER_RANK = 720
"""Units of a payload for each rank of a group: even shares for 1 to 6 colours and 16 slices."""

_FAR_BEHIND = 2.0
"""An estimate above this multiple of the best time is not simulated: barriers overstate by less."""

_MOST_SIMULATED = 5
"""Number of algorithms that are simulated for a payload, those with the lowest estimates."""

_PAYLOAD_RANGE = 16.0
"""Factor within which payloads are interpolated."""

_MOST_FACTORISATIONS = 4
"""Number of factorisations of a group's ranks into levels that are tried."""

_MOST_TRANSFERS = 1_000_000
"""Transfers of all groups together; longer schedules are left out if another one fits."""


def _algorithms(kind: Kind, layout: Topology) -> dict[str, Algorithm]:
    """Returns all algorithms to try for a kind of collective on the network of a group, by name."""
    registry = ALL_TO_ALL if kind == Kind.ALL_TO_ALL else ALL_REDUCE
    algorithms = {name: registry.get(name) for name in registry.names()}
    if kind != Kind.ALL_TO_ALL and layout.switched:
        algorithms |= _level_algorithms(layout.num_ranks)
    return algorithms


def _level_algorithms(size: int) -> dict[str, Algorithm]:
    """Returns the rings in levels that take the fewest steps: switches allow all factorisations.

    Source:
        PowerAI DDL (arXiv:1708.02188): X x Y x Z as a knob, and a mode that explores it.
    """
    levels = [*factorisations(size, 2), *factorisations(size, 3)]
    levels = [sizes for sizes in levels if min(sizes) > 1]
    levels.sort(key=sum)

    algorithms = {}
    for sizes in levels[:_MOST_FACTORISATIONS]:
        name = "x".join(str(extent) for extent in sizes)
        algorithms[f"multi_ring {name}"] = multi_ring(*sizes)
    return algorithms


def _build_schedule(kind: Kind, algorithm: Algorithm, layout: Topology) -> Schedule:
    """Returns the schedule of a collective on the network of a group."""
    num_units = layout.num_ranks * _UNITS_PER_RANK
    if kind == Kind.ALL_TO_ALL:
        num_units *= layout.num_ranks
    schedule = algorithm.build(layout, num_units)
    return owned_reduce_scatter(schedule) if kind == Kind.REDUCE_SCATTER else schedule


class Timing(NamedTuple):
    """The time of a call, and its parts along the critical path, in seconds.

    Attributes:
        seconds: Whole time.
        bandwidth: Time in which bytes are sent.
        latency: Time between bytes sent and bytes received.
        waiting: Time of waiting for links.
    """

    seconds: float
    bandwidth: float
    latency: float
    waiting: float


class Candidate(NamedTuple):
    """An algorithm that was compared.

    Attributes:
        name: Name in its registry.
        steps: Steps of its schedule.
        bound: Seconds of its busiest link, a lower bound.
        estimate: Seconds as if there were a barrier after each step.
        timing: Simulated time; None if bound or estimate excluded it.
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
        collective: The collective.
        groups: The groups that run it at the same time.
        num_simulated: Groups that were simulated: one of each kind, and of those the slowest few.
        candidates: Algorithms that were compared, the best first.
        timing: Time of a call with the best algorithm.
    """

    collective: Collective
    groups: Groups
    num_simulated: int
    candidates: tuple[Candidate, ...]
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
        network: The network, with its notes.
        placement: Where the ranks of the mesh are on it.
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


_AxisAndKind = tuple[str, Kind]
"""Key of a schedule: groups of an axis, and a kind of collective."""

Question = tuple[bytes, str, Kind, float, tuple[float, float] | None]
"""Everything that the time of a call on one network depends on: the ranks of all groups in order, a group's shape
on the network, the kind whose schedules are run, the payload, and the payloads between which it is
interpolated, if any.
"""


class NetworkTimer:
    """Times collectives on a network; equal requests are computed once.

    Args:
        network: The network.
        placement: Where the ranks of the mesh are on it.
        dead: Ranks of the network that have failed.
        known: Results shared with timers of other placements, on the same network with the same
            dead ranks.
    """

    def __init__(
        self,
        network: Network,
        placement: Placement,
        dead: Iterable[int] = (),
        known: dict[Question, TimedCollective] | None = None,
    ) -> None:
        self.network = network
        self.placement = placement
        self.dead = frozenset(dead)
        self.topology = network.topology.without(self.dead) if self.dead else network.topology
        self._known = {} if known is None else known
        self._groups: dict[str, Groups] = {}
        self._built: dict[_AxisAndKind, dict[str, SharedLinks]] = {}
        self._simulated: dict[tuple[_AxisAndKind, str, float], Timing] = {}
        self._ranges: dict[_AxisAndKind, list[tuple[float, float]]] = {}

    def plan(self, collectives: Sequence[Collective]) -> NetworkPlan:
        """Returns the time of all collectives of an update."""
        parts = tuple(self.parts(collectives))
        return NetworkPlan(self.network, self.placement, self.dead, parts)

    def parts(self, collectives: Sequence[Collective]) -> Iterator[TimedCollective]:
        """Yields the collectives of an update with their times; each is simulated when it is requested."""
        # Payloads of the same schedules are in common ranges.
        payloads: dict[_AxisAndKind, list[float]] = {}
        for collective in collectives:
            payloads.setdefault(_key(collective), []).append(collective.payload_bytes)
        self._ranges = {key: _payload_ranges(sizes) for key, sizes in payloads.items()}

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
            ConfigError: If no algorithm fits, or the network has no path left.
        """
        groups = self.groups(collective.axis)
        question = (
            groups.ranks[np.argsort(groups.ranks[:, 0])].tobytes(),
            groups.description,
            _key(collective)[1],
            collective.payload_bytes,
            self._range(collective),
        )
        if question not in self._known:
            self._known[question] = self._best(collective)
        return replace(self._known[question], collective=collective, groups=groups)

    def simulate(self, collective: Collective, name: str) -> Simulation:
        """Returns the simulation of one call with an algorithm: of the group that takes longest."""
        payload = collective.payload_bytes
        simulations = []
        for group in self._schedules(collective)[name].slowest(payload):
            simulations.append(simulate(group.schedule, group.topology, payload))
        return max(simulations, key=attrgetter("seconds"))

    def _best(self, collective: Collective) -> TimedCollective:
        """Returns a collective with the best algorithm and its time."""
        # Bounds and estimates are of all groups at once.
        payload = collective.payload_bytes
        algorithms = self._schedules(collective)
        candidates = []
        for name, shared in algorithms.items():
            bound = shared.bound(payload)
            candidates.append(Candidate(name, shared.steps, bound, shared.estimate(payload)))
        candidates.sort(key=attrgetter("estimate"))

        # The lowest estimates first, until no other can win.
        fastest = math.inf
        for index, candidate in enumerate(candidates[:_MOST_SIMULATED]):
            if candidate.bound < fastest and candidate.estimate < _FAR_BEHIND * fastest:
                timing = self._timing(collective, candidate.name)
                candidates[index] = candidate._replace(timing=timing)
                fastest = min(fastest, timing.seconds)

        # Simulated ones first, the fastest at the head.
        candidates.sort(key=_by_time)
        best = candidates[0]
        assert best.timing is not None, "the first one is simulated"
        return TimedCollective(
            collective=collective,
            groups=self.groups(collective.axis),
            num_simulated=len(algorithms[best.name].slowest(payload)),
            candidates=tuple(candidates),
            timing=best.timing,
        )

    def _range(self, collective: Collective) -> tuple[float, float] | None:
        """Returns the payloads between which a collective is interpolated, itself included."""
        for low, high in self._ranges.get(_key(collective), []):
            if low <= collective.payload_bytes <= high:
                return low, high
        return None

    def _timing(self, collective: Collective, name: str) -> Timing:
        """Returns the time of a call with an algorithm, interpolated inside a range of payloads."""
        payload = collective.payload_bytes
        low, high = self._range(collective) or (payload, payload)
        least = self._simulated_timing(collective._replace(payload_bytes=low), name)
        if payload == low:
            return least
        most = self._simulated_timing(collective._replace(payload_bytes=high), name)
        if payload == high:
            return most
        share = (payload - low) / (high - low)
        pairs = zip(least, most, strict=True)
        return Timing(*(few + share * (many - few) for few, many in pairs))

    def _simulated_timing(self, collective: Collective, name: str) -> Timing:
        key = (_key(collective), name, collective.payload_bytes)
        if key not in self._simulated:
            simulation = self.simulate(collective, name)
            path = simulation.path
            timing = Timing(simulation.seconds, path.bandwidth, path.latency, path.waiting)
            self._simulated[key] = timing
        return self._simulated[key]

    def _schedules(self, collective: Collective) -> dict[str, SharedLinks]:
        """Returns the algorithms that fit on the groups of a collective's axis, by name."""
        key = _key(collective)
        if key not in self._built:
            self._built[key] = self._build(*key)
        return self._built[key]

    def _build(self, axis: str, kind: Kind) -> dict[str, SharedLinks]:
        """Returns the algorithms that fit on the groups of an axis.

        Raises:
            ConfigError: If none fits.
        """
        # Long rings are tried only if nothing else fits.
        groups = self.groups(axis)
        algorithms = _algorithms(kind, groups.layout)
        num_groups, size = groups.ranks.shape
        is_long = 2 * num_groups * size * (size - 1) > _MOST_TRANSFERS
        layouts = self._layouts(axis)
        short = {name: one for name, one in algorithms.items() if not (one.is_one_ring and is_long)}
        unfit = _unfit(short, layouts)
        if len(unfit) == len(short):
            short = algorithms
            unfit = _unfit(short, layouts)
        if len(unfit) == len(algorithms):
            reasons = "; ".join(f"{name}: {reason}" for name, reason in unfit.items())
            raise ConfigError(
                f"No {kind} can be built over {axis}. {reasons} "
                "Declare whole rows or nodes dead, or choose another mesh."
            )

        # The transfers of all groups, unless there are too many; the smallest is always kept.
        instances = {}
        sizes = {}
        for name, algorithm in short.items():
            if name not in unfit:
                instances[name] = self._instances(axis, kind, algorithm)
                sizes[name] = sum(len(one.transfers.step) for _, one in instances[name])
        most = max(_MOST_TRANSFERS, min(sizes.values()))
        kept = [name for name, num_transfers in sizes.items() if num_transfers <= most]
        return {name: share_links(instances[name], self.topology) for name in kept}

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
        return frozenset(np.flatnonzero(np.isin(ranks, list(self.dead))).tolist())

    def _instances(self, axis: str, kind: Kind, algorithm: Algorithm) -> list[Instance]:
        """Returns the transfers of each group: the same, except for groups with dead ranks."""
        # One schedule for all groups with the same members dead.
        groups = self.groups(axis)
        schedules: dict[frozenset[int], Schedule] = {}
        instances = []
        for ranks in groups.ranks:
            dead = self._dead_members(ranks)

            # A single survivor has nobody to send to.
            if len(ranks) - len(dead) < 2:
                continue
            if dead not in schedules:
                schedules[dead] = _build_schedule(kind, algorithm, groups.layout.without(dead))
            instances.append((ranks, schedules[dead]))
        return instances


def _key(collective: Collective) -> _AxisAndKind:
    """Returns the groups and the kind of schedule of a collective.

    An all-gather is a reduce-scatter run backwards and takes as long.
    """
    is_gather = collective.kind == Kind.ALL_GATHER
    return collective.axis, Kind.REDUCE_SCATTER if is_gather else collective.kind


def _unfit(algorithms: dict[str, Algorithm], layouts: list[Topology]) -> dict[str, str]:
    """Returns why algorithms cannot be built on the groups of an axis, by their name."""
    # A reason against one group is one against all of the axis.
    reasons = {}
    for name, algorithm in algorithms.items():
        for layout in layouts:
            reason = algorithm.unfit(layout)
            if reason:
                reasons[name] = reason
    return reasons


def _payload_ranges(payloads: Iterable[float]) -> list[tuple[float, float]]:
    """Returns the least and the largest payload of ranges that cover all, none wider than allowed."""
    ranges: list[tuple[float, float]] = []
    for payload in sorted(payloads):
        if ranges and payload <= _PAYLOAD_RANGE * ranges[-1][0]:
            ranges[-1] = (ranges[-1][0], payload)
        else:
            ranges.append((payload, payload))
    return ranges


def _by_time(candidate: Candidate) -> tuple[bool, float]:
    """Orders candidates by simulated time; then those that were not simulated."""
    if candidate.timing is None:
        return True, candidate.estimate
    return False, candidate.timing.seconds
