"""Warnings of routers that are built to die and to drop, and none of a healthy one."""

import pytest
import torch

from moe.sparse.editing import sparse_layers
from moe.training import router_health
from moe.training.router_health import NUM_LOGS, RouterHealth, layer_keys
from moe.training.step import router_outputs
from tests.models.tiny import DENSE, tiny_batch, tiny_model

LAYERS = layer_keys(tiny_model().config)


@pytest.fixture
def said(caplog):
    """The warnings so far."""
    return lambda: [record.getMessage() for record in caplog.records if is_ours(record)]


def is_ours(record):
    return record.name == router_health.__name__


def gates(model):
    return {key: layer.router.gate for key, layer in sparse_layers(model).items()}


def with_dead_expert(gate):
    """Makes six rows of a gate opposite in pairs and the last one zero: three logits are above 0."""
    rows = gate.detach()
    rows[1] = -rows[0]
    rows[3] = -rows[2]
    rows[5] = -rows[4]
    rows[6] = 0


def with_one_favourite(gate):
    """Makes one of two experts the first choice of every token."""
    rows = gate.detach()
    rows[2:] = 0
    rows[1] = -rows[0]


def stats_of(model, seed):
    output = model(**tiny_batch(seed=seed), output_router_logits=True)
    return [router.stats for router in router_outputs(output)]


def watch(model, num_logs, health=None):
    """Returns what has looked at some logs of one batch each."""
    health = health or RouterHealth(LAYERS)
    with torch.no_grad():
        for step in range(1, num_logs + 1):
            health.observe(step, stats_of(model.train(), step))
    return health


def test_an_expert_without_tokens_is_named_once_and_a_live_one_never(said):
    model = tiny_model()
    with_dead_expert(gates(model)["decoder", 0])
    health = watch(model, NUM_LOGS - 1)
    assert said() == []
    watch(model, 3, health)
    (text,) = said()
    assert text.startswith("1 of 7 experts of decoder 1 are dead: no token asked for them in the ")
    assert "Counted from 0 they are 6. Raise" in text
    assert "Raise load_balance_loss_weight" in text


def test_an_expert_that_few_tokens_could_have_chosen_is_not_dead(said, monkeypatch):
    monkeypatch.setattr(router_health, "FAIR_SHARE", 10_000)
    model = tiny_model()
    with_dead_expert(gates(model)["decoder", 0])
    watch(model, NUM_LOGS)
    assert said() == []


def test_drops_that_rise_are_named_once_and_those_that_stay_never(said):
    model = tiny_model(group_size=1, capacity_factor=0.5, min_expert_capacity=1)
    health = watch(model, 2 * NUM_LOGS)
    assert float(stats_of(model, 1)[0].dropped_tokens) > 0
    assert said() == []

    with_one_favourite(gates(model)["encoder", 0])
    watch(model, NUM_LOGS, health)
    (text,) = [line for line in said() if "dropped" in line]
    assert text.startswith("More and more tokens are dropped in encoder 1: ")
    assert "in those before; up to 15% costs little. Raise load_balance_loss_weight" in text


def test_layers_are_named_as_the_edit_point_names_them():
    for changes in ({}, {"num_sparse_encoder_layers": 2, "num_layers": 4}, DENSE):
        model = tiny_model(**changes)
        assert layer_keys(model.config) == list(sparse_layers(model))


def test_a_healthy_router_is_never_warned_of(said):
    watch(tiny_model(), 2 * NUM_LOGS)
    watch(tiny_model(num_sparse_encoder_layers=0), 1, RouterHealth(LAYERS[1:]))
    assert said() == []
