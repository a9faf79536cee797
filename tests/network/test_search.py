"""The search for a mesh on a network: on small ones nothing is faster than what it puts first."""

import math

import numpy as np
import pytest

from moe.errors import ConfigError
from moe.models.configuration import STMoEConfig
from moe.network.planner.placement import all_placements
from moe.network.planner.search import suggest_on_network
from moe.network.planner.timing import NetworkTimer
from moe.network.topology import Links, Rate, Topology, grid, two_level
from moe.network.topology_file import Network
from moe.planning.plan import suggest
from moe.planning.workload import Workload

CONFIG = STMoEConfig(
    vocab_size=131,
    d_model=64,
    d_kv=16,
    d_ff=128,
    num_layers=2,
    num_heads=4,
    num_experts=8,
    num_sparse_encoder_layers=1,
    num_sparse_decoder_layers=1,
    group_size=64,
)
WORK = Workload(batch_size=32, inputs_length=64, targets_length=16)
MEMORY = 2**50
SLOW = Rate(1e9, 5e-6)
RING = np.array([(0, 1), (1, 2), (2, 3), (3, 0), (1, 0), (2, 1), (3, 2), (0, 3)])
LINKS = Links(RING[:, 0], RING[:, 1], np.full(8, 1e9), np.full(8, 1e-6))
NETWORKS = {
    "ring": grid((4,), wraps=True, bandwidth=1e9, latency=1e-6),
    "mesh": grid((2, 2), wraps=False, bandwidth=1e9, latency=1e-6),
    "nodes": two_level(2, 2, inside=Rate(9e9, 1e-6), across=SLOW, shared_card=True),
    "links": Topology("ring", num_ranks=4, num_nodes=4, links=LINKS),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dead"), [("ring", (3,)), ("mesh", ()), ("nodes", ()), ("links", ())]
)
def test_no_mesh_and_no_placement_is_faster_than_the_first(name, dead):
    network = Network(NETWORKS[name])
    plans = suggest(CONFIG, WORK, network.topology.num_ranks, MEMORY)[::2]
    suggestions = suggest_on_network(plans, network, MEMORY, dead)
    assert len(suggestions) == len(plans)

    # Every second mesh in every place, simulated to the end.
    fastest = float("inf")
    for plan in plans:
        for placement in all_placements(plan.mesh, network.topology):
            try:
                timed = NetworkTimer(network, placement, dead).plan(plan.collectives)
            except ConfigError:
                continue
            fastest = min(fastest, timed.seconds)
    assert suggestions[0].seconds == pytest.approx(fastest, rel=0.02)

    # Those that were simulated to the end come first, the fastest of all at the head.
    seconds = [item.seconds for item in suggestions]
    assert seconds == sorted(seconds)


def test_what_does_not_fit_into_memory_comes_last_and_is_not_simulated():
    network = Network(NETWORKS["mesh"])
    plans = suggest(CONFIG, WORK, 4, MEMORY)
    memory = sorted(plan.memory for plan in plans)[len(plans) // 2]
    suggestions = suggest_on_network(plans, network, memory)
    fits = [item.plan.memory <= memory for item in suggestions]
    assert fits == sorted(fits, reverse=True)
    assert all(math.isinf(item.seconds) for item in suggestions if item.plan.memory > memory)
