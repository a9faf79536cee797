"""The oracles against examples worked out by hand; each number stands with its derivation."""

import math
from types import SimpleNamespace

import pytest
import torch

from tests.oracles import routing as routers
from tests.oracles.layer import combine_by_loop, dense_einsum
from tests.oracles.losses import load_balance, load_balance_of_scope, router_z
from tests.oracles.stats import statistics, summary


def table(*tokens):
    """One group: a row per token, a column per expert."""
    return torch.tensor([tokens], dtype=torch.float64, requires_grad=True)


def numbers(routing):
    """The weights of the only group, to six decimals."""
    return [
        [round(w if isinstance(w, float) else w.item(), 6) for w in token]
        for token in routing.weight[0]
    ]


# Best and second expert: t0 -> 0, 1; t1 -> 0, 1; t2 -> 1, 0; t3 -> 2, then 0 (0.1 twice: the lower
# index).
FOUR = table([0.6, 0.3, 0.1], [0.5, 0.4, 0.1], [0.2, 0.7, 0.1], [0.1, 0.1, 0.8])
REAL = [[True] * 4]


def test_token_choice_serves_first_choices_then_second_choices_in_the_order_of_the_tokens():
    found = routers.token_choice(FOUR, REAL, 2, 2, "all", 0.2, normalize=True)
    assert found.expert_index == [[[0, 1], [0, 1], [1, 0], [2, 0]]]
    # Place 0: t0, t1 fill expert 0; t2 sits in expert 1, t3 in expert 2. Place 1: t0 takes the last
    # slot of expert 1, so t1 is refused there; t2 and t3 are refused at expert 0.
    assert found.requested == [[[True, True]] * 4]
    assert found.slot == [[[0, 1], [1, None], [0, None], [0, None]]]
    assert found.accepted == [[[True, True], [True, False], [True, False], [True, False]]]
    # Gates: 6/9 and 3/9; 5/9; 7/9; 8/9. What is left after a drop is not scaled up.
    assert numbers(found) == [
        [0.666667, 0.333333],
        [0.555556, 0.0],
        [0.777778, 0.0],
        [0.888889, 0.0],
    ]


def test_no_second_choice_is_served_before_a_later_tokens_first_choice():
    # With one slot each, t0's second choice comes after t1's first choice of the same expert.
    found = routers.token_choice(
        table([0.9, 0.1], [0.2, 0.8]), [[True] * 2], 1, 2, "all", 0.2, normalize=True
    )
    assert found.accepted == [[[True, False], [True, False]]]
    assert found.slot == [[[0, None], [0, None]]]


def test_the_policy_decides_who_wants_a_second_choice():
    # Normalised, the second gates are 3/9, 4/9, 2/9, 1/9; raw, they are 0.3, 0.4, 0.2, 0.1, and 0.2
    # is not above 0.2.
    for policy, normalize, second in (
        ("none", True, 0),
        ("threshold", True, 3),
        ("threshold", False, 2),
    ):
        found = routers.token_choice(FOUR, REAL, None, 2, policy, 0.2, normalize)
        assert found.requested == found.accepted == [[[True, s < second] for s in range(4)]]


def test_switch_weighs_by_the_raw_probability_and_skips_padding():
    found = routers.switch(FOUR, [[True, False, True, True]], 1)
    assert found.slot == [[[0], [None], [0], [0]]]
    assert found.requested == [[[True], [False], [True], [True]]]
    assert numbers(found) == [[0.6], [0.0], [0.7], [0.8]]


def test_batch_prioritized_admits_the_surest_tokens_first_and_padding_never():
    # Sureness 0.6, 0.9, 0.7, 0.9 and a padded 1.0: the order is t1, t3 (equal: earlier first), t2,
    # t0.
    probs = table([0.6, 0.4], [0.9, 0.1], [0.7, 0.3], [0.9, 0.1], [1.0, 0.0])
    found = routers.batch_prioritized(
        probs, [[True] * 4 + [False]], 3, 2, "all", 0.2, normalize=True
    )
    # Everybody wants expert 0 and then expert 1; t0 comes last both times and is dropped.
    assert found.slot == [[[None, None], [0, 0], [2, 2], [1, 1], [None, None]]]
    assert found.requested == [[[True, True]] * 4 + [[False, False]]]


