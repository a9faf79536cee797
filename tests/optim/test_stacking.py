"""Parameters that are updated as one stack take the steps that they take alone."""

import pytest
import torch

from moe.optim.optimizers import OPTIMIZERS
from moe.optim.parameter_groups import parameter_groups
from moe.optim.sharded_optimizer import ShardedOptimizer
from tests.models.tiny import tiny_batch, tiny_model

SHARDED = [name for name in OPTIMIZERS.names() if name != "adamw"]  # which is torch's own


@pytest.mark.parametrize("name", SHARDED)
def test_steps_and_state_are_those_of_single_parameters(name):
    results = []
    num_operations = []
    for stack_small in (False, True):
        model = tiny_model(d_model=137, expert_bias="multiplicative").double()
        groups = parameter_groups(model)
        optimizer = OPTIMIZERS.get(name).build(groups, clipping_threshold=1.0, weight_decay=0.0)
        assert isinstance(optimizer, ShardedOptimizer)
        optimizer.stack_small = stack_small
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        for seed in range(4):
            optimizer.zero_grad()
            model(**tiny_batch(seed=seed)).loss.backward()
            if seed == 2:  # a vector has no gradient in one of the steps
                next(p for p in model.parameters() if p.ndim == 1).grad = None
            optimizer.step()
        results.append({**model.state_dict(), "state": optimizer.state_dict()["state"]})

        with torch.profiler.profile() as profile:
            optimizer.step()
        num_operations.append(len(profile.events()))
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-12)

    # A stack was in use, and no step was compared with itself.
    assert num_operations[1] < 0.7 * num_operations[0]
