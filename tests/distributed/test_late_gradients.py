"""Gradients of experts' weights are computed while those of rows travel: the same, and in time."""

import copy

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from moe.distributed.mesh import MeshConfig, build_mesh
from moe.kernels import cpu_experts
from moe.kernels.expert_weights import ExpertWeights
from moe.kernels.late_gradients import pass_weights
from moe.sparse.config import SparseConfig
from moe.sparse.layer import SparseFeedForward
from tests.distributed.ranks import run_ranks
from tests.sparse.expert_loop import KINDS, form_of, problem, tiny, weights_of

D, F, E = 7, 11, 4


def gradients_of(inputs, rows, config, drop_rate, *, is_late):
    """Returns all gradients of the kernel, those of the weights late or at once."""
    tokens, weight, *stacked = inputs
    weights = weights_of(config, stacked)
    late = None
    if is_late:
        weights, late = pass_weights(weights)
        assert late is not None
    torch.manual_seed(0)
    rows = rows._replace(weight=weight)
    output = cpu_experts.fused_feed_forward(tokens, rows, weights, form_of(config, drop_rate), late)
    return torch.autograd.grad(output.square().sum(), inputs, allow_unused=True)


def test_late_gradients_are_those_that_are_computed_at_once():
    for activation, gated, bias in KINDS:
        config = tiny(activation, gated, bias, d_model=D, d_ff=F)
        inputs, rows = problem(config, num_tokens=13, num_rows=23)
        at_once = gradients_of(inputs, rows, config, 0.3, is_late=False)
        late = gradients_of(inputs, rows, config, 0.3, is_late=True)
        assert all(torch.equal(a, b) for a, b in zip(at_once, late, strict=True)), config


@pytest.mark.parametrize("frozen", [2, 3])
def test_a_frozen_weight_gets_no_gradient_late_either(frozen):
    config = tiny(d_model=D, d_ff=F)
    inputs, rows = problem(config, num_tokens=13, num_rows=23)
    form = form_of(config)
    expected = gradients_of(inputs, rows, config, 0.0, is_late=False)
    inputs[frozen].requires_grad_(False)

    weights, late = pass_weights(ExpertWeights(inputs[2], inputs[3], None))
    output = cpu_experts.fused_feed_forward(
        inputs[0], rows._replace(weight=inputs[1]), weights, form, late
    )
    output.square().sum().backward()
    trained = 5 - frozen
    assert inputs[frozen].grad is None
    assert torch.equal(inputs[trained].grad, expected[trained])


def test_nothing_is_late_where_no_weight_is_trained():
    weights = ExpertWeights(torch.ones(E, F, D), torch.ones(E, D, F), None)
    assert pass_weights(weights) == (weights, None)
    with torch.no_grad():
        trained = ExpertWeights(weights.first.requires_grad_(), weights.down, None)
        assert pass_weights(trained)[1] is None


# ---- two ranks ----


def backward_events(rank, num_ranks):
    """Returns the parts of a layer's backward pass in the order in which they began."""
    mesh = build_mesh(MeshConfig(ep=num_ranks), "cpu")
    torch.manual_seed(0)
    shape = {"d_model": D, "d_ff": F, "num_experts": E, "product_bias": True, "activation": "silu"}
    config = SparseConfig(**shape, num_selected_experts=2, capacity_factor=None)
    whole = SparseFeedForward(config)
    for bias in whole.experts.product_biases():
        torch.nn.init.normal_(bias)
    layer = copy.deepcopy(whole)
    here = slice(rank * E // num_ranks, (rank + 1) * E // num_ranks)
    for name, weight in whole.experts.named_parameters():
        setattr(layer.experts, name, torch.nn.Parameter(weight.detach()[here].clone()))
    layer.set_parallel_axes(mesh.ep, None)

    # The same tokens on all ranks: a rank's experts then get each gradient once from each rank.
    x = torch.randn(2, 13, D, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        layer(x)[0].square().sum().backward()
    whole(x)[0].square().sum().backward()
    for name, weight in whole.experts.named_parameters():
        expected = num_ranks * weight.grad[here]
        assert torch.allclose(getattr(layer.experts, name).grad, expected, rtol=1e-4, atol=1e-6)

    names = ("moe.dispatch.backward", "_PassWeightsBackward", "moe.dispatch.backward.wait")
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name in names]


@pytest.mark.slow
def test_gradients_of_rows_are_sent_before_those_of_weights_and_awaited_after(tmp_path):
    expected = ["moe.dispatch.backward", "_PassWeightsBackward", "moe.dispatch.backward.wait"]
    for events in run_ranks(backward_events, 2, tmp_path):
        assert events == expected
