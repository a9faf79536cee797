"""A page on the longest collective of a plan: link loads, critical paths, and times by payload.

One HTML file with its style, its script and its numbers inside; it needs no network and no server.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe.checks import check
from moe.inspection.html_page import render_page
from moe.network.planner.page_layout import node_names, place_network
from moe.network.planner.timing import NetworkPlan, NetworkTimer
from moe.network.routes import find_routes, pair_keys
from moe.network.schedule import IntArray
from moe.network.simulate import Simulation
from moe.network.topology import Topology
from moe.planning.table import show_bytes

MAX_PATH_ROWS = 200
"""Transfers of a critical path in the page's table; the page says how many there are in all."""

_MAX_LINKS = 200_000

_PAYLOADS = tuple(float(2**power) for power in range(12, 31, 3))
"""Bytes, 4 KiB to 1 GiB, for which algorithms are compared on the page, besides the payload of the plan."""

Times = Mapping[float, Mapping[str, float]]
"""Seconds by payload in bytes, and by name of the algorithm."""


def network_page(timer: NetworkTimer, timed: NetworkPlan) -> str:
    """Returns the collective that takes most of an update as an HTML page.

    Raises:
        ConfigError: If the network has more links than a browser can draw.
    """
    num_links = len(timer.topology.links.source)
    check(num_links <= _MAX_LINKS, "links of a page", num_links, f"at most {_MAX_LINKS}")
    part = max(timed.parts, key=lambda part: part.seconds)
    collective = part.collective

    # The algorithms that were simulated, on the links of one group.
    names = [candidate.name for candidate in part.candidates if candidate.timing is not None]
    simulations = {name: timer.simulate(collective, name) for name in names}
    times = {}
    for payload in sorted({*_PAYLOADS, collective.payload_bytes}):
        call = collective._replace(payload_bytes=payload)
        times[payload] = {name: timer.simulate(call, name).seconds for name in names}

    what = f"{collective.kind} over {collective.axis} ({collective.what})"
    place = f"Placement of the mesh: {timed.placement}. The page shows one group, on its share of the links."
    title = f"{what} on {timed.network.topology.name}"
    return render_network_page(title, simulations, times, [*timed.network.notes, place])


def render_network_page(
    title: str, simulations: Mapping[str, Simulation], times: Times, notes: Sequence[str]
) -> str:
    """Returns the page as HTML.

    Args:
        title: Heading.
        simulations: Simulation of each algorithm by name, on one network; the first is shown first.
        times: Times for several payloads.
        notes: Sentences that name what was assumed.
    """
    # A < in a name must not end the script that holds the numbers.
    first = next(iter(simulations.values()))
    numbers = _page_numbers(first.topology, simulations)
    text = json.dumps(numbers, ensure_ascii=False, separators=(",", ":"))

    return render_page(
        "network_page.html",
        Path(__file__).with_name("templates"),
        show_bytes=show_bytes,
        show_seconds=show_seconds,
        title=title,
        notes=notes,
        numbers=text.replace("<", "\\u003c"),
        topology=first.topology,
        simulations=simulations,
        times=times,
        payload=first.payload_bytes,
        num_axes=0 if first.topology.switched else len(first.topology.shape),
    )


def show_seconds(seconds: float) -> str:
    """Returns a time in the largest unit that gives at least 1, with three digits."""
    sizes = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
    unit = next((unit for unit, size in sizes.items() if seconds >= size), "s")
    return f"{seconds / sizes[unit]:.3g} {unit}"


def _page_numbers(topology: Topology, simulations: Mapping[str, Simulation]) -> dict[str, Any]:
    """Returns the data for the page's script."""
    layout = place_network(topology)
    links = topology.links
    return {
        "width": layout.width,
        "height": layout.height,
        "dead": sorted(topology.dead),
        "chips": np.round(layout.chips, 2).tolist(),
        "links": np.round(layout.links, 2).tolist(),
        "labels": layout.labels,
        "names": node_names(topology),
        "source": links.source.tolist(),
        "destination": links.destination.tolist(),
        "algorithms": [_algorithm_numbers(name, part) for name, part in simulations.items()],
    }


def _algorithm_numbers(name: str, simulation: Simulation) -> dict[str, Any]:
    """Returns the loads of links and the critical path of one algorithm."""
    path = simulation.path
    table = simulation.schedule.transfers
    unit_bytes = simulation.payload_bytes / max(simulation.schedule.num_units, 1)

    # The transfers of the path: step, ranks, bytes, start and end.
    rows = path.rows[:MAX_PATH_ROWS]
    num_bytes = (table.high[rows] - table.low[rows]) * unit_bytes
    columns = (
        table.step[rows],
        table.source[rows],
        table.destination[rows],
        num_bytes,
        simulation.timeline.start[rows],
        simulation.timeline.finish[rows],
    )

    # Loads are shares of the time.
    busy = simulation.link_busy_seconds / (simulation.seconds or 1.0)
    return {
        "name": name,
        "seconds": simulation.seconds,
        "busy": np.round(busy, 4).tolist(),
        "bytes": np.round(simulation.link_bytes).tolist(),
        "parts": [path.latency, path.bandwidth, path.waiting],
        "pathLength": len(path.rows),
        "path": list(zip(*(column.tolist() for column in columns), strict=True)),
        "pathLinks": _links_of_path(simulation).tolist(),
    }


def _links_of_path(simulation: Simulation) -> IntArray:
    """Returns the links that the transfers of the critical path cross, each once."""
    table = simulation.schedule.transfers.select(simulation.path.rows)
    routes = find_routes(table, simulation.topology)
    key = pair_keys(table.source, table.destination, simulation.topology.num_ranks)
    _, link = routes.hops(np.searchsorted(routes.key, key))
    return np.unique(link)
