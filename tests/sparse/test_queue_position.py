"""Positions in the queues of experts, against a count by hand, for few requests and for many."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.sparse.plan import queue_position

NUM_EXPERTS = 3


@st.composite
def queues(draw):
    """Returns experts and requests [G, R]: compared in pairs up to R = 32, sorted beyond."""
    num_groups = draw(st.integers(0, 3))
    num_requests = draw(st.integers(0, 5) | st.integers(30, 36))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (num_groups, num_requests)
    expert_index = torch.randint(NUM_EXPERTS, shape, generator=generator)
    requested = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.6, 1.0]))
    return expert_index, requested


@given(queues())
def test_a_request_stands_behind_all_earlier_ones_for_its_expert(queue):
    expert_index, requested = queue
    position = queue_position(expert_index, requested, NUM_EXPERTS)
    assert position.shape == expert_index.shape
    assert position.dtype == torch.int64

    for group in range(expert_index.shape[0]):
        queue_length = [0] * NUM_EXPERTS
        for request in range(expert_index.shape[1]):
            if requested[group, request]:
                expert = int(expert_index[group, request])
                assert position[group, request] == queue_length[expert]
                queue_length[expert] += 1
