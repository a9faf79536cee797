"""What every router promises; a new file in moe/sparse/routers is tested without an edit here.

The oracle is the promise itself in the docstrings of `Router` and `DispatchPlan`, or the layer on
the other form of the same input. What each router computes is held to tests/oracles in
tests/sparse/test_layer.py.
"""

import copy
import dataclasses
import importlib
import pickle
import pkgutil
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moe.sparse.routers
from moe import ConfigError, SparseConfig, SparseFeedForward
from moe.sparse.all_routers import build_router, load_routers
from moe.sparse.plan import router_scores
from moe.sparse.router import RouterInputs

ROUTERS = load_routers()
NAMES = ROUTERS.names()
CAUSAL = [name for name in NAMES if ROUTERS.get(name).causal]
SINGLE = [name for name in NAMES if ROUTERS.get(name).single]
FILES = [module.name for module in pkgutil.iter_modules(moe.sparse.routers.__path__)]
INPUTS = ["hidden", "concat", "concat_stop_gradient", "add", "add_stop_gradient"]
by_name = pytest.mark.parametrize("name", NAMES)


def config_of(name, **fields):
    """The least that a router needs; one that gives each token one expert wants one choice."""
    choices = 1 if ROUTERS.get(name).single else 2
    sizes = {"d_model": 7, "d_ff": 11, "num_experts": 5, "num_selected_experts": choices}
    return SparseConfig(
        **{
            **sizes,
            "router": name,
            "router_initializer_std": 0.7,
            "initializer_scale": 1.0,
            **fields,
        }
    )


def build(name, seed=0, **fields):
    """A layer in float64 and evaluation, with whatever the router keeps beside its parameters away
    from zero.
    """
    torch.manual_seed(seed)
    layer = SparseFeedForward(config_of(name, **fields)).double().eval()
    for buffer in layer.router.buffers():
        buffer.random_(-20, 21)
    return layer


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


@pytest.mark.parametrize("file", FILES)
def test_a_router_with_a_file_is_registered(file):
    module = importlib.import_module(f"moe.sparse.routers.{file}")
    assert module.__name__ in {ROUTERS.get(name).__module__ for name in NAMES}


@by_name
def test_a_registered_router_has_a_file_a_docstring_with_its_source_and_documented_options(name):
    router = ROUTERS.get(name)
    assert router.__module__.rpartition(".")[2] in FILES
    assert "Source:" in router.__doc__
    for option in dataclasses.fields(router.Options):
        assert re.search(rf"\b{option.name}: \S", router.Options.__doc__), option.name


@by_name
def test_options_are_a_frozen_dataclass_with_defaults(name):
    options = ROUTERS.get(name).Options()
    for option in dataclasses.fields(options):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(options, option.name, None)


@by_name
def test_an_unknown_option_is_refused_by_name_with_the_closest(name):
    known = [option.name for option in dataclasses.fields(ROUTERS.get(name).Options)]
    with pytest.raises(
        ConfigError,
        match=f"^Router '{name}' has no option 'zzz'. Known: {', '.join(known) or 'none'}",
    ):
        config_of(name, router_options={"zzz": 1})
    for option in known:
        with pytest.raises(
            ConfigError, match=f"has no option '{option}x'. Did you mean '{option}'?"
        ):
            config_of(name, router_options={f"{option}x": 1})


@by_name
def test_a_decoder_takes_a_router_only_if_it_never_looks_at_later_tokens(name):
    if ROUTERS.get(name).causal:
        assert config_of(name, decoder=True).decoder
    else:
        with pytest.raises(
            ConfigError, match=f"'{name}' cannot be used in a decoder: .* looking at later ones"
        ):
            config_of(name, decoder=True)


@pytest.mark.parametrize("name", SINGLE)
def test_a_router_of_one_expert_a_token_refuses_more_choices_and_fills_no_more(name):
    with pytest.raises(
        ConfigError, match=r"num_selected_experts is 2\. Set num_selected_experts to 1"
    ):
        config_of(name, num_selected_experts=2)
    x, mask, beside = inputs()
    assert build(name)(x, mask, **beside)[1].plan.accepted.sum(dim=-1).max() == 1


# ---- the plan ----


