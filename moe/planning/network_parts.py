"""What all groups of an axis do at once, reduced to the parts of the network that differ.

Groups that share links, directly or by others, are a part: they wait for each other, and are
simulated together. Parts that are alike take the same time, so that one of them is enough.
"""

from typing import NamedTuple

import numpy as np

from moe.network.routes import find_routes
from moe.network.schedule import IntArray, Intervals, Schedule, Transfers
from moe.network.topology import FloatArray, Topology

_DIGITS = 9
"""Decimal digits to which the numbers of two parts agree that are alike."""


class Instance(NamedTuple):
    """What one group does.

    Attributes:
        ranks: <int64>[size] its ranks of the network.
        schedule: Of ranks 0 to size - 1.
    """

    ranks: IntArray
    schedule: Schedule


class Parts(NamedTuple):
    """What all groups do, reduced to parts of the network that differ.

    Attributes:
        schedules: One for each part, of ranks of the network.
        num_groups: Groups in them.
        steps: Steps of the longest.
        load: Units that the busiest link carries, over its bandwidth.
        latency: Mean seconds of a message on the way.
    """

    schedules: tuple[Schedule, ...]
    num_groups: int
    steps: int
    load: float
    latency: float


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
    load: FloatArray
    latency: FloatArray


def differing_parts(instances: list[Instance], topology: Topology) -> Parts:
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
    return Parts(
        schedules=tuple(schedules),
        num_groups=num_groups,
        steps=max(schedule.num_steps for schedule in schedules),
        load=float(np.bincount(hops.link, hops.load).max()),
        latency=float(hops.latency.mean()),
    )


def _hops(instances: list[Instance], topology: Topology) -> _Hops:
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


def _side_by_side(instances: list[Instance], topology: Topology) -> Schedule:
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


def _renamed(instance: Instance) -> Transfers:
    """Returns the transfers of a group between ranks of the network."""
    table = instance.schedule.transfers
    return table._replace(
        source=instance.ranks[table.source],
        destination=instance.ranks[table.destination],
    )


def _renamed_intervals(part: Intervals, instance: Instance) -> Intervals:
    return part._replace(rank=instance.ranks[part.rank])


def _rounded(numbers: FloatArray) -> FloatArray:
    """Returns numbers above 0 with so many digits that equal sums in another order are equal."""
    scale = 10.0 ** (np.floor(np.log10(np.maximum(numbers, 1e-300))) - _DIGITS)
    return np.round(numbers / scale) * scale
