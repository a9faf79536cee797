"""Parameters that are updated as one stack take the steps that they take alone."""

from typing import Any

import pytest
import torch

from moe.optim.optimizers import OPTIMIZERS
from moe.optim.parameter_groups import parameter_groups
from moe.optim.sharded_optimizer import ShardedOptimizer
from tests.models.tiny import tiny_batch, tiny_model

SHARDED = [name for name in OPTIMIZERS.names() if name != "adamw"]  # which is torch's own


def train(name: str, *, stack_small: bool, dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    """Returns a model after four steps, in one of which a vector has no gradient, and its optimizer."""
    model: Any = tiny_model(d_model=137, expert_bias="multiplicative").to(dtype)
    groups = parameter_groups(model)
    optimizer = OPTIMIZERS.get(name).build(groups, clipping_threshold=1.0, weight_decay=0.0)
    assert isinstance(optimizer, ShardedOptimizer)
    optimizer.stack_small = stack_small
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    for seed in range(4):
        optimizer.zero_grad()
        model(**tiny_batch(seed=seed)).loss.backward()
        if seed == 2:
            next(p for p in model.parameters() if p.ndim == 1).grad = None
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("name", SHARDED)
def test_steps_and_state_are_those_of_single_parameters(name):
    alone, optimizer_alone = train(name, stack_small=False)
    stacked, optimizer_stacked = train(name, stack_small=True)
    torch.testing.assert_close(stacked.state_dict(), alone.state_dict(), rtol=1e-9, atol=1e-12)
    state_alone, state_stacked = (
        optimizer_alone.state_dict()["state"],
        optimizer_stacked.state_dict()["state"],
    )
    torch.testing.assert_close(state_stacked, state_alone, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", SHARDED)
def test_stacks_spare_operations(name):
    """A stack must be in use, or the test above would compare a step with itself."""
    counts = []
    for stack_small in (False, True):
        _, optimizer = train(name, stack_small=stack_small)
        with torch.profiler.profile() as profile:
            optimizer.step()
        counts.append(len(profile.events()))
    assert counts[1] < 0.7 * counts[0]