def test_experts_take_their_best_tokens():
    probs = table([0.7, 0.3], [0.4, 0.6], [0.9, 0.1])
    # Expert 0 ranks t2, t0, t1; expert 1 ranks t1, t0, t2; two slots each.
    found = routers.expert_choice_over_experts(probs, [[True] * 3], 2)
    assert found.expert_index == [[[0, 1]] * 3]
    assert found.slot == [[[1, 1], [None, 0], [0, None]]]
    assert found.requested == found.accepted == [[[True, True], [False, True], [True, False]]]
    assert numbers(found) == [[0.7, 0.3], [0.0, 0.6], [0.9, 0.0]]
    # Without t2, both experts take both of the others although there is room for three.
    found = routers.expert_choice_over_experts(probs, [[True, True, False]], 3)
    assert found.slot == [[[0, 1], [1, 0], [None, None]]]


def test_experts_compare_tokens_by_a_softmax_over_the_real_ones():
    # Column 0 is log 1, 2, 5: shares 1/8, 2/8, 5/8. Column 1 is log 4, 1, 5: shares 4/10, 1/10,
    # 5/10.
    real = [[math.log(1), math.log(4)], [math.log(2), math.log(1)], [math.log(5), math.log(5)]]
    logits = table(*real, [99.0, 99.0])
    found = routers.expert_choice_over_tokens(logits, [[True] * 3 + [False]], 2)
    # Expert 0 takes t2, t1; expert 1 takes t2, t0. Both took t2, whose weights 5/8 and 5/10 are
    # halved.
    assert found.slot == [[[None, 1], [1, None], [0, 0], [None, None]]]
    assert numbers(found) == [[0, 0.4], [0.25, 0], [0.3125, 0.25], [0, 0]]
    # A softmax p has slope p (1 - p) = 5/8 * 3/8 in its own logit; halved by the count, which has
    # no slope.
    (slope,) = torch.autograd.grad(found.weight[0][2][0], logits)
    assert slope[0, 2, 0].item() == pytest.approx(15 / 128)


def test_no_token_is_left_behind_while_a_candidate_has_room():
    probs = table([0.9, 0.1, 0.0], [0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.5, 0.4, 0.1])
    found = routers.no_token_left_behind(probs, [[False, True, True, True]], 1, 3)
    # Round 0: t1 takes expert 0. Round 1: t2 takes expert 1, t3 comes too late. Round 2: t3 takes
    # expert 2.
    assert found.requested == [
        [[False] * 3, [True, False, False], [True, True, False], [True, True, True]]
    ]
    assert found.accepted == [
        [[False] * 3, [True, False, False], [False, True, False], [False, False, True]]
    ]
    assert numbers(found) == [[0.0, 0.0, 0.0], [0.7, 0.0, 0.0], [0.0, 0.3, 0.0], [0.0, 0.0, 0.1]]


def test_hashed_tokens_go_where_their_id_says():
    # (id + seed) mod 3: 4 -> 2, 7 -> 2, 6 -> 1. t1 is padding; t4, the third real token of expert
    # 2, is refused.
    ids, hash_fn = [[4, 7, 6, 4, 4]], lambda token, num_experts, seed: (token + seed) % num_experts
    found = routers.hash_by_token(ids, [[True, False, True, True, True]], 2, 3, 1, hash_fn)
    assert found.expert_index == [[[2], [2], [1], [2], [2]]]
    assert found.slot == [[[0], [None], [0], [1], [None]]]
    assert numbers(found) == [[1.0], [0.0], [1.0], [1.0], [0.0]]


def test_a_bias_moves_the_choice_but_not_the_weight():
    # 0.6 - 0.4, 0.3 + 0, 0.1 + 0.3 = 0.2, 0.3, 0.4: experts 2 and 1, weighed 0.1 : 0.3.
    found = routers.bias_balanced(
        table([0.6, 0.3, 0.1]), [[True]], 1, [-0.4, 0.0, 0.3], 2, normalize=True
    )
    assert found.expert_index == [[[2, 1]]]
    assert numbers(found) == [[0.25, 0.75]]


