"""All-reduces around holes are exact for every aligned hole, and cost little more than none."""

from collections.abc import Iterator

import numpy as np
import pytest

from moe.errors import ConfigError
from moe.network.algorithms import ALL_REDUCE
from moe.network.row_bands import find_bands
from moe.network.row_pair_clients import pair_rows_around_holes
from moe.network.simulate import simulate
from moe.network.topology import Topology, grid
from tests.oracles.schedule_promise import verify

SHAPES = [(4, 4), (4, 8), (8, 8)]
HOLES = [(2, 2), (2, 4), (4, 2)]
AROUND_HOLES = ["neighbour_ring", "row_bands", "column_bands", "row_pair_clients_2"]


def mesh(*shape: int) -> Topology:
    return grid(shape, wraps=False, bandwidth=70e9, latency=1.5e-6)


def block(shape: tuple[int, int], corner: tuple[int, int], hole: tuple[int, int]) -> list[int]:
    """Returns the ranks of a hole in a grid."""
    ranks = np.arange(shape[0] * shape[1]).reshape(shape)
    y, x = corner
    return ranks[y : y + hole[0], x : x + hole[1]].ravel().tolist()


def broken_meshes(shape: tuple[int, int], hole: tuple[int, int]) -> Iterator[Topology]:
    """Yields a mesh with each aligned hole of a size."""
    for y in range(0, shape[0] - hole[0] + 1, 2):
        for x in range(0, shape[1] - hole[1] + 1, 2):
            yield mesh(*shape).without(block(shape, (y, x), hole))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("hole", HOLES)
def test_survivors_of_every_aligned_hole_sum_exactly(
    shape: tuple[int, int], hole: tuple[int, int]
) -> None:
    num_units = 2 * shape[0] * shape[1] + 3
    for network in broken_meshes(shape, hole):
        reasons = {name: ALL_REDUCE.get(name).unfit(network) for name in AROUND_HOLES}
        if ALL_REDUCE.get("ring").unfit(network):
            assert all(reasons.values())
            continue

        # One of them fits each hole that does not cut the mesh in two.
        assert not all(reasons.values())
        for name, reason in reasons.items():
            if not reason:
                verify(ALL_REDUCE.get(name).build(network, num_units))


@pytest.mark.parametrize(
    "dead",
    [
        block((8, 8), (2, 2), (2, 2)) + block((8, 8), (2, 6), (2, 2)),
        block((8, 8), (0, 0), (2, 2)) + block((8, 8), (4, 4), (2, 2)),
        block((8, 8), (2, 2), (4, 2)) + block((8, 8), (2, 6), (2, 2)),
    ],
)
@pytest.mark.parametrize("name", AROUND_HOLES)
def test_survivors_of_two_holes_sum_exactly(dead: list[int], name: str) -> None:
    network = mesh(8, 8).without(dead)
    algorithm = ALL_REDUCE.get(name)

    assert algorithm.unfit(network) == ""
    verify(algorithm.build(network, 200))


@pytest.mark.parametrize(
    ("corner", "hole"),
    [((0, 0), (2, 2)), ((0, 4), (2, 4)), ((2, 2), (4, 4)), ((4, 0), (2, 12)), ((10, 8), (2, 4))],
)
def test_a_band_is_a_ring_of_neighbours(corner: tuple[int, int], hole: tuple[int, int]) -> None:
    shape = (12, 12)
    network = mesh(*shape).without(block(shape, corner, hole))
    ranks = np.arange(144).reshape(shape)
    bands = find_bands(ranks, network.dead)

    assert sorted(np.concatenate([band.ring for band in bands])) == network.live_ranks.tolist()
    for ring, owners in bands:
        hops = zip(ring.tolist(), np.roll(ring, -1).tolist(), strict=True)
        assert all(network.find_links(source, target) >= 0 for source, target in hops)
        assert np.all(np.diff(owners) >= 0)


def test_holes_that_do_not_fit_are_refused_with_the_ranks() -> None:
    ranks = np.arange(16).reshape(4, 4)

    with pytest.raises(ConfigError, match=r"is \[5\]; expected both of \[1, 5\] or none"):
        pair_rows_around_holes(ranks, [5])
    with pytest.raises(ConfigError, match="whole pairs of rows is 0"):
        pair_rows_around_holes(ranks, [0, 4, 8, 12])
    with pytest.raises(ConfigError, match=r"expected all of the block \[0, 1, 4, 5\] or none"):
        find_bands(ranks, [0, 4])
    with pytest.raises(ConfigError, match="whole pairs beside lines 0 and 1 is 0"):
        find_bands(ranks, [0, 1, 4, 5, 8, 9, 12, 13])


def test_a_hole_costs_little() -> None:
    shape = (8, 16)
    whole = mesh(*shape)
    broken = whole.without(block(shape, (4, 8), (2, 4)))
    num_units = 8 * whole.num_ranks
    healthy = ALL_REDUCE.get("row_pairs").build(whole, num_units)
    around = ALL_REDUCE.get("row_bands").build(broken, num_units)

    healthy_seconds = simulate(healthy, whole, 668e6).seconds
    seconds = simulate(around, broken, 668e6).seconds
    assert 1.0 < seconds / healthy_seconds <= 1.25
