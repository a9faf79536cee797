"""Settings at the door, capacity and grouping: blackboard examples and one property."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe import SparseConfig
from moe.sparse.capacity import expert_capacity, slots_of_expert
from moe.sparse.groups import from_groups, sequences_per_group, to_groups

SIZES = {"d_model": 7, "d_ff": 11, "num_experts": 5}


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "factor", "least", "rounding", "expected"),
    [
        (1024, 32, 1.25, 4, "floor", 40),  # the paper's numbers
        (13, 5, 1.25, 4, "floor", 4),  # 3.25, raised to the least
        (13, 5, 1.25, 0, "floor", 3),
        (13, 5, 1.25, 0, "round", 3),
        (14, 5, 1.25, 0, "floor", 3),  # 3.5
        (14, 5, 1.25, 0, "round", 4),
        (10, 5, 1.25, 0, "round", 2),  # 2.5, half to even
        (10, 1, 2.0, 4, "floor", 10),  # never more than the group
        (10, 1, 2.0, 4, "round", 20),  # no such bound
        (100, 1, 0.29, 0, "floor", 29),  # 100 * 0.29 is 28.999... in binary
        (2, 5, 1.0, 4, "floor", 4),  # the least holds even above the group
        (13, 5, 0.01, 0, "floor", 0),
        (13, 5, 1e-7, 0, "round", 0),
    ],
)
def test_capacity(num_tokens, num_experts, factor, least, rounding, expected):
    assert expert_capacity(num_tokens, num_experts, factor, least, rounding) == expected


def test_experts_of_a_prefix_leave_the_slots_of_the_others_alone():
    base = SparseConfig(7, 11, num_experts=7, min_expert_capacity=0)
    larger = dataclasses.replace(base, num_experts=8, prefix_experts=(1,))
    for num_tokens in (7, 13, 700):  # a factor of 2.0 * 8 / 7 would lose one slot of two
        slots = slots_of_expert(larger, num_tokens, training=False)
        assert slots == slots_of_expert(base, num_tokens, training=False) == 2 * num_tokens // 7


@pytest.mark.parametrize(
    ("batch", "length", "size", "expected"),
    [(8, 512, 2048, 4), (6, 512, 2048, 3), (7, 512, 2048, 1), (8, 5000, 4096, 1)],
)
def test_a_group_is_the_most_sequences_that_divide_the_batch_and_fit(batch, length, size, expected):
    assert sequences_per_group(batch, length, size) == expected


@given(st.integers(1, 12), st.integers(1, 7), st.integers(1, 50))
def test_groups_and_back_is_the_identity_and_keeps_sequences_whole(batch, length, size):
    x = torch.arange(batch * length * 3).reshape(batch, length, 3)
    per_group = sequences_per_group(batch, length, size)
    groups = to_groups(x, per_group)
    assert groups.shape[1] == per_group * length
    assert torch.equal(groups[0, :length], x[0])
    assert torch.equal(from_groups(groups, per_group), x)


def test_a_configuration_keeps_its_own_copy_of_the_router_options():
    options = {"second_expert_policy": "all"}
    config = SparseConfig(**SIZES, router_options=options)
    options["second_expert_policy"] = "none"
    assert config.router_options == {"second_expert_policy": "all"}
    assert dataclasses.asdict(config)["router_options"] == {"second_expert_policy": "all"}
    assert dataclasses.replace(config, d_ff=13).router_options == config.router_options
