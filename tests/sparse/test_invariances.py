"""What changes nothing: the order of experts, padding, later tokens, cuts of a batch,
checkpointing, compiling.

The oracle is the layer itself on the other form of the same input; there are no golden numbers.
"""

import functools
import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe.sparse.all_routers import load_routers
from tests.sparse.layers import (
    DROPLESS,
    GATED_NAMES,
    ROUTER_NAMES,
    THREE_SLOTS,
    assert_all_close,
    build_layer,
    gradients,
)

DISPATCHES = ["ragged", "static"]
# Every router once, every second one by slots.
ROUTERS_ON_EITHER_DISPATCH = list(zip(GATED_NAMES, itertools.cycle(DISPATCHES)))
CAUSAL_NAMES = [name for name in ROUTER_NAMES if load_routers().get(name).causal]


def random_input(batch=3, length=13):
    torch.manual_seed(1)
    x = torch.randn(batch, length, 7, dtype=torch.float64)
    mask = torch.rand(batch, length) > 0.2
    return x, mask, torch.randint(0, 997, (batch, length))


# ---- the order of the experts ----


@pytest.mark.parametrize(("name", "dispatch"), ROUTERS_ON_EITHER_DISPATCH)
def test_permuting_the_experts_permutes_the_plan_and_leaves_the_output(name, dispatch):
    fields = {"dispatch": dispatch, "expert_bias": "multiplicative", **THREE_SLOTS}
    layer, permuted = build_layer(name, **fields), build_layer(name, seed=1, **fields)
    old_of_new = torch.tensor([3, 0, 4, 2, 1])
    with torch.no_grad():
        weights = layer.state_dict()
        for parameter, value in permuted.state_dict().items():
            value.copy_(weights[parameter][old_of_new])
    x, mask, _ = random_input()
    (y, router), (y_permuted, router_permuted) = layer(x, mask), permuted(x, mask)

    torch.testing.assert_close(y, y_permuted, rtol=0, atol=1e-12)
    plan, plan_permuted = router.plan, router_permuted.plan
    if name == "expert_choice":  # choice e of a token is expert e: the choices are permuted
        fields = ("slot", "accepted", "requested", "combine_weight")
        plan = plan._replace(**{field: getattr(plan, field)[..., old_of_new] for field in fields})
    else:
        real = plan.token_mask  # padding has equal scores, and the lower index of equals
        assert torch.equal(plan.expert_index[real], old_of_new[plan_permuted.expert_index[real]])
    assert 0 < int(plan.accepted.sum()) < 2 * int(mask.sum())
    for field in ("accepted", "requested"):
        assert torch.equal(getattr(plan, field), getattr(plan_permuted, field))
    assert torch.equal(plan.slot[plan.accepted], plan_permuted.slot[plan.accepted])
    assert_all_close([plan.combine_weight], [plan_permuted.combine_weight], atol=1e-12)

    stats, stats_permuted = router.stats, router_permuted.stats
    stats = stats._replace(
        expert_load=stats.expert_load[old_of_new], accepted_load=stats.accepted_load[old_of_new]
    )
    assert_all_close(stats, stats_permuted, atol=1e-10)


# ---- padding ----


def run_on_all(layer, x, mask, ids):
    """Returns the output of the real tokens, losses, statistics without the number of positions,
    and gradients.
    """
    x = x.clone().requires_grad_()
    y, router = layer(x, mask, token_ids=ids)
    torch.manual_seed(2)
    cotangent = torch.randn(int(mask.sum()), x.shape[-1], dtype=torch.float64)
    losses = router.losses
    total = (y[mask] * cotangent).sum() + losses.load_balance_loss + losses.router_z_loss
    assert torch.count_nonzero(y[~mask]) == 0
    *parameters, d_x = gradients(total, layer, x)
    assert torch.count_nonzero(d_x[~mask]) == 0
    stats = router.stats._replace(num_positions=torch.zeros(()))
    return [y[mask], *losses, *stats, *parameters, d_x[mask]]


