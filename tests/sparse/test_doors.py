"""Every error at the doors of the sparse layer: its text says what is wrong, with which value, and
what to do.
"""

import copy
import dataclasses
import inspect
import math
import pickle
import re

import pytest
import torch

from moe.errors import ConfigError, DataError
from moe.sparse.config import SparseConfig
from moe.sparse.editing import edit_routing
from moe.sparse.groups import to_groups
from moe.sparse.integration import collect_routers, router_loss, total_stats
from moe.sparse.router import ROUTERS
from moe.sparse.stats import RouterStats, add_stats, summarize
from tests.sparse.layers import build_layer

KNOWN_ROUTERS = (
    "Known: batch_prioritized, bias_balanced, expert_choice, hash, no_token_left_behind, switch, "
    "token_choice."
)


def refused(error, text):
    return pytest.raises(error, match=f"^{re.escape(text)}$")


def config(**fields):
    return SparseConfig(**{"d_model": 7, "d_ff": 11, "num_experts": 5, **fields})


def options(router, **router_options):
    single = {"num_selected_experts": 1} if ROUTERS.get(router).single else {}
    return config(router=router, router_options=router_options, **single)


# ---- settings ----


@pytest.mark.parametrize("name", ["d_model", "d_ff", "num_experts", "num_selected_experts"])
@pytest.mark.parametrize("value", [0, -3, 2**24 + 1, 5.0, True, "5", None, [5]])
def test_sizes_are_at_least_one_and_fit_somewhere(name, value):
    expected = "an integer from 1 to 16,777,216 (the weights of a larger layer fit on no machine)"
    with refused(ConfigError, f"{name} is {value!r}; expected {expected}."):
        config(**{name: value})


@pytest.mark.parametrize("value", [0, 2**63, 1.5, math.inf, "all"])
def test_a_group_size_is_a_number_of_tokens(value):
    with pytest.raises(
        ConfigError,
        match=rf"^group_size is {re.escape(repr(value))}; expected an integer from 1 to ",
    ):
        config(group_size=value)


@pytest.mark.parametrize("name", ["gated", "decoder"])
@pytest.mark.parametrize("value", ["no", "yes", 0, 1, None, 0.0, torch.tensor(True)])
def test_a_flag_is_true_or_false_and_no_word(name, value):
    with refused(ConfigError, f"{name} is {value!r}; expected true or false."):
        config(**{name: value})


@pytest.mark.parametrize("name", ["capacity_factor", "eval_capacity_factor"])
@pytest.mark.parametrize(
    "value", [0, -1.25, float("nan"), float("inf"), 1e308, 10**400, "1.25", True]
)
def test_a_capacity_factor_is_a_finite_number_above_zero(name, value):
    expected = (
        "expected a finite number above 0 and of at most 1,000,000.0, or None to drop no token."
    )
    with pytest.raises(ConfigError, match=rf"^{name} is .*; {re.escape(expected)}$"):
        config(**{name: value})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"min_expert_capacity": -1},
            "min_expert_capacity is -1; expected an integer from 0 to 1,048,576 (every expert of every group has so "
            "many).",
        ),
        (
            {"expert_capacity": 0},
            "expert_capacity is 0; expected an integer from 1 to 9,223,372,036,854,775,807, or None to follow the "
            "capacity factors (tokens are counted in 64 bits).",
        ),
        (
            {"expert_dropout_rate": 1.0},
            "expert_dropout_rate is 1.0; expected a finite number of at least 0 and below 1.",
        ),
        (
            {"expert_dropout_rate": -0.1},
            "expert_dropout_rate is -0.1; expected a finite number of at least 0 and below 1.",
        ),
        (
            {"initializer_scale": 0.0},
            "initializer_scale is 0.0; expected a finite number above 0 and of at most 1,000,000.0 (products of larger "
            "weights overflow).",
        ),
        (
            {"router_initializer_std": -1.0},
            "router_initializer_std is -1.0; expected a finite number from 0 to 1,000,000.0, or None to draw it like "
            "the experts (products of larger weights overflow).",
        ),
    ],
)
def test_rates_and_scales_have_a_range(fields, expected):
    with refused(ConfigError, expected):
        config(**fields)


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("activation", "gelu, relu"),
        ("expert_bias", "none, additive, multiplicative"),
        ("capacity_rounding", "floor, round"),
        ("router_input", "hidden, concat, concat_stop_gradient, add, add_stop_gradient"),
        ("balance_choices", "first, all"),
        ("balance_over", "real_tokens, all_positions"),
        ("router_z_loss_over", "real_tokens, all_positions"),
        ("balance_scope", "group, micro_batch, ranks, global"),
        ("dispatch", "ragged, static"),
    ],
)
def test_a_choice_that_does_not_exist_is_answered_with_those_that_do(name, choices):
    for value in ("sometimes", None, 1, [choices]):
        with refused(ConfigError, f"{name} is {value!r}; expected one of {choices}."):
            config(**{name: value})


