"""Search for the best mesh, placement and schedules: the exploration of DDL on any network.

A formula estimates the cost of every mesh that fits and every placement by tiles: one axis of the
network after the other, each with a smaller payload. Whole plans are then simulated with their best
schedules, the cheapest estimate first, until no other plan can be faster: a mesh needs at least the
time in which all links together carry what any schedule must send.

Source:
    PowerAI DDL (arXiv:1708.02188): learners as a grid, cost by dimension, and an exploring mode.
    Differs: the dimensions are those of the network, and the search runs over meshes and placements.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe.distributed.mesh import MeshConfig
from moe.errors import ConfigError
from moe.network.planner.placement import Groups, Placement, all_placements
from moe.network.planner.timing import NetworkTimer, Question, TimedCollective
from moe.network.routes import find_route
from moe.network.schedule import IntArray
from moe.network.topology import Topology
from moe.network.topology_file import Network
from moe.planning.plan import Plan
from moe.planning.table import MESH_HEADING, MOST_SUGGESTIONS, show_bytes, show_mesh
from moe.planning.traffic import Collective, Kind

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class Suggestion:
    """A mesh on a network.

    Attributes:
        plan: The mesh and its requirements.
        placement: Positions of its ranks on the network.
        estimate: Seconds of all collectives by the formula.
        seconds: Simulated seconds of all collectives; None if it does not fit or is slower than
            another.
    """

    plan: Plan
    placement: Placement
    estimate: float
    seconds: float | None = None


def suggest_on_network(
    plans: Iterable[Plan], network: Network, memory: int, dead: Iterable[int] = ()
) -> list[Suggestion]:
    """Returns every mesh with its best placement, the best first.

    Meshes that fit into memory come first. They and all their placements are simulated in the order
    of the formula, each until another is known to be faster; so nothing that fits is faster than
    the first. Fully simulated meshes come first, ordered by their time, then the others, ordered by
    the formula.

    Args:
        plans: Meshes of at most as many ranks as the network.
        network: The network.
        memory: Bytes of a device.
        dead: Ranks of the network that have failed.

    Raises:
        ConfigError: If no mesh that fits has a way around the dead ranks.
    """
    # Every way to place each mesh, the lowest cost by the formula first.
    placed = []
    for plan in plans:
        for placement in all_placements(plan.mesh, network.topology):
            placed.append(_estimated(plan, placement, network))
    placed.sort(key=attrgetter("estimate"))

    # The fastest placement of each mesh. For a mesh that was not simulated, the formula's first
    # one.
    bounds = LowerBounds(network.topology, dead)
    known: dict[Question, TimedCollective] = {}
    fastest = math.inf
    best: dict[MeshConfig, Suggestion] = {}
    unfit: ConfigError | None = None
    for item in placed:
        mesh = item.plan.mesh
        if item.plan.memory <= memory:
            try:
                seconds = _seconds_below(fastest, item, network, bounds, known)
            except ConfigError as error:  # no way around the dead ranks
                unfit = error
                continue
            item = replace(item, seconds=seconds)
            fastest = fastest if seconds is None else min(fastest, seconds)
        if mesh not in best or _preference(item, memory) < _preference(best[mesh], memory):
            best[mesh] = item
    if unfit is not None and math.isinf(fastest):
        raise unfit
    return sorted(best.values(), key=lambda item: _preference(item, memory))


def _preference(item: Suggestion, memory: int) -> tuple[bool, float, float]:
    seconds = math.inf if item.seconds is None else item.seconds
    return item.plan.memory > memory, seconds, item.estimate


def _seconds_below(
    limit: float,
    item: Suggestion,
    network: Network,
    bounds: "LowerBounds",
    known: dict[Question, TimedCollective],
) -> float | None:
    """Returns the simulated seconds of all collectives; None if not below a limit.

    Collectives that are not simulated yet count with their lower bounds, so that most end early.
    """
    least = {}
    for collective in item.plan.collectives:
        least[collective] = bounds.seconds(collective, item.placement)
    seconds = sum(least.values())
    if seconds >= limit:
        return None

    # The longest first: they decide.
    timer = NetworkTimer(network, item.placement, bounds.dead, known)
    for part in timer.parts(sorted(least, key=least.__getitem__, reverse=True)):
        seconds += part.seconds - least[part.collective]
        if seconds >= limit:
            return None
    return seconds


def _estimated(plan: Plan, placement: Placement, network: Network) -> Suggestion:
    """Returns a placement with the cost of all its collectives by the formula."""
    # Groups of an axis are the same for all its collectives.
    groups: dict[str, Groups] = {}
    seconds = 0.0
    for collective in plan.collectives:
        axis = collective.axis
        if axis not in groups:
            groups[axis] = placement.groups(axis)
        seconds += estimated_seconds(collective, groups[axis], network.topology)
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
        route = find_route(*neighbours.tolist(), topology)
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


# ---------------------------------------------------------------------------
# Lower bounds


class _Cut(NamedTuple):
    """Counts traffic on links: every message adds its distance times its bytes.

    Attributes:
        positions: <int64>[ranks, axes] position of each rank.
        periods: Ranks of each axis whose ends are joined; 0 for others.
        farthest: Largest distance that counts: 1 if positions only identify neighbours.
        bandwidth: Bytes a second of all links that are counted, together.
    """

    positions: IntArray
    periods: tuple[int, ...]
    farthest: int
    bandwidth: float

    def distance(self, members: IntArray, others: IntArray) -> IntArray:
        """Returns <int64>[...] a lower bound on the links of the cut between ranks."""
        total = np.zeros(np.broadcast_shapes(members.shape, others.shape), np.int64)
        for axis, period in enumerate(self.periods):
            along = np.abs(self.positions[members, axis] - self.positions[others, axis])
            total += np.minimum(along, period - along) if period else along
        return np.minimum(total, self.farthest)


class LowerBounds:
    """Lower bound on the seconds of collectives, with any schedule.

    The live links together carry every byte over its distance. A sum reaches all ranks of a
    group along a tree, so it crosses no less than the shortest tree that spans the group; an
    exchange goes from each rank to each.

    Args:
        topology: The whole network.
        dead: Ranks that have failed.
    """

    def __init__(self, topology: Topology, dead: Iterable[int] = ()) -> None:
        self.dead = frozenset(dead)
        self._cuts = list(_cuts(topology.without(self.dead)))
        self._known: dict[tuple[bytes, int, bool], float] = {}

    def seconds(self, collective: Collective, placement: Placement) -> float:
        """Returns a lower bound on the seconds of all calls of a collective."""
        ranks = placement.groups(collective.axis).ranks
        ranks = ranks[np.argsort(ranks[:, 0])]
        is_exchange = collective.kind == Kind.ALL_TO_ALL
        key = (ranks.tobytes(), ranks.shape[1], is_exchange)
        if key not in self._known:
            self._known[key] = max(self._of_one_byte(ranks, is_exchange, cut) for cut in self._cuts)
        rounds = 2 if collective.kind == Kind.ALL_REDUCE else 1
        return rounds * collective.payload_bytes * self._known[key] * collective.num_calls

    def _of_one_byte(self, ranks: IntArray, is_exchange: bool, cut: _Cut) -> float:
        """Returns the seconds of a payload of one byte, in one direction."""
        is_live = ~np.isin(ranks, list(self.dead))
        measure = _exchange_distance if is_exchange else _tree_distance
        if not is_live.all():
            return measure(ranks, is_live, cut) / cut.bandwidth

        # Without holes, all groups are equivalent.
        return measure(ranks[:1], is_live[:1], cut) * len(ranks) / cut.bandwidth


def _cuts(topology: Topology) -> Iterator[_Cut]:
    """Yields the cuts of a network: links of a grid, of each axis too, or the links that leave ranks and nodes."""
    links = topology.links
    ranks = np.arange(topology.num_ranks)
    if topology.shape and not topology.switched:
        positions = np.stack(np.unravel_index(ranks, topology.shape), axis=1)
        sizes = zip(topology.shape, topology.wraps, strict=True)
        periods = tuple(size if wraps else 0 for size, wraps in sizes)
        farthest = sum(topology.shape)
        yield _Cut(positions, periods, farthest, float(links.bandwidth.sum()))
        for axis, period in enumerate(periods):
            along = positions[:, axis : axis + 1]
            is_along = along[links.source, 0] != along[links.destination, 0]
            if is_along.any():
                yield _Cut(along, (period,), farthest, float(links.bandwidth[is_along].sum()))
        return

    leaves_rank = links.source < topology.num_ranks
    yield _Cut(ranks[:, None], (0,), 1, float(links.bandwidth[leaves_rank].sum()))
    if len(topology.shape) > 1:
        nodes = ranks // topology.shape[-1]
        leaves_node = links.destination == topology.num_nodes - 1
        yield _Cut(nodes[:, None], (0,), 1, float(links.bandwidth[leaves_node].sum()))


def _tree_distance(ranks: IntArray, is_live: BoolArray, cut: _Cut) -> float:
    """Returns the length of the shortest trees that span the live ranks of each group, added up.

    Args:
        ranks: <int64>[groups, size] ranks of the network.
        is_live: <bool>[groups, size] those that are spanned.
        cut: Links that are counted.
    """
    # Prim's algorithm for all groups at once: each time the nearest rank outside joins the tree.
    rows = np.arange(len(ranks))
    is_outside = is_live.copy()
    distance = np.full(ranks.shape, np.inf)
    joining = is_outside.argmax(axis=1)
    total = 0.0
    for _ in range(ranks.shape[1] - 1):
        is_outside[rows, joining] = False
        joined = ranks[rows, joining][:, None]
        distance = np.minimum(distance, cut.distance(ranks, joined))
        nearest = np.where(is_outside, distance, np.inf)
        joining = nearest.argmin(axis=1)
        total += float(nearest[rows, joining][is_outside.any(axis=1)].sum())
    return total


def _exchange_distance(ranks: IntArray, is_live: BoolArray, cut: _Cut) -> float:
    """Returns bytes times distance of an exchange between live ranks, for a payload of one byte."""
    total = 0
    for member in range(ranks.shape[1]):
        distance = cut.distance(ranks, ranks[:, member : member + 1])
        total += int((distance * is_live * is_live[:, member : member + 1]).sum())
    return total / ranks.shape[1] ** 2


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
        seconds = "" if item.seconds is None else f"{item.seconds:.3g}"
        mesh = show_mesh(item.plan, memory)
        lines.append(f"{mesh}{item.estimate:>10.3g}{seconds:>10}  {item.placement}")

    # Count those that are not shown, too.
    num_fitting = sum(item.plan.memory <= memory for item in suggestions)
    lines.append(
        f"{len(suggestions):,} meshes, of which {num_fitting:,} fit into {show_bytes(memory)}. All "
        "their placements were compared with the first: those without seconds are slower."
    )
    return "\n".join(lines)
