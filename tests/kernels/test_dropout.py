"""Dropout's draws: their share, their independence, their gradient, and who draws them."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from moe.kernels.dropout import Dropout, draw_kept, dropout

NUM_ELEMENTS = 2**20


@given(rate=st.floats(0.001, 0.999), seed=st.integers(0, 2**31))
@settings(max_examples=30)
def test_the_share_that_is_dropped_is_the_rate(rate, seed):
    kept = draw_kept((NUM_ELEMENTS,), rate, torch.Generator().manual_seed(seed))

    # Six deviations of a binomial share, and what rounding of the rate may add.
    deviation = math.sqrt(rate * (1 - rate) / NUM_ELEMENTS)
    assert abs(kept.double().mean().item() - (1 - rate)) < 6 * deviation + 2**-17


def test_elements_of_a_word_are_independent():
    torch.manual_seed(0)
    kept = draw_kept((NUM_ELEMENTS, 4), 0.3).double() - 0.7
    correlation = kept.T @ kept / NUM_ELEMENTS / 0.21

    # Four neighbours come from one word; estimates of a correlation deviate by 1 / sqrt(N).
    assert torch.allclose(correlation, torch.eye(4, dtype=torch.float64), atol=6 / 2**10)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 13, 7)])
def test_any_shape_is_masked(shape):
    kept = draw_kept(shape, 0.5)
    assert kept.shape == shape
    assert kept.dtype == torch.bool


@pytest.mark.parametrize("rate", [1e-9, 1 - 1e-9])
def test_rates_next_to_the_ends_drop_almost_nothing_or_almost_all(rate):
    torch.manual_seed(0)
    share = draw_kept((NUM_ELEMENTS,), rate).double().mean().item()
    assert share == pytest.approx(1 - rate, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_outputs_and_gradients_are_those_of_the_mask(dtype):
    x = torch.randn(13, 7, dtype=dtype, requires_grad=True)
    torch.manual_seed(3)
    y = dropout(x, 0.25)
    torch.manual_seed(3)
    kept = draw_kept(x.shape, 0.25)

    assert y.dtype == dtype
    assert torch.equal(y, x * kept * (1 / 0.75))
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, kept.to(dtype) * (1 / 0.75))


def test_gradients_of_gradients_are_right():
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)

    def loss(x):
        torch.manual_seed(0)
        return dropout(x, 0.5) ** 3

    assert torch.autograd.gradgradcheck(loss, x)


def test_a_checkpoint_draws_the_same_again():
    x = torch.randn(11, 5, requires_grad=True)
    gradients = []
    for with_checkpoint in (False, True):
        torch.manual_seed(0)
        run = lambda x: dropout(x, 0.4).square()  # noqa: E731
        y = checkpoint(run, x, use_reentrant=False) if with_checkpoint else run(x)
        gradients.append(torch.autograd.grad(y.sum(), x)[0])
    assert torch.equal(*gradients)


def test_nothing_is_drawn_where_nothing_is_dropped():
    x = torch.randn(3, 5)
    state = torch.get_rng_state()
    assert dropout(x, 0.0) is x
    assert Dropout(0.3).eval()(x) is x
    assert torch.equal(torch.get_rng_state(), state)


def test_all_is_dropped_at_rate_one():
    assert not Dropout(1.0)(torch.ones(3, 5)).any()


def test_transforms_get_the_operation_of_torch():
    x = torch.ones(7, 5)
    torch.manual_seed(0)
    expected = F.dropout(x, 0.5)
    torch.manual_seed(0)
    gradient = torch.func.grad(lambda x: dropout(x, 0.5).sum())(x)
    assert torch.equal(gradient, expected)
