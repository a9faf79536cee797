"""Adafactor against a plain numpy derivation of T5X's formulas, experts one by one."""

import numpy as np
import pytest
import torch

from moe import ConfigError
from moe.optim.adafactor import Adafactor
from moe.optim.parameter_groups import EXPERT_STACKS, parameter_groups
from tests.models.tiny import tiny_model


def oracle_steps(parameter, grads, *, lr, factored):
    """Runs T5X's update on one scalar, vector or matrix; t5x/adafactor.py at 0eb60a642d."""
    p, v, v_row, v_col = parameter.copy(), 0.0, 0.0, 0.0
    for t, g in enumerate(grads):
        decay = 1 - (t + 1) ** -0.8
        squared = g**2 + 1e-30
        if factored:
            v_row = decay * v_row + (1 - decay) * squared.mean(axis=1)
            v_col = decay * v_col + (1 - decay) * squared.mean(axis=0)
            y = g * ((v_row / v_row.mean()) ** -0.5)[:, None] * (v_col**-0.5)[None, :]
        else:
            v = decay * v + (1 - decay) * squared
            y = g * v**-0.5
        y = y / max(1.0, np.sqrt((y**2).mean()))
        p = p - lr * max(np.sqrt((p**2).mean()), 1e-3) * y
    return p


@pytest.mark.parametrize(
    ("shape", "batch_dims", "factored"),
    [
        ((7,), 0, False),
        ((5, 7), 0, False),
        ((130, 131), 0, True),
        ((127, 131), 0, False),
        ((3, 5, 7), 1, True),
        ((3, 7), 1, False),
    ],
)
def test_steps_equal_the_formulas_expert_by_expert(shape, batch_dims, factored):
    rng = np.random.default_rng(0)
    for size in (1.0, 1e-7, 0.0):
        start = rng.normal(size=shape) * size
        scales = np.array([1, 1e-3, 30, 1]).reshape(4, *[1] * len(shape))
        grads = rng.normal(size=(4, *shape)) * scales
        parameter = torch.nn.Parameter(torch.tensor(start))
        optimizer = Adafactor([{"params": [parameter], "batch_dims": batch_dims}], lr=0.3)
        for grad in grads:
            parameter.grad = torch.tensor(grad)
            optimizer.step()

        if batch_dims:
            by_expert = zip(start, grads.swapaxes(0, 1), strict=True)
            expected = [oracle_steps(w, g, lr=0.3, factored=factored) for w, g in by_expert]
        else:
            expected = oracle_steps(start, grads, lr=0.3, factored=factored)
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=0, atol=1e-12)


def test_one_experts_gradient_never_moves_another_and_zero_gradients_give_no_nan():
    parameter = torch.nn.Parameter(torch.randn(3, 5, 7))
    before = parameter.detach().clone()
    alone = torch.nn.Parameter(before[1].clone().unsqueeze(0))
    optimizer = Adafactor([{"params": [parameter, alone], "batch_dims": 1}], lr=0.1)
    for scale in (1.0, 100.0, 0.01):
        parameter.grad = torch.zeros(3, 5, 7)
        parameter.grad[1] = scale * torch.randn(5, 7)
        alone.grad = parameter.grad[1:2].clone()
        optimizer.step()
    assert torch.equal(parameter[0], before[0])
    assert torch.equal(parameter[2], before[2])
    assert not torch.equal(parameter[1], before[1])
    torch.testing.assert_close(parameter[1], alone[0], rtol=1e-6, atol=1e-7)


def test_a_parameter_without_gradient_keeps_its_weights_and_moments():
    parameter, other = (torch.nn.Parameter(torch.randn(5)) for _ in range(2))
    before = parameter.detach().clone()
    optimizer = Adafactor([parameter, other])
    other.grad = torch.ones(5)
    optimizer.step()
    assert list(optimizer.state) == [other]
    assert torch.equal(parameter, before)


def test_groups_put_exactly_the_stacked_experts_apart():
    model = tiny_model(expert_bias="multiplicative")
    dense, stacked = parameter_groups(model)
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)].rsplit(".", 2)[-1] for p in stacked["params"]} == {
        "gate_up_proj",
        "down_proj",
        "bias",
    }
    assert all(names[id(p)].endswith(EXPERT_STACKS) for p in stacked["params"])
    assert sorted(id(p) for p in dense["params"] + stacked["params"]) == sorted(names)
    assert (dense["batch_dims"], stacked["batch_dims"]) == (0, 1)


def test_a_stack_of_nothing_is_refused_with_the_way_out():
    for shape, batch_dims, message in (
        ((3,), 1, r"batch_dims is 1 .*shape \(3,\): 0 dim"),
        ((), 1, "-1 dim"),
        ((3, 5), -1, "batch_dims is -1 .*: 3 dim"),
    ):
        parameter = torch.nn.Parameter(torch.zeros(shape))
        with pytest.raises(ConfigError, match=message):
            Adafactor([{"params": [parameter], "batch_dims": batch_dims}])


@pytest.mark.parametrize(
    ("shape", "batch_dims", "min_dim", "state"),
    [
        ((3, 2, 5, 7), 1, 128, {"v_row": (3, 2, 5), "v_col": (3, 7)}),
        ((2, 5, 7), 0, 8, {"v": (2, 5, 7)}),
        # 2 x 5 rows: 5 alone would not be enough.
        ((2, 5, 7), 0, 7, {"v_row": (2, 5), "v_col": (7,)}),
        ((2, 3, 5, 7), 0, 7, {"v_row": (2, 3, 5), "v_col": (7,)}),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "is_dense"), [(torch.float64, True), (torch.float32, False), (torch.bfloat16, True)]
)
def test_packed_rows_take_exactly_the_steps_of_a_matrix(
    shape, batch_dims, min_dim, state, dtype, is_dense
):
    torch.manual_seed(0)
    start = torch.randn(shape, dtype=dtype)
    if not is_dense:
        start = start.transpose(0, -1).contiguous().transpose(0, -1)
    packed = torch.nn.Parameter(start)
    matrix = torch.nn.Parameter(start.flatten(batch_dims, -2).clone())
    optimizers = []
    for parameter in (packed, matrix):
        group = {"params": [parameter], "batch_dims": batch_dims}
        optimizers.append(Adafactor([group], lr=0.1, min_dim_size_to_factor=min_dim))
    for _ in range(3):
        packed.grad = torch.randn(shape, dtype=dtype)
        matrix.grad = packed.grad.flatten(batch_dims, -2)
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(packed.flatten(batch_dims, -2), matrix)
    moments = optimizers[0].state[packed]
    assert {name: tuple(value.shape) for name, value in moments.items() if name != "step"} == state
