"""Which numbers have which precision, and how far half precision may be from float32.

The oracle is the same layer in float64 with the same, already rounded, weights and tokens: its
routing is the same number for number, so that what differs are the roundings of the experts'
products, which are counted below.
"""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F

from moe.errors import DataError
from tests.sparse.layers import GATED_NAMES, build_layer, gradients

HALF = [torch.bfloat16, torch.float16]
UNIT = {torch.bfloat16: 2**-8, torch.float16: 2**-11}  # half the distance from 1 to the next number
DISPATCHES = ["ragged", "static"]
NOT_FINITE = r"router's logits are not finite: .* NaN or infinity\. .* bfloat16 instead of float16"


def tokens(batch=3, length=13):
    torch.manual_seed(1)
    return torch.randn(batch, length, 7, dtype=torch.float64)


def ids(batch=3, length=13):
    torch.manual_seed(2)
    return torch.randint(0, 997, (batch, length))


# ---- routing ----


@pytest.mark.parametrize("name", [*GATED_NAMES, "hash"])
def test_routing_is_at_least_float32_whatever_the_parameter_dtype(name):
    for dtype in (*HALF, torch.float32, torch.float64):
        layer = build_layer(name).to(dtype)
        y, router = layer(tokens().to(dtype), token_ids=ids())
        expected = torch.float64 if dtype == torch.float64 else torch.float32
        assert y.dtype == dtype
        assert router.router_logits.dtype == router.plan.combine_weight.dtype == expected
        assert {value.dtype for value in router.losses} == {expected}
        assert {value.dtype for value in router.stats} == {torch.int64, torch.float64}


@pytest.mark.parametrize("dtype", HALF)
def test_logits_of_a_half_precision_layer_are_the_float32_product_of_its_numbers(dtype):
    layer, x = build_layer().to(dtype), tokens().to(dtype)
    logits = layer(x)[1].router_logits.detach()
    expected = F.linear(x.float(), layer.router.gate.detach().float()).flatten(0, 1)
    torch.testing.assert_close(logits.flatten(0, 1), expected, rtol=0, atol=1e-6)
    half_product = expected.to(dtype)
    assert float((half_product - expected).abs().max()) > 1e-4  # it would have been seen


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_autocast_leaves_routing_alone_and_runs_the_experts_in_its_dtype(dispatch, dtype):
    layer, x = build_layer(dispatch=dispatch, expert_bias="additive").float(), tokens().float()
    plain_y, plain = layer(x)
    with torch.autocast("cpu", dtype):
        y, router = layer(x)
    assert y.dtype == torch.float32
    assert torch.equal(router.router_logits, plain.router_logits)
    assert torch.equal(router.plan.combine_weight, plain.plan.combine_weight)
    assert all(map(torch.equal, router.losses, plain.losses))
    assert all(map(torch.equal, router.stats, plain.stats))

    layer.experts = copy.deepcopy(layer.experts).to(dtype)
    assert torch.equal(y, layer(x)[0])
    assert not torch.equal(y, plain_y)


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_the_output_has_the_dtype_of_the_input_and_gradients_that_of_their_tensor(dispatch):
    dtypes = [torch.bfloat16, torch.float32, torch.float64]
    for given, parameters in itertools.permutations(dtypes, 2):
        layer = build_layer(dispatch=dispatch).to(parameters)
        x = tokens().to(given).requires_grad_()
        y, router = layer(x)
        assert y.dtype == given
        assert router.router_logits.dtype == torch.promote_types(given, torch.float32)
        *of_parameters, of_x = gradients(y.float().square().sum(), layer, x)
        assert {gradient.dtype for gradient in of_parameters} == {parameters}
        assert of_x.dtype == given


# ---- how far half precision is from float64 ----


def in_half_and_double(dtype, dispatch, **fields):
    """Returns a half precision layer and its float64 double with the same numbers, and tokens for
    each.
    """
    half = build_layer(dispatch=dispatch, eval_capacity_factor=None, **fields).to(dtype)
    x = tokens().to(dtype)
    double, x_double = copy.deepcopy(half).double(), x.double().requires_grad_()
    return half, double, x.requires_grad_(), x_double


