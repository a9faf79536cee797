"""Packed weights: the same numbers, products of float64, and no way to change them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moe.kernels.packed_weight import PackedWeight
from moe.surgery.packing import can_pack, pack

pytestmark = pytest.mark.skipif(not can_pack(torch.ones(2, 3)), reason="this torch has no oneDNN")


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed_parameter(*shape, dtype=torch.float32):
    return nn.Parameter(pack(random(*shape, dtype=dtype)), requires_grad=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 131), (1, 131), (2, 3, 131), (67, 131), (131,)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_that_of_float64(dtype, shape, has_bias):
    x = random(*reversed(shape), dtype=dtype).permute(*reversed(range(len(shape))))
    weight = packed_parameter(103, 131, dtype=dtype)
    bias = random(103, seed=1, dtype=dtype) if has_bias else None
    y = F.linear(x, weight, bias)
    wide_bias = None if bias is None else bias.double()
    expected = F.linear(x.double(), random(103, 131, dtype=dtype).double(), wide_bias)
    assert (type(y), y.dtype, y.shape) == (torch.Tensor, dtype, expected.shape)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("shape", [(103, 131), (3, 103, 131)], ids=str)
def test_any_other_operation_gets_the_numbers_in_rows(shape):
    weight, plain = packed_parameter(*shape), random(*shape)
    assert torch.equal(weight + 0, plain)
    assert torch.equal(weight[2], plain[2])
    assert torch.equal(weight.to(torch.bfloat16), plain.bfloat16())
    assert (weight.shape, weight.dtype, weight.nbytes) == (plain.shape, plain.dtype, plain.nbytes)
    for same in (copy.deepcopy(weight), weight.detach()):
        assert isinstance(same, PackedWeight)
        assert torch.equal(same.dequantize(), plain)


@pytest.mark.parametrize("changes_list", [False, True], ids=["one", "as an optimizer does"])
def test_a_change_is_refused(changes_list):
    weight = packed_parameter(103, 131)
    with pytest.raises(RuntimeError, match=r"a packed weight.*Load the model again"):
        torch._foreach_add_([weight], 1.0) if changes_list else weight.mul_(2)


def test_a_gradient_passes_through():
    x, weight = random(7, 131).requires_grad_(), packed_parameter(103, 131)
    F.linear(x, weight).sum().backward()
    expected = random(103, 131).sum(0).expand(7, 131)
    torch.testing.assert_close(x.grad, expected, rtol=0, atol=1e-4)


def test_autocast_is_obeyed():
    with torch.autocast("cpu", torch.bfloat16):
        assert F.linear(random(7, 131), packed_parameter(103, 131)).dtype == torch.bfloat16
