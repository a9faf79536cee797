"""All-to-alls bring every unit to where it is bound, at the loads that their closed forms say."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from moe.errors import ConfigError
from moe.network.algorithms import ALL_TO_ALL
from moe.network.all_to_all import (
    along_axes,
    around,
    around_both_ways,
    direct,
    even_counts,
    two_level,
)
from moe.network.axis_hops import Detour, half_ring, one_way_ring, straight, two_way_ring
from moe.network.schedule import IntArray, Schedule
from moe.network.simulate import simulate
from moe.network.topology import Rate, Topology, grid, switch
from moe.network.topology import two_level as levels
from tests.oracles.schedule_promise import verify

ORDERS = (half_ring, one_way_ring, two_way_ring, straight)
SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).filter(lambda s: np.prod(s) <= 24)
BRIEF = settings(max_examples=20)
RATE = Rate(bandwidth=1.0, latency=0.0)


def unit_grid(*shape: int, wraps: bool = True) -> Topology:
    """Returns a grid whose links carry a byte a second."""
    return grid(shape, wraps=wraps, bandwidth=1.0, latency=0.0)


def ragged(num_ranks: int) -> st.SearchStrategy[IntArray]:
    """Returns counts of a few units for each pair, many of them 0."""
    return arrays(np.int64, (num_ranks, num_ranks), elements=st.integers(0, 3))


def without_cable(topology: Topology, one: int, other: int) -> Topology:
    """Returns a network without the links between two ranks."""
    return topology.without(links=[(one, other), (other, one)])


def loads(schedule: Schedule, topology: Topology) -> list[float]:
    """Returns the units that each link carries, counted route by route."""
    table = schedule.transfers
    units = [0.0] * len(topology.links.source)
    for source, destination, low, high in zip(
        table.source, table.destination, table.low, table.high, strict=True
    ):
        for link in topology.route(source, destination):
            units[link] += high - low
    return units


def busiest(schedule: Schedule, topology: Topology) -> float:
    """Returns the load of the busiest link by what each rank has for all others and itself."""
    return max(loads(schedule, topology)) * topology.num_ranks / schedule.num_units


@BRIEF
@given(data=st.data(), shape=SHAPES, wraps=st.booleans(), slices=st.integers(1, 5))
def test_ragged_counts_arrive_on_any_grid(
    data: st.DataObject, shape: list[int], wraps: bool, slices: int
) -> None:
    topology = unit_grid(*shape, wraps=wraps)
    counts = data.draw(ragged(topology.num_ranks))
    ring = data.draw(st.sampled_from(ORDERS))
    rotates = data.draw(st.booleans())

    along = along_axes(counts, topology, ring=ring, num_slices=slices, rotates=rotates)

    for exchange in (direct(counts, topology), along):
        verify(exchange)
        assert exchange.num_units == counts.sum()


@BRIEF
@given(data=st.data(), num_ranks=st.integers(1, 11))
def test_ragged_counts_arrive_around_any_ring_of_some_ranks(
    data: st.DataObject, num_ranks: int
) -> None:
    order = data.draw(st.permutations(range(num_ranks)))
    order = order[: data.draw(st.integers(1, num_ranks))]
    counts = data.draw(ragged(num_ranks))
    outside = np.setdiff1d(np.arange(num_ranks), order)
    counts[outside] = 0
    counts[:, outside] = 0

    for ring in ORDERS:
        verify(around(counts, order, ring=ring))
    verify(around_both_ways(counts, order))


@BRIEF
@given(
    data=st.data(),
    shape=SHAPES.filter(lambda shape: np.prod(shape) > 1),
    kept=st.none() | st.floats(0, 1),
    sides=st.integers(1, 2),
)
def test_ragged_counts_arrive_around_any_broken_cables(
    data: st.DataObject, shape: list[int], kept: float | None, sides: int
) -> None:
    topology = unit_grid(*shape)
    links = list(zip(topology.links.source, topology.links.destination, strict=True))
    broken = data.draw(st.lists(st.sampled_from(links), max_size=2, unique=True))
    for one, other in {tuple(sorted(map(int, link))) for link in broken}:
        topology = without_cable(topology, one, other)
    counts = data.draw(ragged(topology.num_ranks))

    exchange = along_axes(counts, topology, num_slices=2, detour=Detour(kept, sides))

    verify(exchange)


@pytest.mark.parametrize("shape", [(5,), (3, 3, 2)])
def test_every_broken_cable_has_a_way_around(shape: tuple[int, ...]) -> None:
    whole = unit_grid(*shape)
    counts = np.random.default_rng(7).integers(0, 4, (whole.num_ranks,) * 2)

    links = zip(whole.links.source.tolist(), whole.links.destination.tolist(), strict=True)
    for one, other in links:
        topology = without_cable(whole, one, other)
        for kept in (None, 1.0):
            exchange = along_axes(counts, topology, detour=Detour(kept))
            verify(exchange)


@BRIEF
@given(data=st.data(), num_nodes=st.integers(1, 5), per_node=st.integers(1, 4))
def test_ragged_counts_arrive_through_the_ranks_of_the_own_node(
    data: st.DataObject, num_nodes: int, per_node: int
) -> None:
    topology = levels(num_nodes, per_node, inside=RATE, across=RATE)
    counts = data.draw(ragged(topology.num_ranks))

    schedule = two_level(counts, topology)

    verify(schedule)
    table = schedule.transfers
    is_inside = table.source // per_node == table.destination // per_node
    has_same_index = table.source % per_node == table.destination % per_node
    assert (is_inside | has_same_index).all()
    assert table.step[is_inside].max(initial=-1) < table.step[~is_inside].min(initial=99)


@BRIEF
@given(data=st.data())
def test_a_combine_brings_every_unit_back(data: st.DataObject) -> None:
    topology = unit_grid(2, 3)
    counts = data.draw(ragged(6))
    exchanges = [
        direct(counts, topology),
        along_axes(counts, topology, num_slices=2),
        along_axes(counts, without_cable(topology, 0, 1), num_slices=2),
    ]

    for dispatch in exchanges:
        there_and_back = dispatch.then(dispatch.reversed())
        assert there_and_back.after is dispatch.before
        verify(there_and_back)
        verify(dispatch.reversed())


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 13])
def test_rings_load_their_links_as_the_closed_forms_say(size: int) -> None:
    topology = unit_grid(size)
    counts = even_counts(topology, 2 * size**2)
    half = (size**2 - size % 2) / (8 * size) if size > 2 else 0.5
    whole = (size - 1) / 4 if size > 2 else 0.5

    exchanges = (
        (around(counts, range(size)), half),
        (around(counts, range(size), ring=two_way_ring), whole),
        (around_both_ways(counts, range(size)), whole),
    )
    for schedule, load in exchanges:
        assert busiest(schedule, topology) == pytest.approx(load, rel=1e-12)

        # Nothing waits: the time is that of the busiest link.
        if size > 2:
            seconds = simulate(schedule, topology, size).seconds
            assert seconds == pytest.approx(load, rel=1e-12)


@pytest.mark.parametrize("size", [3, 4, 9])
def test_a_ring_with_a_dead_link_does_twice_what_a_half_ring_does(size: int) -> None:
    topology = without_cable(unit_grid(size), size - 1, 0)
    counts = even_counts(topology, 2 * size**2)

    folded = around(counts, range(size), ring=one_way_ring)
    detour = along_axes(counts, topology)

    assert busiest(folded, topology) == pytest.approx((size - 1) / 2, rel=1e-12)
    on_line = (size**2 - size % 2) / (4 * size)
    assert busiest(detour, topology) == pytest.approx(on_line, rel=1e-12)
    assert busiest(detour, topology) <= size / 4


@pytest.mark.parametrize("shape", [(4, 4), (5, 5), (3, 3, 3, 3)])
def test_rotated_axes_keep_all_links_of_a_torus_busy(shape: tuple[int, ...]) -> None:
    topology = unit_grid(*shape)
    num_axes = len(shape)
    counts = even_counts(topology, 2 * num_axes * topology.num_ranks**2)
    schedule = along_axes(counts, topology, num_slices=num_axes)

    size = shape[0]
    load = (size**2 - size % 2) / (8 * size)
    result = simulate(schedule, topology, topology.num_ranks)
    assert result.link_busy_seconds == pytest.approx(load, rel=1e-12)
    assert result.seconds == pytest.approx(load, rel=1e-12)


def test_neighbours_take_over_what_a_broken_ring_cannot_carry() -> None:
    topology = without_cable(unit_grid(5, 5), 0, 1)
    counts = even_counts(topology, 600 * 25**2)

    alone = along_axes(counts, topology, num_slices=2, detour=Detour(kept=1))
    helped = along_axes(counts, topology, num_slices=2)

    assert busiest(alone, topology) == pytest.approx(1.2, rel=1e-12)
    # Two neighbours: 1.2 f = 0.6 + 0.8 (1 - f) / 2.
    assert busiest(helped, topology) == pytest.approx(0.75, rel=0.01)
    assert simulate(helped, topology, 25).seconds < simulate(alone, topology, 25).seconds


def test_what_travels_together_is_one_transfer() -> None:
    topology = unit_grid(8, 8)
    schedule = along_axes(even_counts(topology, 2 * 64**2), topology)

    # On the first axis a hop is one transfer, or two where its run goes over the end.
    first = schedule.transfers.step < 4
    table = schedule.transfers
    hops = set(zip(table.step[first], table.source[first], table.destination[first], strict=True))
    assert first.sum() < 1.5 * len(hops)


def test_all_registered_algorithms_arrive_on_the_networks_that_they_fit() -> None:
    networks = [
        unit_grid(3, 4),
        unit_grid(3, 4, wraps=False),
        unit_grid(3, 4).without(ranks=[5, 6]),
        without_cable(unit_grid(3, 4), 0, 1),
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


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (np.ones((3, 3), np.int64), r"shape of counts"),
        (np.ones((4, 4)), r"type of counts"),
        (np.full((4, 4), -1), r"counts"),
        (np.ones((4, 4), np.int64), r"units from or for dead ranks is 7"),
    ],
)
def test_counts_that_are_not_those_of_the_live_ranks_are_refused(
    counts: IntArray, message: str
) -> None:
    topology = unit_grid(4).without(ranks=[2])

    with pytest.raises(ConfigError, match=message):
        direct(counts, topology)


def test_ranks_outside_a_ring_may_have_nothing_to_send() -> None:
    with pytest.raises(ConfigError, match="units from or for ranks outside the ring"):
        around(np.ones((3, 3), np.int64), [0, 1])


def test_a_ring_has_every_rank_once() -> None:
    for order in ([], [0, 1, 1], [0, 1, 3], [-1, 0, 1]):
        with pytest.raises(ConfigError, match=r"order of the ring is .*different ranks from 0"):
            around(np.zeros((3, 3), np.int64), order)


def test_lines_with_dead_ranks_are_refused() -> None:
    topology = unit_grid(2, 2).without(ranks=[3])

    with pytest.raises(ConfigError, match=r"Ranks \[3\] are dead.*Use `direct`"):
        along_axes(np.zeros((4, 4), np.int64), topology)


def test_too_many_ranks_are_named_before_their_pairs_fill_the_memory() -> None:
    for name in ALL_TO_ALL.names():
        reason = ALL_TO_ALL.get(name).unfit(unit_grid(32, 64))
        assert reason == "2,048 live ranks; all-to-alls are built for 1,024 at most."


def test_nothing_to_send_is_no_transfer() -> None:
    topology = unit_grid(2, 3)
    nothing = np.zeros((6, 6), np.int64)

    for exchange in (direct(nothing, topology), along_axes(nothing, topology)):
        assert not len(exchange.transfers.step)
        verify(exchange)
