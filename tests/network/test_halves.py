"""The first half of every all-reduce is a reduce-scatter."""

import pytest

from moe.network.algorithms import ALL_REDUCE
from moe.network.halves import owned_reduce_scatter
from moe.network.rings import ring_all_reduce
from moe.network.topology import Rate, grid, two_level
from moe.network.verify import ScheduleError, verify

MESH = grid((4, 6), wraps=False, bandwidth=1e9, latency=1e-6)
NETWORKS = {
    "torus": grid((4, 6), wraps=True, bandwidth=1e9, latency=1e-6),
    "mesh": MESH,
    "mesh with a hole": MESH.without([8, 9, 14, 15]),
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


def test_a_sum_that_is_missing_shows():
    scatter = owned_reduce_scatter(ring_all_reduce(range(5), 10))
    table = scatter.transfers
    with pytest.raises(ScheduleError):
        verify(type(scatter)(5, 10, table.select(table.step > 0), scatter.before, scatter.after))
