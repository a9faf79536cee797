"""Which mesh, how placed, with which schedules: the exploration of DDL on any network.

Every mesh that fits, and every way to place it with tiles, has a cost by a formula: each axis of the
network in turn, the payload smaller after each. The best few are then timed as a whole plan, with
the schedules that are best for them.

Source:
    PowerAI DDL (arXiv:1708.02188): learners as a grid, cost by dimension, and a mode that explores.
    Differs: the dimensions are those of the network, and what is explored are meshes and placements.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from moe.network.topology import Topology
from moe.network.topology_file import Network
from moe.planning.network import NetworkPlan, NetworkTimer
from moe.planning.network_placement import Groups, Placement, all_placements
from moe.planning.plan import Plan
from moe.planning.table import show_bytes
from moe.planning.traffic import ALL_REDUCE, ALL_TO_ALL, Collective

NUM_TIMED = 3
"""Plans that are simulated: each takes seconds on 1,024 chips."""

_MOST_SHOWN = 10


@dataclass(frozen=True)
class Suggestion:
    """A mesh on a network.

    Attributes:
        plan: The mesh and what it needs.
        placement: Where it stands.
        estimate: Seconds of all collectives by the formula.
        timed: The plan with simulated times; None where the estimate was too long.
    """

    plan: Plan
    placement: Placement
    estimate: float
    timed: NetworkPlan | None = None


def suggest_on_network(
    plans: Iterable[Plan],
    network: Network,
    memory: int,
    dead: Iterable[int] = (),
) -> list[Suggestion]:
    """Returns every mesh with its best placement, the best first.

    Those that fit into memory come first; of these the few with the lowest estimates are timed and
    come first of all, by their time.

    Args:
        plans: Meshes of so many ranks as the network has, or fewer.
        network: Where.
        memory: Bytes of a device.
        dead: Ranks of the network that have failed.
    """
    # The best placement of each mesh, by the formula.
    suggestions = []
    for plan in plans:
        placed = [_estimated(plan, placement, network) for placement in _placements(plan, network)]
        suggestions.append(min(placed, key=_by_estimate))
    suggestions.sort(key=_by_estimate)
    fitting = [item for item in suggestions if item.plan.memory <= memory]
    others = [item for item in suggestions if item.plan.memory > memory]

    # The best few that fit, with simulated times.
    timed = []
    for item in fitting[:NUM_TIMED]:
        timer = NetworkTimer(network, item.placement, dead)
        times = timer.plan(item.plan.collectives)
        timed.append(Suggestion(item.plan, item.placement, item.estimate, times))
    timed.sort(key=_by_time)
    return timed + fitting[NUM_TIMED:] + others


def _placements(plan: Plan, network: Network) -> Iterable[Placement]:
    return all_placements(plan.mesh, network.topology)


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
    rings go both ways around, the axes share the payload, strided rings beside each other share
    links, and a ring on a line without wrap crosses each link twice.

    Args:
        collective: What, and how often.
        groups: Where.
        topology: The network.
    """
    ranks = groups.ranks[0].reshape(groups.layout.shape or -1)
    wraps = groups.layout.wraps or (False,) * ranks.ndim
    strides = groups.strides or (1,) * ranks.ndim
    num_axes = sum(extent > 1 for extent in ranks.shape)
    is_exchange = collective.kind == ALL_TO_ALL
    rounds = 2 if collective.kind == ALL_REDUCE else 1

    latency = 0.0
    sending = 0.0
    payload = collective.payload_bytes
    for axis in reversed(range(ranks.ndim)):
        extent = ranks.shape[axis]
        if extent == 1:
            continue

        # The way from the first rank to the next along the axis.
        neighbours = np.moveaxis(ranks, axis, 0).reshape(extent, -1)[:2, 0]
        route = topology.route(*neighbours.tolist())
        latency += rounds * (extent - 1) * float(topology.links.latency[route].sum())

        # Bytes over the busiest link of the axis: of an exchange each rank's, a mean way far.
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


def _by_estimate(item: Suggestion) -> float:
    return item.estimate


def _by_time(item: Suggestion) -> float:
    assert item.timed is not None
    return item.timed.seconds


def show_network_suggestions(
    suggestions: Sequence[Suggestion],
    network: Network,
    memory: int,
) -> str:
    """Returns meshes on a network, the best first, as a table.

    Args:
        suggestions: In the order in which they are shown.
        network: Where.
        memory: Bytes of a device.
    """
    names = f"{'dp_replicate':>12}{'dp_shard':>10}{'ep':>6}{'tp':>6}"
    heading = f"{names}{'rows/pass':>11}{'memory':>13}{'fits':>6}{'formula':>10}{'seconds':>10}"

    # A row for each mesh; those that were simulated come first.
    lines = [f"on {network.topology.name}", f"{heading}  placed"]
    for item in suggestions[:_MOST_SHOWN]:
        plan = item.plan
        mesh = plan.mesh
        fits = "yes" if plan.memory <= memory else "no"
        seconds = "" if item.timed is None else f"{item.timed.seconds:.3g}"
        sizes = f"{mesh.dp_replicate:>12}{mesh.dp_shard:>10}{mesh.ep:>6}{mesh.tp:>6}"
        needs = f"{plan.workload.rows_of_pass(mesh):>11}{show_bytes(plan.memory):>13}{fits:>6}"
        lines.append(f"{sizes}{needs}{item.estimate:>10.3g}{seconds:>10}  {item.placement}")

    # Also of those that are not shown.
    num_fitting = sum(item.plan.memory <= memory for item in suggestions)
    lines.append(
        f"{len(suggestions):,} meshes, each with the placement of the lowest cost by formula; "
        f"{num_fitting:,} fit into {show_bytes(memory)}, of which {min(NUM_TIMED, num_fitting)} "
        "were simulated."
    )
    return "\n".join(lines)
