"""Every algorithm is exact where it says that it fits, and says why where it does not."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.network.algorithms import ALL_REDUCE, multi_ring
from moe.network.topology import Rate, grid, two_level
from tests.oracles.schedule_promise import verify

SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@settings(max_examples=30)
@given(data=st.data())
def test_what_fits_a_grid_is_exact_on_it(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    wraps = data.draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
    ranks = st.integers(0, math.prod(shape) - 1)
    dead = data.draw(st.one_of(st.just(set()), st.sets(ranks, max_size=3)))
    network = grid(shape, wraps=wraps, bandwidth=1.0, latency=1.0).without(dead)

    num_units = data.draw(st.integers(0, 50))
    for name in ALL_REDUCE.names():
        algorithm = ALL_REDUCE.get(name)
        if not algorithm.unfit(network):
            schedule = algorithm.build(network, num_units)
            verify(schedule)
            assert not dead.intersection(schedule.transfers.source.tolist())
            assert not dead.intersection(schedule.transfers.destination.tolist())


def test_ranks_that_are_cut_off_are_named() -> None:
    network = grid((4, 4), wraps=False, bandwidth=1.0, latency=1.0).without([1, 4])

    for name in ("ring", "neighbour_ring"):
        assert "live ranks that are cut off is [0]" in ALL_REDUCE.get(name).unfit(network)


@pytest.mark.parametrize("dead", [[], [4, 5, 6, 7]])
def test_a_cluster_is_a_torus_of_levels_without_its_dead_hosts(dead: list[int]) -> None:
    cluster = two_level(3, 4, inside=Rate(1e11, 1e-6), across=Rate(1e10, 1e-5)).without(dead)

    assert ALL_REDUCE.get("torus").unfit(cluster) == ""
    assert "links between neighbours" in ALL_REDUCE.get("row_pairs").unfit(cluster)
    verify(ALL_REDUCE.get("torus").build(cluster, 50))


def test_levels_are_an_algorithm_of_their_own() -> None:
    network = grid((3, 4), wraps=True, bandwidth=1.0, latency=1.0)

    assert multi_ring(4, 3).unfit(network) == ""
    assert "product is 12" in multi_ring(4, 2).unfit(network)
    verify(multi_ring(2, 3, 2).build(network, 50))
