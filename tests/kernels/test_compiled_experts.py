"""The experts as an operation of torch: equal to the engine, and what compilers take it for."""

import pytest
import torch

from moe.kernels import compiled_experts
from moe.kernels.compiled_experts import compiled_feed_forward
from moe.kernels.cpu_experts import fused_feed_forward
from moe.kernels.expert_weights import ExpertWeights
from tests.sparse.expert_loop import form_of, problem, tiny, weights_of

SIZES = {"num_tokens": 13, "num_rows": 23}


def padded(rows, weight, num_unread=5):
    """Returns the rows and their weights with some behind that nobody reads: they name no token."""
    nowhere = torch.full((num_unread,), 2**40)
    rows = rows._replace(
        token=torch.cat([rows.token, nowhere]), by_token=torch.cat([rows.by_token, nowhere])
    )
    return rows, torch.cat([weight, weight.new_full((num_unread,), torch.nan)])


@pytest.mark.parametrize(
    ("activation", "gated", "bias", "drop_rate"),
    [
        ("gelu_pytorch_tanh", True, "none", 0.3),
        ("gelu", False, "multiplicative", 0.0),
        ("silu", True, "product", 0.3),
        ("relu", True, "additive", 0.0),
        ("relu", False, "none", 0.3),
    ],
)
def test_the_operation_equals_the_engine_whatever_stands_in_rows_that_nobody_reads(
    activation, gated, bias, drop_rate
):
    config = tiny(activation, gated, bias)
    (tokens, weight, *stacked), rows = problem(config, **SIZES)
    form = form_of(config, drop_rate)
    weights = weights_of(config, stacked)
    more_rows, more_weight = padded(rows, weight)

    results = []
    for run, given in (
        (fused_feed_forward, rows._replace(weight=weight)),
        (compiled_feed_forward, more_rows._replace(weight=more_weight)),
    ):
        torch.manual_seed(2)
        output = run(tokens, given, weights, form)
        gradients = torch.autograd.grad(output.square().sum(), [tokens, weight, *stacked])
        results.append([output, *gradients])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("frozen", [(), (0, 1), (2, 3)], ids=str)
def test_what_is_frozen_costs_no_gradient(frozen):
    config = tiny()
    inputs, rows = problem(config, **SIZES)
    for index in frozen:
        inputs[index].requires_grad_(False)
    tokens, weight, *stacked = inputs
    form = form_of(config)
    compiled_feed_forward(
        tokens, rows._replace(weight=weight), ExpertWeights(*stacked, None), form
    ).sum().backward()
    assert [index for index, x in enumerate(inputs) if x.grad is None] == list(frozen)


@pytest.mark.slow
def test_the_operation_is_what_it_says_to_compilers():
    """torch's own check of schema, shapes, gradients and tracing."""
    expert_bias = "additive"
    config = tiny(bias=expert_bias)
    (tokens, weight, *stacked), rows = problem(config, **SIZES)
    indices = [rows.counts, rows.token, rows.by_token, rows.token_start]

    # An adapter of the first product, and none of the second.
    first, _, _ = stacked
    a, b = torch.randn_like(first[:, :2]), torch.randn_like(first[:, :, :2].mT)
    absent = torch.empty(0, dtype=first.dtype)
    scale = torch.rand(2, dtype=first.dtype)
    stacked += [absent, torch.randn(4, 3, dtype=first.dtype).requires_grad_()]  # no b1, but b2
    stacked += [a.requires_grad_(), b.requires_grad_(), scale, absent, absent, absent]
    seed = torch.tensor(3)
    inputs = [tokens, weight, *stacked]
    arguments = (inputs, indices, seed, "silu", True, expert_bias, 0.3, True)
    torch.library.opcheck(compiled_experts._fused_experts, arguments)
