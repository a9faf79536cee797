"""Search for the best mesh, placement and schedules: the exploration of DDL on any network.

A formula estimates the cost of every mesh that fits and every placement by tiles: one axis of the
network after the other, each with a smaller payload. Those with the lowest estimates are simulated with
their best schedules.

Source:
    PowerAI DDL (arXiv:1708.02188): learners as a grid, cost by dimension, and an exploring mode.
    Differs: the dimensions are those of the network, and the search runs over meshes and placements.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from moe.distributed.mesh import MeshConfig
from moe.errors import ConfigError
from moe.network.planner.placement import Groups, Placement, all_placements
from moe.network.planner.timing import NetworkTimer, Question, TimedCollective
from moe.network.routes import find_route
from moe.network.topology import Topology
from moe.network.topology_file import Network
from moe.planning.plan import Plan
from moe.planning.table import MESH_HEADING, MOST_SUGGESTIONS, show_bytes, show_mesh
from moe.planning.traffic import Collective, Kind

_MOST_SIMULATED = 32
"""Placements that are simulated, of all meshes together."""


@dataclass(frozen=True)
class Suggestion:
    """A mesh on a network.

    Attributes:
        plan: The mesh and its requirements.
        placement: Positions of its ranks on the network.
        estimate: Seconds of all collectives by the formula.
        seconds: Simulated seconds of all collectives; infinite if it was not simulated, or is slower than
            another.
    """

    plan: Plan
    placement: Placement
    estimate: float
    seconds: float = math.inf


def suggest_on_network(
    plans: Iterable[Plan], network: Network, memory: int, dead: Iterable[int] = ()
) -> list[Suggestion]:
    """Returns every mesh with its best placement, the best first.

    Meshes that fit into memory come first. Of them and all their placements those with the lowest
    estimates are simulated, each until another is known to be faster. Fully simulated meshes come
    first, ordered by their time, then the others, ordered by the formula.

    Args:
        plans: Meshes of at most as many ranks as the network.
        network: The network.
        memory: Bytes of a device.
        dead: Ranks of the network that have failed.

    Raises:
        ConfigError: If no mesh that was simulated has a way around the dead ranks.
    """
    # Every way to place each mesh, the lowest cost by the formula first.
    placed = []
    for plan in plans:
        for placement in all_placements(plan.mesh, network.topology):
            placed.append(_estimated(plan, placement, network))
    placed.sort(key=attrgetter("estimate"))
    fitting = [item for item in placed if item.plan.memory <= memory]

    # The fastest of the first few.
    known: dict[Question, TimedCollective] = {}
    fastest = math.inf
    simulated: list[Suggestion] = []
    unfit: ConfigError | None = None
    for item in fitting[:_MOST_SIMULATED]:
        timer = NetworkTimer(network, item.placement, dead, known)
        try:
            seconds = _seconds_below(fastest, item, timer)
        except ConfigError as error:  # no way around the dead ranks
            unfit = error
            continue
        fastest = min(fastest, seconds)
        simulated.append(replace(item, seconds=seconds))
    if unfit is not None and math.isinf(fastest):
        raise unfit

    # The best placement of each mesh.
    def preference(item: Suggestion) -> tuple[bool, float, float]:
        return item.plan.memory > memory, item.seconds, item.estimate

    best: dict[MeshConfig, Suggestion] = {}
    for item in sorted([*simulated, *placed], key=preference):
        best.setdefault(item.plan.mesh, item)
    return list(best.values())


def _seconds_below(limit: float, item: Suggestion, timer: NetworkTimer) -> float:
    """Returns the simulated seconds of all collectives; infinite if not below a limit."""

    # The largest first: they decide.
    def size(collective: Collective) -> float:
        return -collective.payload_bytes * collective.num_calls

    seconds = 0.0
    for part in timer.parts(sorted(item.plan.collectives, key=size)):
        seconds += part.seconds
        if seconds >= limit:
            return math.inf
    return seconds


def _estimated(plan: Plan, placement: Placement, network: Network) -> Suggestion:
    """Returns a placement with the cost of all its collectives by the formula."""
    # Groups of an axis are the same for all its collectives.
    axes = {collective.axis for collective in plan.collectives}
    groups = {axis: placement.groups(axis) for axis in axes}
    seconds = 0.0
    for collective in plan.collectives:
        seconds += estimated_seconds(collective, groups[collective.axis], network.topology)
    return Suggestion(plan, placement, seconds)


def estimated_seconds(collective: Collective, groups: Groups, topology: Topology) -> float:
    """Returns the cost of all calls of a collective by the formula.

    A ring along each axis of the group in turn: p - 1 messages of the latency from a rank to its
    neighbour, and (p - 1) / p of the payload, which is smaller by p for the next axis. On a grid
    rings go both ways around, the axes share the payload, adjacent strided rings share links, and a
    ring on a line without wrap crosses each link twice.

    Args:
        collective: The collective.
        groups: The groups that run it.
        topology: The network.
    """
    ranks = groups.ranks[0].reshape(groups.layout.shape or -1)
    wraps = groups.layout.wraps or (False,) * ranks.ndim
    strides = groups.strides or (1,) * ranks.ndim
    num_axes = sum(extent > 1 for extent in ranks.shape)
    is_exchange = collective.kind == Kind.ALL_TO_ALL
    rounds = 2 if collective.kind == Kind.ALL_REDUCE else 1

    latency = 0.0
    sending = 0.0
    payload = collective.payload_bytes
    for axis in reversed(range(ranks.ndim)):
        extent = ranks.shape[axis]
        if extent == 1:
            continue

        # The way from the first rank to the next along the axis.
        neighbours = np.moveaxis(ranks, axis, 0).reshape(extent, -1)[:2, 0]
        source, destination = neighbours.tolist()
        route = find_route(source, destination, topology)
        latency += rounds * (extent - 1) * float(topology.links.latency[route].sum())

        # Bytes over the busiest link of the axis: each rank's bytes of an exchange, over a mean
        # distance.
        part = (extent - 1) / extent
        sent = rounds * payload * part
        if is_exchange:
            sent = payload / ranks.size * (part if topology.switched else extent / 4)
        if not topology.switched:
            sent *= strides[axis] / (2 * num_axes)
            sent *= 1 if wraps[axis] or extent == 2 else 2
        sending += sent / float(topology.links.bandwidth[route].min())
        payload /= 1 if is_exchange else extent
    return (latency + sending) * collective.num_calls


def show_network_suggestions(
    suggestions: Sequence[Suggestion], network: Network, memory: int
) -> str:
    """Returns meshes on a network, the best first, as a table.

    Args:
        suggestions: In display order.
        network: The network.
        memory: Bytes of a device.
    """
    heading = f"{MESH_HEADING}{'formula':>10}{'seconds':>10}  placed"
    lines = [f"on {network.topology.name}", heading]
    for item in suggestions[:MOST_SUGGESTIONS]:
        seconds = "" if math.isinf(item.seconds) else f"{item.seconds:.3g}"
        mesh = show_mesh(item.plan, memory)
        lines.append(f"{mesh}{item.estimate:>10.3g}{seconds:>10}  {item.placement}")

    # Count those that are not shown, too.
    num_fitting = sum(item.plan.memory <= memory for item in suggestions)
    lines.append(
        f"{len(suggestions):,} meshes, of which {num_fitting:,} fit into {show_bytes(memory)}. Of "
        f"their placements the best {_MOST_SIMULATED} by the formula were simulated, each until another was faster."
    )
    return "\n".join(lines)
