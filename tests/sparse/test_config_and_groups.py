"""Settings at the door, capacity and grouping: blackboard examples and one property."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe import ConfigError, SparseConfig
from moe.sparse.capacity import expert_capacity
from moe.sparse.groups import from_groups, sequences_per_group, to_groups


@pytest.mark.parametrize(
    ("tokens", "experts", "factor", "least", "expected"),
    [
        (1024, 32, 1.25, 4, 40),  # the paper's numbers
        (13, 5, 1.25, 4, 4),  # floor(3.25) raised to the least
        (13, 5, 1.25, 0, 3),
        (10, 1, 2.0, 4, 10),  # never more than the group
        (100, 1, 0.29, 0, 29),  # 100 * 0.29 is 28.999... in binary
        (2, 5, 1.0, 4, 4),  # the least holds even above the group
    ],
)
def test_capacity(tokens, experts, factor, least, expected):
    assert expert_capacity(tokens, experts, factor, least) == expected


@pytest.mark.parametrize(
    ("batch", "length", "size", "expected"),
    [(8, 512, 2048, 4), (6, 512, 2048, 3), (7, 512, 2048, 1), (8, 5000, 4096, 1)],
)
def test_a_group_is_the_most_sequences_that_divide_the_batch_and_fit(batch, length, size, expected):
    assert sequences_per_group(batch, length, size) == expected


@given(st.integers(1, 12), st.integers(1, 7), st.integers(1, 50))
def test_groups_and_back_is_the_identity_and_keeps_sequences_whole(batch, length, size):
    x = torch.arange(batch * length * 3).reshape(batch, length, 3)
    together = sequences_per_group(batch, length, size)
    groups = to_groups(x, together)
    assert groups.shape[1] == together * length
    assert torch.equal(groups[0, :length], x[0])
    assert torch.equal(from_groups(groups, together), x)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_selected_experts": 6}, "num_selected_experts is 6, but there are only 5 experts"),
        ({"capacity_factor": 0.0}, "capacity_factor is 0.0; expected a number above 0, or None"),
        ({"second_expert_policy": "sometimes"}, "expected one of all, none, threshold, random"),
        ({"expert_dropout_rate": 1.0}, "expert_dropout_rate is 1.0"),
        ({"d_ff": 0}, "d_ff is 0; expected an integer of at least 1"),
    ],
)
def test_an_impossible_setting_is_refused_with_its_value(changes, message):
    with pytest.raises(ConfigError, match=message):
        SparseConfig(**{"d_model": 7, "d_ff": 11, "num_experts": 5, **changes})
