"""The auxiliary losses, and routing after the references, by hand; test_layer.py draws cases for the
oracle.

A table of probabilities stands in for the gate, so that every number can be worked out beside it.
"""

import math

import pytest
import torch

from moe.sparse.losses import add_totals, balance_totals, balance_within
from tests.sparse.by_hand import assert_close, layer_with_logits, logits_of, tokens
from tests.sparse.layers import build_layer


def losses_of(x, mask=None, **changes):
    layer = layer_with_logits(x.shape[-1], **changes)
    return layer(x, None if mask is None else torch.tensor(mask))[1].losses


def test_one_expert_for_all_costs_as_much_as_there_are_experts():
    one_expert = [1 - 4e-9, *[1e-9] * 4]
    assert losses_of(logits_of(*[one_expert] * 3)).load_balance_loss.item() == pytest.approx(5)


@pytest.mark.parametrize(
    ("router", "convention"),
    [
        ("token_choice", "ours"),
        ("token_choice", "mesh_tensorflow"),
        ("expert_choice", "flaxformer"),
    ],
)
def test_the_losses_of_a_group_are_those_of_the_layer_on_that_group_alone(router, convention):
    layer = build_layer(router=router, group_size=13, convention=convention)
    x, mask = tokens(3, 13, 7), torch.arange(13) < torch.tensor([[13], [5], [0]])
    losses = layer(x, mask)[1].losses
    alone = [layer(x[row : row + 1], mask[row : row + 1])[1].losses for row in range(3)]
    assert_close(
        losses.group_load_balance, torch.stack([group.load_balance_loss for group in alone])
    )
    assert_close(losses.group_router_z, torch.stack([group.router_z_loss for group in alone]))
    assert losses.group_router_z[:2].min() > 0


@pytest.mark.parametrize("scope", ["micro_batch", "global"])
def test_in_a_wider_scope_every_group_has_the_balance_loss_of_the_scope(scope):
    losses = build_layer(balance_scope=scope, group_size=13)(tokens(3, 13, 7))[1].losses
    assert_close(losses.group_load_balance, losses.load_balance_loss.expand(3))
    parted = balance_within(losses, add_totals(balance_totals(losses), balance_totals(losses)))
    assert_close(parted.group_load_balance, parted.load_balance_loss.expand(3))


@pytest.mark.parametrize("convention", ["ours", "mesh_tensorflow", "flaxformer"])
def test_a_global_scope_in_parts_is_the_scope_at_once_in_loss_and_gradient(convention):
    layer = build_layer(balance_scope="global", convention=convention, group_size=13)
    x, mask = tokens(5, 13, 7), torch.rand(5, 13, generator=torch.Generator().manual_seed(0)) < 0.7
    whole = layer(x, mask)[1].losses
    gradient = torch.autograd.grad(whole.load_balance_loss, layer.router.gate)[0]

    parts = [layer(x[rows], mask[rows])[1].losses for rows in (slice(0, 2), slice(2, 5))]
    totals = add_totals(*[balance_totals(part) for part in parts])
    parts = [balance_within(part, totals) for part in parts]
    count = sum(part.load_balance_count for part in parts)
    loss = sum(part.load_balance_sum for part in parts) / count
    assert_close(loss, whole.load_balance_loss)
    assert_close(torch.autograd.grad(loss, layer.router.gate)[0], gradient)
    one_alone = parts[0].load_balance_loss
    assert not torch.allclose(one_alone, loss)


# ---- the reference implementations ----

# Second gates of tokens 0, 2, 4 are above 0.2, so that even the random policy keeps them; that of
# token 1 is as good as 0. Token 3 is padding. Logits are 1 above log p, so that the logsumexp of a
# real token is 1.
TABLE = (
    [0.6, 0.3, 0.1],
    [1.0, 1e-30, 1e-30],
    [0.2, 0.5, 0.3],
    [0.4, 0.35, 0.25],
    [0.25, 0.05, 0.7],
)
MASK = torch.tensor([[True, True, True, False, True]])
UP_TO_THE_GROUP = {"eval_capacity_factor": 1.0, "min_expert_capacity": 0}  # 5/3 of a slot


def route_after(reference):
    """Routes the table; returns plan and losses."""
    return layer_with_logits(3, convention=reference, **UP_TO_THE_GROUP)(
        logits_of(*TABLE) + 1, MASK
    )[1]


def test_after_mesh_tensorflow_routes_and_costs_as_worked_out_by_hand():
    router = route_after("mesh_tensorflow")
    # 5/3 is 1 slot. t0, t2 and t4 take the only slots of experts 0, 1 and 2; all second choices come
    # too late.
    assert router.plan.capacity == 1
    assert router.plan.expert_index[0].tolist() == [[0, 1], [0, 1], [1, 2], [0, 1], [2, 0]]
    assert router.plan.requested[0].tolist() == [
        [True, True],
        [True, False],
        [True, True],
        [False] * 2,
        [True, True],
    ]
    weights = [[6 / 9, 0], [0, 0], [5 / 8, 0], [0, 0], [70 / 95, 0]]
    assert_close(
        router.plan.combine_weight[0], torch.tensor(weights, dtype=torch.float64), tolerance=1e-8
    )
    # Of 5 positions: f = (2, 1, 1) / 5 by first choices, P = (2.05, 0.85, 1.1) / 5; z over the 4
    # real tokens.
    assert router.losses.load_balance_loss.item() == pytest.approx(3 * (2 * 2.05 + 0.85 + 1.1) / 25)
    assert router.losses.router_z_loss.item() == pytest.approx(1)


def test_after_flaxformer_routes_and_costs_as_worked_out_by_hand():
    router = route_after("flaxformer")
    # 5/3 is 2 slots. Expert 0 takes t0, t1; expert 1 t2, t0; expert 2 t4, t2. Gates stay raw.
    assert router.plan.capacity == 2
    assert router.plan.requested[0].tolist() == [[True, True]] * 3 + [[False] * 2, [True, True]]
    weights = [[0.6, 0.3], [1, 0], [0.5, 0.3], [0, 0], [0.7, 0]]
    assert_close(router.plan.combine_weight[0], torch.tensor(weights, dtype=torch.float64))
    # Of 4 real tokens: f = (3, 3, 2) / 4 by all choices; z over 5 positions, and that of padding is
    # (log 3)².
    assert router.losses.load_balance_loss.item() == pytest.approx(
        3 * (3 * 2.05 + 3 * 0.85 + 2 * 1.1) / 16
    )
    assert router.losses.router_z_loss.item() == pytest.approx((4 + math.log(3) ** 2) / 5)
