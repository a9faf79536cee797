"""The longest collective of a network plan as a trace and as a page."""

import json

from moe.errors import ConfigError
from moe.network.chrome_trace import chrome_trace
from moe.planning.network import NetworkPlan, NetworkTimer, TimedCollective
from moe.planning.network_page import NetworkPage, render_network_page
from moe.planning.network_page_curves import Curve

_CURVE_PAYLOADS = tuple(float(2**power) for power in range(12, 31, 3))
"""Bytes, 4 KiB to 1 GiB, for which algorithms are compared on the page."""


def longest_collective(timed: NetworkPlan) -> TimedCollective:
    """Returns the collective that takes most of an update.

    Raises:
        ConfigError: When there is none.
    """
    if not timed.parts:
        raise ConfigError(
            "A mesh of one rank exchanges nothing that --trace or --page could show. Choose another "
            "mesh, e.g. --mesh.dp_replicate 4."
        )
    return max(timed.parts, key=_seconds)


def network_trace(timer: NetworkTimer, timed: NetworkPlan) -> str:
    """Returns one call of the longest collective as a Chrome trace."""
    part = longest_collective(timed)
    simulation = timer.simulate(part.collective, part.algorithm)
    return json.dumps(chrome_trace(simulation))


def network_page(timer: NetworkTimer, timed: NetworkPlan) -> str:
    """Returns the longest collective as a page: loads, critical paths, payload against time."""
    # Those that were compared, on the links of one group.
    part = longest_collective(timed)
    collective = part.collective
    names = [candidate.name for candidate in part.candidates if candidate.timing is not None]
    simulations = {name: timer.simulate(collective, name) for name in names}

    # Every algorithm for payloads from small to large.
    curves = []
    for name in names:
        seconds = []
        for payload in _CURVE_PAYLOADS:
            call = collective._replace(payload_bytes=payload)
            seconds.append(timer.simulate(call, name).seconds)
        curves.append(Curve(name, _CURVE_PAYLOADS, tuple(seconds)))

    # What is shown, and on what it rests.
    title = f"{collective.kind.name} over {collective.axis}, for {collective.what}"
    notes = [
        *timed.network.notes,
        f"The mesh is placed {timed.placement}. One group is shown, on its share of the links.",
    ]
    page = NetworkPage(
        title=f"{title}, on {timed.network.topology.name}",
        topology=next(iter(simulations.values())).topology,
        simulations=simulations,
        curves=curves,
        notes=notes,
    )
    return render_network_page(page)


def _seconds(part: TimedCollective) -> float:
    return part.seconds
