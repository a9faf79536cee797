"""Counts against the published numbers (presets name the sources) and against built models; errors at the door."""

import pytest
import torch

from moe import PRESETS, ConfigError, SparseConfig, STMoEConfig, STMoEForConditionalGeneration
from moe.sparse.config import REFERENCES
from moe.sparse.experts import Experts
from moe.sparse.router import Router, load_routers
from tests.models.tiny import FIELDS

SPARSE = {"num_experts": 5, "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2}
PUBLISHED = {
    "st-moe-l": 4_105_444_352,
    "st-moe-32b": 269_104_613_376,
    "t5-1.1-large": 783_150_080,
}
ROUNDED = {  # billions, as printed in the papers
    "switch-base-16": 1.1,
    "switch-base-32": 2.0,
    "switch-base-64": 3.8,
    "switch-base-128": 7.4,
    "switch-base-256": 14.7,
    "switch-xxl-128": 394.7,
    "switch-c-2048": 1571.3,
    "switch-large-128": 26.3,
    "t5-1.1-xxl": 11.1,
    "st-moe-base": 0.7,
    "st-moe-xl": 8.9,
}


@pytest.mark.parametrize(("name", "expected"), PUBLISHED.items())
def test_parameters_are_the_published_number(name, expected):
    assert STMoEConfig.from_preset(name).num_parameters() == expected


@pytest.mark.parametrize(("name", "billions"), ROUNDED.items())
def test_parameters_round_to_the_printed_number(name, billions):
    assert round(STMoEConfig.from_preset(name).num_parameters() / 1e9, 1) == billions


@pytest.mark.parametrize("name", PRESETS.names())
def test_the_count_equals_the_model_that_is_built(name):
    config = STMoEConfig.from_preset(name)
    with torch.device("meta"):
        model = STMoEForConditionalGeneration(config)
    assert sum(p.numel() for p in model.parameters()) == config.num_parameters()
    assert PRESETS.get(name).source


def test_st_moe_l_without_experts_is_t5_large_and_twelve_norms():
    with torch.device("meta"):
        model = STMoEForConditionalGeneration(STMoEConfig.from_preset("st-moe-l"))
    routed = sum(
        p.numel() for module in model.modules() if isinstance(module, Experts | Router) for p in module.parameters()
    )
    dense = STMoEConfig.from_preset("t5-1.1-large")
    assert model.num_parameters() - routed == dense.num_parameters() + 12 * dense.d_model


def test_the_sparse_blocks_are_the_last_of_each_stretch():
    config = STMoEConfig.from_preset("st-moe-l")
    sparse = [block for block in range(24) if config.is_sparse_block(block, decoder=False)]
    assert sparse == [3, 7, 11, 15, 19, 23]


@pytest.mark.parametrize(
    ("layers", "sparse"), [(layers, n) for layers in range(1, 13) for n in range(1, layers + 1) if layers % n == 0]
)
def test_the_second_block_of_a_stretch_is_where_transformers_puts_the_experts(layers, sparse):
    step = layers // sparse  # SwitchTransformersStack of 5.23.0
    expected = [block for block in range(layers) if block % step == 1 or step == 1]
    fields = {"num_layers": layers, "num_sparse_encoder_layers": sparse, "num_experts": 3, "sparse_position": "second"}
    config = STMoEConfig(**fields, num_decoder_layers=5)
    assert [block for block in range(layers) if config.is_sparse_block(block, decoder=False)] == expected
    assert not any(config.is_sparse_block(block, decoder=True) for block in range(5))


def test_active_parameters_count_two_of_the_experts():
    config = STMoEConfig.from_preset("st-moe-32b")
    expert = 3 * 5120 * 20480
    assert config.num_parameters() - config.num_active_parameters() == 12 * 62 * expert


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_expert": 3}, "no field 'num_expert'.*Did you mean 'num_experts'"),
        ({"num_experts": 5}, "num_experts is 5, but num_sparse_encoder_layers"),
        ({"num_experts": 5, "num_sparse_encoder_layers": 5}, r"does not divide the 12 blocks.*\[1, 2, 3, 4, 6, 12\]"),
        ({"d_model": 0}, "d_model is 0; expected an integer of at least 1"),
        ({"d_model": "wide"}, "d_model is 'wide'"),
        ({"dropout_rate": 1.5}, "dropout_rate is 1.5"),
        ({"feed_forward_proj": "swish"}, "expected one of gated-gelu, relu"),
        ({"eos_token_id": 40_000}, "eos_token_id is 40000; expected a token id below vocab_size"),
        ({"relative_attention_max_distance": 16}, "relative_attention_max_distance is 16"),
        ({"router_loss_reduction": "max"}, "router_loss_reduction is 'max'; expected one of sum, mean"),
        (
            {**SPARSE, "router": "expert_choice"},
            "'expert_choice' cannot be used in a decoder.*Set decoder_router to one",
        ),
        ({**SPARSE, "router": "swich"}, "Did you mean 'switch'"),
        ({"router": "swich"}, "Did you mean 'switch'"),
        ({**SPARSE, "router": None}, "no router called None"),
        (
            {**SPARSE, "second_expert_policy": "all"},
            "no field 'second_expert_policy' .*option of batch_prioritized, token_choice. Give it inside router_opt",
        ),
        ({**SPARSE, "expert_capacity": 0}, "expert_capacity is 0; expected an integer of at least 1, or None"),
        ({**SPARSE, "capacity_scope": "batch"}, "capacity_scope is 'batch'; expected one of group, sequence"),
        ({**SPARSE, "sparse_position": "first"}, "sparse_position is 'first'; expected one of last, second"),
        ({**SPARSE, "capacity_factor": "1.25"}, "capacity_factor is '1.25'; expected a number above 0, or None"),
        ({"decoder_router": "switch"}, "decoder_router is 'switch', but the decoder has no sparse layer"),
        ({"decoder_router_options": {"policy": "sample"}}, "decoder_router_options is .*, but the decoder has no"),
        ({**SPARSE, "router_options": {"jiter": 0.1}}, "Router 'token_choice' has no option 'jiter'"),
        ({**SPARSE, "router_options": "all"}, "router_options is 'all'; expected a mapping"),
        ({**SPARSE, "decoder_router": "batch_prioritized"}, "'batch_prioritized' cannot be used in a decoder"),
    ],
)
def test_a_config_whose_numbers_are_wrong_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        STMoEConfig(**fields)


