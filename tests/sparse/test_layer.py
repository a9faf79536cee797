"""The sparse layer against tests/oracles: a loop over tokens for every router and option, and the
dense einsum.

Each drawn case is computed once by the oracle and twice by the layer, by ragged and by static
dispatch.
"""

import dataclasses
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe import RouterStats, SparseFeedForward
from moe.errors import ConfigError
from moe.kernels.expert_weights import dequantized
from moe.sparse.config import CONVENTIONS, Activation, Dispatch, RouterInput
from moe.sparse.routers.token_choice import keep_choices
from tests.oracles.layer import answer, dense_einsum, shared_output
from tests.oracles.stats import summary
from tests.sparse.by_hand import assert_close, layer_with_logits, logits_of
from tests.sparse.layers import build_layer

# ---- every router and option against the loop over tokens ----

NORMALIZED = {"normalize_gates": st.booleans()}
GATES = {
    **NORMALIZED,
    "normalize_accepted": st.booleans(),
    "token_dropout": st.sampled_from([0.0, 0.2]),
}
THRESHOLD = {"threshold": st.sampled_from([0.2, 0.45])}
OPTIONS = {
    "token_choice all": {"policy": st.just("all"), **GATES},
    "token_choice none": {"policy": st.just("none"), **GATES},
    "token_choice threshold": {"policy": st.just("threshold"), **GATES, **THRESHOLD},
    "batch_prioritized all": {"policy": st.just("all"), **GATES},
    "batch_prioritized threshold": {"policy": st.just("threshold"), **GATES, **THRESHOLD},
    "switch argmax": {"policy": st.just("argmax")},
    "expert_choice experts": {"softmax_over": st.just("experts")},
    "expert_choice tokens": {"softmax_over": st.just("tokens")},
    "no_token_left_behind": {"num_candidates": st.integers(1, 4)},
    "hash": {"seed": st.integers(0, 5)},
    "bias_balanced": {
        "update_rate": st.sampled_from([0.05, 0.3]),
        "score": st.sampled_from(["softmax", "sigmoid"]),
        **NORMALIZED,
    },
}
PADDING = ["no mask", "none", "left", "right", "scattered", "whole sequences", "everything"]


@st.composite
def cases(draw, options):
    """The settings, shapes and kind of input of a case."""
    num_experts = draw(st.sampled_from([1, 2, 3, 5, 5, 17]))
    drawn = {name: draw(values) for name, values in options.items()}
    if "num_candidates" in drawn:
        drawn["num_candidates"] = min(drawn["num_candidates"], num_experts)
    length = draw(st.sampled_from([1, 2, 5, 13, 13, 13]))
    factors = st.sampled_from([0.05, 0.5, 0.7, 1.0, 1.25, 2.0, None])
    config = {
        "num_experts": num_experts,
        "num_selected_experts": min(draw(st.sampled_from([1, 2, 3])), num_experts),
        "num_shared_experts": draw(st.sampled_from([0, 0, 1, 2])),
        "capacity_factor": draw(factors),
        "expert_capacity": draw(st.sampled_from([None, None, 1, 2, 3, 50])),
        "convention": draw(st.sampled_from(sorted(CONVENTIONS))),
        "eval_capacity_factor": draw(factors),
        "min_expert_capacity": draw(st.sampled_from([0, 0, 0, 1, 4])),
        "group_size": draw(st.sampled_from([1, 2, 3])) * length,
        "router_input": draw(st.sampled_from(["hidden", "hidden", *get_args(RouterInput)])),
        "balance_scope": draw(st.sampled_from(["group", "group", "micro_batch", "global"])),
        "gated": draw(st.booleans()),
        "activation": draw(st.sampled_from(get_args(Activation))),
        "product_bias": draw(st.booleans()),
        "expert_bias": draw(st.sampled_from(["none", "additive", "multiplicative"])),
    }
    return {
        "config": config,
        "options": drawn,
        "training": draw(st.booleans()),
        "batch": draw(st.sampled_from([1, 2, 3, 4])),
        "length": length,
        "inputs": draw(st.sampled_from(["normal", "normal", "whole", "equal", "no gate"])),
        "padding": draw(st.sampled_from([*PADDING, "scattered", "scattered"])),
        "drop_tokens": draw(st.sampled_from([True, True, True, False])),
        "seed": draw(st.integers(0, 10_000)),
    }


