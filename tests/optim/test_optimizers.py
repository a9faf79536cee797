"""Every optimizer that a recipe can name learns, keeps the state that it says, and checks its settings."""

import pytest
import torch

from moe import ConfigError
from moe.distributed.mesh import MeshConfig
from moe.models.parallelize import model_layouts
from moe.optim.adafactor import Adafactor
from moe.optim.lamb import LAMB
from moe.optim.lars import LARS
from moe.optim.muon import Muon
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


@pytest.mark.parametrize("optimizer", [Adafactor, Muon, LARS, LAMB])
def test_bfloat16_parameters_keep_float32_moments_through_a_state_dict(optimizer):
    parameter = torch.nn.Parameter(torch.randn(5, 7, dtype=torch.bfloat16))
    step = optimizer([parameter])
    parameter.grad = torch.randn(5, 7, dtype=torch.bfloat16)
    step.step()
    copy = torch.nn.Parameter(parameter.detach().clone())
    resumed = optimizer([copy])
    resumed.load_state_dict(step.state_dict())
    moments = [x for x in resumed.state[copy].values() if isinstance(x, torch.Tensor)]
    assert moments and all(moment.dtype == torch.float32 for moment in moments)
    copy.grad = parameter.grad.clone()
    step.step()
    resumed.step()
    assert torch.equal(copy, parameter)


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        (Adafactor, {"lr": float("nan"), "clipping_threshold": 0.0}),
        (Muon, {"lr": -1.0, "momentum": 1, "beta2": 1.5, "epsilon": -1}),
        (LARS, {"lr": -1.0, "beta": 1, "trust_coefficient": 0, "momentum": "nesterov"}),
        (LARS, {"skip": ["norm"]}),
        (LAMB, {"skip": "norms", "beta2": float("nan"), "weight_decay": -0.1}),
    ],
)
def test_an_impossible_setting_is_refused_by_name_and_value(optimizer, settings):
    for name, value in settings.items():
        with pytest.raises(ConfigError) as error:
            optimizer([torch.nn.Parameter(torch.zeros(3))], **{name: value})
        message = f"{name} of {optimizer.__name__.lower()} is {value!r}"
        assert str(error.value).startswith(message)
