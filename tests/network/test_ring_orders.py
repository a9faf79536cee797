"""Rings of neighbours visit every live rank once, each by one link."""

import numpy as np
import pytest

from moe.errors import ConfigError
from moe.network.ring_orders import fold, neighbour_ring, whole_grid_of
from moe.network.schedule import IntArray
from moe.network.topology import Topology, grid


def mesh(*shape: int, wraps: bool = False) -> Topology:
    return grid(shape, wraps=wraps, bandwidth=1.0, latency=1.0)


def assert_ring_of_neighbours(order: IntArray, network: Topology) -> None:
    assert sorted(order.tolist()) == network.live_ranks.tolist()
    hops = zip(order.tolist(), np.roll(order, -1).tolist(), strict=True)
    for source, destination in hops:
        assert network.find_links(source, destination) >= 0


@pytest.mark.parametrize("shape", [(2,), (4, 4), (3, 4), (4, 3), (2, 3, 5), (3, 3, 2), (1, 2, 5)])
def test_a_grid_with_an_even_axis_has_a_ring(shape: tuple[int, ...]) -> None:
    assert_ring_of_neighbours(neighbour_ring(mesh(*shape)), mesh(*shape))


@pytest.mark.parametrize("shape", [(5,), (3, 3), (3, 5, 3)])
def test_a_grid_of_odd_axes_has_a_ring_where_one_wraps(shape: tuple[int, ...]) -> None:
    torus = mesh(*shape, wraps=True)

    assert_ring_of_neighbours(neighbour_ring(torus), torus)
    with pytest.raises(ConfigError, match="wraps"):
        neighbour_ring(mesh(*shape))


@pytest.mark.parametrize(
    "dead",
    [
        [0, 1, 8, 9],
        [18, 19, 26, 27, 44, 45, 36, 37],
        [2, 3, 10, 11, 32, 33, 40, 41, 52, 53, 60, 61],
    ],
)
def test_a_ring_goes_around_any_blocks_that_do_not_divide_the_grid(dead: list[int]) -> None:
    network = mesh(8, 8).without(dead)

    assert_ring_of_neighbours(neighbour_ring(network), network)


def test_a_ring_uses_the_wrap_where_a_hole_divides_the_mesh() -> None:
    dead = [2, 3, 10, 11, 18, 19, 26, 27]
    torus = mesh(4, 8, wraps=True).without(dead)

    assert_ring_of_neighbours(neighbour_ring(torus), torus)
    with pytest.raises(ConfigError, match="live ranks is 24; expected no more than the 8"):
        neighbour_ring(mesh(4, 8).without(dead))


def test_a_grid_without_a_known_ring_is_refused_with_the_reason() -> None:
    with pytest.raises(
        ConfigError, match=r"dead ranks is \[5\]; expected none or all of the block"
    ):
        neighbour_ring(mesh(4, 4).without([5]))
    with pytest.raises(ConfigError, match="expected even sizes"):
        neighbour_ring(mesh(3, 4).without([0, 1, 4, 5]))
    with pytest.raises(ConfigError, match="expected two axes"):
        neighbour_ring(mesh(2, 2, 2).without([0, 1]))


def test_a_folded_line_is_a_ring_of_hops_over_two_links() -> None:
    assert fold(np.arange(5), [False]).tolist() == [0, 2, 4, 3, 1]
    assert fold(np.arange(4), [True]).tolist() == [0, 1, 2, 3]


def test_lines_that_are_dead_as_a_whole_leave_a_grid() -> None:
    network = mesh(3, 4).without([4, 5, 6, 7])

    assert whole_grid_of(network).tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]]
    with pytest.raises(ConfigError, match=r"dead ranks is \[4\]"):
        whole_grid_of(mesh(3, 4).without([4]))
