"""Dropout's draws: their share, their independence, their gradient, and who draws them."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.kernels.dropout import Dropout, draw_kept, dropout

NUM_ELEMENTS = 2**20


@given(rate=st.floats(0.001, 0.999), seed=st.integers(0, 2**31))
@settings(max_examples=15)
def test_the_share_that_is_dropped_is_the_rate(rate, seed):
    kept = draw_kept((NUM_ELEMENTS,), rate, seed=(seed,))

    # Six deviations of a binomial share, and what rounding of the rate may add.
    deviation = math.sqrt(rate * (1 - rate) / NUM_ELEMENTS)
    assert abs(kept.double().mean().item() - (1 - rate)) < 6 * deviation + 2**-17


def test_rates_in_normal_use_take_sixteen_bits_an_element():
    """These masks are those of every release, so that trained models can be trained again."""
    for rate in (0.05, 0.1, 0.3, 0.9):
        torch.manual_seed(0)
        kept = draw_kept((31,), rate)

        torch.manual_seed(0)
        draws = torch.empty(8, dtype=torch.int64).random_(-(2**63), None).view(torch.int16)[:31]
        assert torch.equal(kept, draws.int() + 2**15 >= round(rate * 2**16))


@pytest.mark.parametrize("rate", [1e-5, 0.9999])
def test_the_mean_of_what_is_kept_is_right_at_extreme_rates(rate):
    torch.manual_seed(0)
    num_elements = 2**22
    mean = dropout(torch.ones(num_elements), rate).double().mean()

    # Of N units B(N, 1 - p) are kept, each worth 1 / (1 - p): the mean deviates by
    # sqrt(p / (N (1 - p))) from 1.
    deviation = math.sqrt(rate / (num_elements * (1 - rate)))
    assert abs(float(mean) - 1) < 5 * deviation


SEEDS = st.integers(0, 2**64 - 1)


@given(seed=SEEDS, others=st.tuples(SEEDS, st.integers(0, 63)))
@settings(max_examples=20)
def test_every_bit_of_a_seed_counts(seed, others):
    other_seed, bit = others
    seeds = {seed, seed ^ 1 << bit, other_seed}
    masks = [draw_kept((2**14,), 0.5, (value, 3)) for value in seeds]

    # Masks of different seeds are independent: estimates of a correlation deviate by 1 / sqrt(N).
    signs = torch.stack(masks).double() * 2 - 1
    correlation = signs @ signs.T / 2**14
    eye = torch.eye(len(masks), dtype=torch.float64)
    assert torch.allclose(correlation, eye, atol=7 / 2**7)


def test_elements_of_a_word_are_independent():
    torch.manual_seed(0)
    kept = draw_kept((NUM_ELEMENTS, 4), 0.3).double() - 0.7
    correlation = kept.T @ kept / NUM_ELEMENTS / 0.21

    # Four neighbours come from one word; estimates of a correlation deviate by 1 / sqrt(N).
    assert torch.allclose(correlation, torch.eye(4, dtype=torch.float64), atol=6 / 2**10)


def test_any_shape_is_masked():
    for shape in ((), (0,), (1,), (2, 13, 7)):
        kept = draw_kept(shape, 0.5)
        assert kept.shape == shape
        assert kept.dtype == torch.bool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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


def test_nothing_is_drawn_where_nothing_is_dropped_and_all_is_dropped_at_rate_one():
    x = torch.randn(3, 5)
    state = torch.get_rng_state()
    assert dropout(x, 0.0) is x
    assert Dropout(0.3).eval()(x) is x
    assert torch.equal(torch.get_rng_state(), state)
    assert not Dropout(1.0)(torch.ones(3, 5)).any()


def test_transforms_get_the_operation_of_torch():
    x = torch.ones(7, 5)
    torch.manual_seed(0)
    expected = F.dropout(x, 0.5)
    torch.manual_seed(0)
    gradient = torch.func.grad(lambda x: dropout(x, 0.5).sum())(x)
    assert torch.equal(gradient, expected)
