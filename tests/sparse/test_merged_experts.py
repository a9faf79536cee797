"""Rows of the router that share a stored expert. The oracle stores a copy of the expert for each row."""

import pytest
import torch

from moe import ConfigError
from moe.sparse.editing import edit_routing
from moe.sparse.edits import DropExperts, SwapExperts
from moe.sparse.plan import assign_slots, stored_index
from moe.sparse.router import ROUTERS
from tests.sparse.layers import (
    DROPLESS,
    ROUTER_NAMES,
    THREE_SLOTS,
    assert_all_close,
    build_layer,
    losses_and_gradients,
)

B, L, D = 3, 11, 7
MAP = (1, 0, 1, 0, 2)
KEY = ("encoder", 0)
MERGEABLE = [name for name in ROUTER_NAMES if ROUTERS.get(name).mergeable]


def tokens():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(B, L, D, generator=generator, dtype=torch.float64, requires_grad=True)


def merged_and_copied(router="token_choice", **fields):
    """Returns a layer with three stored experts for five rows, and one with five copies of them."""
    merged = build_layer(router, expert_map=MAP, **fields)
    copied = build_layer(router, **fields)
    state = merged.state_dict()
    for name in state:
        if name.startswith("experts."):
            state[name] = state[name][list(MAP)]
    copied.load_state_dict(state)
    return merged, copied


@pytest.mark.parametrize("dispatch", ["ragged", "static"])
@pytest.mark.parametrize("router", MERGEABLE)
def test_a_merged_expert_computes_what_its_copies_do(router, dispatch):
    merged, copied = merged_and_copied(router, dispatch=dispatch, **DROPLESS)
    assert merged.experts.down_proj.shape[0] == 3
    ours = dict(zip(names(merged), losses_and_gradients(merged, tokens()), strict=True))
    theirs = dict(zip(names(copied), losses_and_gradients(copied, tokens()), strict=True))

    # The gradient of a stored expert is the sum over its copies.
    for name, value in theirs.items():
        if name.startswith("experts."):
            index = torch.tensor(MAP)
            value = torch.zeros_like(ours[name]).index_add(0, index, value)
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-11)

    # Statistics count rows.
    stats = [layer(tokens())[1].stats for layer in (merged, copied)]
    assert_all_close(*stats)


def names(layer):
    return ["output", *(name for name, _ in layer.named_parameters()), "input"]


@pytest.mark.parametrize("dispatch", ["ragged", "static"])
def test_both_choices_of_a_token_may_go_to_one_expert_and_their_weights_add(dispatch):
    layer = build_layer(expert_map=(0, 0, 1, 1, 2), dispatch=dispatch, **DROPLESS)
    with torch.no_grad():
        layer.router.gate[2:] = -layer.router.gate[:2].sum(dim=0)
    x = tokens()
    y, router = layer(x)
    first, second = stored_index(router.plan.expert_index, layer.config.expert_map).unbind(-1)
    is_same = first == second  # [1, B * L]
    weight = router.plan.combine_weight.sum(dim=-1)
    assert is_same.any() and bool((weight > 0.999).any())

    alone = build_layer(num_experts=1, num_selected_experts=1, router="hash", **DROPLESS)
    for stored in range(3):
        state = {name: value[stored, None] for name, value in layer.experts.state_dict().items()}
        alone.experts.load_state_dict(state)
        output, _ = alone(x, token_ids=torch.ones(B, L, dtype=torch.int64))
        here = (is_same & (first == stored)).view(B, L)
        expected = weight.view(B, L, 1) * output
        torch.testing.assert_close(y[here], expected[here], rtol=0, atol=1e-11)


@pytest.mark.parametrize("dispatch", ["ragged", "static"])
@pytest.mark.parametrize("router", MERGEABLE)
def test_slots_are_those_of_stored_experts(router, dispatch):
    merged, copied = merged_and_copied(router, dispatch=dispatch, **THREE_SLOTS)
    y, output = merged(tokens())
    plan = output.plan
    stored = stored_index(plan.expert_index, MAP)
    served = torch.stack([stored[plan.accepted], plan.slot[plan.accepted]])
    assert served.unique(dim=1).shape == served.shape  # nobody shares a slot
    assert int(output.stats.num_slots) == 3 * 3
    assert torch.bincount(stored[plan.accepted], minlength=3).tolist() == [3, 3, 3]
    if router != "batch_prioritized":
        _, accepted = assign_slots(stored, plan.requested, 3, 3)
        assert torch.equal(accepted, plan.accepted)

    # The copies compute the same for the same plan.
    with edit_routing(copied, {KEY: lambda scores, _: plan}):
        expected, _ = copied(tokens())
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dispatch", ["ragged", "static"])
def test_edits_are_of_rows(dispatch):
    merged, copied = merged_and_copied(dispatch=dispatch, **DROPLESS)
    for edit in (DropExperts(0), SwapExperts(2, 4)):
        outputs = []
        for layer in (merged, copied):
            with edit_routing(layer, {KEY: edit}):
                outputs.append(layer(tokens())[0])
        assert not torch.equal(outputs[0], merged(tokens())[0])
        torch.testing.assert_close(*outputs, rtol=0, atol=1e-11)


def test_capacity_is_a_share_of_stored_experts():
    merged, copied = merged_and_copied(eval_capacity_factor=1.0, min_expert_capacity=0)
    capacities = [layer(tokens())[1].plan.capacity for layer in (merged, copied)]
    assert capacities == [B * L // 3, B * L // 5]


@pytest.mark.parametrize("router", sorted(set(ROUTER_NAMES) - set(MERGEABLE)))
def test_a_router_that_cannot_share_experts_is_refused(router):
    with pytest.raises(ConfigError, match=f"'{router}' cannot have merged.*token_choice"):
        build_layer(router, expert_map=MAP)


@pytest.mark.parametrize(
    ("expert_map", "message"),
    [
        ((0, 1, 2, 3), r"expert_map is \(0, 1, 2, 3\); expected 5 numbers"),
        ((0, 1, 3, 3, 3), "none left out"),
        ((0, 1, -1, 0, 1), "from 0 on"),
        ((0, 1, 1.0, 0, 1), "from 0 on"),
        ((0, 0, 0, 0, 0), "stored experts in expert_map is 1; .*num_selected_experts, 2"),
    ],
)
def test_a_map_that_leaves_an_expert_out_is_refused(expert_map, message):
    with pytest.raises(ConfigError, match=message):
        build_layer(expert_map=expert_map)