@by_name
@settings(max_examples=30)
@given(
    num_experts=st.sampled_from([5, 17]),
    factor=st.sampled_from([0.05, 0.7, 1.25, None]),
    least=st.sampled_from([0, 1, 4]),
    group_size=st.sampled_from([13, 39]),
    training=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_plan_is_well_formed(name, num_experts, factor, least, group_size, training, seed):
    factors = {"capacity_factor": factor, "eval_capacity_factor": factor}
    fields = {
        "num_experts": num_experts,
        "min_expert_capacity": least,
        "group_size": group_size,
        **factors,
    }
    layer, (x, mask, beside) = build(name, seed, **fields).train(training), inputs(seed=seed)
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
    assert plan.capacity == layer.router.capacity(group_size, drop_tokens=True)
    room = group_size if plan.capacity is None else plan.capacity
    for group in range(shape[0]):
        here = plan.accepted[group]
        taken = list(
            zip(
                plan.expert_index[group][here].tolist(),
                plan.slot[group][here].tolist(),
                strict=True,
            )
        )
        assert len(set(taken)) == len(taken)
        assert all(0 <= slot < room for _, slot in taken)
        experts_of = [plan.expert_index[group, s][here[s]].tolist() for s in range(group_size)]
        assert all(len(set(experts)) == len(experts) for experts in experts_of)


@by_name
def test_a_plan_is_pure_in_evaluation_and_draws_nothing(name):
    layer, (x, mask, beside) = build(name), inputs()
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    plan = layer(x, mask, **beside)[1].plan
    assert same_plan(layer(x, mask, **beside)[1].plan, plan)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())


@by_name
def test_a_plan_is_made_of_the_scores_and_the_mask_alone(name):
    layer, (x, mask, beside) = build(name), inputs()
    words = beside["word_embeddings"]
    scores = layer.router(RouterInputs(x, mask, beside["token_ids"], words))
    plan = layer.router.assign(scores, mask)
    assert same_plan(layer.router.assign(router_scores(scores.logits), mask), plan)


@pytest.mark.parametrize("how", ["no factor", "drop_tokens=False"])
@by_name
def test_without_a_capacity_nothing_is_dropped_and_every_token_has_an_expert(name, how):
    layer, (x, mask, beside) = (
        build(name, eval_capacity_factor=None if how == "no factor" else 0.05),
        inputs(),
    )
    router = layer(x, mask, drop_tokens=how == "no factor", **beside)[1]
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
        layer, tokens = (
            build(name, dispatch=dispatch, eval_capacity_factor=factor),
            x.clone().requires_grad_(),
        )
        y, router = layer(tokens, mask, **beside)
        total = (y * x.cos()).sum() + router.losses.load_balance_loss + router.losses.router_z_loss
        wanted = [tokens, *layer.parameters()]
        results.append([y, *router.stats, *torch.autograd.grad(total, wanted)])
    for ragged, static in zip(*results, strict=True):
        torch.testing.assert_close(static, ragged, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CAUSAL)
def test_in_a_decoder_that_drops_nothing_no_output_depends_on_later_tokens(name):
    layer, (x, _, beside) = build(name, decoder=True), inputs()
    other, _, other_beside = inputs(seed=1)
    y, _ = layer(x, drop_tokens=False, **beside)
    for length in (1, 5, 12):
        later = torch.cat([x[:, :length], other[:, length:]], dim=1)
        for key, value in beside.items():
            other_beside[key] = torch.cat([value[:, :length], other_beside[key][:, length:]], dim=1)
        changed, _ = layer(later, drop_tokens=False, **other_beside)
        alone, _ = layer(
            x[:, :length], drop_tokens=False, **{key: v[:, :length] for key, v in beside.items()}
        )
        torch.testing.assert_close(changed[:, :length], y[:, :length], rtol=0, atol=1e-12)
        torch.testing.assert_close(alone, y[:, :length], rtol=0, atol=1e-12)
        assert not torch.allclose(changed[:, length:], y[:, length:])


@pytest.mark.parametrize("router_input", INPUTS)
@by_name
def test_the_number_of_parameters_is_known_before_they_are_built(name, router_input):
    try:
        config = config_of(name, router_input=router_input)
    except ConfigError as error:
        assert router_input in str(error)  # a router without a gate says so
        return
    built = sum(parameter.numel() for parameter in build_router(config).parameters())
    assert ROUTERS.get(name).num_parameters(config) == built


@by_name
def test_a_state_dict_brings_a_layer_back(name):
    layer, other, (x, mask, beside) = build(name), build(name, seed=1), inputs()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x, mask, **beside)[0], layer(x, mask, **beside)[0])


@by_name
def test_a_layer_and_its_configuration_survive_copying_and_pickling(name):
    layer, (x, mask, beside) = build(name), inputs()
    options = dataclasses.asdict(layer.router.options)
    config = config_of(name, router_options=options)
    for same in (
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
        dataclasses.replace(config),
    ):
        assert same == config
        assert same.router_options == options
    expected = layer(x, mask, **beside)[0]
    for same in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(same(x, mask, **beside)[0], expected)


@by_name
def test_learning_from_the_load_touches_no_parameter(name):
    layer, (x, mask, beside) = build(name), inputs()
    before = [parameter.clone() for parameter in layer.parameters()]
    layer.router.update(layer(x, mask, **beside)[1].stats)
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), before, strict=True))


@by_name
def test_fresh_parameters_do_not_depend_on_what_was_there(name):
    one, other = build(name), build(name, seed=1)
    for layer in (one, other):
        torch.manual_seed(2)
        layer.router.reset_parameters()
    same = zip(one.router.state_dict().values(), other.router.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
