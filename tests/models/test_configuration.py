"""Counts against the published numbers (presets name the sources) and against built models; errors at the door."""

import pytest
import torch

from moe import PRESETS, ConfigError, STMoEConfig, STMoEForConditionalGeneration
from moe.sparse.experts import Experts
from moe.sparse.router import TokenChoiceRouter

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
        p.numel()
        for module in model.modules()
        if isinstance(module, Experts | TokenChoiceRouter)
        for p in module.parameters()
    )
    dense = STMoEConfig.from_preset("t5-1.1-large")
    assert model.num_parameters() - routed == dense.num_parameters() + 12 * dense.d_model


def test_the_sparse_blocks_are_the_last_of_each_stretch():
    config = STMoEConfig.from_preset("st-moe-l")
    sparse = [block for block in range(24) if config.is_sparse_block(block, decoder=False)]
    assert sparse == [3, 7, 11, 15, 19, 23]


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
    ],
)
def test_a_config_whose_numbers_are_wrong_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        STMoEConfig(**fields)


def test_an_unknown_preset_names_the_closest():
    with pytest.raises(ConfigError, match="Did you mean 'st-moe-32b'"):
        STMoEConfig.from_preset("st-moe-32")


def test_a_config_survives_saving(tmp_path):
    config = STMoEConfig.from_preset("st-moe-base", eval_capacity_factor=None, expert_bias="multiplicative")
    config.save_pretrained(tmp_path)
    assert STMoEConfig.from_pretrained(tmp_path).to_diff_dict() == config.to_diff_dict()
