"""Networks from files and mappings: what they mean, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.errors import ConfigError
from moe.network.routes import find_route, find_routes
from moe.network.schedule import transfers
from moe.network.topology import Rate, two_level
from moe.network.topology_file import parse_network, read_network
from tests.oracles.network import route_of

RECIPES = Path(__file__).parents[2] / "recipes" / "networks"
RATE = {"bandwidth": "8 Gb/s", "latency": "2 us"}
GRID = {"shape": [3, 5], "wraps": True, **RATE}
NODES = {"nodes": 3, "per_node": 5, "inside": RATE, "across": RATE}
LINK = {"from": 0, "to": 1, **RATE}
TABLE = {"ranks": 2, "switches": 1, "both_ways": True, "table": [LINK]}


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_links"),
    [
        ("tpu_v3_pod", 1024, 4 * 1024),
        ("tpu_v3_multipod", 4096, 2 * 4096 + 2 * 32 * 127),
        ("hgx_h100", 1024, 4 * 1024),
        ("ethernet_two_level", 256, 2 * 256 + 2 * 16),
        ("this_machine", 4, 8),
    ],
)
def test_the_networks_of_the_recipes_have_their_links(name, num_ranks, num_links):
    network = read_network(RECIPES / f"{name}.yaml")
    assert network.topology.num_ranks == num_ranks
    assert len(network.topology.links.source) == num_links
    assert network.notes
    assert len(list(RECIPES.glob("*"))) == 5  # each has its case


def test_units_are_those_of_the_field():
    topology = parse_network({"grid": GRID}).topology
    assert set(topology.links.bandwidth) == {1e9}
    assert set(topology.links.latency) == {2e-6}
    numbers = {"ranks": 3, "bandwidth": 1e9, "latency": 2e-6}
    links = parse_network({"switch": numbers, "device_flops": "989 TFLOP/s"})
    assert set(links.topology.links.latency) == {1e-6}  # half of it to the switch
    assert links.device_flops == 989e12


def test_a_list_of_links_is_a_network():
    chain = [LINK, {**LINK, "from": 1, "to": 2}]
    links = {**TABLE, "table": chain, "ranks": 3, "switches": 0}
    topology = parse_network({"links": links}).topology
    assert [int(topology.links.destination[hop]) for hop in find_route(0, 2, topology)] == [1, 2]
    assert topology.shape == ()


def test_json_and_yaml_hold_the_same(tmp_path):
    content = {"name": "x", "two_level": NODES, "notes": ["measured"]}
    (tmp_path / "x.json").write_text(json.dumps(content))
    (tmp_path / "x.yaml").write_text(json.dumps(content))  # YAML holds JSON
    both = [read_network(tmp_path / name) for name in ("x.json", "x.yaml")]
    assert both[0].notes == both[1].notes == ("measured",)
    assert np.array_equal(both[0].topology.links.source, both[1].topology.links.source)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "the form of a network is 0; expected exactly one of grid, switch"),
        ({"grid": {**GRID, "wrap": 1}}, "grid.wrap is .*not permitted"),
        ({"grid": {**GRID, "shape": [10**9, 10**9]}}, "ranks of the network is 10{18}"),
        ({"grid": {**GRID, "wraps": [True]}}, "wraps is .*; expected one for each of 2"),
        ({"grid": {**GRID, "bandwidth": "70"}}, "grid.bandwidth is '70'.*units B/s.*e.g. 400"),
        ({"grid": {**GRID, "latency": -1}}, "grid.latency is -1"),
        ({"links": {**TABLE, "table": [{**LINK, "to": 3}]}}, "an end in links.table is 3"),
        ({"links": {**TABLE, "table": [{**LINK, "to": 0}]}}, "two different nodes"),
        ({"links": {**TABLE, "table": [LINK, LINK]}}, "expected each link once"),
    ],
)
def test_what_is_no_network_is_refused_with_its_file(content, message, tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=rf"x\.yaml: .*{message}"):
        read_network(path)


# ---------------------------------------------------------------------------
# Switches


@pytest.mark.parametrize("shared_card", [False, True])
def test_messages_stay_inside_their_node_where_they_can(shared_card):
    slow = Rate(5e9, 7e-6)
    topology = two_level(3, 2, inside=Rate(50e9, 3e-6), across=slow, shared_card=shared_card)
    inside = find_route(2, 3, topology)
    assert topology.links.bandwidth[inside].tolist() == [50e9, 50e9]
    across = find_route(2, 4, topology)
    assert topology.links.bandwidth[across].min() == 5e9
    expected = 10e-6 if shared_card else 7e-6
    assert topology.links.latency[across].sum() == pytest.approx(expected)


@settings(max_examples=30)
@given(num_nodes=st.integers(1, 5), per_node=st.integers(1, 5), shared_card=st.booleans())
def test_all_routes_at_once_are_those_of_one_pair(num_nodes, per_node, shared_card):
    rate = Rate(1e9, 1e-6)
    topology = two_level(num_nodes, per_node, inside=rate, across=rate, shared_card=shared_card)
    source, destination = np.divmod(np.arange(topology.num_ranks**2), topology.num_ranks)
    is_pair = source != destination
    table = transfers(0, source[is_pair], destination[is_pair], 0, 1, adds=False)
    routes = find_routes(table, topology)
    for index, key in enumerate(routes.key.tolist()):
        pair = divmod(key, topology.num_ranks)
        links = routes.link[routes.offset[index] : routes.offset[index + 1]]
        assert links.tolist() == route_of(topology, *pair), pair
