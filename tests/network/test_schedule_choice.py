"""What a recipe may say of schedules, and what it hears of mistakes before any rank exists."""

import pytest

from moe.distributed.mesh import MeshConfig
from moe.errors import ConfigError
from moe.network.algorithms import ALL_REDUCE
from moe.network.ranks.schedule_choice import parse_schedule


def test_a_text_names_algorithm_grid_dead_ranks_and_wire():
    choice = parse_schedule("key", "ring 3x4 without 5, 6 in bfloat16", ALL_REDUCE)

    assert choice.algorithm is ALL_REDUCE.get("ring")
    assert (choice.shape, choice.dead, choice.bfloat16) == ((3, 4), (5, 6), True)
    assert choice.topology(10).live_ranks.tolist() == [0, 1, 2, 3, 4, 7, 8, 9, 10, 11]


def test_a_text_that_names_no_schedule_is_refused():
    for text, message in (
        ("ring in float16", "key is 'ring in float16'; expected null, or a text such as ring"),
        ("ring 4x0", "expected sizes above 0"),
        ("ring 4x4 without 16", "expected different dead ranks from 0 to 15"),
        ("two_way_rin", "called 'two_way_rin'. Did you mean 'two_way_ring'"),
        (7, "key is 7; expected null, or a text"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_schedule("key", text, ALL_REDUCE)


def test_a_schedule_that_does_not_fit_the_mesh_is_refused():
    exchange = {"ep": 4, "expert_exchange": "ring"}
    for fields, message in (
        ({"dp_replicate": 8, "gradient_reduction": "ring 4x4"}, "16 live ranks, but dp_replicate"),
        ({"dp_shard": 4, "ep": 2, "gradient_reduction": "ring 2x4"}, "8 live ranks, but dp_shard"),
        ({**exchange, "ep_nodes": 2}, "null with mesh.ep_nodes above 1"),
        ({**exchange, "expert_exchange": "ring in bfloat16"}, "expected no wire"),
        ({**exchange, "expert_exchange": "ring 3x2"}, "6 live ranks, but ep has 4"),
        ({"dp_replicate": 3, "gradient_reduction": "row_pairs"}, "cannot be built"),
    ):
        with pytest.raises(ConfigError, match=message):
            MeshConfig(**fields)


def test_survivors_of_a_grid_are_ranks_of_the_mesh():
    config = MeshConfig(dp_replicate=12, gradient_reduction="ring 4x4 without 5,6,9,10")
    assert config.num_ranks == 12
