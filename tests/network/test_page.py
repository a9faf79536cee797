"""The page has the numbers of the simulations, everything inside, and each link in its place."""

import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.network.planner.page import MAX_PATH_ROWS, render_network_page
from moe.network.planner.page_chart import (
    Curve,
    Range,
    draw_chart,
    fastest_ranges,
    show_bytes,
    show_seconds,
)
from moe.network.planner.page_layout import PITCH, node_names, place_network
from moe.network.rings import grid_all_reduce, torus_all_reduce
from moe.network.simulate import Simulation, simulate
from moe.network.topology import Links, Rate, Topology, grid, switch, two_level

ROW, COLUMN = 3, 5


def mesh(*, wraps: bool = False) -> Topology:
    return grid((ROW, COLUMN), wraps=wraps, bandwidth=8e9, latency=1e-6)


def tree() -> Topology:
    """Returns two switches with two ranks each."""
    ends = [(0, 4), (1, 4), (2, 5), (3, 5), (4, 5), (4, 0), (4, 1), (5, 2), (5, 3), (5, 4)]
    links = Links(*np.array(ends).T, bandwidth=np.full(10, 8e9), latency=np.zeros(10))
    return Topology("tree", 4, 6, links)


def simulations(topology: Topology) -> dict[str, Simulation]:
    ranks = topology.live_ranks
    ring = grid_all_reduce(ranks, len(ranks), num_ranks=topology.num_ranks)
    both = torus_all_reduce(ranks, 2 * len(ranks), num_ranks=topology.num_ranks)
    return {"ring": simulate(ring, topology, 1e6), "two ways": simulate(both, topology, 1e6)}


def numbers_in(page: str) -> dict[str, Any]:
    match = re.search(
        r'<script type="application/json" id="numbers">(.*?)</script>', page, re.DOTALL
    )
    assert match is not None
    return json.loads(match[1])


def test_the_page_has_the_loads_and_the_path_of_every_algorithm() -> None:
    topology = mesh().without(ranks=[7])
    parts = simulations(topology)

    page = render_network_page("A hole", topology, parts)

    numbers = numbers_in(page)
    assert numbers["dead"] == [7]
    assert [shown["name"] for shown in numbers["algorithms"]] == ["ring", "two ways"]
    for shown, simulation in zip(numbers["algorithms"], parts.values(), strict=True):
        busy = simulation.link_busy_seconds / simulation.seconds
        np.testing.assert_allclose(shown["busy"], busy, atol=1e-4)
        assert shown["pathLength"] == len(simulation.path.rows)
        assert sum(shown["parts"]) == pytest.approx(simulation.seconds)
        assert shown["path"][-1][-1] == simulation.seconds

        # Each transfer of the path goes over at least one of the links that are outlined.
        sources = {numbers["source"][link] for link in shown["pathLinks"]}
        assert {step[1] for step in shown["path"]} <= sources
    assert "8 GB/s" in page
    assert "<dd>1: 7</dd>" in page


def test_the_page_needs_nothing_from_elsewhere() -> None:
    curve = Curve("ring", (1e3, 1e6), (1e-5, 1e-3))
    page = render_network_page("Page", mesh(), simulations(mesh()), [curve], ["Note."])

    assert re.findall(r"\s(?:src|href|srcset|data)=", page) == []
    assert "http" not in page
    assert "@import" not in page
    assert "url(" not in page


def test_names_are_texts_and_no_markup() -> None:
    name = "</script><b>bold</b>"
    part = simulations(mesh())["ring"]
    curves = [Curve(name, (1e3, 1e6), (1e-5, 1e-3))]

    page = render_network_page(name, mesh(), {name: part}, curves, [name])

    assert "<b>" not in page
    assert page.count("</script>") == 2
    assert numbers_in(page)["algorithms"][0]["name"] == name


def test_a_long_path_is_shortened_and_the_page_says_how_long_it_is() -> None:
    line = grid((103,), wraps=True, bandwidth=8e9, latency=1e-6)
    part = simulate(grid_all_reduce(range(103), 103), line, 1e6)

    shown = numbers_in(render_network_page("Long", line, {"ring": part}))

    assert len(shown["algorithms"][0]["path"]) == MAX_PATH_ROWS
    assert shown["algorithms"][0]["pathLength"] == 204