def forward_bound(layer, x, plan):
    """Returns the bound on the error of each output in units of rounding, <float64>[B, L, D].

    With u the unit of rounding, a = gelu(g), and every stored number off by at most u times itself:
        product of each g and up         u |g|, u |up|
        a, whose slope is at most 1.13   1.13 u |g| + u |a|
        a * up                           1.13 u |g| |up| + 3 u |a up|
        product with W                   |W| times that, and u |W| |a up|
        weight, weighted row, sum of 2   3 u |W| |a up| w
    A token's error is the sum of these over its experts, each times its weight w: at most
    w |W| (1.13 |g| |up| + 7 |a up|) u. Terms of u² and the float32 sums inside products are below a
    tenth of that.
    """
    experts = layer.experts
    gate, up = torch.einsum("bld,efd->blef", x, experts.gate_up_proj).chunk(2, dim=-1)
    hidden = 1.13 * (gate * up).abs() + 7 * (F.gelu(gate, approximate="tanh") * up).abs()
    rows = torch.einsum("blef,edf->bled", hidden, experts.down_proj.abs())
    weight = x.new_zeros(*x.shape[:2], rows.shape[2])
    shape = (*x.shape[:2], plan.expert_index.shape[-1])
    chosen, combine_weight = plan.expert_index.reshape(shape), plan.combine_weight.reshape(shape)
    weight.scatter_(2, chosen, combine_weight.double())
    return 1.1 * torch.einsum("bled,ble->bld", rows, weight)


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_outputs_are_within_the_counted_roundings(dtype, dispatch):
    half, double, x, x_double = in_half_and_double(dtype, dispatch)
    (y, router), (expected, router_double) = half(x), double(x_double)
    assert torch.equal(router.plan.expert_index, router_double.plan.expert_index)
    with torch.no_grad():
        error = (y.double() - expected).abs() / UNIT[dtype]
        bound = forward_bound(double, x_double, router_double.plan)
    assert (error <= bound).all()
    assert float((error / bound).max()) > 0.1  # and the bound is not idle


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_gradients_are_within_the_counted_roundings(dtype, dispatch):
    """At most twelve roundings lie between the cotangent and a gradient.

    They are the hidden activation (4), the weight and its product (2), the product with W (1), the
    derivatives of product and activation (4) and the last product (1). Each has a deviation of u /
    √3, and independent ones add as √12, so that the deviation relative to the norm is 2 u; sums
    that cancel about half of their terms double it.
    """
    half, double, x, x_double = in_half_and_double(dtype, dispatch, expert_bias="multiplicative")
    torch.manual_seed(3)
    cotangent = torch.randn(3, 13, 7).to(dtype)
    ours = gradients((half(x)[0] * cotangent).sum(), half, x)
    theirs = gradients((double(x_double)[0] * cotangent.double()).sum(), double, x_double)
    for a, b in zip(ours, theirs, strict=True):
        assert float((a.double() - b).norm() / b.norm()) <= 4 * UNIT[dtype]


# ---- numbers that are not finite ----


def test_numbers_that_are_not_finite_are_refused():
    for name in GATED_NAMES:
        x = tokens()
        x[1, 5, 2] = float("inf")
        with pytest.raises(DataError, match=NOT_FINITE):
            build_layer(name)(x)

    layer = build_layer().float()
    with pytest.raises(DataError, match=NOT_FINITE):
        layer(tokens().float() * 1e38)  # overflows in the gate
    with torch.no_grad():
        layer.router.gate[2, 3] = float("nan")
    with pytest.raises(DataError, match=NOT_FINITE):
        layer(tokens().float())


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_an_expert_that_overflows_for_a_token_harms_only_who_chose_it(dispatch):
    """Empty slots are computed too: one with a token of another expert would turn 0 times infinity
    into NaN.
    """
    fields = {"num_selected_experts": 1, "expert_bias": "multiplicative"}
    layer, x = build_layer(dispatch=dispatch, **fields).float(), tokens().float()
    used = int(layer(x)[1].plan.expert_index[0, 0, 0])
    with torch.no_grad():
        for expert in range(5):
            if expert != used:
                layer.experts.down_proj[expert] *= 3e38
    chose_used = (layer(x)[1].plan.expert_index[..., 0] == used).reshape(3, 13)
    assert 0 < int(chose_used.sum()) < 39
    assert layer(x)[0][chose_used].isfinite().all()