def router_options(router, case):
    """The options by their names in the library; those that the mode should not read are set to
    something else.
    """
    options = dict(case["options"])
    if router == "switch" and not case["training"]:
        options["policy"] = "sample"  # evaluation takes the best expert under every policy
    if router in ("token_choice", "batch_prioritized"):
        if case["training"]:
            options["token_dropout"] = 0.0
        read, other = ("", "eval_") if case["training"] else ("eval_", "")
        options[f"{read}second_expert_policy"] = options.pop("policy")
        options[f"{other}second_expert_policy"] = "random"
        options[f"{read}second_expert_threshold"] = options.pop("threshold", 0.2)
        options[f"{other}second_expert_threshold"] = 0.9
    return options


def build(router, case):
    """The layer of a case, with a gate and biases that make ties where the case wants them."""
    config = {**case["config"], "router_options": router_options(router, case)}
    if router in ("switch", "no_token_left_behind", "hash"):
        config["num_selected_experts"] = 1
    if router == "hash":
        config["router_input"] = "hidden"
    layer = build_layer(router, case["seed"], **config).train(case["training"])
    with torch.no_grad():
        if router == "bias_balanced":
            layer.router.load_steps.random_(-3, 4)
        if case["inputs"] != "normal" and router != "hash":
            low, high = (0, 1) if case["inputs"] == "no gate" else (-1, 2)
            layer.router.gate.random_(low, high)
    return layer


def inputs(case):
    """Tokens, their mask, ids and word embeddings; in whole numbers, scores tie exactly in any
    order of summing.
    """
    batch, length = case["batch"], case["length"]
    x = torch.randn(batch, length, 7, dtype=torch.float64)
    words = torch.randn(batch, length, 7, dtype=torch.float64)
    if case["inputs"] in ("whole", "equal"):
        x, words = x.random_(-2, 3), words.random_(-1, 2)
    if case["inputs"] == "equal":
        x[:], words[:] = x[:1, :1].clone(), words[:1, :1].clone()
    ids = torch.randint(0, 11, (batch, length))
    position, border = torch.arange(length), torch.randint(0, length + 1, (batch, 1))
    mask = {
        "no mask": None,
        "none": torch.ones(batch, length, dtype=torch.bool),
        "left": position >= border,
        "right": position < border,
        "scattered": torch.rand(batch, length) < 0.6,
        "whole sequences": (torch.rand(batch, 1) < 0.5).expand(batch, length),
        "everything": torch.zeros(batch, length, dtype=torch.bool),
    }[case["padding"]]
    return x.requires_grad_(), mask, ids, words.requires_grad_()


def gradients(output, load_balance_loss, router_z_loss, cotangent, inputs):
    """Gradients of a weighted sum of all that is learnt from; zeros where nothing depends on it."""
    total = (output * cotangent).sum() + 0.7 * load_balance_loss + 0.3 * router_z_loss
    if not total.requires_grad:
        return [torch.zeros_like(x) for x in inputs]
    return torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)


def check_plan(plan, routing):
    """A plan holds the routing of the oracle; slots and weights count where accepted, and slots only
    if there is a capacity.
    """
    assert plan.expert_index.tolist() == routing.expert_index
    assert plan.requested.tolist() == routing.requested
    assert plan.accepted.tolist() == routing.accepted
    if plan.capacity is not None:
        slots = torch.tensor(
            [[[-1 if slot is None else slot for slot in s] for s in g] for g in routing.slot]
        )
        assert torch.equal(plan.slot.masked_fill(~plan.accepted, -1), slots)
    weights = [
        [[torch.as_tensor(weight).item() for weight in s] for s in g] for g in routing.weight
    ]
    assert_close(plan.combine_weight, torch.tensor(weights, dtype=torch.float64), "combine_weight")


