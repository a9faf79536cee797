"""Loss splits. Oracles: models that differ in their routers alone, or in all but them."""

import copy

import pytest
import torch

from moe.inspection.ablation.loss_split import split_loss
from moe.sparse.editing import sparse_layers
from moe.tracing.recorder import record_routing, traced_batches
from tests.tracing.models import build_batch, build_model


@pytest.fixture
def first():
    return build_model(eval_capacity_factor=None)


@pytest.fixture
def batches():
    return list(traced_batches([build_batch(seed=seed) for seed in (1, 2)]))


def changed(model, is_changed):
    """Returns the model with noise on some of its parameters."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if is_changed(name):
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += noise * parameter.std()
    return other


def test_a_model_against_itself_differs_in_nothing(first, batches):
    trace = record_routing(first, batches)
    split = split_loss(first, copy.deepcopy(first), trace, batches)
    assert split.routing == split.weights == (0, 0, 0)
    assert split.first == split.second == split.replayed

    # The loss is that of the model, over all target tokens.
    losses = [float(first(**traced.batch).ce_loss.detach()) for traced in batches]
    assert split.first == pytest.approx(sum(losses) / 2, rel=1e-5)


def test_parts_add_up_and_have_intervals_around_them(first, batches):
    trace = record_routing(first, batches)
    second = changed(first, lambda name: True).train()
    split = split_loss(first, second, trace, batches)
    assert second.training
    difference = split.second - split.first
    assert split.routing.value + split.weights.value == pytest.approx(difference)
    for part in (split.routing, split.weights):
        assert part.low < part.value < part.high


def test_other_experts_with_the_same_router_cost_nothing_by_routing_in_the_last_layer(batches):
    model = build_model(
        eval_capacity_factor=None, num_sparse_encoder_layers=0, num_decoder_layers=2
    )
    trace = record_routing(model, batches)
    split = split_loss(model, changed(model, lambda name: ".experts." in name), trace, batches)
    assert split.routing == (0, 0, 0)
    assert split.weights.value != 0


def test_experts_that_are_all_alike_cost_nothing_by_their_weights(batches):
    # With equal experts and gates that sum to one, who works does not matter, nor does a replay.
    model = build_model(eval_capacity_factor=None, router_options=ALL_CHOICES)
    with torch.no_grad():
        for layer in sparse_layers(model).values():
            for parameter in layer.experts.parameters():
                parameter.copy_(parameter[:1].expand_as(parameter))
    trace = record_routing(model, batches)
    split = split_loss(model, changed(model, lambda name: "router" in name), trace, batches)
    assert split.routing.value == pytest.approx(0, abs=1e-6)
    assert split.weights.value == pytest.approx(0, abs=1e-6)


ALL_CHOICES = {"second_expert_policy": "all", "eval_second_expert_policy": "all"}
