"""A page on the longest collective of a plan: link loads, critical paths, payload against time.

One HTML file with its style, its script and its numbers inside; it needs no network and no server.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from moe.checks import check
from moe.network.planner.page_chart import (
    HEIGHT,
    WIDTH,
    Curve,
    draw_chart,
    fastest_ranges,
    show_bytes,
    show_seconds,
)
from moe.network.planner.page_layout import node_names, place_network
from moe.network.planner.timing import NetworkPlan, NetworkTimer
from moe.network.routes import find_routes, pair_keys
from moe.network.schedule import IntArray
from moe.network.simulate import Simulation
from moe.network.topology import Topology

MAX_PATH_ROWS = 200
"""Transfers of a critical path in the page's table; the page says how many there are in all."""

_MAX_LINKS = 200_000
_MAX_DEAD_SHOWN = 32

_CURVE_PAYLOADS = tuple(float(2**power) for power in range(12, 31, 3))
"""Bytes, 4 KiB to 1 GiB, for which algorithms are compared on the page, besides the payload of the plan."""


def network_page(timer: NetworkTimer, timed: NetworkPlan) -> str:
    """Returns the collective that takes most of an update as an HTML page."""
    part = max(timed.parts, key=lambda part: part.seconds)
    collective = part.collective

    # The algorithms that were simulated, on the links of one group.
    simulations = {}
    curves = []
    payloads = tuple(sorted({*_CURVE_PAYLOADS, collective.payload_bytes}))
    for candidate in part.candidates:
        if candidate.timing is None:
            continue
        name = candidate.name
        simulations[name] = timer.simulate(collective, name)
        seconds = []
        for payload in payloads:
            call = collective._replace(payload_bytes=payload)
            seconds.append(timer.simulate(call, name).seconds)
        curves.append(Curve(name, payloads, tuple(seconds)))

    what = f"{collective.kind} over {collective.axis} ({collective.what})"
    return render_network_page(
        f"{what} on {timed.network.topology.name}",
        next(iter(simulations.values())).topology,
        simulations,
        curves,
        notes=[
            *timed.network.notes,
            f"Placement of the mesh: {timed.placement}. The page shows one group, on its share of the links.",
        ],
    )


def render_network_page(
    title: str,
    topology: Topology,
    simulations: Mapping[str, Simulation],
    curves: Sequence[Curve] = (),
    notes: Sequence[str] = (),
) -> str:
    """Returns the page as HTML.

    Args:
        title: Heading.
        topology: The network, with its dead ranks.
        simulations: Simulation of each algorithm by name, on this network; the first is shown first.
        curves: Times of algorithms for several payloads, that of the simulations included; may be empty.
        notes: Sentences that name what was assumed.

    Raises:
        ConfigError: If the network has more links than a browser can draw.
    """
    num_links = len(topology.links.source)
    check(num_links <= _MAX_LINKS, "links of a page", num_links, f"at most {_MAX_LINKS}")

    # A < in a name must not end the script that holds the numbers.
    numbers = _page_numbers(topology, simulations)
    text = json.dumps(numbers, ensure_ascii=False, separators=(",", ":"))

    # The template escapes texts.
    payload = next(iter(simulations.values())).payload_bytes
    ranges = fastest_ranges(curves)
    environment = Environment(
        loader=PackageLoader("moe.network.planner"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["bytes"] = show_bytes
    return environment.get_template("network_page.html").render(
        title=title,
        notes=notes,
        numbers=text.replace("<", "\\u003c"),
        facts=_facts(topology),
        summaries=[_summary(name, part) for name, part in simulations.items()],
        ranges=ranges,
        payload=show_bytes(payload),
        chart=draw_chart(curves, ranges, payload) if curves else None,
        num_axes=0 if topology.switched else len(topology.shape),
        chart_width=WIDTH,
        chart_height=HEIGHT,
    )


def _facts(topology: Topology) -> list[tuple[str, str]]:
    """Returns names and values of the network's properties on the page."""
    links = topology.links
    rates = sorted({f"{rate / 1e9:.4g} GB/s" for rate in links.bandwidth.tolist()})
    latencies = sorted({show_seconds(part) for part in links.latency.tolist() if part > 0})
    dead = sorted(topology.dead)
    shown = ", ".join(str(rank) for rank in dead[:_MAX_DEAD_SHOWN])
    if len(dead) > _MAX_DEAD_SHOWN:
        shown += " ..."
    return [
        ("ranks", f"{topology.num_ranks:,}"),
        ("one-way links", f"{len(links.source):,}"),
        ("bandwidth of a link", ", ".join(rates) or "-"),
        ("latency of a link", ", ".join(latencies) or "0"),
        ("dead ranks", f"{len(dead)}: {shown}" if dead else "none"),
    ]


def _summary(name: str, simulation: Simulation) -> dict[str, str]:
    """Returns a row of the table of algorithms."""
    path = simulation.path
    busiest = simulation.link_busy_seconds.max(initial=0.0)
    share = busiest / simulation.seconds if simulation.seconds else 0.0
    return {
        "name": name,
        "time": show_seconds(simulation.seconds),
        "transfers": f"{len(simulation.start):,}",
        "busiest": f"{100 * share:.0f} %",
        "latency": show_seconds(path.latency),
        "bandwidth": show_seconds(path.bandwidth),
        "waiting": show_seconds(path.waiting),
    }


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
    steps = []
    for row in path.rows[:MAX_PATH_ROWS].tolist():
        step = [int(table.step[row]), int(table.source[row]), int(table.destination[row])]
        num_bytes = float((table.high[row] - table.low[row]) * unit_bytes)
        steps.append(
            [*step, num_bytes, float(simulation.start[row]), float(simulation.finish[row])]
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
        "path": steps,
        "pathLinks": _links_of_path(simulation).tolist(),
    }


def _links_of_path(simulation: Simulation) -> IntArray:
    """Returns the links that the transfers of the critical path cross, each once."""
    table = simulation.schedule.transfers.select(simulation.path.rows)
    if not len(table.step):
        return np.empty(0, np.int64)
    routes = find_routes(table, simulation.topology)
    key = pair_keys(table.source, table.destination, simulation.topology.num_ranks)
    _, link = routes.hops(np.searchsorted(routes.key, key))
    return np.unique(link)
