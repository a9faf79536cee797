"""All-to-alls bring every unit to where it is bound, at the loads that their closed forms say."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.network.algorithms import ALL_TO_ALL
from moe.network.all_to_all import along_axes, around, around_both_ways, direct
from moe.network.routes import find_route
from moe.network.schedule import Schedule
from moe.network.simulate import simulate
from moe.network.topology import Rate, Topology, grid, switch
from moe.network.topology import two_level as levels
from tests.oracles.schedule_promise import verify

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).filter(lambda s: np.prod(s) <= 24)
UNITS = st.integers(0, 1500)
BRIEF = settings(max_examples=20)
RATE = Rate(bandwidth=1.0, latency=0.0)


def unit_grid(*shape: int, wraps: bool = True) -> Topology:
    """Returns a grid whose links carry a byte a second."""
    return grid(shape, wraps=wraps, bandwidth=1.0, latency=0.0)


def busiest(schedule: Schedule, topology: Topology) -> float:
    """Returns the load of the busiest link, route by route, by what each rank has for all others and itself."""
    table = schedule.transfers
    units = [0.0] * len(topology.links.source)
    ends = zip(table.source, table.destination, table.low, table.high, strict=True)
    for source, destination, low, high in ends:
        for link in find_route(source, destination, topology):
            units[link] += high - low
    return max(units) * topology.num_ranks / schedule.num_units


@BRIEF
@given(num_units=UNITS, shape=SHAPES, wraps=st.booleans(), slices=st.integers(1, 5))
def test_any_number_of_units_arrives_on_any_grid(num_units, shape, wraps, slices) -> None:
    topology = unit_grid(*shape, wraps=wraps)
    along = along_axes(topology, num_units, num_slices=slices)
    for exchange in (direct(topology, num_units), along):
        verify(exchange)
        assert exchange.num_units == num_units


@BRIEF
@given(data=st.data(), num_ranks=st.integers(1, 11), num_units=UNITS)
def test_any_number_of_units_arrives_around_any_ring(data, num_ranks, num_units) -> None:
    topology = unit_grid(num_ranks)
    order = np.array(data.draw(st.permutations(range(num_ranks))))
    dead = data.draw(st.sets(st.integers(0, num_ranks - 1), max_size=num_ranks - 1))
    survivors = order[~np.isin(order, list(dead))]
    for build in (around, around_both_ways):
        verify(build(topology.without(dead), num_units, survivors))


@BRIEF
@given(num_units=UNITS, num_nodes=st.integers(1, 5), per_node=st.integers(1, 4))
def test_units_go_through_the_ranks_of_the_own_node(num_units, num_nodes, per_node) -> None:
    topology = levels(num_nodes, per_node, inside=RATE, across=RATE)
    schedule = ALL_TO_ALL.get("two_level").build(topology, num_units)

    verify(schedule)
    table = schedule.transfers
    is_inside = table.source // per_node == table.destination // per_node
    has_same_index = table.source % per_node == table.destination % per_node
    assert (is_inside | has_same_index).all()
    assert table.step[is_inside].max(initial=-1) < table.step[~is_inside].min(initial=99)


@pytest.mark.parametrize("num_units", [0, 71, 288])
def test_a_combine_brings_every_unit_back(num_units: int) -> None:
    topology = unit_grid(2, 3)
    exchanges = [direct(topology, num_units), along_axes(topology, num_units, num_slices=2)]
    for dispatch in exchanges:
        assert bool(len(dispatch.transfers.step)) == bool(num_units)
        verify(dispatch.then(dispatch.reversed()))
        verify(dispatch.reversed())


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 13])
def test_rings_load_their_links_as_the_closed_forms_say(size: int) -> None:
    topology = unit_grid(size)
    half = (size**2 - size % 2) / (8 * size) if size > 2 else 0.5
    whole = (size - 1) / 4 if size > 2 else 0.5
    for build, load in ((around, half), (around_both_ways, whole)):
        schedule = build(topology, 2 * size**2, np.arange(size))
        assert busiest(schedule, topology) == pytest.approx(load, rel=1e-12)

        # Nothing waits: the time is that of the busiest link.
        if size > 2:
            seconds = simulate(schedule, topology, size).seconds
            assert seconds == pytest.approx(load, rel=1e-12)


@pytest.mark.parametrize("shape", [(4, 4), (5, 5), (3, 3, 3, 3)])
def test_rotated_axes_keep_all_links_of_a_torus_busy(shape: tuple[int, ...]) -> None:
    topology = unit_grid(*shape)
    num_axes = len(shape)
    num_units = 2 * num_axes * topology.num_ranks**2
    schedule = ALL_TO_ALL.get("rotated_axes").build(topology, num_units)

    size = shape[0]
    load = (size**2 - size % 2) / (8 * size)
    result = simulate(schedule, topology, topology.num_ranks)
    assert result.link_busy_seconds == pytest.approx(load, rel=1e-12)
    assert result.seconds == pytest.approx(load, rel=1e-12)


def test_all_registered_algorithms_arrive_on_the_networks_that_they_fit() -> None:
    networks = [
        unit_grid(3, 4),
        unit_grid(3, 4, wraps=False),
        unit_grid(3, 4).without(ranks=[5, 6]),
        switch(5, RATE),
        levels(2, 3, inside=RATE, across=RATE),
    ]
    num_fitting = 0
    for name, topology in itertools.product(ALL_TO_ALL.names(), networks):
        algorithm = ALL_TO_ALL.get(name)
        reason = algorithm.unfit(topology)
        if reason:
            assert reason.endswith(".")
            continue
        schedule = algorithm.build(topology, 600)
        verify(schedule)
        assert schedule.num_units == 600
        assert not np.isin(schedule.transfers.source, list(topology.dead)).any()
        num_fitting += 1
    assert num_fitting >= 3 * len(networks)