def check_stats(stats, counted):
    """Counts are exact, sums are close, and the numbers that people read follow from them."""
    for name in RouterStats._fields:
        ours, theirs = getattr(stats, name), counted[name]
        if ours.dtype == torch.int64:
            assert ours.tolist() == theirs, name
        else:
            assert_close(ours, torch.tensor(theirs, dtype=torch.float64), name)
    means = {
        f"{name}_loss": counted[f"{name}_sum"] / (counted[f"{name}_count"] or 1)
        for name in ("load_balance", "router_z")
    }
    assert stats.summary() == pytest.approx(summary(counted) | means, rel=1e-12, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("variant", OPTIONS)
@settings(max_examples=36)
@given(data=st.data())
def test_output_losses_statistics_and_every_gradient_equal_the_loop_over_tokens(variant, data):
    case, router = data.draw(cases(OPTIONS[variant])), variant.split()[0]
    layer = build(router, case)
    x, mask, ids, words = inputs(case)
    expected = answer(layer, x, mask, ids, words, case["drop_tokens"])
    output = expected.output.reshape(x.shape)
    cotangent = torch.randn_like(x)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    leaves = [x, words, *parameters]
    losses = (expected.load_balance_loss, expected.router_z_loss)
    expected_gradients = gradients(output, *losses, cotangent, leaves)

    for dispatch in ("ragged", "static"):
        ours = SparseFeedForward(dataclasses.replace(layer.config, dispatch=dispatch)).double()
        ours.load_state_dict(layer.state_dict())
        ours.train(layer.training)
        options = {"token_ids": ids, "word_embeddings": words, "drop_tokens": case["drop_tokens"]}
        y, found = ours(x, mask, **options)
        check_plan(found.plan, expected.routing)
        assert_close(y, output, "output")
        assert_close(found.losses.load_balance_loss, losses[0].detach(), "load_balance_loss")
        assert_close(found.losses.router_z_loss, losses[1].detach(), "router_z_loss")
        check_stats(found.stats, expected.counted)
        found_losses = (found.losses.load_balance_loss, found.losses.router_z_loss)
        found_gradients = gradients(y, *found_losses, cotangent, [x, words, *ours.parameters()])
        for name, a, b in zip(
            ("input", "words", *names), found_gradients, expected_gradients, strict=True
        ):
            assert_close(a, b, f"gradient of {name}, {dispatch}")

    with torch.no_grad():
        groups, plan = expected.groups, found.plan
        sums = dense_einsum(layer, groups, plan) + shared_output(layer, groups, plan.token_mask)
        assert_close(sums.reshape(x.shape), output, "dense einsum")
    assert_close(found.router_logits, expected.logits, "router_logits")


# ---- order, slots and weights, by hand ----


def test_a_choice_whose_gate_is_at_the_threshold_is_not_kept_and_the_first_always_is():
    gates = torch.tensor([[[0.5, 0.25, 0.25], [0.125, 0.3, 0.0]]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    kept = {
        policy: keep_choices(gates, mask, policy, 0.25)[0].tolist()
        for policy in ("all", "none", "threshold")
    }
    assert kept["all"] == [[True] * 3] * 2
    assert kept["none"] == [[True, False, False]] * 2
    assert kept["threshold"] == [[True, False, False], [True, True, False]]


def test_a_bias_moves_against_the_load_and_steers_the_choice_but_not_the_weight():
    options = {"update_rate": 0.1, "normalize_gates": False}
    layer = layer_with_logits(3, "bias_balanced", num_selected_experts=1, router_options=options)
    layer.router.load_steps.zero_()
    x = logits_of([0.6, 0.3, 0.1], [0.5, 0.4, 0.1], [0.7, 0.2, 0.1])
    _, router = layer(x)
    assert router.stats.expert_load.tolist() == [3, 0, 0]
    layer.router.update(router.stats)
    assert layer.router.load_steps.tolist() == [-1, 1, 1]  # against a mean of 1
    # Probability plus bias is 0.5, 0.4, 0.2 for token 0; 0.4, 0.5, 0.2 for token 1; 0.6, 0.3, 0.2
    # for token 2.
    _, router = layer(x)
    assert router.plan.expert_index.flatten().tolist() == [0, 1, 0]
    assert_close(
        router.plan.combine_weight.flatten(), torch.tensor([0.6, 0.4, 0.7], dtype=torch.float64)
    )
    layer.router.update(router.stats._replace(expert_load=torch.tensor([1, 1, 1])))
    assert layer.router.load_steps.tolist() == [-1, 1, 1]


def test_biases_of_products_are_refused_where_ranks_share_hidden_units():
    layer = build_layer(product_bias=True)
    with pytest.raises(ConfigError, match="product_bias"):
        layer.set_parallel_axes(None, object())


@pytest.mark.parametrize("dispatch", get_args(Dispatch))
@pytest.mark.parametrize("quantization", [{"bits": 8}, {"bits": 4, "group_size": 2}], ids=str)
def test_quantized_experts_keep_their_biases_and_compute_as_their_numbers(dispatch, quantization):
    sizes = {"d_model": 10, "d_ff": 14, "dispatch": dispatch, "product_bias": True}
    for activation in get_args(Activation):
        fields = {**sizes, "activation": activation}
        quantized = build_layer(**fields, expert_quantization=quantization)
        plain = build_layer(**fields)
        state = {name: dequantized(w) for name, w in quantized.state_dict().items()}
        plain.load_state_dict(state)
        x = torch.randn(3, 13, 10, dtype=torch.float64)
        assert_close(quantized(x)[0].detach(), plain(x)[0].detach())
