"""A page on a network and its collectives: link loads, critical paths, payload against time.

One HTML file with its style, its script and its numbers inside; it needs no network and no server.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from moe.checks import check
from moe.network.routes import find_routes, pair_keys
from moe.network.schedule import IntArray
from moe.network.simulate import Simulation
from moe.network.topology import Topology
from moe.planning.network_page_curves import (
    HEIGHT,
    WIDTH,
    Curve,
    draw_chart,
    fastest_ranges,
    show_seconds,
)
from moe.planning.network_page_layout import place_network
from moe.planning.table import show_bytes

MAX_PATH_ROWS = 200
"""Transfers of a critical path in the page's table; it says how many there are."""

_MAX_LINKS = 200_000


@dataclass(frozen=True, eq=False)
class NetworkPage:
    """What a page shows.

    Attributes:
        title: Its heading.
        topology: The network, with its dead ranks.
        simulations: Of each algorithm by name, on this network; the first one is shown first.
        curves: Times of algorithms for several payloads; may be empty.
        notes: Sentences that name what was assumed.
    """

    title: str
    topology: Topology
    simulations: Mapping[str, Simulation]
    curves: Sequence[Curve] = ()
    notes: Sequence[str] = field(default_factory=tuple)


def render_network_page(page: NetworkPage) -> str:
    """Returns the page as HTML.

    Raises:
        ConfigError: When nothing was simulated, something on another network, or the network has
            more links than a browser can draw.
    """
    check(len(page.simulations) > 0, "simulations of a page", 0, "at least one")
    num_links = len(page.topology.links.source)
    check(num_links <= _MAX_LINKS, "links of a page", num_links, f"at most {_MAX_LINKS}")
    for name, simulation in page.simulations.items():
        theirs = len(simulation.link_bytes)
        check(theirs == num_links, f"links of {name}", theirs, f"the {num_links} of the page")

    # A < in a name must not end the script that holds the numbers.
    numbers = json.dumps(_page_numbers(page), ensure_ascii=False, separators=(",", ":"))

    # Texts are escaped by the template.
    ranges = fastest_ranges(page.curves)
    environment = Environment(
        loader=PackageLoader("moe.planning"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["bytes"] = show_bytes
    return environment.get_template("network_page.html").render(
        page=page,
        numbers=numbers.replace("<", "\\u003c"),
        facts=_facts(page.topology),
        summaries=[_summary(name, part) for name, part in page.simulations.items()],
        ranges=ranges,
        chart=draw_chart(page.curves, ranges) if page.curves else None,
        num_axes=len(page.topology.shape),
        chart_width=WIDTH,
        chart_height=HEIGHT,
    )


def _facts(topology: Topology) -> list[tuple[str, str]]:
    """Returns what the page says of the network."""
    links = topology.links

    # Links may differ: each rate and latency once.
    rates = sorted({f"{rate / 1e9:.4g} GB/s" for rate in links.bandwidth.tolist()})
    latencies = sorted({show_seconds(part) for part in links.latency.tolist() if part > 0})
    dead = sorted(topology.dead)

    # Long lists are cut short.
    shown = ", ".join(str(rank) for rank in dead[:32]) + (" ..." if len(dead) > 32 else "")
    return [
        ("ranks", f"{topology.num_ranks:,}"),
        ("links, one way each", f"{len(links.source):,}"),
        ("bandwidth of a link", ", ".join(rates) or "-"),
        ("latency of a link", ", ".join(latencies) or "0"),
        ("dead ranks", f"{len(dead)}: {shown}" if dead else "none"),
    ]


@dataclass(frozen=True)
class _Summary:
    """A row of the table of algorithms."""

    name: str
    time: str
    payload: str
    transfers: str
    busiest: str
    latency: str
    bandwidth: str
    waiting: str


def _summary(name: str, simulation: Simulation) -> _Summary:
    path = simulation.path

    # How close the time is to what the links allow.
    busiest = simulation.link_busy_seconds.max(initial=0.0)
    share = busiest / simulation.seconds if simulation.seconds else 0.0
    return _Summary(
        name=name,
        time=show_seconds(simulation.seconds),
        payload=show_bytes(simulation.payload_bytes),
        transfers=f"{len(simulation.start):,}",
        busiest=f"{share:.0%}",
        latency=show_seconds(path.latency),
        bandwidth=show_seconds(path.bandwidth),
        waiting=show_seconds(path.waiting),
    )


def _page_numbers(page: NetworkPage) -> dict[str, Any]:
    """Returns what the page's script draws."""
    layout = place_network(page.topology)

    # Lengths are rounded to what can be seen.
    links = page.topology.links
    return {
        "width": layout.width,
        "height": layout.height,
        "shape": page.topology.shape,
        "numRanks": page.topology.num_ranks,
        "dead": sorted(page.topology.dead),
        "chips": np.round(layout.chips, 2).tolist(),
        "links": np.round(layout.links, 2).tolist(),
        "strips": [[strip.title, strip.y] for strip in layout.strips],
        "source": links.source.tolist(),
        "destination": links.destination.tolist(),
        "algorithms": [_algorithm(name, part) for name, part in page.simulations.items()],
    }


def _algorithm(name: str, simulation: Simulation) -> dict[str, Any]:
    """Returns the loads of links and the critical path of one algorithm."""
    path = simulation.path

    # Loads are shares of the time.
    seconds = simulation.seconds or 1.0
    rows = path.rows[:MAX_PATH_ROWS]
    table = simulation.schedule.transfers
    unit = simulation.payload_bytes / max(simulation.schedule.num_units, 1)
    num_bytes = (table.high - table.low)[rows] * unit

    # The transfers of the path: step, ranks, bytes, start and end.
    steps = []
    for row, size in zip(rows.tolist(), num_bytes.tolist(), strict=True):
        step = [int(table.step[row]), int(table.source[row]), int(table.destination[row])]
        times = [float(simulation.start[row]), float(simulation.finish[row])]
        steps.append([*step, size, *times])
    return {
        "name": name,
        "seconds": simulation.seconds,
        "busy": np.round(simulation.link_busy_seconds / seconds, 4).tolist(),
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

    # All hops of all transfers of the path.
    routes = find_routes(table, simulation.topology)
    key = pair_keys(table.source, table.destination, simulation.topology.num_ranks)
    _, link = routes.hops(np.searchsorted(routes.key, key))
    return np.unique(link)
