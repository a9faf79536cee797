"""The page has the numbers of the simulations, everything inside, and each link in its place."""

import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.network.planner.page import MAX_PATH_ROWS, render_network_page
from moe.network.planner.page_layout import PITCH, node_names, place_network
from moe.network.rings import grid_all_reduce, torus_all_reduce
from moe.network.simulate import Simulation, simulate
from moe.network.topology import Links, Rate, Topology, grid, switch, two_level

SLOW = Rate(1e9, 1e-5)
TIMES = {1e3: {"ring": 1e-5, "two ways": 2e-5}, 1e6: {"ring": 1e-3, "two ways": 5e-4}}


def mesh(*, wraps: bool = False) -> Topology:
    return grid((3, 5), wraps=wraps, bandwidth=8e9, latency=1e-6)


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
    parts = simulations(mesh().without(ranks=[7]))
    page = render_network_page("A hole", parts, TIMES, [])

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
    assert "<dt>dead ranks</dt><dd>7</dd>" in page

    # The fastest of each payload is marked, and the payload of the plan.
    assert re.findall(r'fastest">(.*?)<', page) == ["10 µs", "500 µs"]
    assert "976.56 KiB (plan)" in page

    # It needs nothing from elsewhere.
    assert not re.search(r"\s(?:src|href|srcset|data)=|http|@import|url\(", page)


def test_names_are_texts_and_no_markup() -> None:
    name = "</script><b>bold</b>"
    part = simulations(mesh())["ring"]
    page = render_network_page(name, {name: part}, {1e6: {name: 1e-3}}, [name])
    assert "<b>" not in page
    assert page.count("</script>") == 2
    assert numbers_in(page)["algorithms"][0]["name"] == name


def test_a_long_path_is_shortened_and_the_page_says_how_long_it_is() -> None:
    line = grid((103,), wraps=True, bandwidth=8e9, latency=1e-6)
    part = simulate(grid_all_reduce(range(103), 103), line, 1e6)
    (shown,) = numbers_in(render_network_page("Long", {"ring": part}, {}, []))["algorithms"]
    assert len(shown["path"]) == MAX_PATH_ROWS
    assert shown["pathLength"] == 204


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


def are_all_on_the_page(topology: Topology) -> None:
    """Asserts that no two links are in one place, and that all boxes are inside."""
    layout = place_network(topology)
    boxes = np.concatenate([layout.links, layout.chips])
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 0] + boxes[:, 2] <= layout.width + 1e-9).all()
    assert (boxes[:, 1] + boxes[:, 3] <= layout.height + 1e-9).all()
    assert len(np.unique(np.round(layout.links, 6), axis=0)) == len(layout.links)


@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4), wraps=st.booleans())
def test_no_two_links_of_a_grid_are_in_one_place(shape: list[int], wraps: bool) -> None:
    are_all_on_the_page(grid(shape, wraps=wraps, bandwidth=1.0, latency=0.0))


@pytest.mark.parametrize("shared_card", [False, True])
def test_links_of_nodes_have_a_column_for_the_node_and_a_row_for_the_nic(shared_card) -> None:
    # 67 nodes of three ranks: more columns than one block has.
    inside = Rate(8e9, 1e-6)
    topology = two_level(67, 3, inside=inside, across=SLOW, shared_card=shared_card)
    are_all_on_the_page(topology)
    layout = place_network(topology)
    node = np.minimum(topology.links.source, topology.links.destination)
    node = np.where(node < 201, node // 3, node - 201)
    assert (layout.links[:, 0] == node % 64 * PITCH).all()

    names = node_names(topology)
    card = "" if shared_card else ", NIC 1"
    assert names[7] == f"rank 7 (node 2{card})"
    assert names[203] == ("switch and NIC of node 2" if shared_card else "switch of node 2")
    assert names[-1] == "network switch"
    ends = "node" if shared_card else "rank"
    number = 67 if shared_card else 201
    assert f"{number} links, {ends} to network" in [text for text, _, _ in layout.labels]


def test_links_of_other_switches_are_under_headings_of_their_kind() -> None:
    are_all_on_the_page(tree())
    are_all_on_the_page(switch(4, SLOW).without(ranks=[1]))
    titles = [title for title, _, _ in place_network(tree()).labels]
    assert titles == [
        "4 links, rank to switch",
        "4 links, switch to rank",
        "2 links, switch to switch",
    ]
    page = render_network_page("Tree", simulations(tree()), TIMES, [])
    assert numbers_in(page)["chips"] == []
