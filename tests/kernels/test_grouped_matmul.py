"""The grouped products that experts use on other devices, run on the CPU, against a loop over
experts.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe.kernels.grouped_matmul import grouped_linear
from moe.sparse.dispatch import RowDispatcher
from moe.sparse.experts import Experts
from tests.sparse.expert_loop import KINDS, problem, run_loop, tiny, weights_of


def grouped_outputs(inputs, rows, config):
    """Returns what `Experts.forward` makes of these on a device other than the CPU."""
    tokens, weight, *stacked = inputs
    dispatcher = RowDispatcher(rows._replace(weight=weight))
    inputs = dispatcher.dispatch(tokens).wait()
    outputs = Experts(config).eval().run_rows(inputs.x, inputs.ends, weights_of(config, stacked))
    return dispatcher.combine(outputs)


@pytest.mark.parametrize(
    ("dtype", "sizes", "tolerance"),
    [
        (torch.float64, {"d_model": 7, "d_ff": 11}, 1e-12),
        (torch.float32, {"d_model": 12, "d_ff": 20}, 1e-4),
    ],
    ids=["float64", "float32, rows of 16 bytes"],
)
@pytest.mark.parametrize(("activation", "gated", "bias"), KINDS)
def test_grouped_products_equal_a_loop_over_experts(
    activation, gated, bias, dtype, sizes, tolerance
):
    config = tiny(activation, gated, bias, **sizes)
    inputs, rows = problem(config, num_tokens=13, num_rows=23)
    given = [x.detach().to(dtype).requires_grad_() for x in inputs]
    output, expected = grouped_outputs(given, rows, config), run_loop(inputs, rows, config)
    assert output.dtype == dtype
    scale = expected.detach().abs().max()
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=float(tolerance * scale))
    cotangent = torch.randn_like(expected)
    ours = torch.autograd.grad(output, given, cotangent.to(dtype))
    for a, b in zip(ours, torch.autograd.grad(expected, inputs, cotangent), strict=True):
        assert float((a.double() - b).abs().max()) <= 10 * tolerance * float(b.abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_products_take_gradients_of_any_strides_and_experts_without_rows(dtype):
    torch.manual_seed(0)
    weight = torch.randn(5, 24, 40, dtype=dtype, requires_grad=True)
    x = torch.randn(23, 40, dtype=dtype, requires_grad=True)
    counts = torch.tensor([0, 13, 0, 10, 0])
    y = grouped_linear(x, weight, counts.cumsum(0, dtype=torch.int32))
    expected = torch.cat([x[:13] @ weight[1].T, x[13:] @ weight[3].T])
    torch.testing.assert_close(y, expected)
    for cotangent in (
        torch.ones(1, 1, dtype=dtype).expand(23, 24),
        torch.randn(24, 23, dtype=dtype).T,
    ):
        ours = torch.autograd.grad(y, (x, weight), cotangent, retain_graph=True)
        theirs = torch.autograd.grad(expected, (x, weight), cotangent, retain_graph=True)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)
        assert torch.count_nonzero(ours[1][counts == 0]) == 0


@pytest.mark.parametrize("size", [12, 11])
def test_grouped_products_of_no_row_at_all_are_empty(size):
    weight = torch.randn(3, size, size, requires_grad=True)
    x = torch.randn(0, size, requires_grad=True)
    y = grouped_linear(x, weight, torch.zeros(3, dtype=torch.int32))
    assert y.shape == (0, size)
    d_x, d_weight = torch.autograd.grad(y.sum(), (x, weight))
    assert d_x.shape == (0, size)
    assert torch.count_nonzero(d_weight) == 0


class CountedProducts(TorchDispatchMode):
    """Counts the products of rows and weights inside the block."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        self.count += name.startswith(("aten._grouped_mm", "aten.grouped_mm", "moe.grouped_linear"))
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # by torch's compiler
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gradient_that_is_not_needed_is_not_computed(dtype, compiled):
    run = torch.compile(grouped_linear, backend="aot_eager") if compiled else grouped_linear
    ends = torch.tensor([4, 4, 13], dtype=torch.int32)
    for needs_x, needs_weight in ((True, True), (True, False), (False, True)):
        x = torch.randn(13, 16, dtype=dtype, requires_grad=needs_x)
        weight = torch.randn(3, 8, 16, dtype=dtype, requires_grad=needs_weight)
        y = run(x, weight, ends)
        with CountedProducts() as products:
            y.sum().backward()
        assert products.count == needs_x + needs_weight
        assert (x.grad is not None, weight.grad is not None) == (needs_x, needs_weight)
