"""Both reduce-scatters in an all-reduce are exact, and send no more than needed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.network.algorithms import ALL_REDUCE
from moe.network.reduce_scatter import owned_reduce_scatter, reduce_scatter_of
from moe.network.rings import grid_all_reduce, ring_reduce_scatter, torus_all_reduce
from moe.network.topology import Rate, grid, two_level
from tests.oracles.schedule_promise import verify

RANKS = st.integers(1, 9)
UNITS = st.integers(0, 53)


@given(num_ranks=RANKS, num_units=UNITS)
def test_the_reduce_scatter_in_a_ring_is_its_first_half(num_ranks: int, num_units: int) -> None:
    ring = np.arange(num_ranks)
    left = reduce_scatter_of(grid_all_reduce(ring, num_units), ring)

    first_half = ring_reduce_scatter(ring, 0, num_units, num_ranks=num_ranks, num_units=num_units)
    for ours, theirs in zip(left.transfers, first_half.transfers, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@given(num_ranks=RANKS, num_units=UNITS, seed=st.integers(0, 99))
def test_chunks_may_belong_to_the_ranks_in_any_order(
    num_ranks: int, num_units: int, seed: int
) -> None:
    owners = np.random.default_rng(seed).permutation(num_ranks)

    verify(reduce_scatter_of(torus_all_reduce(range(num_ranks), num_units), owners))


MESH = grid((4, 6), wraps=False, bandwidth=1e9, latency=1e-6)
TORUS = grid((4, 6), wraps=True, bandwidth=1e9, latency=1e-6)
NETWORKS = {
    "torus": TORUS,
    "mesh": MESH,
    "mesh with a hole": MESH.without([8, 9, 14, 15]),
    "torus with a hole": TORUS.without([8, 9, 14, 15]),
    "nodes": two_level(3, 5, inside=Rate(1e9, 0.0), across=Rate(1e9, 0.0)),
}


@pytest.mark.parametrize("name", ALL_REDUCE.names())
@pytest.mark.parametrize("network", NETWORKS)
def test_its_ranks_end_with_sums_of_all_units_between_them(name, network):
    topology = NETWORKS[network]
    algorithm = ALL_REDUCE.get(name)
    if algorithm.unfit(topology):
        return
    scatter = owned_reduce_scatter(algorithm.build(topology, topology.num_ranks * 48))
    verify(scatter)
    num_owned = (scatter.after.high - scatter.after.low).sum()
    assert num_owned == scatter.num_units  # each unit at one rank
    assert scatter.transfers.adds.all()