def test_there_are_no_more_choices_than_experts():
    text = (
        "num_selected_experts is 7, but there are only 5 experts. Set num_selected_experts to at most 5, or raise "
        "num_experts."
    )
    with refused(ConfigError, text):
        config(num_selected_experts=7)


def test_an_unknown_reference_is_answered_with_the_closest():
    text = (
        "There is no reference implementation called 'flaxforme'. Did you mean 'flaxformer'? "
        "Known: flaxformer, mesh_tensorflow."
    )
    with refused(ConfigError, text):
        SparseConfig.after("flaxforme", d_model=7, d_ff=11, num_experts=5)


def test_an_unknown_setting_is_answered_with_the_closest():
    text = "SparseConfig has no setting 'num_expert'. Did you mean 'num_experts'? Known: d_model, "
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}"):
        config(num_expert=4)
    with pytest.raises(ConfigError, match=r"Did you mean 'expert_bias'\?"):
        SparseConfig.after("flaxformer", d_model=7, d_ff=11, num_experts=5, expert_bia="none")


def test_a_configuration_keeps_its_signature_and_is_copied():
    assert list(inspect.signature(SparseConfig).parameters)[:3] == [
        "d_model",
        "d_ff",
        "num_experts",
    ]
    assert pickle.loads(pickle.dumps(config())) == copy.copy(config()) == config()
    assert dataclasses.replace(config(), d_ff=13).d_ff == 13


# ---- routers and their options ----


def test_an_unknown_router_is_answered_with_the_closest():
    text = f"There is no router called 'token_choise'. Did you mean 'token_choice'? {KNOWN_ROUTERS}"
    with refused(ConfigError, text):
        config(router="token_choise")


@pytest.mark.parametrize("value", [None, 5, [1], {}])
def test_a_router_is_a_name(value):
    with refused(ConfigError, f"There is no router called {value!r}. {KNOWN_ROUTERS}"):
        config(router=value)


@pytest.mark.parametrize("value", [torch.nn.Linear, lambda config: None, "switch", None])
def test_what_is_no_router_is_not_registered_as_one(value):
    with refused(
        ConfigError,
        f"The router 'mine' is {value!r}; expected a subclass of moe.sparse.router.Router.",
    ):
        ROUTERS.add("mine", value)
    assert "mine" not in ROUTERS.names()


def test_an_unknown_router_that_resembles_none_is_answered_with_all():
    with refused(ConfigError, f"There is no router called 'zzz'. {KNOWN_ROUTERS}"):
        config(router="zzz")


def test_an_unknown_option_is_answered_with_the_closest():
    text = (
        "Router 'switch' has no option 'jiter'. Did you mean 'jitter'? Known: policy, jitter, input_dropout_rate, "
        "temperature."
    )
    with refused(ConfigError, text):
        options("switch", jiter=0.1)


