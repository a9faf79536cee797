"""The routes of all pairs at once are those found one by one."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.network.routes import find_routes, pair_keys
from moe.network.schedule import transfers
from moe.network.topology import grid
from tests.oracles.network import route_of, without_link


@settings(max_examples=30)
@given(
    shape=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    wraps=st.booleans(),
    failure=st.integers(0, 63),
)
def test_routes_are_those_of_the_topology(shape: list[int], wraps: bool, failure: int) -> None:
    topology = grid(shape, wraps=wraps, bandwidth=3.0, latency=0.1)
    num_links = len(topology.links.source)
    if wraps and num_links and min(shape) > 2:
        topology = without_link(topology, failure % num_links)
    pairs = list(itertools.permutations(range(topology.num_ranks), 2))
    source, destination = np.array(pairs, np.int64).reshape(-1, 2).T

    routes = find_routes(transfers(0, source, destination, 0, 1, adds=True), topology)

    place = np.searchsorted(routes.key, pair_keys(source, destination, topology.num_ranks))
    expected = [route_of(topology, *pair) for pair in pairs]
    row, link = routes.hops(place)
    assert row.tolist() == [index for index, route in enumerate(expected) for _ in route]
    assert link.tolist() == [hop for route in expected for hop in route]
    num_hops = [len(route) for route in expected]
    np.testing.assert_allclose(routes.latency[place], 0.1 * np.array(num_hops))
    assert (routes.bandwidth[place] == 3.0).all()
