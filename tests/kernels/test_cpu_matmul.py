"""Large float32 products of a CPU, against float64 as an oracle, whichever library does them."""

import pytest
import torch
import torch.nn.functional as F

from moe.kernels.cpu_matmul import expert_weight_gradient, linear, multiply
from moe.kernels.product_choice import fixed_choice, products_in_use, use_products

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has one library"
)


@pytest.fixture(autouse=True, params=["blas", "onednn"])
def library(request):
    """Gives products to one library, whatever is faster here."""
    before = products_in_use()
    use_products(fixed_choice(request.param))
    yield request.param
    use_products(before)


def large(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(a, b):
    torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=5e-6 * b.abs().max().item())


@pytest.mark.parametrize("shape", [(1, 769), (2, 43, 769)], ids=str)
def test_a_large_product_and_its_gradients_are_those_of_float64(shape, library):
    x, weight = large(*shape).requires_grad_(), large(1031, 769, seed=1).requires_grad_()
    y = linear(x, weight)
    assert y.grad_fn is not None
    names = y.grad_fn.name() + str(y.grad_fn.next_functions)
    assert ("_Linear" in names) == (library == "onednn")
    d = large(*y.shape, seed=2)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = F.linear(*wide)
    close(y, expected)
    gradients = (
        torch.autograd.grad(y, (x, weight), d),
        torch.autograd.grad(expected, wide, d.double()),
    )
    for a, b in zip(*gradients, strict=True):
        close(a, b)


def test_products_of_any_number_of_rows_have_a_few_sizes_for_which_onednn_keeps_memory(library):
    x, weight = large(300, 131), large(103, 131, seed=1)
    with torch.no_grad(), torch.profiler.profile(record_shapes=True) as profile:
        for number in range(65, 300, 3):
            product = linear(x[:number], weight)
            assert product.shape == (number, 103)
            close(product[-1:], F.linear(x[number - 1 :][:1].double(), weight.double()))
    sizes = {
        event.input_shapes[0][0]
        for event in profile.events()
        if event.name == "mkldnn::_linear_pointwise"
    }
    rounded = {*range(68, 129, 4), *range(136, 257, 8), *range(272, 305, 16)}
    assert sizes == (rounded if library == "onednn" else set())


def test_gradients_have_gradients():
    x, weight = large(67, 131).requires_grad_(), large(103, 131, seed=1).requires_grad_()

    def second(product, *inputs):
        (dx,) = torch.autograd.grad(product(*inputs).square().sum(), inputs[0], create_graph=True)
        return torch.autograd.grad(dx.square().mean(), inputs)

    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    for a, b in zip(second(linear, x, weight), second(F.linear, *wide), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-3)


def test_only_the_gradients_that_are_needed_are_made():
    x, weight = large(67, 131), large(103, 131, seed=1).requires_grad_()
    linear(x, weight).sum().backward()
    close(weight.grad, x.sum(dim=0).expand(103, 131))


def test_strides_do_not_matter():
    x, weight = large(83, 131), large(103, 131, seed=1)
    expected = x.double() @ weight.double().t()
    x, weight = x.t().contiguous().t(), weight.t().contiguous().t()
    out = torch.empty(2, 83, 103)[1]
    close(multiply(x, weight), expected)
    assert multiply(x, weight, out=out) is out
    close(out, expected)


def test_other_dtypes_keep_their_library_and_autocast_is_obeyed():
    wide, wide_weight = large(83, 131), large(103, 131, seed=1)
    for dtype in (torch.float64, torch.bfloat16):
        x, weight = wide.to(dtype), wide_weight.to(dtype)
        assert torch.equal(linear(x, weight), F.linear(x, weight))
        assert torch.equal(multiply(x, weight), x @ weight.t())
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(wide, wide_weight).dtype == torch.bfloat16


@pytest.mark.filterwarnings(
    "ignore:TF32 acceleration on top of oneDNN"
)  # torch's own flags warn of themselves
def test_whoever_switches_onednn_off_does_without_it():
    x, weight = large(83, 131), large(103, 131, seed=1)
    with torch.backends.mkldnn.flags(enabled=False):
        assert torch.equal(linear(x, weight), F.linear(x, weight))


@pytest.mark.slow
def test_compiled_graphs_hold_a_plain_product():
    x, weight = large(83, 131), large(103, 131, seed=1)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    close(compiled(x, weight), x.double() @ weight.double().t())


def test_no_rows_small_products_and_a_single_vector_are_taken():
    weight = large(1031, 769, seed=1)
    assert linear(torch.ones(0, 769), weight).shape == (0, 1031)
    vector = large(769)
    close(linear(vector, weight), weight.double() @ vector.double())
    x, small = large(7, 11), large(13, 11, seed=1)
    assert torch.equal(linear(x, small), F.linear(x, small))


def test_torch_func_sees_a_plain_product():
    x, weight = large(83, 131), large(103, 131, seed=1)
    gradient = torch.func.grad(lambda w: linear(x, w).sum())(weight)
    close(gradient, x.double().sum(dim=0).expand(103, 131))


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gradient_of_an_experts_weight_is_that_of_float64(dtype, copies, library):
    use_products(fixed_choice(library)._replace(copies_expert_gradient=copies))
    d_output, x = large(67, 131).to(dtype), large(67, 103, seed=1).to(dtype)
    out = torch.empty(131, 103, dtype=dtype)
    expert_weight_gradient(d_output, x, out)
    expected = d_output.double().T @ x.double()
    tolerance = 0.3 if dtype == torch.bfloat16 else 1e-4
    assert torch.allclose(out.double(), expected, rtol=0, atol=tolerance)