def test_capacity_0_accepts_nobody():
    found = routers.token_choice(FOUR, REAL, 0, 2, "all", 0.2, normalize=True)
    assert found.requested == [[[True, True]] * 4]
    assert found.accepted == [[[False, False]] * 4]
    assert routers.expert_choice_over_experts(FOUR, REAL, 0).requested == [[[False] * 3] * 4]
    counted = statistics(FOUR, REAL, found, 3, 0)
    assert (counted["dropped_tokens"], counted["dropped_by_choice"], counted["num_slots"]) == (
        4,
        [4, 4],
        0,
    )
    assert summary(counted)["expert_usage"] == summary(counted)["confidence"] == 0


def test_the_loop_and_the_einsum_add_up_weighed_experts():
    # D = F = 1 and ReLU: expert 0 doubles a positive token, expert 1 triples it.
    weights = SimpleNamespace(
        up_proj=torch.ones(2, 1, 1).double(), down_proj=torch.tensor([[[2.0]], [[3.0]]]).double()
    )
    config = SimpleNamespace(
        num_experts=2, gated=False, activation="relu", expert_bias="none", product_bias=False
    )
    layer, groups = (
        SimpleNamespace(experts=weights, config=config),
        torch.tensor([[[5.0], [7.0]]]).double(),
    )
    both = [5 * (0.7 * 2 + 0.3 * 3), 7 * (0.4 * 2 + 0.6 * 3)]
    one = [5 * 0.7 * 2, 7 * 0.6 * 3]  # expert 0 takes t0 and expert 1 takes t1
    for capacity, output in ((None, both), (1, one), (0, [0.0, 0.0])):
        found = routers.expert_choice_over_experts(
            table([0.7, 0.3], [0.4, 0.6]), [[True] * 2], capacity
        )
        expert_index, accepted = torch.tensor(found.expert_index), torch.tensor(found.accepted)
        slot = torch.tensor(
            [[[99 if x is None else x for x in token] for token in group] for group in found.slot]
        )
        plan = SimpleNamespace(
            expert_index=expert_index, accepted=accepted, slot=slot, capacity=capacity
        )
        plan.combine_weight = torch.tensor([numbers(found)], dtype=torch.float64)
        assert combine_by_loop(layer, groups, found).flatten().tolist() == pytest.approx(output)
        assert dense_einsum(layer, groups, plan).flatten().tolist() == pytest.approx(output)


def test_perfect_balance_costs_1_by_first_choices_and_k_by_all():
    # P = (1/2, 1/2); f = (1/2, 1/2) of first choices, (1, 1) of all, requested or not: 2 * 1/2 = 1 and
    # 2 * 1 = 2.
    probs, mask = table([0.9, 0.1], [0.1, 0.9]), [[True] * 2]
    found = routers.token_choice(probs, mask, 0, 2, "none", 0.2, normalize=True)
    for choices, loss in (("first", 1.0), ("all", 2.0)):
        assert load_balance(probs, mask, found, choices, "real_tokens").item() == pytest.approx(
            loss
        )


@pytest.mark.parametrize(
    ("loss", "over", "expected"),
    [
        (
            load_balance,
            "real_tokens",
            1.4,
        ),  # f = (1, 0), P = (1.4, 0.6) / 2: 2 * 0.7; group 1 mirrors it
        (
            load_balance,
            "all_positions",
            11.2 / 27,
        ),  # f = (2/3, 0), P = (1.4, 0.6) / 3: 2 * 2/3 * 1.4/3, of 3 groups
        (
            load_balance_of_scope,
            "real_tokens",
            1.0,
        ),  # f = (2, 2) / 4, P = (2, 2) / 4: 2 * (1/4 + 1/4)
        (
            load_balance_of_scope,
            "all_positions",
            16 / 81,
        ),  # the same sums over 9 positions: 2 * 2 * (2/9)²
    ],
)
def test_balance_is_a_mean_over_groups_or_one_product_of_the_scope(loss, over, expected):
    padding, mask = [0.5, 0.5], [[True, True, False], [True, True, False], [False] * 3]
    groups = [
        table([0.6, 0.4], [0.8, 0.2], padding),
        table([0.2, 0.8], [0.4, 0.6], padding),
        table(*[padding] * 3),
    ]
    probs = torch.cat(groups)
    found = routers.switch(probs, mask, None)
    assert loss(probs, mask, found, "first", over).item() == pytest.approx(expected)
    assert loss(probs, [[False] * 3] * 3, found, "first", over).item() == 0


