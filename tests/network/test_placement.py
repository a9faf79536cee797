"""Where meshes stand on networks: every rank once, groups as tiles and strided rings."""

import numpy as np
import pytest

from moe.distributed.mesh import MeshConfig
from moe.errors import ConfigError
from moe.network.planner.placement import all_placements, place_by_tiles, place_in_order
from moe.network.topology import Rate, Topology, grid, switch, two_level

TORUS = grid((4, 6), wraps=True, bandwidth=1e9, latency=0.0)
RATE = Rate(1e9, 0.0)
MESH = MeshConfig(dp_replicate=2, dp_shard=1, ep=3, tp=4)


def test_ranks_in_order_are_those_of_torchrun():
    mesh = MeshConfig(dp_replicate=2, ep=2, tp=6)
    placement = place_in_order(mesh, TORUS)
    assert np.array_equal(placement.ranks.ravel(), np.arange(24))
    assert str(placement) == "dp_replicate=2x1,ep=2x1,tp=1x6"
    assert placement.groups("tp").ranks.tolist()[1] == [6, 7, 8, 9, 10, 11]
    assert placement.groups("tp").layout.wraps == (True,)


def test_ranks_in_order_that_no_tiles_make_are_a_line():
    mesh = MeshConfig(ep=6, tp=4)  # rows of six hold one and a half groups of tp
    placement = place_in_order(mesh, TORUS)
    assert placement.shape == (24,)
    assert np.array_equal(placement.ranks.ravel(), np.arange(24))
    assert placement.groups("tp").ranks.tolist()[1] == [4, 5, 6, 7]


def test_groups_of_an_outer_axis_hop_over_the_ranks_of_an_inner_one():
    placement = place_by_tiles(MESH, TORUS, "tp=2x2, ep=1x3, dp_replicate=2x1")
    tp = placement.groups("tp")
    assert tp.ranks[0].tolist() == [0, 1, 6, 7]
    assert tp.layout.shape == (2, 2)
    assert tp.description == "2x2"
    ep = placement.groups("ep")
    assert ep.ranks[0].tolist() == [0, 2, 4]
    assert ep.layout.wraps == (True,)  # three ranks, two apart, around a ring of six
    assert ep.description == "3, stride 2"

    # An axis that ends before the network does not wrap.
    short = place_by_tiles(MeshConfig(tp=3), TORUS, "tp=1x3")
    assert short.groups("tp").layout.wraps == (False,)


def test_groups_that_stand_unevenly_say_so():
    line = switch(12, RATE)
    even = place_in_order(MeshConfig(dp_shard=2, ep=3, tp=2), line)
    assert even.groups("data ranks").description == "6, stride 2"
    mixed = place_in_order(MeshConfig(dp_replicate=2, dp_shard=3, ep=2), line)
    assert mixed.groups("dp_shard x ep").description == "6"
    torus = place_by_tiles(MeshConfig(dp_shard=2, ep=3, tp=4), TORUS, "dp_shard=2x1,ep=1x3,tp=2x2")
    assert torus.groups("dp_shard x ep").strides == (2, 2)


@pytest.mark.parametrize(
    "topology",
    [
        TORUS,
        switch(24, RATE),
        two_level(3, 8, inside=RATE, across=RATE),
        grid((2, 3, 4), wraps=False, bandwidth=1.0, latency=0.0),
    ],
)
@pytest.mark.parametrize("mesh", [MESH, MeshConfig(dp_shard=2, ep=6, tp=2, ep_nodes=2)])
def test_every_placement_holds_every_rank_once_in_the_groups_of_every_axis(topology, mesh):
    placements = list(all_placements(mesh, topology))
    assert placements
    for placement in placements:
        assert sorted(placement.ranks.ravel().tolist()) == list(range(24))
        for axis in ("tp", "ep", "dp_shard x ep", "data ranks", "all ranks"):
            groups = placement.groups(axis)
            assert sorted(groups.ranks.ravel().tolist()) == list(range(24))
            assert groups.layout.num_ranks == groups.ranks.shape[1]


def test_the_levels_of_an_exchange_are_those_of_the_mesh():
    mesh = MeshConfig(ep=8, tp=1, ep_nodes=2)
    placement = place_in_order(mesh, two_level(2, 4, inside=RATE, across=RATE))
    assert placement.groups("ep inside a node").ranks.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert placement.groups("ep across nodes").ranks[0].tolist() == [0, 4]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tq=2x2", "expected tiles of axes, e.g. tp=4x4,ep=8x8; axes are dp_replicate"),
        ("tp=2x2", "expected dp_replicate with 2 sizes, whose product is mesh.dp_replicate, 2"),
        ("tp=4x1,ep=3x1,dp_replicate=2x1", "tiles of at most 4 ranks along axis 0"),
    ],
)
def test_what_is_no_placement_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        place_by_tiles(MESH, TORUS, text)


def test_a_network_without_axes_takes_ranks_in_order_alone():
    chain = Topology("chain", 24, 24, TORUS.links)
    assert str(place_in_order(MESH, chain)) == "dp_replicate=2,ep=3,tp=4"
    with pytest.raises(ConfigError, match="chain has no axes"):
        place_by_tiles(MESH, chain, "tp=2x2")
