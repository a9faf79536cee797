"""Models on tensors without values, as estimators of memory use them, and under torch.func.

Oracles: shapes of the same calls with values; autograd.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, jvp, vmap

from moe import ConfigError
from tests.models.tiny import tiny_batch, tiny_model

FAMILIES = {
    "ragged": {},
    "static": {"dispatch": "static", "expert_bias": "additive", "num_shared_experts": 1},
    "hash": {"router": "hash", "router_options": None, "num_selected_experts": 1},
    "dropout": {"dropout_rate": 0.1},
}


def shapes_of(model, batch):
    """Returns the shapes of a step's outputs and gradients, in training and in evaluation."""
    shapes = []
    for training in (True, False):
        model.train(training)
        output = model(**batch)
        output.loss.backward()
        tensors = [output.logits, output.loss, *(weight.grad for weight in model.parameters())]
        shapes.append([None if x is None else (x.shape, x.dtype) for x in tensors])
    return shapes


@pytest.mark.parametrize("fields", FAMILIES.values(), ids=FAMILIES)
def test_a_step_without_values_has_the_shapes_of_one_with_values(fields):
    batch = tiny_batch()
    batch["attention_mask"] = batch["attention_mask"].float()
    expected = shapes_of(tiny_model(**fields), batch)
    on_meta = {name: tensor.to("meta") for name, tensor in batch.items()}
    assert shapes_of(tiny_model(**fields).to("meta"), on_meta) == expected
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(tensor) for name, tensor in batch.items()}
        assert shapes_of(tiny_model(**fields), fakes) == expected


@torch.no_grad()
@pytest.mark.parametrize("device", ["meta", "fake"])
def test_a_step_with_a_cache_has_its_shape(device):
    with FakeTensorMode() if device == "fake" else torch.device("meta"):
        model = tiny_model(eval_capacity_factor=None)
        ids = torch.zeros(4, 13, dtype=torch.int64)
        assert model(ids, decoder_input_ids=ids, use_cache=True).logits.shape == (4, 13, 131)


@pytest.mark.parametrize(
    "fields", [{"num_shared_experts": 1}, {"expert_bias": "additive", "capacity_factor": None}]
)
def test_transforms_of_torch_func_give_the_gradients_of_autograd(fields):
    model = tiny_model(dispatch="static", **fields).double()
    model.set_attn_implementation("eager")  # torch has no jvp of the other
    weights, batch = dict(model.named_parameters()), tiny_batch()

    def loss_of(weights, batch):
        return functional_call(model, weights, kwargs=batch).ce_loss

    expected = torch.autograd.grad(loss_of(weights, batch), list(weights.values()))
    gradients = grad(loss_of)(weights, batch)
    torch.testing.assert_close(tuple(gradients.values()), expected)
    tangent = {name: torch.ones_like(weight) for name, weight in weights.items()}
    _, slope = jvp(lambda weights: loss_of(weights, batch), (weights,), (tangent,))
    torch.testing.assert_close(slope, sum(x.sum() for x in expected))

    # Each sequence alone.
    rows = {name: tensor[:, None] for name, tensor in batch.items()}
    of_rows = vmap(grad(loss_of), in_dims=(None, 0))(weights, rows)
    for row in range(4):
        alone = {name: tensor[row] for name, tensor in rows.items()}
        gradients = torch.autograd.grad(loss_of(weights, alone), list(weights.values()))
        torch.testing.assert_close(tuple(x[row] for x in of_rows.values()), gradients)


def test_transforms_of_ragged_dispatch_are_refused_with_the_other_one():
    model = tiny_model()
    weights = dict(model.named_parameters())
    with pytest.raises(ConfigError, match='dispatch="static"'):
        grad(lambda weights: functional_call(model, weights, kwargs=tiny_batch()).loss)(weights)