@pytest.mark.parametrize("wraps", [False, True])
def test_a_lane_is_between_its_two_chips(wraps: bool) -> None:
    topology = mesh(wraps=wraps)
    layout = place_network(topology)
    middle = layout.chips[:, :2] + layout.chips[:, 2:] / 2
    lanes = layout.links[:, :2] + layout.links[:, 2:] / 2

    source = middle[topology.links.source]
    destination = middle[topology.links.destination]
    distance = np.linalg.norm(source - destination, axis=1)
    is_near = distance < 1.5 * PITCH

    # Halfway between neighbours; next to its source where it goes around the end.
    halfway = (source + destination) / 2
    assert np.abs(lanes - halfway)[is_near].max() < PITCH / 4
    assert np.linalg.norm(lanes - source, axis=1).max() < PITCH
    assert (~is_near).any() == wraps
    assert len(np.unique(layout.links, axis=0)) == len(layout.links)


@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4), wraps=st.booleans())
def test_no_two_links_stand_in_one_place_and_all_are_on_the_page(
    shape: list[int], wraps: bool
) -> None:
    topology = grid(shape, wraps=wraps, bandwidth=1.0, latency=0.0)
    layout = place_network(topology)

    boxes = np.concatenate([layout.links, layout.chips])
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 0] + boxes[:, 2] <= layout.width + 1e-9).all()
    assert (boxes[:, 1] + boxes[:, 3] <= layout.height + 1e-9).all()
    assert len(np.unique(np.round(layout.links, 6), axis=0)) == len(layout.links)


def nodes(*, shared_card: bool = False) -> Topology:
    """Returns 67 nodes of three ranks: more columns than one block has."""
    inside, across = Rate(8e9, 1e-6), Rate(1e9, 1e-5)
    return two_level(67, 3, inside=inside, across=across, shared_card=shared_card)


def test_links_of_nodes_have_a_column_for_the_node_and_a_row_for_the_nic() -> None:
    topology = nodes()
    layout = place_network(topology)
    texts = [text for text, _, _ in layout.labels]
    assert texts.count("NIC 2") == texts.count("rank 2") == 4  # both ways, two blocks
    assert texts.count("64") == 4
    names = node_names(topology)
    assert names[7] == "rank 7 (node 2, NIC 1)"
    assert names[-1] == "network switch"
    assert names[201] == "switch of node 0"

    # The link of each card is below the number of its column, and right of that of its row.
    rank = 64 * 3 + 2
    (link,) = np.flatnonzero(
        (topology.links.source == rank) & (topology.links.destination == topology.num_nodes - 1)
    )
    x, y, width, height = layout.links[link]
    heads = [
        place for place in layout.labels if place[0] == "64" and place[1] <= x < place[1] + width
    ]
    rows = [place for place in layout.labels if place[0] == "NIC 2" and y < place[2] < y + height]
    assert any(0 < y - head[2] < 3 * PITCH for head in heads)
    assert len(rows) == 1

    # No two links in one place, and all on the page.
    assert len(np.unique(layout.links[:, :2], axis=0)) == len(topology.links.source)
    assert layout.links[:, 0].min() > 0
    assert (layout.links[:, 0] + layout.links[:, 2]).max() <= layout.width
    assert (layout.links[:, 1] + layout.links[:, 3]).max() <= layout.height


def test_one_card_of_a_node_is_named_with_its_switch() -> None:
    topology = nodes(shared_card=True)
    names = node_names(topology)
    assert names[7] == "rank 7 (node 2)"
    assert names[203] == "switch and NIC of node 2"
    texts = [text for text, _, _ in place_network(topology).labels]
    assert "NIC 0" in texts
    assert "NIC 1" not in texts


