"""What the layer draws: random policies, jitter and initial weights, against their own
probabilities.

Oracle: mean and deviation of the distribution, with a fixed seed; the dense einsum for what must
not be disturbed.
"""

import math

import pytest
import torch

from moe import SparseConfig
from moe.sparse.experts import Experts, truncated_normal_
from moe.sparse.routers.token_choice import keep_choices
from tests.oracles.layer import dense_einsum
from tests.sparse.by_hand import assert_close, layer_with_logits, logits_of, tokens
from tests.sparse.layers import build_layer

RANDOM = {
    "second choices": {"router_options": {"second_expert_policy": "random"}},
    "surest first": {
        "router": "batch_prioritized",
        "router_options": {"second_expert_policy": "random"},
    },
    "jitter": {"router": "switch", "router_options": {"policy": "input_jitter", "jitter": 0.5}},
    "hidden units": {"expert_dropout_rate": 0.3, "router_options": {"second_expert_policy": "all"}},
    "sample": {"router": "switch", "router_options": {"policy": "sample"}},
}


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("dispatch", ["ragged", "static"])
def test_training_repeats_itself_under_the_same_seed_and_evaluation_draws_nothing(name, dispatch):
    layer, x = build_layer(dispatch=dispatch, **RANDOM[name]), tokens(2, 13, 7)
    before = torch.random.get_rng_state()
    y, _ = layer(x)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(layer(x)[0], y)

    layer.train()
    outputs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outputs.append(layer(x)[0])
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_a_choice_is_kept_with_probability_gate_over_threshold():
    torch.manual_seed(0)
    gates = torch.tensor([0.7, 0.25, 0.05]).expand(3, 40_009, 3)
    mask = torch.ones(3, 40_009, dtype=torch.bool)
    kept = keep_choices(gates, mask, "random", 0.2).double().mean(dim=(0, 1))
    assert kept[:2].tolist() == [1, 1]
    assert abs(kept[2].item() - 0.25) < 5 * math.sqrt(0.25 * 0.75 / (3 * 40_009))


@pytest.mark.parametrize("training", [True, False])
def test_each_mode_draws_second_choices_by_its_own_policy_and_threshold(training):
    read, other = ("", "eval_") if training else ("eval_", "")
    options = {f"{read}second_expert_policy": "random", f"{read}second_expert_threshold": 0.5}
    options |= {f"{other}second_expert_policy": "none", f"{other}second_expert_threshold": 0.1}
    layer = layer_with_logits(2, router_options=options).train(training)
    torch.manual_seed(0)
    requested = layer(logits_of([0.9, 0.1]).expand(1, 4099, 2))[1].plan.requested[0]
    assert requested[:, 0].all()
    assert abs(requested[:, 1].double().mean().item() - 0.2) < 5 * math.sqrt(0.2 * 0.8 / 4099)


def switch(num_experts, **options):
    """A layer in training whose inputs are its router's logits."""
    return layer_with_logits(num_experts, "switch", group_size=17, router_options=options).train()


def test_jitter_scales_each_number_that_the_router_sees_and_none_that_the_experts_see():
    layer, x = switch(5, policy="input_jitter", jitter=0.3), tokens(29, 17, 5)
    torch.manual_seed(0)
    y, router = layer(x)
    factor = router.router_logits / x
    assert 0.7 <= factor.min() < 0.71
    assert 1.29 < factor.max() <= 1.3
    assert abs(factor.mean().item() - 1) < 5 * 0.3 / math.sqrt(3 * factor.numel())
    assert_close(y, dense_einsum(layer, x, router.plan))


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_sample_draws_by_the_tempered_probabilities_and_weighs_by_the_raw_ones(temperature):
    layer = switch(3, policy="sample", temperature=temperature)
    x = logits_of([0.6, 0.3, 0.1])
    torch.manual_seed(0)
    plan = layer(x.expand(1, 4099, 3))[1].plan
    shares = torch.bincount(plan.expert_index.flatten(), minlength=3) / 4099
    expected = (x[0, 0] / temperature).softmax(dim=0)
    assert ((shares - expected).abs() < 5 * (expected * (1 - expected) / 4099).sqrt()).all()
    weight = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)[plan.expert_index]
    assert_close(plan.combine_weight, weight * plan.accepted)


def test_initial_weights_have_the_deviation_that_the_configuration_asks_for():
    fields = {"d_model": 101, "d_ff": 211, "num_experts": 13, "initializer_scale": 0.1}
    gate = build_layer(**fields, router_initializer_std=0.02).router.gate
    assert gate.std().item() == pytest.approx(0.02, rel=0.1)
    layer = build_layer(**fields, convention="mesh_tensorflow", router_initializer_std=None)
    for weight in (layer.router.gate, layer.experts.gate_up_proj, layer.experts.down_proj):
        std = math.sqrt(0.1 / weight.shape[-1])
        assert weight.std().item() == pytest.approx(std, rel=0.1)
        assert weight.abs().max() <= 2 * std / 0.87962566103423978


@pytest.mark.parametrize(("expert_bias", "value"), [("multiplicative", 1), ("additive", 0)])
def test_an_expert_bias_begins_as_if_it_were_not_there(expert_bias, value):
    experts = Experts(SparseConfig(7, 11, 5, expert_bias=expert_bias))
    assert (experts.bias == value).all()


def test_a_cut_normal_still_has_the_deviation_asked_for():
    torch.manual_seed(0)
    drawn = truncated_normal_(torch.empty(100_003, dtype=torch.float64), 3.0)
    assert drawn.std().item() == pytest.approx(3.0, rel=0.01)
