"""Every optimizer that a recipe can name keeps as much state as it says, in one process."""

import pytest
import torch

from moe.distributed.mesh import MeshConfig
from moe.models.parallelize import model_layouts
from moe.optim.optimizers import OPTIMIZERS
from moe.optim.parameter_groups import parameter_groups
from tests.models.tiny import tiny_model


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_the_state_has_as_many_numbers_as_the_optimizer_says(name):
    model = tiny_model(d_model=137, expert_bias="multiplicative")
    spec = OPTIMIZERS.get(name)
    optimizer = spec.build(parameter_groups(model), clipping_threshold=1.0, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    layouts = model_layouts(model, model.config, MeshConfig())
    for parameter_name, parameter in model.named_parameters():
        tensors = [x for x in optimizer.state[parameter].values() if isinstance(x, torch.Tensor)]
        numbers = sum(tensor.numel() for tensor in tensors if tensor.ndim)
        layout = layouts[parameter_name]
        assert spec.state_elements(layout, MeshConfig()) == numbers, parameter_name
        assert spec.summed_elements(layout, MeshConfig()) == {}, parameter_name
