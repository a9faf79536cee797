"""Every error at the doors of the sparse layer names what is wrong, the value and what to do."""

import dataclasses
import math
import typing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.errors import ConfigError, DataError
from moe.sparse.config import SparseConfig
from moe.sparse.router_options import ROUTERS
from tests.sparse.layers import build_layer


def config(**fields):
    return SparseConfig(**{"d_model": 7, "d_ff": 11, "num_experts": 5, **fields})


def options(router, **router_options):
    single = {"num_selected_experts": 1} if ROUTERS.get(router).single else {}
    return config(router=router, router_options=router_options, **single)


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.float64)


# ---- settings ----


OTHERS = st.sampled_from([[], {1: 2}, math.nan, -math.inf, -0.5, "", "7", "none of these"])


def test_numbers_that_contradict_each_other_and_misspelt_settings_are_refused():
    for fields, message in (
        ({"num_selected_experts": 7}, "num_selected_experts is 7; .* num_experts, 5"),
        ({"router": "switch"}, "num_selected_experts is 2.* to 1"),
        ({"router_options": "all"}, "router_options is 'all'; expected a mapping"),
        ({"convention": "flaxforme"}, "convention is 'flaxforme'; .* flaxformer"),
        ({"expert_quantization": {"bits": 4, "group_size": 2}}, "divisor of d_model, 7"),
    ):
        with pytest.raises(ConfigError, match=message):
            config(**fields)


# ---- routers and their options ----


@pytest.mark.parametrize("router", ROUTERS.names())
@given(data=st.data())
def test_a_wrong_option_of_a_router_is_refused_by_name(router, data):
    known = dataclasses.fields(ROUTERS.get(router).Options)
    if known:
        field = data.draw(st.sampled_from(known))
        kind = typing.get_type_hints(ROUTERS.get(router).Options)[field.name]
        value = data.draw(OTHERS if kind is not int else st.sampled_from(["a", 2.5, True]))
        with pytest.raises(ConfigError, match=field.name):
            options(router, **{field.name: value})


def test_options_out_of_range_are_refused():
    for router, wrong, message in (
        ("switch", {"jitter": 1.0}, "jitter is 1.0; .* below 1"),
        ("switch", {"temperature": 0.0}, "temperature is 0.0"),
        ("bias_balanced", {"update_rate": 0.0}, "update_rate is 0.0; .* above 0"),
        ("no_token_left_behind", {"num_candidates": 7}, "num_candidates is 7; .* 1 to 5"),
    ):
        with pytest.raises(ConfigError, match=message):
            options(router, **wrong)


# ---- inputs ----


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"x": zeros(13, 7)}, r"x .*shape \[13, 7\]; expected floats \[B, L, 7\]"),
        ({"x": None}, "x None; expected floats"),
        ({"x": zeros(2, 3, 7).long()}, "x of dtype torch.int64"),
        (
            {"token_mask": torch.ones(2, 11)},
            r"token_mask is .*\[2, 11\], but x has 2 seq.*\[2, 3\]",
        ),
        ({"token_mask": [[1]]}, r"token_mask is \[\[1\]\], but x has"),
        ({"token_mask": torch.zeros(2, 3)}, "token_mask is 0 everywhere, in torch.float32"),
        ({}, "'hash' needs the ids of the tokens"),
    ],
)
def test_an_input_that_does_not_fit_is_refused(inputs, message):
    layer = build_layer("token_choice" if inputs else "hash")
    with pytest.raises(DataError, match=message):
        layer(**{"x": zeros(2, 3, 7), **inputs})


def test_word_embeddings_that_do_not_fit_are_refused():
    layer = build_layer(router_input="add")
    for embeddings, message in (
        (None, "router_input is 'add', but the layer got no word embeddings"),
        (zeros(2, 3, 1), r"word_embeddings is .*\[2, 3, 1\].*\[2, 3, 7\]"),
    ):
        with pytest.raises(DataError, match=message):
            layer(zeros(2, 3, 7), word_embeddings=embeddings)


def test_a_mask_of_zeros_and_ones_of_any_dtype_is_that_of_bools():
    layer = build_layer()
    x = torch.randn(2, 13, 7, dtype=torch.float64)
    mask = torch.arange(26).reshape(2, 13) % 3 != 1
    expected, router = layer(x, mask)
    for dtype in (torch.int64, torch.uint8, torch.bfloat16):
        output, given = layer(x, mask.to(dtype))
        assert torch.equal(output, expected)
        assert given.plan.token_mask.equal(router.plan.token_mask)
    nothing = torch.zeros(2, 13, dtype=torch.int64)
    assert not layer(x, nothing)[1].plan.token_mask.any()


@pytest.mark.parametrize("values", [[0.0, -math.inf], [1.0, math.nan], [1, 2]])
def test_additive_masks_and_other_numbers_are_no_mask(values):
    with pytest.raises(DataError, match=r"token_mask holds .*for an additive mask.* `mask == 0`"):
        build_layer()(zeros(1, 2, 7), torch.tensor([values]))


# ---- what routers did ----