def test_an_option_of_another_router_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"^Router 'expert_choice' has no option 'jitter'\. Known: softmax_over\.$",
    ):
        options("expert_choice", jitter=0.1)


@pytest.mark.parametrize(
    ("router", "name", "value", "expected"),
    [
        ("bias_balanced", "update_rate", "1e-3", "a finite number"),
        ("bias_balanced", "update_rate", math.inf, "a finite number"),
        ("bias_balanced", "update_rate", True, "a finite number"),
        ("token_choice", "normalize_gates", "no", "True or False"),
        ("no_token_left_behind", "num_candidates", 2.5, "an integer"),
        ("hash", "seed", "a", "an integer"),
    ],
)
def test_an_option_of_the_wrong_kind_is_refused(router, name, value, expected):
    with refused(ConfigError, f"{name} of router {router!r} is {value!r}; expected {expected}."):
        options(router, **{name: value})


@pytest.mark.parametrize("router", ["batch_prioritized", "expert_choice", "no_token_left_behind"])
def test_a_router_that_looks_ahead_is_refused_in_a_decoder(router):
    text = (
        f"Router '{router}' cannot be used in a decoder: it decides about a token by looking at later ones, which a "
        "decoder does not have when it generates. Use it in the encoder only, and here one of bias_balanced, hash, "
        "switch, token_choice."
    )
    with refused(ConfigError, text):
        config(router=router, decoder=True, num_selected_experts=1)


@pytest.mark.parametrize("router", ["hash", "no_token_left_behind", "switch"])
def test_a_router_of_one_expert_a_token_wants_one_choice(router):
    text = (
        f"Router '{router}' gives each token one expert, but num_selected_experts is 2. "
        "Set num_selected_experts to 1."
    )
    with refused(ConfigError, text):
        config(router=router)


@pytest.mark.parametrize("router", ["token_choice", "batch_prioritized"])
@pytest.mark.parametrize("name", ["second_expert_policy", "eval_second_expert_policy"])
def test_token_choice_knows_four_policies(router, name):
    with refused(ConfigError, f"{name} is 'some'; expected one of all, none, threshold, random."):
        options(router, **{name: "some"})


@pytest.mark.parametrize("router", ["token_choice", "batch_prioritized"])
@pytest.mark.parametrize("name", ["second_expert_threshold", "eval_second_expert_threshold"])
def test_token_choice_wants_thresholds_above_zero(router, name):
    text = (
        f"{name} is 0.0; expected a finite number above 0 (policy 'all' always uses every choice)."
    )
    with refused(ConfigError, text):
        options(router, **{name: 0.0})


@pytest.mark.parametrize(
    ("router", "given", "text"),
    [
        (
            "switch",
            {"policy": "x"},
            "policy is 'x'; expected one of argmax, input_jitter, input_dropout, sample.",
        ),
        (
            "switch",
            {"jitter": 1.0},
            "jitter is 1.0; expected a finite number of at least 0 and below 1.",
        ),
        (
            "switch",
            {"input_dropout_rate": -0.5},
            "input_dropout_rate is -0.5; expected a finite number of at least 0 and below 1.",
        ),
        (
            "switch",
            {"temperature": 0.0},
            "temperature is 0.0; expected a finite number of at least 1e-06 ('argmax' is its limit).",
        ),
        (
            "expert_choice",
            {"softmax_over": "x"},
            "softmax_over is 'x'; expected one of experts, tokens.",
        ),
        (
            "bias_balanced",
            {"update_rate": 0.0},
            "update_rate is 0.0; expected a finite number above 0 and of at most 1 (a probability is at most 1; "
            "without a bias use 'token_choice').",
        ),
        (
            "no_token_left_behind",
            {"num_candidates": 7},
            "num_candidates is 7; expected an integer from 1 to 5 (num_experts is 5).",
        ),
        (
            "no_token_left_behind",
            {"num_candidates": 0},
            "num_candidates is 0; expected an integer from 1 to 5 (num_experts is 5).",
        ),
    ],
)
def test_options_have_a_range(router, given, text):
    with refused(ConfigError, text):
        options(router, **given)


