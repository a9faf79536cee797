"""What every router promises; a new file in moe/sparse/routers is tested without an edit here.

The oracle is the promise itself in the docstrings of `Router` and `DispatchPlan`, or the layer on
the other form of the same input. What each router computes is held to tests/oracles in
tests/sparse/test_layer.py.
"""

import copy
import dataclasses
import pickle
import pkgutil
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moe.sparse.routers
from moe import ConfigError
from moe.sparse.all_routers import build_router, load_routers
from moe.sparse.plan import router_scores
from moe.sparse.router import RouterInputs
from tests.sparse.layers import build_layer

ROUTERS = load_routers()
NAMES = ROUTERS.names()
CAUSAL = [name for name in NAMES if ROUTERS.get(name).causal]
SINGLE = [name for name in NAMES if ROUTERS.get(name).single]
FILES = [module.name for module in pkgutil.iter_modules(moe.sparse.routers.__path__)]
INPUTS = ["hidden", "concat", "concat_stop_gradient", "add", "add_stop_gradient"]
by_name = pytest.mark.parametrize("name", NAMES)


def inputs(batch=3, length=13, seed=0):
    """Tokens, a mask with padding anywhere, and what stands beside them."""
    torch.manual_seed(seed)
    x, words = torch.randn(2, batch, length, 7, dtype=torch.float64).unbind()
    beside = {"token_ids": torch.randint(0, 997, (batch, length)), "word_embeddings": words}
    return x, torch.rand(batch, length) < 0.8, beside


def same_plan(ours, theirs):
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(ours, theirs, strict=True)
    )


# ---- the registry ----


def test_every_file_of_routers_registers_one():
    modules = {ROUTERS.get(name).__module__ for name in NAMES}
    assert modules == {f"moe.sparse.routers.{file}" for file in FILES}


@by_name
def test_a_router_names_its_source_and_documents_its_frozen_options(name):
    router = ROUTERS.get(name)
    assert "Source:" in router.__doc__
    options = router.Options()
    for option in dataclasses.fields(options):
        assert re.search(rf"\b{option.name}: \S", router.Options.__doc__), option.name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(options, option.name, None)


@by_name
def test_an_unknown_option_is_refused_by_name_with_the_closest(name):
    known = [option.name for option in dataclasses.fields(ROUTERS.get(name).Options)]
    message = f"^Router '{name}' has no option 'zzz'. Known: {', '.join(known) or 'none'}"
    with pytest.raises(ConfigError, match=message):
        build_layer(name, router_options={"zzz": 1})
    for option in known:
        with pytest.raises(ConfigError, match=f"option '{option}x'. Did you mean '{option}'?"):
            build_layer(name, router_options={f"{option}x": 1})


@by_name
def test_a_decoder_takes_a_router_only_if_it_never_looks_at_later_tokens(name):
    if ROUTERS.get(name).causal:
        assert build_layer(name, decoder=True).config.decoder
    else:
        with pytest.raises(
            ConfigError, match=f"'{name}' cannot be used in a decoder: .* later tokens"
        ):
            build_layer(name, decoder=True)


@pytest.mark.parametrize("name", SINGLE)
def test_a_router_of_one_expert_a_token_refuses_more_choices_and_fills_no_more(name):
    with pytest.raises(ConfigError, match=r"num_selected_experts is 2\. Set .* to 1"):
        build_layer(name, num_selected_experts=2)
    x, mask, beside = inputs()
    assert build_layer(name)(x, mask, **beside)[1].plan.accepted.sum(dim=-1).max() == 1


# ---- the plan ----