def test_links_of_one_switch_have_a_column_for_each_rank() -> None:
    layout = place_network(switch(4, Rate(8e9, 1e-6)).without(ranks=[1]))
    texts = [text for text, _, _ in layout.labels]
    assert texts == [
        *("from ranks to the switch", "rank", "0", "1", "2", "3"),
        *("from the switch to ranks", "rank", "0", "1", "2", "3"),
    ]
    assert len(np.unique(layout.links[:, :2], axis=0)) == 6


def test_links_of_other_switches_are_in_lines() -> None:
    layout = place_network(tree())

    titles = [title for title, _, _ in layout.labels]
    assert titles == [
        "4 links from ranks to switches",
        "2 links between switches",
        "4 links from switches to ranks",
    ]
    assert len(np.unique(layout.links[:, :2], axis=0)) == 10
    part = simulations(tree())
    assert numbers_in(render_network_page("Tree", tree(), part))["chips"] == []


def test_the_fastest_algorithm_changes_where_the_curves_cross() -> None:
    # 1 ms + S / (1 GB/s), and 10 ms + S / (2 GB/s), cross at 18 MB; both are straight between the
    # payloads on logarithmic axes only, so that payloads are dense.
    payloads = tuple(np.geomspace(1e5, 1e9, 801).tolist())
    small = Curve("small", payloads, tuple(1e-3 + size / 1e9 for size in payloads))
    large = Curve("large", payloads, tuple(1e-2 + size / 2e9 for size in payloads))

    first, second = fastest_ranges([large, small])

    assert (first.name, second.name) == ("small", "large")
    assert first.low == 1e5
    assert first.high == second.low == pytest.approx(18e6, rel=1e-3)
    assert second.high == 1e9
    assert fastest_ranges([small]) == [Range("small", 1e5, 1e9)]
    gibibyte = Curve("whole", (1024.0, 2.0**30), (1.0, 2.0))
    assert fastest_ranges([gibibyte]) == [Range("whole", 1024.0, 2.0**30)]
    assert fastest_ranges([]) == []


@pytest.mark.parametrize("seconds", [(1e-5, 4e-3), (9.6e-6, 4e-5), (2e-3, 2.1e-3), (3e-4, 3e-4)])
def test_the_axis_of_times_has_more_than_two_ticks(seconds: tuple[float, float]) -> None:
    curve = Curve("ring", (4096.0, 12.5 * 2**30), seconds)
    chart = draw_chart([curve], fastest_ranges([curve]), 12.5 * 2**30)
    assert len({label for _, label in chart.rows}) > 2
    heights = [y for y, _ in chart.rows]
    assert heights == sorted(heights, reverse=True)

    # The curve ends at the payload of the plan.
    _, _, marks = chart.lines[0]
    assert chart.payload == marks[-1][0]
    assert marks[-1][2].startswith("ring: 12.5 GiB in ")


def test_one_algorithm_needs_no_choice_and_tables_scroll_in_their_own_box() -> None:
    parts = simulations(mesh())
    curves = [Curve(name, (1e3, 1e6), (1e-5, 1e-3 + index)) for index, name in enumerate(parts)]
    both = render_network_page("Page", mesh(), parts, curves)
    one = render_network_page("Page", mesh(), {"ring": parts["ring"]}, curves[:1])
    assert both.count("<select") == 1
    assert one.count("<select") == 0
    assert "payload of the plan: 977 KiB" in one
    for page in (both, one):
        tables = re.findall(r"(.*)\s*<table", page)
        assert len(tables) >= 2
        assert all('<div class="scroll"' in before for before in tables)


def test_quantities_have_three_digits_in_the_largest_unit_in_which_they_are_one_at_least() -> None:
    sizes = [0.0, 5.0, 4096.0, 1.5 * 2**20, 12.5 * 2**30, 4096 * 2**30]
    expected = ["0 B", "5 B", "4 KiB", "1.5 MiB", "12.5 GiB", "4,100 GiB"]
    assert [show_bytes(size) for size in sizes] == expected
    times = [0.0, 2e-9, 1.5e-6, 0.25, 61.0]
    assert [show_seconds(time) for time in times] == ["0 s", "2 ns", "1.5 µs", "250 ms", "61 s"]