def test_hash_routing_has_no_gate_that_could_see_word_embeddings():
    text = "router_input is 'concat', but router 'hash' has no gate that could see it. Leave router_input at 'hidden'."
    with refused(ConfigError, text):
        config(router="hash", num_selected_experts=1, router_input="concat")


# ---- inputs ----


@pytest.mark.parametrize("shape", [(13, 7), (2, 13, 5), (2, 3, 13, 7)])
def test_tokens_are_batch_length_and_width(shape):
    text = (
        f"The sparse layer got x of shape {list(shape)}; expected [B, L, 7] (batch, length, d_model). Reshape the "
        "input, or build the layer with its width."
    )
    with refused(DataError, text):
        build_layer()(torch.zeros(shape, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(2, 11), (13, 2), (2,), (2, 13, 1)])
def test_a_mask_has_one_value_for_each_token(shape):
    text = f"token_mask has shape {list(shape)}, but x has 2 sequences of 13 tokens. Give one value for each token."
    with refused(DataError, text):
        build_layer()(
            torch.zeros(2, 13, 7, dtype=torch.float64), torch.ones(shape, dtype=torch.bool)
        )


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.uint8, torch.float32, torch.bfloat16]
)
def test_a_mask_of_zeros_and_ones_of_any_dtype_is_that_of_bools(dtype):
    layer, x, mask = (
        build_layer(),
        torch.randn(2, 13, 7, dtype=torch.float64),
        torch.arange(26).reshape(2, 13) % 3 != 1,
    )
    expected, given = layer(x, mask), layer(x, mask.to(dtype))
    assert torch.equal(given[0], expected[0])
    assert given[1].plan.token_mask.equal(expected[1].plan.token_mask)


@pytest.mark.parametrize(
    ("mask", "shown"),
    [
        (torch.tensor([0.0, -math.inf]), "-inf"),
        (torch.tensor([0.0, -1e9]), "-1000000000.0"),
        (torch.tensor([0.0, torch.finfo(torch.float32).min]), "-3.4028234663852886e+38"),
        (torch.tensor([1.0, math.nan]), "nan"),
        (torch.tensor([1, -1]), "-1"),
        (torch.tensor([1, 2]), "2"),
        (torch.tensor([1.0, 0.5]), "0.5"),
    ],
)
def test_additive_masks_and_other_numbers_are_no_mask(mask, shown):
    text = (
        f"token_mask holds {shown}; expected 0 for padding and 1 for real tokens. Give a bool mask, True for real "
        "tokens and False for padding; of an additive mask, which hides by large negative numbers, that is `mask == 0`."
    )
    with refused(DataError, text):
        build_layer()(torch.zeros(1, 2, 7, dtype=torch.float64), mask[None])


def test_a_mask_of_nothing_but_zeros_could_be_additive_where_it_is_not_of_integers():
    layer, x = build_layer(), torch.zeros(1, 2, 7, dtype=torch.float64)
    text = (
        "token_mask is 0 everywhere, in torch.float32: nothing but padding, or an additive mask that hides nothing. "
        "Give a bool mask, True for real tokens and False for padding."
    )
    with refused(DataError, text):
        layer(x, torch.zeros(1, 2))
    assert layer(x, torch.zeros(1, 2, dtype=torch.int64))[1].plan.token_mask.sum() == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x", None),
        ("x", [[1.0]]),
        ("token_mask", [[1]]),
        ("token_ids", 5),
        ("word_embeddings", "a"),
    ],
)
def test_an_input_is_a_tensor(name, value):
    inputs = {"x": torch.zeros(1, 1, 7, dtype=torch.float64), name: value}
    with refused(DataError, f"{name} is {value!r}; expected a tensor."):
        build_layer()(**inputs)


