"""More than one backward pass: a graph that is kept, gradients of gradients, and shared records.

Oracles: the first of two passes; torch's own check of second gradients; the loop over experts.
"""

import pytest
import torch

from moe.kernels.compiled_experts import compiled_feed_forward
from moe.kernels.cpu_experts import fused_feed_forward
from moe.kernels.expert_rows import combine_rows
from moe.kernels.expert_weights import ExpertWeights
from moe.kernels.grouped_matmul import grouped_linear
from tests.sparse.expert_loop import form_of, problem, run_loop, tiny
from tests.sparse.layers import build_layer

CONFIG = tiny(d_model=7, d_ff=11)
FORM = form_of(CONFIG)
REFUSED = r"gradients of gradients \(create_graph=True\).*dispatch=\"static\""


def build_problem():
    inputs, rows = problem(CONFIG, num_tokens=13, num_rows=23)
    weights = ExpertWeights(inputs[2], inputs[3], None)
    return inputs, rows._replace(weight=inputs[1]), weights


def run_fused(tokens, rows, weights):
    return fused_feed_forward(tokens, rows, weights, FORM)


def run_compiled(tokens, rows, weights):
    return compiled_feed_forward(tokens, rows, weights, FORM)


FORMS = [run_fused, run_compiled]


@pytest.mark.parametrize("run", FORMS)
def test_a_graph_that_is_kept_gives_the_same_gradients_again(run):
    inputs, rows, weights = build_problem()
    loss = run(inputs[0], rows, weights).square().sum()
    expected = torch.autograd.grad(run_loop(inputs, rows, CONFIG).square().sum(), inputs)

    # Gradients of the tokens alone leave those of the weights behind.
    torch.autograd.grad(loss, inputs[0], retain_graph=True)
    for keeps_graph in (True, True, False):
        gradients = torch.autograd.grad(loss, inputs, retain_graph=keeps_graph)
        torch.testing.assert_close(gradients, expected)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("run", FORMS)
def test_gradients_of_gradients_are_refused_even_where_the_loss_is_a_sum(run):
    message = "no autograd formula was registered" if run is run_compiled else REFUSED
    for wanted in range(4):
        inputs, rows, weights = build_problem()
        loss = run(inputs[0], rows, weights).sum()
        (gradient,) = torch.autograd.grad(loss, inputs[wanted], create_graph=True)
        with pytest.raises(RuntimeError, match=message):
            (loss + gradient.square().sum()).backward()


def test_a_layer_refuses_gradients_of_gradients():
    x = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    loss = build_layer(capacity_factor=None)(x)[0].sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match=REFUSED):
        gradient.square().sum().backward()


def test_a_layer_of_static_dispatch_has_gradients_of_gradients():
    layer = build_layer(dispatch="static", expert_bias="multiplicative", d_model=3, d_ff=5)
    x = torch.randn(1, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: layer(x)[0], x)


def test_rows_that_are_combined_and_grouped_products_refuse_gradients_of_gradients():
    _, rows, _ = build_problem()
    outputs = torch.randn(23, 7, dtype=torch.float64, requires_grad=True)
    x = torch.randn(7, 12, requires_grad=True)
    weight = torch.randn(3, 12, 12, requires_grad=True)
    grouped = grouped_linear(x, weight, torch.tensor([3, 3, 7], dtype=torch.int32))
    for result, wanted in ((combine_rows(outputs, rows), rows.weight), (grouped, x)):
        (gradient,) = torch.autograd.grad(result.sum(), wanted, create_graph=True)
        with pytest.raises(RuntimeError, match=REFUSED):
            gradient.sum().backward()
