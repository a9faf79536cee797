"""Every error at the doors of the sparse layer names what is wrong, the value and what to do."""

import copy
import dataclasses
import inspect
import math
import operator
import pickle
import typing
from typing import get_args

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from moe.errors import ConfigError, DataError
from moe.sparse.config import SparseConfig
from moe.sparse.editing import edit_routing
from moe.sparse.groups import to_groups
from moe.sparse.integration import collect_routers, router_loss
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


TEXTS = st.sampled_from(["", "no", "7", "token_choise", "none of these"])
OTHERS = st.sampled_from([[], {1: 2}, math.nan, math.inf, -math.inf, -1, -0.5]) | TEXTS
WRONG = {
    bool: OTHERS | st.sampled_from([0, 1, None]),
    int: OTHERS | st.sampled_from([True, 2.5, None]),
    float: OTHERS | st.just(True),
}


@given(st.sampled_from(dataclasses.fields(SparseConfig)), st.data())
def test_a_value_of_another_type_or_out_of_range_is_refused_by_the_name_of_its_field(field, data):
    kinds = (field.type, *get_args(field.type))
    kind = next((kind for kind in WRONG if kind in kinds), None)
    value = data.draw(WRONG.get(kind, OTHERS | st.sampled_from([True, 7])))
    assume(value is not None or type(None) not in kinds)
    with pytest.raises(ConfigError) as refusal:
        config(**{field.name: value})
    assert field.name.partition("_")[0] in str(refusal.value).lower()


def test_numbers_that_contradict_each_other_and_misspelt_settings_are_refused():
    for fields, message in (
        ({"num_selected_experts": 7}, "num_selected_experts is 7; .* num_experts, 5"),
        ({"router": "switch"}, "num_selected_experts is 2.* to 1"),
        ({"num_expert": 4}, "'num_expert'.*'num_experts'"),
        ({"convention": "flaxforme"}, "convention is 'flaxforme'; .* flaxformer"),
        ({"expert_quantization": {"bits": 4, "group_size": 2}}, "divisor of d_model, 7"),
    ):
        with pytest.raises(ConfigError, match=message):
            config(**fields)


def test_a_configuration_keeps_its_signature_and_is_copied():
    parameters = list(inspect.signature(SparseConfig).parameters)
    assert parameters[:3] == ["d_model", "d_ff", "num_experts"]
    assert pickle.loads(pickle.dumps(config())) == copy.copy(config()) == config()
    assert dataclasses.replace(config(), d_ff=13).d_ff == 13


# ---- routers and their options ----


@pytest.mark.parametrize("router", ROUTERS.names())
@given(data=st.data())
def test_a_wrong_option_of_a_router_is_refused_by_name(router, data):
    with pytest.raises(ConfigError, match=f"'{router}' has no option 'jiter'"):
        options(router, jiter=0.1)
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


@pytest.mark.parametrize("router", ["batch_prioritized", "expert_choice", "no_token_left_behind"])
def test_a_router_that_looks_ahead_is_refused_in_a_decoder(router):
    message = f"'{router}' cannot be used in a decoder.*one of bias_balanced, hash, switch, token_"
    with pytest.raises(ConfigError, match=message):
        config(router=router, decoder=True, num_selected_experts=1)


def test_hash_routing_has_no_gate_that_could_see_word_embeddings():
    with pytest.raises(ConfigError, match="router_input is 'concat', but router 'hash'"):
        config(router="hash", num_selected_experts=1, router_input="concat")


# ---- inputs ----


FLOAT8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"x": zeros(13, 7)}, r"x .*shape \[13, 7\]; expected floats \[B, L, 7\]"),
        ({"x": None}, "x None; expected floats"),
        ({"x": zeros(2, 3, 7).long()}, "x of dtype torch.int64"),
        ({"x": zeros(2, 3, 7).to("meta")}, "x is on meta, but the sparse layer on cpu"),
        (
            {"token_mask": torch.ones(2, 11)},
            r"token_mask is .*\[2, 11\], but x has 2 seq.*\[2, 3\]",
        ),
        ({"token_mask": [[1]]}, r"token_mask is \[\[1\]\], but x has"),
        ({"token_mask": torch.ones(2, 3).to(FLOAT8)}, "token_mask is of dtype torch.float8_e4m3fn"),
        ({"token_mask": torch.zeros(2, 3)}, "token_mask is 0 everywhere, in torch.float32"),
        ({"token_ids": torch.ones(2, 3)}, "token_ids is of dtype torch.float32.*expected integers"),
        ({"token_ids": torch.full((2, 3), -100)}, "token_ids hold -100"),
        ({}, "'hash' needs the ids of the tokens"),
    ],
)
def test_an_input_that_does_not_fit_is_refused(inputs, message):
    layer = build_layer("hash" if inputs.keys() <= {"token_ids"} else "token_choice")
    with pytest.raises(DataError, match=message):
        layer(**{"x": zeros(2, 3, 7), **inputs})


def test_word_embeddings_that_do_not_fit_are_refused():
    layer = build_layer(router_input="add")
    for embeddings, message in (
        (None, "router_input is 'add', but the layer got no word embeddings"),
        (zeros(2, 3, 1), r"word_embeddings is .*\[2, 3, 1\].*\[2, 3, 7\]"),
        (zeros(2, 3, 7).long(), "word_embeddings is of dtype torch.int64"),
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


@pytest.mark.parametrize("values", [[0.0, -math.inf], [1.0, math.nan], [1, 2]])
def test_additive_masks_and_other_numbers_are_no_mask(values):
    with pytest.raises(DataError, match=r"token_mask holds .*for an additive mask.* `mask == 0`"):
        build_layer()(zeros(1, 2, 7), torch.tensor([values]))


def test_ids_of_any_integers_have_the_experts_of_int64():
    layer, ids = build_layer("hash"), torch.tensor([[5, 99, 0], [127, 1, 64]])
    expected = layer(zeros(2, 3, 7), token_ids=ids)[1].plan.expert_index
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
        router = layer(zeros(2, 3, 7), token_ids=ids.to(dtype))[1]
        assert torch.equal(router.plan.expert_index, expected)


def test_padding_may_have_a_negative_id_and_be_all_there_is():
    nothing = torch.zeros(1, 3, dtype=torch.int64)
    assert not build_layer()(zeros(1, 3, 7), nothing)[1].plan.token_mask.any()
    ids = torch.tensor([[5, -100, 0]])
    build_layer("hash")(zeros(1, 3, 7), torch.tensor([[True, False, True]]), token_ids=ids)


def test_groups_divide_the_batch():
    with pytest.raises(ConfigError, match=r"5 sequences .* batch of 6 .*one of \[1, 2, 3, 6\]"):
        to_groups(torch.zeros(6, 13, 7), 5)


# ---- what routers did ----


def test_losses_statistics_and_contexts_refuse_what_is_no_router_output_or_module():
    output = build_layer()(zeros(1, 2, 7))[1]
    with pytest.raises(DataError, match=r"^routers are .*expected the RouterOutputs"):
        router_loss([None])
    with pytest.raises(TypeError):
        operator.add(output.stats, (output,))
    with pytest.raises(ConfigError, match=r"^module of collect_routers is .*an nn.Module"):
        collect_routers(output).__enter__()
    with pytest.raises(ConfigError, match=r"^module with sparse layers is .*an nn.Module"):
        edit_routing(output, {}).__enter__()