@by_name
@settings(max_examples=20)
@given(
    num_experts=st.sampled_from([5, 17]),
    factor=st.sampled_from([0.05, 0.7, 1.25, None]),
    least=st.sampled_from([0, 1, 4]),
    group_size=st.sampled_from([13, 39]),
    training=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_plan_is_well_formed(name, num_experts, factor, least, group_size, training, seed):
    fields = {"num_experts": num_experts, "min_expert_capacity": least, "group_size": group_size}
    fields |= {"capacity_factor": factor, "eval_capacity_factor": factor}
    layer = build_layer(name, seed, **fields).train(training)
    x, mask, beside = inputs(seed=seed)
    plan = layer(x, mask, **beside)[1].plan

    shape = (39 // group_size, group_size)
    assert torch.equal(plan.token_mask.reshape(3, 13), mask)
    choices = plan.expert_index.shape[-1]
    for field in (plan.expert_index, plan.slot, plan.accepted, plan.combine_weight, plan.requested):
        assert field.shape == (*shape, choices)
    assert plan.expert_index.dtype == plan.slot.dtype == torch.int64
    assert plan.accepted.dtype == plan.requested.dtype == torch.bool

    assert not (plan.accepted & ~plan.requested).any()
    assert not (plan.requested & ~plan.token_mask[..., None]).any()
    assert ((plan.expert_index >= 0) & (plan.expert_index < num_experts)).all()
    assert plan.combine_weight.isfinite().all()
    assert torch.count_nonzero(plan.combine_weight[~plan.accepted]) == 0
    assert (plan.combine_weight >= 0).all()

    # No two choices have one slot, and no token has an expert twice.
    assert plan.capacity == layer.router.capacity(group_size, drop_tokens=True)
    room = group_size if plan.capacity is None else plan.capacity
    for group, here in enumerate(plan.accepted):
        experts, slots = plan.expert_index[group][here], plan.slot[group][here]
        tokens = here.nonzero()[:, 0]
        assert ((slots >= 0) & (slots < room)).all()
        for pairs in (torch.stack([experts, slots]), torch.stack([tokens, experts])):
            assert pairs.unique(dim=1).shape == pairs.shape


@by_name
def test_a_plan_is_pure_in_evaluation_and_made_of_the_scores_and_the_mask_alone(name):
    layer, (x, mask, beside) = build_layer(name), inputs()
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    plan = layer(x, mask, **beside)[1].plan
    assert same_plan(layer(x, mask, **beside)[1].plan, plan)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())

    words = beside["word_embeddings"]
    scores = layer.router(RouterInputs(x, mask, beside["token_ids"], words))
    plan = layer.router.assign(scores, mask)
    assert same_plan(layer.router.assign(router_scores(scores.logits), mask), plan)


@pytest.mark.parametrize(("factor", "drop_tokens"), [(None, True), (0.05, False)])
@by_name
def test_without_a_capacity_nothing_is_dropped_and_every_token_has_an_expert(
    name, factor, drop_tokens
):
    layer, (x, mask, beside) = build_layer(name, eval_capacity_factor=factor), inputs()
    router = layer(x, mask, drop_tokens=drop_tokens, **beside)[1]
    assert torch.equal(router.plan.accepted, router.plan.requested)
    assert router.plan.accepted.any(dim=-1).equal(router.plan.token_mask)
    assert int(router.stats.dropped_tokens) == 0


# ---- the layer around it ----


@pytest.mark.parametrize("factor", [0.4, None])
@by_name
def test_ragged_and_static_dispatch_are_one_layer_in_output_and_all_gradients(name, factor):
    x, mask, beside = inputs()
    results = []
    for dispatch in ("ragged", "static"):
        layer = build_layer(name, dispatch=dispatch, eval_capacity_factor=factor)
        tokens = x.clone().requires_grad_()
        y, router = layer(tokens, mask, **beside)
        total = (y * x.cos()).sum() + router.losses.load_balance_loss + router.losses.router_z_loss
        gradients = torch.autograd.grad(total, [tokens, *layer.parameters()])
        results.append([y, *router.stats, *gradients])
    for ragged, static in zip(*results, strict=True):
        torch.testing.assert_close(static, ragged, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CAUSAL)
def test_in_a_decoder_that_drops_nothing_no_output_depends_on_later_tokens(name):
    layer, (x, _, beside) = build_layer(name, decoder=True), inputs()
    other, _, other_beside = inputs(seed=1)
    y, _ = layer(x, drop_tokens=False, **beside)
    for length in (1, 5, 12):
        start = {key: value[:, :length] for key, value in beside.items()}
        alone, _ = layer(x[:, :length], drop_tokens=False, **start)
        torch.testing.assert_close(alone, y[:, :length], rtol=0, atol=1e-12)

        later = torch.cat([x[:, :length], other[:, length:]], dim=1)
        mixed = {}
        for key, value in start.items():
            mixed[key] = torch.cat([value, other_beside[key][:, length:]], dim=1)
        changed, _ = layer(later, drop_tokens=False, **mixed)
        torch.testing.assert_close(changed[:, :length], y[:, :length], rtol=0, atol=1e-12)
        assert not torch.allclose(changed[:, length:], y[:, length:])


@by_name
def test_the_number_of_parameters_is_known_before_they_are_built(name):
    for router_input in INPUTS:
        try:
            config = build_layer(name, router_input=router_input).config
        except ConfigError as error:
            assert router_input in str(error)  # a router without a gate says so
            continue
        built = sum(parameter.numel() for parameter in build_router(config).parameters())
        assert ROUTERS.get(name).num_parameters(config) == built


@by_name
def test_a_layer_survives_saving_copying_and_pickling(name):
    layer, (x, mask, beside) = build_layer(name), inputs()
    loaded = build_layer(name, seed=1)
    loaded.load_state_dict(layer.state_dict())
    expected = layer(x, mask, **beside)[0]
    for same in (loaded, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(same(x, mask, **beside)[0], expected)

    options = dataclasses.asdict(layer.router.options)
    config = build_layer(name, router_options=options).config
    for same in (pickle.loads(pickle.dumps(config)), dataclasses.replace(config)):
        assert same == config
        assert same.router_options == options


@by_name
def test_learning_from_the_load_touches_no_parameter_and_a_reset_forgets_them(name):
    layer, (x, mask, beside) = build_layer(name), inputs()
    before = [parameter.clone() for parameter in layer.parameters()]
    layer.router.update(layer(x, mask, **beside)[1].stats)
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), before, strict=True))

    states = []
    for router in (layer.router, build_layer(name, seed=1).router):
        torch.manual_seed(2)
        router.reset_parameters()
        states.append(router.state_dict().values())
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