@pytest.mark.parametrize(
    ("sequences", "slots", "dispatch"),
    [(1, DROPLESS, "ragged"), (3, THREE_SLOTS, "ragged"), (3, THREE_SLOTS, "static")],
    ids=["dropless", "three_slots", "static"],
)
@pytest.mark.parametrize("name", ROUTER_NAMES)
def test_padding_added_or_moved_changes_nothing_for_the_real_tokens(
    name, sequences, slots, dispatch
):
    # The number of slots depends on the length with padding, so that a capacity factor would change
    # with it.
    layer = build_layer(name, dispatch=dispatch, group_size=19 * sequences, **slots)
    x, mask, ids = random_input()
    kept = mask.sum(dim=1)

    def laid_out(length, seed):
        """Returns the same real tokens, in order, at other places between padding that must not be
        looked at.
        """
        torch.manual_seed(seed)
        new_mask = torch.stack([torch.randperm(length).argsort() < count for count in kept])
        new_x = torch.full((3, length, 7), float("nan"), dtype=torch.float64)
        new_ids = torch.full((3, length), 991)
        new_x[new_mask], new_ids[new_mask] = x[mask], ids[mask]
        return new_x, new_mask, new_ids

    expected = run_on_all(layer, *laid_out(13, seed=0))
    for length, seed in ((13, 1), (19, 3)):
        assert_all_close(run_on_all(layer, *laid_out(length, seed)), expected, atol=1e-10)


# ---- later tokens ----


def change_after(x, ids, last):
    """Returns the same tokens up to position `last` of the flattened batch, and others behind it."""
    torch.manual_seed(3)
    other, other_ids = torch.randn_like(x), torch.randint(0, 997, ids.shape)
    keep = torch.arange(ids.numel()).reshape(ids.shape) <= last
    return torch.where(keep[..., None], x, other), torch.where(keep, ids, other_ids)


def plans_up_to(layer, last, choices=None):
    """Returns who of the tokens up to `last` goes where, in so many choices, for two inputs that
    differ behind it.
    """
    x, _, ids = random_input(batch=2)
    decided = []
    for tokens, token_ids in ((x, ids), change_after(x, ids, last)):
        plan = layer(tokens, token_ids=token_ids)[1].plan
        fields = (plan.expert_index, plan.requested, plan.accepted, plan.combine_weight)
        decided.append([field[:, : last + 1, :choices] for field in fields])
    return decided


@pytest.mark.parametrize("slots", [DROPLESS, THREE_SLOTS, {"eval_capacity_factor": 1.0}], ids=str)
@pytest.mark.parametrize("name", CAUSAL_NAMES)
def test_with_one_choice_a_decoders_plan_does_not_depend_on_later_tokens(name, slots):
    layer = build_layer(name, decoder=True, num_selected_experts=1, group_size=26, **slots)
    for last in (5, 17):
        before, after = plans_up_to(layer, last)
        assert_all_close(before, after, atol=0)


@pytest.mark.parametrize(("name", "choices"), [("token_choice", 3), ("bias_balanced", 2)])
def test_with_several_choices_later_tokens_change_no_first_choice_and_without_a_capacity_none(
    name, choices
):
    fields = {"decoder": True, "num_selected_experts": choices, "group_size": 26}
    for slots, fixed_choices in ((THREE_SLOTS, 1), (DROPLESS, None)):
        for last in (5, 17):
            before, after = plans_up_to(build_layer(name, **fields, **slots), last, fixed_choices)
            assert_all_close(before, after, atol=0)


@pytest.mark.parametrize("name", sorted(set(ROUTER_NAMES) - set(CAUSAL_NAMES)))
def test_routers_that_a_decoder_refuses_do_look_ahead(name):
    fields = {"num_selected_experts": 1, "group_size": 26, "min_expert_capacity": 0}
    differs = False
    for seed in range(3):
        layer = build_layer(name, seed, eval_capacity_factor=0.5, **fields)
        before, after = plans_up_to(layer, last=11)
        differs |= not all(map(torch.equal, before, after))
    assert differs


# ---- cuts of a batch ----


@pytest.mark.parametrize("name", ROUTER_NAMES)
def test_splitting_a_batch_on_group_borders_changes_nothing(name):
    layer = build_layer(name, group_size=26, eval_capacity_factor=1.0, min_expert_capacity=0)
    x, mask, ids = random_input(batch=6)

    def run(rows):
        y, router = layer(x[rows], mask[rows], token_ids=ids[rows])
        weights = torch.arange(1, 7, dtype=torch.float64)[rows, None, None]
        total = (y * weights).square().sum()
        total = total + router.losses.load_balance_sum + router.losses.router_z_sum
        return y, router, gradients(total, layer)

    y, router, grads = run(slice(0, 6))
    (y_1, first, grads_1), (y_2, second, grads_2) = run(slice(0, 4)), run(slice(4, 6))
    assert_all_close([torch.cat([y_1, y_2])], [y], atol=1e-12)
    assert_all_close(first.stats + second.stats, router.stats, atol=1e-10)
    assert_all_close([a + b for a, b in zip(grads_1, grads_2, strict=True)], grads, atol=1e-9)

    # The last two losses have a number for each group.
    *sums, a, b = zip(first.losses, second.losses, strict=True)
    losses = [*map(sum, sums), torch.cat(a), torch.cat(b)]
    assert_all_close(losses, router.losses, atol=1e-10)