@pytest.mark.parametrize(
    ("router", "router_input"),
    [
        (name, seen)
        for name in load_routers().names()
        for seen in ("hidden", "concat")
        if (name, seen) != ("hash", "concat")
    ],
)
def test_parameters_of_every_router_are_counted_before_anything_is_built(router, router_input):
    kind = load_routers().get(router)
    config = STMoEConfig(
        **FIELDS
        | {"router": router, "router_options": None, "router_input": router_input, "decoder_router": "switch"}
        | {"num_selected_experts": 1, "expert_bias": "multiplicative"}
    )
    built = STMoEForConditionalGeneration(config)
    assert sum(p.numel() for p in built.parameters()) == config.num_parameters()
    assert isinstance(built.sparse_layers()[0].router, kind)


def test_the_decoder_takes_over_the_router_and_its_options_unless_it_has_its_own():
    same = STMoEConfig(**SPARSE, num_selected_experts=1, router="switch", router_options={"policy": "sample"})
    assert same.sparse_config(decoder=True).router_options == {"policy": "sample"}
    other = STMoEConfig(**SPARSE, router="batch_prioritized", decoder_router="token_choice")
    assert other.sparse_config(decoder=True).router == "token_choice"
    assert other.sparse_config(decoder=False).router == "batch_prioritized"
    options = {"second_expert_policy": "all"}
    own = STMoEConfig(**SPARSE, decoder_router_options=options)
    assert own.sparse_config(decoder=False).router_options == {}
    assert own.sparse_config(decoder=True).router_options == options


@pytest.mark.parametrize(("reference", "reduction"), [("mesh_tensorflow", "sum"), ("flaxformer", "mean")])
def test_a_reference_sets_the_layers_and_the_reduction_over_them(reference, reduction):
    config = STMoEConfig.after(reference, **SPARSE)
    layer = config.sparse_config(decoder=False)
    assert config.router_loss_reduction == reduction
    expected = SparseConfig.after(reference, d_model=layer.d_model, d_ff=layer.d_ff, num_experts=5)
    for name in REFERENCES[reference]:
        assert getattr(layer, name) == getattr(expected, name)


def test_a_reference_gives_every_router_the_options_that_it_has():
    config = STMoEConfig.after("flaxformer", **SPARSE, router="expert_choice", decoder_router="bias_balanced")
    assert config.sparse_config(decoder=False).router_options == {"softmax_over": "experts"}
    assert config.sparse_config(decoder=True).router_options == {"normalize_gates": False}
    config = STMoEConfig.after("mesh_tensorflow", **SPARSE, router="expert_choice", decoder_router="token_choice")
    assert config.sparse_config(decoder=False).router_options == {"softmax_over": "tokens"}


def test_a_configuration_keeps_its_own_copy_of_the_router_options():
    options = {"second_expert_policy": "all"}
    config = STMoEConfig(**SPARSE, router_options=options)
    options["second_expert_policy"] = "none"
    assert config.router_options == {"second_expert_policy": "all"}


def test_an_unknown_preset_names_the_closest():
    with pytest.raises(ConfigError, match="Did you mean 'st-moe-32b'"):
        STMoEConfig.from_preset("st-moe-32")


def test_a_config_survives_saving(tmp_path):
    routers = {"router_options": {"second_expert_policy": "all"}, "decoder_router": "bias_balanced"}
    config = STMoEConfig.from_preset("st-moe-base", eval_capacity_factor=None, expert_bias="multiplicative", **routers)
    config.save_pretrained(tmp_path)
    assert STMoEConfig.from_pretrained(tmp_path).to_diff_dict() == config.to_diff_dict()
