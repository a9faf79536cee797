"""What a router did, by hand: a made load, and the layer on a table of probabilities; drawn cases
are in test_layer.py.

That statistics of two batches add up is in test_invariances.py.
"""

import math

import pytest
import torch

from moe import RouterStats
from tests.sparse.by_hand import tokens
from tests.sparse.layers import build_layer


def made_stats(**changes):
    """Ten tokens of 16 positions with two choices, three experts with 8 slots each."""
    fields = {
        "expert_load": torch.tensor([9, 0, 3]),
        "accepted_load": torch.tensor([7, 0, 2]),
        "num_slots": torch.tensor(24),
        "num_tokens": torch.tensor(10),
        "num_positions": torch.tensor(16),
        "dropped_tokens": torch.tensor(3),
        "dropped_by_choice": torch.tensor([1, 2]),
        "second_expert_tokens": torch.tensor(2),
        "entropy_sum": torch.tensor(5.0),
        "confidence_sum": torch.tensor(6.75),
        "load_balance_sum": torch.tensor(3.0),
        "load_balance_count": torch.tensor(2.0),
        "router_z_sum": torch.tensor(40.0),
        "router_z_count": torch.tensor(10.0),
    }
    return RouterStats(**{**fields, **changes})


def test_a_made_load_is_summarised_as_worked_out_by_hand():
    assert made_stats().summary() == pytest.approx(
        {
            "load_balance_loss": 3 / 2,
            "router_z_loss": 40 / 10,
            "fraction_dropped": 3 / 10,
            "fraction_dropped_choice_1": 1 / 10,
            "fraction_dropped_choice_2": 2 / 10,
            "fraction_padding": 6 / 16,
            "second_expert_rate": 2 / 10,
            "entropy": 5 / 10,
            "load_cv": math.sqrt((25 + 16 + 1) / 3) / 4,  # 9, 0, 3 about their mean 4
            "max_over_mean": 9 / 4,
            "dead_experts": 1,
            "expert_usage": 9 / 24,
            "confidence": 6.75 / 9,
        }
    )


def test_the_balance_of_all_layers_is_the_median_and_the_95th_percentile_of_maxvio():
    # Largest over mean load, less 1: 5/4, 0 and 2.
    layers = [
        made_stats(expert_load=torch.tensor(load)) for load in ([9, 0, 3], [5, 5, 5], [0, 6, 0])
    ]
    assert RouterStats.max_violations(layers) == pytest.approx(
        {"max_vio_p50": 5 / 4, "max_vio_p95": 5 / 4 + 0.9 * 3 / 4}
    )
    assert RouterStats.max_violations(layers[1:2]) == {"max_vio_p50": 0, "max_vio_p95": 0}


def test_no_token_is_lost_in_a_long_run():
    many = made_stats(
        expert_load=torch.tensor([2**53, 0, 3]), entropy_sum=torch.tensor(2.0**40).double()
    )
    total = many + made_stats(expert_load=torch.tensor([1, 0, 0]))
    assert total.expert_load.tolist() == [2**53 + 1, 0, 3]
    assert total.entropy_sum.item() == 2**40 + 5


def test_one_process_is_the_sum_over_all_ranks():
    stats = made_stats()
    assert all(torch.equal(a, b) for a, b in zip(stats.all_reduce(), stats, strict=True))


def test_statistics_carry_no_gradient():
    stats = build_layer()(tokens(2, 13, 7).requires_grad_())[1].stats
    assert not any(value.requires_grad for value in stats)


def test_a_compiled_sum_adds_statistics_and_does_not_append_them():
    layer = build_layer(dispatch="static")
    x, y = tokens(2, 13, 7), tokens(3, 13, 7)

    def add(x, y):
        first, second = layer(x)[1].stats, layer(y)[1].stats
        return first + second, RouterStats.sum([first, second])

    compiled = torch.compile(add, fullgraph=True, backend="aot_eager")(x, y)
    for total, expected in zip(compiled, add(x, y), strict=True):
        assert isinstance(total, RouterStats)
        assert total.num_tokens == expected.num_tokens == 5 * 13
        torch.testing.assert_close(tuple(total), tuple(expected))