def odd_tensors():
    """Tensors of which a layer cannot take the values, and a noun of the message."""
    x = torch.zeros(1, 2, 7)
    nested = torch.nested.nested_tensor([torch.zeros(1, 7), torch.zeros(2, 7)], layout=torch.jagged)
    return {
        "meta device": x.to("meta"),
        "torch.float8_e4m3fn; expected float16": x.to(torch.float8_e4m3fn),
        "torch.sparse_coo": x.to_sparse(),
        "nested tensor": nested,
    }


@pytest.mark.parametrize("noun", odd_tensors())
@pytest.mark.parametrize("name", ["x", "word_embeddings"])
def test_tokens_and_embeddings_are_dense_and_have_values(name, noun):
    inputs = {"x": torch.zeros(1, 2, 7, dtype=torch.float64), name: odd_tensors()[noun]}
    with pytest.raises(DataError, match=rf"^{name} (is|has) .*{noun}[^\n]*$"):
        build_layer(router_input="add")(**inputs)


@pytest.mark.parametrize("name", ["token_mask", "token_ids"])
def test_what_stands_beside_the_tokens_is_on_their_device(name):
    inputs = {"x": torch.zeros(1, 2, 7, dtype=torch.float64), name: torch.ones(1, 2, device="meta")}
    with pytest.raises(DataError, match=f"^{name} is on the meta device"):
        build_layer()(**inputs)


def test_a_mask_of_eight_bit_floats_is_refused():
    mask = torch.ones(1, 2).to(torch.float8_e4m3fn)
    with pytest.raises(DataError, match=r"^token_mask has dtype torch.float8_e4m3fn. Give a bool"):
        build_layer()(torch.zeros(1, 2, 7, dtype=torch.float64), mask)


# ---- what routers did ----

NO_OUTPUTS = [
    None,
    3,
    torch.zeros(2),
    torch.zeros(2, device="meta"),
    [None],
    "ab",
    [torch.zeros(2)],
]


@pytest.mark.parametrize("call", [router_loss, total_stats])
@pytest.mark.parametrize("value", NO_OUTPUTS)
def test_losses_and_statistics_are_of_router_outputs(call, value):
    with pytest.raises(DataError, match=r"^routers (are|hold) .*expected a list of RouterOutput"):
        call(value)


def test_a_single_router_output_is_not_taken_for_a_list():
    output = build_layer()(torch.zeros(1, 2, 7, dtype=torch.float64))[1]
    for call in (router_loss, total_stats):
        with pytest.raises(DataError, match=r"^routers are RouterOutput\("):
            call(output)
        call(iter([output]))


@pytest.mark.parametrize("value", [*NO_OUTPUTS, RouterStats(*[1] * 14)])
def test_a_summary_is_of_router_statistics(value):
    stats = build_layer()(torch.zeros(1, 2, 7, dtype=torch.float64))[1].stats
    for call in (summarize, lambda value: add_stats(stats, value)):
        with pytest.raises(DataError, match=r"statistics of routers are .*expected a RouterStats"):
            call(value)


def test_a_summary_needs_values():
    stats = build_layer()(torch.zeros(1, 2, 7, dtype=torch.float64))[1].stats
    on_meta = RouterStats(*(number.to("meta") for number in stats))
    with pytest.raises(DataError, match="RouterStats are on the meta device"):
        summarize(on_meta)


@pytest.mark.parametrize("value", NO_OUTPUTS)
def test_routers_are_collected_and_edited_in_a_module(value):
    with pytest.raises(ConfigError, match=r"^module of collect_routers is .*expected an nn.Module"):
        collect_routers(value).__enter__()
    with pytest.raises(ConfigError, match=r"^module with sparse layers is .*an nn.Module"):
        edit_routing(value, {}).__enter__()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("name", ["x", "word_embeddings"])