def test_router_z_squares_the_logsumexp():
    # log(1 + 1), log(3 + 1), log(7 + 1) = 1, 2, 3 times log 2; the third is padding.
    logits, mask = table([0.0, 0.0], [math.log(3), 0.0], [math.log(7), 0.0]), [[True, True, False]]
    assert router_z(logits, mask, "real_tokens").item() == pytest.approx(
        (1 + 4) / 2 * math.log(2) ** 2
    )
    assert router_z(logits, mask, "all_positions").item() == pytest.approx(
        (1 + 4 + 9) / 3 * math.log(2) ** 2
    )


def test_statistics_count_the_first_example_with_a_fifth_padded_token():
    probs, mask = torch.cat([FOUR, table([1 / 3] * 3)], dim=1), [[True] * 4 + [False]]
    found = routers.token_choice(probs, mask, 2, 2, "all", 0.2, normalize=True)
    # Entropies log 2, 0, 0, 0 stand in for the four rows of FOUR; the padded row does not count.
    counted = statistics(table([0.5, 0.5, 0], *[[1.0, 0, 0]] * 3, [1 / 3] * 3), mask, found, 3, 2)
    # Asked for expert 0: t0, t1, t2, t3; for 1: t2, t0, t1; for 2: t3. Only t0 got both. Weights
    # (6+3+5+7+8) / 9.
    lists = {"expert_load": [4, 3, 1], "accepted_load": [2, 2, 1], "dropped_by_choice": [0, 3]}
    counts = {
        "num_tokens": 4,
        "num_positions": 5,
        "num_slots": 6,
        "dropped_tokens": 0,
        "second_expert_tokens": 1,
    }
    sums = {"entropy_sum": pytest.approx(math.log(2)), "confidence_sum": pytest.approx(29 / 9)}
    assert counted == lists | counts | sums
    assert statistics(probs, mask, found, 3, None)["num_slots"] == 5
    # Load: mean 8/3, variance (16 + 1 + 25) / 27 = 14/9.
    spread = {"load_cv": math.sqrt(14) / 8, "max_over_mean": 12 / 8, "dead_experts": 0}
    means = {
        "entropy": math.log(2) / 4,
        "confidence": 29 / 45,
        "second_expert_rate": 1 / 4,
        "fraction_dropped": 0,
    }
    refused = {"fraction_dropped_choice_1": 0, "fraction_dropped_choice_2": 3 / 4}
    shares = {"expert_usage": 5 / 6, "fraction_padding": 1 / 5}
    assert summary(counted) == pytest.approx(spread | means | shares | refused)


def test_capacity_is_rounded_down_or_up_to_the_group_or_half_to_even_without_a_bound():
    # 13 tokens over 5 experts at 1.25: 3.25. 10 over 4 at 1.0: 2.5, half to even. 3 over 1 at 2.0:
    # 6, or the group, 3.
    for rounding, expected in (("floor", [3, 2, 3]), ("ceil", [4, 3, 3]), ("round", [3, 2, 6])):
        cases = [(13, 5, 1.25), (10, 4, 1.0), (3, 1, 2.0)]
        assert [routers.capacity_of(*case, 0, rounding) for case in cases] == expected
    assert routers.capacity_of(14, 5, 1.25, 0, "round") == 4  # 3.5, half to even
    assert routers.capacity_of(13, 5, 0.1, 7) == 7


def test_the_hash_is_worked_out_for_id_0_and_reads_tensors():
    # Seed 0, id 0: 1. 1 ^ 0 times 0x45D9F3B is itself; folded by 16 bits 0x45D9B66; times
    # 0x119DE1F3, of which 31 bits are 0x7DFD27D2; folded by 15 bits 0x7DFDDC28.
    assert routers.hash_by_murmur(0, 2**31, 0) == 0x7DFDDC28
    both = [[routers.hash_by_murmur(0, 7, 1), routers.hash_by_murmur(3, 7, 1)]]
    assert routers.hash_by_murmur(torch.tensor([[0, 3]]), 7, 1).tolist() == both
