"""The edit point. Oracles: layers without an edit; plans, losses and outputs made by hand."""

import copy
import functools
from contextlib import ExitStack

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from moe import ConfigError, DataError
from moe.sparse.editing import edit_routing, sparse_layers
from moe.sparse.edits import DropExperts, RerouteExperts, SwapExperts, choose_again
from tests.models.tiny import tiny_batch, tiny_model
from tests.sparse.layers import DROPLESS, GATED_NAMES, ROUTER_NAMES, THREE_SLOTS, build_layer

E, D, B, L = 5, 7, 3, 11
KEY = ("encoder", 0)


def tokens():
    return torch.randn(B, L, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_layers_have_the_names_of_their_stacks_in_order():
    model = tiny_model(num_sparse_encoder_layers=2)
    assert list(sparse_layers(model)) == [("encoder", 0), ("encoder", 1), ("decoder", 0)]
    layers = list(sparse_layers(model).values())
    assert layers == list(model.sparse_layers())


@pytest.mark.parametrize("router", ROUTER_NAMES)
def test_a_plan_has_the_weights_that_its_router_gives_it(router):
    layer = build_layer(router)
    layer.train()
    seen = []

    def look(scores, plan):
        assert torch.equal(layer.router.combine_weight(scores, plan), plan.combine_weight)
        seen.append(plan)
        return plan

    ids = torch.arange(B * L).view(B, L)
    mask = ids % 5 > 0
    state = torch.get_rng_state()
    expected, _ = layer(tokens(), mask, token_ids=ids)
    torch.set_rng_state(state)
    with edit_routing(layer, {KEY: look}):
        output, router_output = layer(tokens(), mask, token_ids=ids)
    assert torch.equal(output, expected)
    assert seen == [router_output.plan]


def test_edits_compose_in_their_order_and_end_with_their_block():
    layer = build_layer()
    order = []

    def note(name):
        return lambda scores, plan: order.append(name) or plan

    with pytest.raises(ZeroDivisionError), edit_routing(layer, {KEY: note("outer")}):
        with edit_routing(layer, {KEY: note("inner")}):
            layer(tokens())
        layer(tokens())
        raise ZeroDivisionError
    layer(tokens())
    assert order == ["outer", "inner", "outer"] and layer.plan_edits == ()


@pytest.mark.parametrize("dispatch", ["ragged", "static"])
def test_dropped_experts_give_nothing_and_swapped_ones_have_each_others_weights(dispatch):
    layer = build_layer(dispatch=dispatch)
    silent, swapped = copy.deepcopy(layer), copy.deepcopy(layer)
    with torch.no_grad():
        silent.experts.down_proj[[1, 4]] = 0
        for parameter in swapped.experts.parameters():
            parameter[[1, 3]] = parameter[[3, 1]]
    with edit_routing(layer, {KEY: DropExperts(1, 4)}):
        output, router = layer(tokens())
    torch.testing.assert_close(output, silent(tokens())[0])
    assert router.stats.accepted_load[[1, 4]].tolist() == [0, 0]
    with edit_routing(layer, {KEY: SwapExperts(3, 1)}):
        output, _ = layer(tokens())
    torch.testing.assert_close(output, swapped(tokens())[0])


@pytest.mark.parametrize("router", ["token_choice", "bias_balanced"])
def test_rerouting_is_what_a_layer_without_the_expert_does(router):
    """Even if the expert has the largest of all biases."""
    fields = {"router": router, **DROPLESS}
    if router == "bias_balanced":
        fields["router_options"] = {"score": "sigmoid", "update_rate": 0.2}
    layer = build_layer(**fields)
    small = build_layer(num_experts=E - 1, **fields)
    left = [0, 1, 3, 4]
    for steps in layer.router.buffers():
        steps.copy_(torch.tensor([2, -1, 10, 0, 1]))
    weights = {name: value[left] for name, value in layer.state_dict().items()}
    small.load_state_dict(weights)
    with edit_routing(layer, {KEY: RerouteExperts(2)}):
        output, _ = layer(tokens())
    torch.testing.assert_close(output, small(tokens())[0])


@pytest.mark.parametrize("over", ["experts", "tokens"])
def test_where_experts_choose_the_weights_are_those_without_the_expert(over):
    """A token that is shared by fewer experts has a larger part of each."""
    options = {"router": "expert_choice", "router_options": {"softmax_over": over}}
    layer = build_layer(**options, **THREE_SLOTS)
    pruned = build_layer(num_experts=4, **options, **THREE_SLOTS)
    keep = torch.tensor([0, 1, 3, 4])
    with torch.no_grad():
        pruned.router.gate.copy_(layer.router.gate[keep])

    x = torch.randn(2, 13, 7, dtype=torch.float64)
    with edit_routing(layer, {("encoder", 0): RerouteExperts(2)}):
        ours = layer(x)[1].plan
    theirs = pruned(x)[1].plan
    assert torch.equal(ours.accepted[..., keep], theirs.accepted)
    assert not ours.accepted[..., 2].any()
    if over == "tokens":
        torch.testing.assert_close(ours.combine_weight[..., keep], theirs.combine_weight)


@pytest.mark.parametrize("router", GATED_NAMES)
def test_a_token_has_no_barred_expert_and_none_twice(router):
    """Even where fewer experts are left to it than it chooses."""
    x = torch.randn(2, 13, 7, dtype=torch.float64)
    barred = torch.rand(1, 26, 5) < 0.7
    barred[:, :13] = True
    barred[:, :13, 3] = False
    for capacity in (DROPLESS, THREE_SLOTS):
        layer = build_layer(router=router, **capacity)
        bar = functools.partial(choose_again, layer.router, barred=barred)
        with edit_routing(layer, {KEY: bar}):
            y, router_output = layer(x)
        plan = router_output.plan
        assert y.isfinite().all() and plan.combine_weight.isfinite().all()
        one_hot = torch.nn.functional.one_hot(plan.expert_index, 5) * plan.accepted[..., None]
        count = one_hot.sum(dim=2)  # [G, S, E]
        assert count.max() == 1
        assert not count[barred].any()


# ---- both forms of dispatch ----


def merge_experts(scores, plan):
    """Sends both choices of many tokens to the same expert."""
    return plan._replace(expert_index=plan.expert_index // 3)


def to_any_expert(scores, plan):
    generator = torch.Generator().manual_seed(3)
    index = torch.randint(E, plan.expert_index.shape, generator=generator)
    return plan._replace(expert_index=index)


def accept_all(scores, plan):
    accepted = plan.token_mask[..., None].expand_as(plan.accepted)
    gates = scores.probs.gather(-1, plan.expert_index) * accepted
    return plan._replace(accepted=accepted, requested=accepted, combine_weight=gates)


def without_slots(scores, plan):
    return plan._replace(slot=torch.full_like(plan.slot, -1))


EDITS = {
    "drop": DropExperts(1, 4),
    "reroute": RerouteExperts(0, 3),
    "swap": SwapExperts(3, 1),
    "merge": merge_experts,
    "to any": to_any_expert,
    "accept all": accept_all,
    "without slots": without_slots,
}


@pytest.mark.parametrize("router", ROUTER_NAMES)
@settings(max_examples=10)
@given(
    names=st.lists(st.sampled_from(sorted(EDITS)), min_size=1, max_size=3),
    factor=st.sampled_from([0.3, 1.0, None]),
    group_size=st.sampled_from([L, B * L]),
    seed=st.integers(0, 100),
)
def test_slots_and_rows_of_an_edited_plan_give_the_same(router, names, factor, group_size, seed):
    factors = {"capacity_factor": factor, "eval_capacity_factor": factor, "min_expert_capacity": 2}
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(B, L, D, generator=generator, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(B, L, generator=generator) < 0.8
    ids = torch.randint(97, (B, L), generator=generator)

    results = []
    for dispatch in ("ragged", "static"):
        layer = build_layer(router, seed, group_size=group_size, dispatch=dispatch, **factors)
        with ExitStack() as edits:
            for name in names:
                edits.enter_context(edit_routing(layer, {KEY: EDITS[name]}))
            output, router_output = layer(x, mask, token_ids=ids)
        gradients = torch.autograd.grad(output.square().sum(), [x, *layer.experts.parameters()])
        results.append((output, gradients, router_output.losses, router_output.stats))
    torch.testing.assert_close(*results)

    # With a capacity no slot is used twice, and none is beyond it.
    plan = router_output.plan
    if plan.capacity is None:
        return
    group = torch.arange(plan.slot.shape[0])[:, None, None].expand_as(plan.slot)
    used = torch.stack([group, plan.expert_index, plan.slot], dim=-1)[plan.accepted]
    assert used.unique(dim=0).shape == used.shape
    assert (used[:, 2] < plan.capacity).all()


@pytest.mark.parametrize("router", ROUTER_NAMES)
def test_an_edit_that_changes_nothing_leaves_the_slots_and_the_capacity(router):
    layer = build_layer(router, **THREE_SLOTS)
    ids = torch.arange(B * L).view(B, L)
    expected = layer(tokens(), token_ids=ids)[1].plan
    with edit_routing(layer, {KEY: lambda scores, plan: plan._replace()}):
        plan = layer(tokens(), token_ids=ids)[1].plan
    assert torch.equal(plan.slot, expected.slot)
    assert plan.capacity == expected.capacity == 3


@pytest.mark.slow
def test_an_exported_layer_carries_out_its_edits():
    layer = build_layer()
    with edit_routing(layer, {KEY: merge_experts}), torch.no_grad():
        expected, _ = layer(tokens())
        exported = torch.export.export(layer, (tokens(),))
        torch.testing.assert_close(exported.module()(tokens())[0], expected)


def test_edits_hold_in_every_step_of_generation():
    model, inputs = tiny_model(eval_capacity_factor=None), tiny_batch()
    del inputs["labels"]
    loads = []

    def note(scores, plan):
        loads.append(plan.expert_index[plan.accepted].bincount(minlength=7))
        return plan

    layer = sparse_layers(model)["decoder", 0]
    edits = {("decoder", 0): DropExperts(2)}
    with edit_routing(model, edits), edit_routing(model, {("decoder", 0): note}):
        dropped = model.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert len(loads) == 6
    assert sum(loads)[2] == 0

    # The same as in a model whose expert gives nothing.
    with torch.no_grad():
        layer.experts.down_proj[2] = 0
    silent = model.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert torch.equal(dropped, silent)


def test_checkpointed_layers_are_recomputed_with_their_edits():
    plain = build_layer()
    checkpointed = checkpoint_wrapper(copy.deepcopy(plain))
    for layer in (plain, checkpointed):
        layer.train()
        x = tokens().requires_grad_()
        torch.manual_seed(0)
        with edit_routing(layer, {KEY: DropExperts(1)}):
            output, _ = layer(x)
            output.square().sum().backward()
    expected = dict(plain.named_parameters())
    for name, parameter in checkpointed.named_parameters():
        gradient = expected[name.removeprefix("_checkpoint_wrapped_module.")].grad
        torch.testing.assert_close(parameter.grad, gradient)

    # Without the backward pass inside the block it would be another layer.
    with (
        pytest.raises(ConfigError, match="ended before the backward pass"),
        edit_routing(checkpointed, {KEY: DropExperts(1)}),
    ):
        output, _ = checkpointed(tokens().requires_grad_())


def test_padding_is_never_accepted_and_a_choice_that_is_not_accepted_weighs_nothing():
    layer = build_layer(**DROPLESS)
    mask = torch.ones(B, L, dtype=torch.bool)
    mask[0, 3:] = False

    def accept_first_choices(scores, plan):
        accepted = torch.ones_like(plan.accepted)
        accepted[..., 1] = False
        return plan._replace(accepted=accepted, combine_weight=torch.ones_like(plan.combine_weight))

    with edit_routing(layer, {KEY: accept_first_choices}):
        plan = layer(tokens(), mask)[1].plan
    assert torch.equal(plan.accepted[..., 0], plan.token_mask) and not plan.accepted[..., 1].any()
    assert torch.equal(plan.combine_weight, plan.accepted.to(plan.combine_weight.dtype))


def test_wrong_edits_and_what_is_no_plan_for_the_tokens_are_refused():
    for edits, message in (
        ({("encoder", 1): DropExperts(0)}, r"no sparse layer \('encoder', 1\)"),
        ({KEY: DropExperts(E)}, "expert is 5; expected .*4"),
        ({KEY: 3}, "edit of .* is 3; expected a function"),
    ):
        with pytest.raises(ConfigError, match=message), edit_routing(build_layer(), edits):
            pass

    layer = build_layer(**DROPLESS)
    for edit, message in (
        (lambda plan: None, "edit returned None"),
        (lambda plan: plan._replace(expert_index=plan.expert_index[:, 1:]), "choices of shape"),
        (lambda plan: plan._replace(expert_index=plan.expert_index + 1), "expert 1 to 5 of 5"),
    ):
        edits = {KEY: lambda scores, plan, edit=edit: edit(plan)}
        with pytest.raises(DataError, match=message), edit_routing(layer, edits):
            layer(tokens())