# ---- activation checkpointing ----


@pytest.mark.parametrize(
    ("name", "options", "dispatch"),
    [
        ("token_choice", {"second_expert_policy": "random"}, "static"),
        ("switch", {"policy": "input_jitter", "jitter": 0.5}, "ragged"),
        ("switch", {"policy": "sample"}, "static"),
        ("expert_choice", {}, "ragged"),
    ],
    ids=str,
)
def test_activation_checkpointing_changes_neither_losses_statistics_nor_gradients_of_a_random_layer(
    name, options, dispatch
):
    layer = build_layer(
        name, router_options=options, dispatch=dispatch, expert_dropout_rate=0.3
    ).train()
    x, mask, _ = random_input()
    x.requires_grad_()

    def run(call, seed):
        torch.manual_seed(seed)
        y, router = call(x, mask)
        torch.rand(())  # the loss of a model draws too, between the forward pass and its repetition
        total = y.square().sum() + router.losses.load_balance_loss + router.losses.router_z_loss
        return [y, *router.losses, *router.stats, *gradients(total, layer, x)]

    expected = run(layer, seed=5)
    checkpointed = functools.partial(checkpoint, layer, use_reentrant=False)
    assert_all_close(run(checkpointed, seed=5), expected, atol=0)
    if layer.router.config.router != "expert_choice":
        assert not torch.equal(run(layer, seed=6)[0], expected[0])


# ---- compiled graphs ----


def compare_compiled(layer, compiled, seed, ids):
    """Compares outputs, losses, statistics and gradients of the compiled layer with those of the
    plain one.
    """
    torch.manual_seed(seed)
    x = torch.randn(2, 13, 7, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(2, 13) > 0.2
    results = []
    for call in (layer, compiled):
        y, router = call(x, mask, token_ids=ids)
        total = y.square().sum() + router.losses.load_balance_loss + router.losses.router_z_loss
        results.append([y, *router.losses, *router.stats, *gradients(total, layer, x)])
        assert router.plan.capacity == layer.router.capacity(13 * 2, drop_tokens=True)
    assert_all_close(results[1], results[0], atol=1e-10)


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["batch_prioritized", "expert_choice", "hash", "no_token_left_behind"]
)
def test_static_dispatch_is_one_graph_that_serves_every_batch_of_its_shape(name, fresh_compiler):
    layer = build_layer(name, dispatch="static", convention="flaxformer", eval_capacity_factor=0.9)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    ids = torch.randint(0, 997, (2, 13))
    compare_compiled(layer, compiled, seed=0, ids=ids)
    with torch.compiler.set_stance("fail_on_recompile"):
        compare_compiled(layer, compiled, seed=1, ids=ids.flip(0))


@pytest.mark.slow
def test_static_dispatch_is_one_graph_in_training_too_and_knows_the_capacity_of_each_mode(
    fresh_compiler,
):
    fields = {"capacity_factor": 0.29, "min_expert_capacity": 0, "expert_dropout_rate": 0.3}
    layer = build_layer("switch", dispatch="static", **fields)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 13, 7, dtype=torch.float64)
    for training in (False, True, False):
        plan = compiled.train(training)(x)[1].plan
        assert plan.capacity == (1 if training else 10)  # 26 tokens, 5 experts: 1.508 and 10.4
        assert int(plan.accepted.sum(dim=1).max()) <= 26


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*")  # both are torch's own affair
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_code_made_by_the_compiler_computes_what_the_plain_layer_does(fresh_compiler):
    layer = build_layer(eval_capacity_factor=0.9, min_expert_capacity=0)
    compiled = torch.compile(
        layer, options={"cpp.simdlen": 1}
    )  # plain loops compile in half the time
    compare_compiled(layer, compiled, seed=0, ids=None)
