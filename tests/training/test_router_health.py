"""Warnings of routers that are built to die, and none of a healthy one."""

import pytest
import torch

from moe.sparse.editing import sparse_layers
from moe.training import router_health
from moe.training.router_health import NUM_LOGS, DeadExperts
from moe.training.step import router_outputs
from tests.models.tiny import tiny_batch, tiny_model


@pytest.fixture
def said(caplog):
    """The warnings so far."""
    return lambda: [r.getMessage() for r in caplog.records if r.name == router_health.__name__]


def with_dead_expert(gate):
    """Makes six rows of a gate opposite in pairs and the last one zero: three logits are above 0."""
    rows = gate.detach()
    rows[1] = -rows[0]
    rows[3] = -rows[2]
    rows[5] = -rows[4]
    rows[6] = 0


def watch(model, num_logs, watcher=None):
    """Returns what has looked at some logs of one batch each."""
    watcher = watcher or DeadExperts(sparse_layers(model))
    with torch.no_grad():
        for step in range(1, num_logs + 1):
            output = model.train()(**tiny_batch(seed=step), output_router_logits=True)
            watcher.observe(step, [router.stats for router in router_outputs(output)])
    return watcher


def test_an_expert_without_tokens_is_named_once_and_a_live_one_never(said):
    model = tiny_model()
    with_dead_expert(sparse_layers(model)["decoder", 0].router.gate)
    watcher = watch(model, NUM_LOGS - 1)
    assert said() == []
    watch(model, 3, watcher)
    (text,) = said()
    assert text.startswith("1 of 7 experts of decoder 1 are dead: ")
    assert "Counted from 0 they are 6. Raise load_balance_loss_weight" in text


def test_an_expert_that_few_tokens_could_have_chosen_is_not_dead(said, monkeypatch):
    monkeypatch.setattr(router_health, "FAIR_SHARE", 10_000)
    model = tiny_model()
    with_dead_expert(sparse_layers(model)["decoder", 0].router.gate)
    watch(model, NUM_LOGS)
    assert said() == []
