"""The groups of an axis that run at once, each on its share of the links.

A link that several groups use is shared in proportion to their traffic, as packet networks do. So every group can be
timed alone, on links that are slower where others use them too, and groups whose links and routes are alike take the
same time.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from moe.network.routes import find_routes
from moe.network.schedule import IntArray, Schedule
from moe.network.topology import FloatArray, Topology

_DIGITS = 9
"""Decimal digits to which the numbers of groups that are alike agree."""

_MOST_GROUPS = 3
"""Number of groups that are simulated, of those that differ: near a hole there may be dozens."""


Instance = tuple[IntArray, Schedule]
"""Ranks <int64>[size] of one group on the network, and its schedule of ranks 0 to size - 1."""


class GroupOnLinks(NamedTuple):
    """A group on its share of the links.

    Attributes:
        schedule: Schedule of ranks of the network.
        topology: The network with the group's share of each bandwidth.
        load: Units on its busiest link, including other groups', over the bandwidth.
        latency: Mean latency of a message in seconds.
    """

    schedule: Schedule
    topology: Topology
    load: float
    latency: float

    def estimate(self, payload_bytes: float) -> float:
        """Returns seconds as if there were a barrier after each step."""
        bound = self.load * payload_bytes / self.schedule.num_units
        return bound + self.schedule.num_steps * self.latency


class SharedLinks(NamedTuple):
    """The groups of an axis that differ from each other.

    Attributes:
        groups: One group of each kind.
    """

    groups: tuple[GroupOnLinks, ...]

    @property
    def steps(self) -> int:
        """Steps of the longest schedule."""
        return max(group.schedule.num_steps for group in self.groups)

    def bound(self, payload_bytes: float) -> float:
        """Returns the seconds of the busiest link, a lower bound for all groups together."""
        num_units = self.groups[0].schedule.num_units
        return max(group.load for group in self.groups) * payload_bytes / num_units

    def estimate(self, payload_bytes: float) -> float:
        """Returns the estimate of the slowest group."""
        return max(group.estimate(payload_bytes) for group in self.groups)

    def slowest(self, payload_bytes: float) -> list[GroupOnLinks]:
        """Returns the few groups that take longest by their estimates."""
        groups = sorted(self.groups, key=lambda group: -group.estimate(payload_bytes))
        return groups[:_MOST_GROUPS]


def share_links(instances: list[Instance], topology: Topology) -> SharedLinks:
    """Returns one group of each kind, each on its share of the links.

    Args:
        instances: Schedule of every group, all at the same time.
        topology: The network.
    """
    # Load of each link from all groups.
    uses = [_links_of(*instance, topology) for instance in instances]
    total = np.zeros(len(topology.links.source))
    for link, load, _ in uses:
        total[link] += load

    groups: dict[tuple[int, bytes, bytes], GroupOnLinks] = {}
    for (ranks, schedule), (link, load, latency) in zip(instances, uses, strict=True):
        # Groups are alike if their links are equally busy and their routes equally long, in any order.
        busy = _rounded(np.sort(total[link])).tobytes()
        signature = (id(schedule), busy, _rounded(np.sort(latency)).tobytes())
        if signature in groups:
            continue

        # A group's share of a link is its own load divided by the load of all groups.
        bandwidth = topology.links.bandwidth.copy()
        bandwidth[link] *= load / total[link]
        groups[signature] = GroupOnLinks(
            schedule=schedule.among(ranks, topology.num_ranks),
            topology=replace(topology, links=topology.links._replace(bandwidth=bandwidth)),
            load=float(total[link].max()),
            latency=float(latency.mean()),
        )
    return SharedLinks(tuple(groups.values()))


def _links_of(
    ranks: IntArray, schedule: Schedule, topology: Topology
) -> tuple[IntArray, FloatArray, FloatArray]:
    """Returns the links that a group uses, and its load on them.

    Returns:
        <int64>[L] links, <float64>[L] units that it sends over each, over the bandwidth, and
        <float64>[P] seconds of its routes.
    """
    table = schedule.transfers
    source = ranks[table.source]
    destination = ranks[table.destination]
    routes = find_routes(table._replace(source=source, destination=destination), topology)

    # Units of each pair of ranks.
    pair = np.searchsorted(routes.key, source * topology.num_ranks + destination)
    units = np.bincount(pair, table.high - table.low, minlength=len(routes.key))

    # Units of each link, which may be on the routes of several pairs.
    row, hop = routes.hops(np.arange(len(routes.key)))
    link, place = np.unique(hop, return_inverse=True)
    load = np.bincount(place, units[row]) / topology.links.bandwidth[link]
    return link, load, routes.latency


def _rounded(numbers: FloatArray) -> FloatArray:
    """Returns numbers rounded so that equal sums in another order are equal."""
    scale = 10.0 ** (np.floor(np.log10(np.maximum(numbers, 1e-300))) - _DIGITS)
    return np.round(numbers / scale) * scale