def test_tokens_and_embeddings_are_floating_point(name, dtype):
    inputs = {
        "x": torch.zeros(1, 2, 7, dtype=torch.float64),
        name: torch.zeros(1, 2, 7, dtype=dtype),
    }
    text = (
        f"{name} has dtype {dtype}; expected floating-point numbers. Give hidden states or embeddings, not token ids, "
        "and convert whole numbers with .float()."
    )
    with refused(DataError, text):
        build_layer(router_input="add")(**inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_token_ids_are_integers(dtype):
    layer, x = build_layer("hash"), torch.zeros(1, 2, 7, dtype=torch.float64)
    with refused(
        DataError, f"token_ids have dtype {dtype}; expected integers, the ids of a vocabulary."
    ):
        layer(x, token_ids=torch.ones(1, 2, dtype=dtype))


def test_hash_routing_refuses_the_negative_id_of_a_real_token():
    layer, x, ids = (
        build_layer("hash"),
        torch.zeros(1, 3, 7, dtype=torch.float64),
        torch.tensor([[5, -100, 0]]),
    )
    text = (
        "token_ids hold -100; expected ids of a vocabulary, 0 or more. Give the ids of the tokens, not labels, and "
        "mark padding in token_mask."
    )
    with refused(DataError, text):
        layer(x, token_ids=ids)
    layer(x, torch.tensor([[True, False, True]]), token_ids=ids)


def test_token_ids_are_one_for_each_token():
    layer, x = build_layer("hash"), torch.zeros(2, 13, 7, dtype=torch.float64)
    text = "token_ids has shape [2, 11], but x has 2 sequences of 13 tokens. Give one value for each token."
    with refused(DataError, text):
        layer(x, token_ids=torch.zeros(2, 11, dtype=torch.int64))


@pytest.mark.parametrize("shape", [(3, 13, 7), (2, 13, 1), (2, 13)])
def test_word_embeddings_are_one_for_each_token_and_as_wide(shape):
    layer, x = build_layer(router_input="add"), torch.zeros(2, 13, 7, dtype=torch.float64)
    text = (
        f"word_embeddings has shape {list(shape)}, but x has 2 sequences of 13 tokens. Give one embedding of 7 "
        "numbers for each token."
    )
    with refused(DataError, text):
        layer(x, word_embeddings=torch.zeros(shape, dtype=torch.float64))


def test_hash_routing_needs_token_ids():
    text = (
        "Router 'hash' needs the ids of the tokens, but the layer got none. Pass token_ids [B, L] beside the tokens; "
        "a model does so when it is given input_ids, not inputs_embeds."
    )
    with refused(DataError, text):
        build_layer("hash")(torch.zeros(2, 13, 7, dtype=torch.float64))


@pytest.mark.parametrize("mode", ["concat", "concat_stop_gradient", "add", "add_stop_gradient"])
def test_a_gate_that_sees_word_embeddings_needs_them(mode):
    text = (
        f"router_input is '{mode}', but the layer got no word embeddings. Pass word_embeddings [B, L, D] beside the "
        "tokens, or set router_input to 'hidden'."
    )
    with refused(DataError, text):
        build_layer(router_input=mode)(torch.zeros(2, 13, 7, dtype=torch.float64))


def test_tokens_that_are_not_finite_are_refused():
    x = torch.zeros(2, 13, 7, dtype=torch.float64)
    x[1, 2, 3] = float("nan")
    text = (
        "The router's logits are not finite: its input or its weights hold NaN or infinity. Look for the first layer "
        "whose output is not finite; lower the learning rate, or use bfloat16 instead of float16."
    )
    with refused(DataError, text):
        build_layer()(x)


def test_groups_divide_the_batch():
    text = (
        "A group of 5 sequences does not divide a batch of 6 sequences. Choose one of [1, 2, 3, 6] sequences a group, "
        "or another batch size."
    )
    with refused(ConfigError, text):
        to_groups(torch.zeros(6, 13, 7), 5)
