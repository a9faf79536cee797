"""Counts against the published numbers (presets name the sources) and against built models; errors
at the door.
"""

import copy
import json
import pickle
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import SwitchTransformersConfig, T5Config

from moe import PRESETS, ConfigError, MoEError, STMoEConfig, STMoEForConditionalGeneration
from moe.sparse.all_routers import load_routers
from moe.sparse.routers.token_choice import TokenChoiceOptions
from tests.models.tiny import FIELDS

SPARSE = {"num_experts": 5, "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2}
PUBLISHED = {"st-moe-l": 4_105_444_352, "st-moe-32b": 269_104_613_376, "t5-1.1-large": 783_150_080}
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


def test_parameters_are_the_published_numbers():
    for name, expected in PUBLISHED.items():
        assert STMoEConfig.from_preset(name).num_parameters() == expected, name
    for name, billions in ROUNDED.items():
        assert round(STMoEConfig.from_preset(name).num_parameters() / 1e9, 1) == billions, name


def test_the_count_of_every_preset_equals_the_model_that_is_built():
    """One stretch of blocks in each stack: the other stretches repeat it."""
    for name in PRESETS.names():
        config = STMoEConfig.from_preset(name)
        layers = config.num_layers // max(1, config.num_sparse_encoder_layers)
        sizes = {"num_layers": layers, "num_decoder_layers": layers}
        if config.num_experts:
            sizes |= {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
        shallow = config.replaced(**sizes)
        with torch.device("meta"):
            model = STMoEForConditionalGeneration(shallow)
        assert sum(p.numel() for p in model.parameters()) == shallow.num_parameters(), name
        assert PRESETS.get(name).source


def test_the_sparse_blocks_are_the_last_of_each_stretch():
    config = STMoEConfig.from_preset("st-moe-l")
    sparse = [block for block in range(24) if config.is_sparse_block(block, decoder=False)]
    assert sparse == [3, 7, 11, 15, 19, 23]


def test_the_second_block_of_a_stretch_is_where_transformers_puts_the_experts():
    fields = {"num_experts": 3, "num_decoder_layers": 5, "sparse_position": "second"}
    for layers, num_sparse in [(1, 1), (6, 6), (6, 3), (6, 2), (6, 1), (12, 4)]:
        config = STMoEConfig(**fields, num_layers=layers, num_sparse_encoder_layers=num_sparse)
        sparse = [block for block in range(layers) if config.is_sparse_block(block, decoder=False)]
        step = layers // num_sparse  # SwitchTransformersStack of 5.23.0
        assert sparse == [block for block in range(layers) if block % step == 1 or step == 1]
        assert not any(config.is_sparse_block(block, decoder=True) for block in range(5))


def test_active_parameters_count_two_of_the_experts():
    config = STMoEConfig.from_preset("st-moe-32b")
    expert = 3 * 5120 * 20480
    assert config.num_parameters() - config.num_active_parameters() == 12 * 62 * expert


# Single values out of range are drawn below; these contradict others, or are close to a name.
WRONG = [
    ({"num_expert": 3}, "'num_expert'.*'num_experts'"),
    ({"num_experts": 5}, "num_experts is 5; .* or 0 without any"),
    ({"num_experts": 5, "num_sparse_encoder_layers": 5}, "layers is 5; .* divisor of the 12"),
    ({"eos_token_id": [1, 40_000]}, r"eos_token_id is \[1, 40000\]; .* below vocab_size"),
    ({"relative_attention_max_distance": 16}, "relative_attention_max_distance is 16"),
    ({"is_decoder": True}, "'is_decoder'"),
    ({"router": "swich"}, "'switch'"),
    ({**SPARSE, "router": "expert_choice"}, "decoder.*decoder_router"),
    ({**SPARSE, "router_options": {"jiter": 0.1}}, "'token_choice' has no option 'jiter'"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_a_config_whose_numbers_are_wrong_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        STMoEConfig(**fields)


@pytest.mark.parametrize("router", load_routers().names())
def test_parameters_of_every_router_are_counted_before_anything_is_built(router):
    fields = FIELDS | {"router": router, "router_options": None, "decoder_router": "switch"}
    fields |= {"num_selected_experts": 1, "expert_bias": "multiplicative", "num_shared_experts": 2}
    for router_input in ("hidden",) if router == "hash" else ("hidden", "concat"):
        config = STMoEConfig(**fields, router_input=router_input)
        built = STMoEForConditionalGeneration(config)
        assert sum(p.numel() for p in built.parameters()) == config.num_parameters()
        assert isinstance(built.sparse_layers()[0].router, load_routers().get(router))


def test_the_decoder_takes_over_the_router_and_its_options_unless_it_has_its_own():
    same = STMoEConfig(
        **SPARSE, num_selected_experts=1, router="switch", router_options={"policy": "sample"}
    )
    assert same.sparse_config(decoder=True).router_options == {"policy": "sample"}
    other = STMoEConfig(**SPARSE, router="batch_prioritized", decoder_router="token_choice")
    assert other.sparse_config(decoder=True).router == "token_choice"
    assert other.sparse_config(decoder=False).router == "batch_prioritized"
    options = {"second_expert_policy": "all"}
    own = STMoEConfig(**SPARSE, decoder_router_options=options)
    assert own.sparse_config(decoder=False).router_options == {}
    assert own.sparse_config(decoder=True).router_options == options


def test_a_convention_gives_every_router_the_options_that_it_has():
    routers = {"router": "expert_choice", "decoder_router": "bias_balanced"}
    config = STMoEConfig(**SPARSE, **routers, convention="flaxformer")
    assert config.sparse_config(decoder=False).router_options == {"softmax_over": "experts"}
    assert config.sparse_config(decoder=True).router_options == {"normalize_gates": False}
    own = {"second_expert_policy": "none"}
    config = STMoEConfig(**SPARSE, router_options=own, convention="mesh_tensorflow")
    options = config.sparse_config(decoder=False).router_options
    assert options == {"second_expert_policy": "none", "eval_second_expert_policy": "random"}


EARLIER = {
    "ours": {"capacity_rounding": "floor"},
    "mesh_tensorflow": {"balance_over": "all_positions", "router_initializer_std": None},
    "flaxformer": {
        "capacity_rounding": "round",
        "balance_choices": "all",
        "router_z_loss_over": "all_positions",
        "router_loss_reduction": "mean",
    },
    "switch": {"capacity_scope": "sequence", "router_loss_reduction": "mean"},
}


@pytest.mark.parametrize("convention", EARLIER)
def test_a_config_of_an_earlier_version_gets_its_convention_and_keeps_its_options(convention):
    fields = {**SPARSE, "transformers_version": "5.17.0", **EARLIER[convention]}
    config = STMoEConfig.from_dict(fields)
    assert config.convention == convention
    assert STMoEConfig.from_dict(config.to_dict()) == config

    # Such a file left out options with our defaults, which the convention must not change.
    for decoder in (False, True):
        layer = config.sparse_config(decoder=decoder)
        assert TokenChoiceOptions(**layer.router_options) == TokenChoiceOptions()
    given = STMoEConfig.from_dict({**fields, "router_options": {"normalize_gates": False}})
    assert given.sparse_config(decoder=True).router_options["normalize_gates"] is False


def test_an_earlier_config_of_no_convention_is_refused_by_its_values():
    with pytest.raises(
        ConfigError, match=r"capacity_scope 'sequence', balance_choices 'all'.* ours"
    ):
        STMoEConfig(**SPARSE, balance_choices="all", capacity_scope="sequence")


def test_what_transformers_defines_for_every_config_is_kept_and_loads_again(tmp_path):
    told = {
        "eos_token_id": [1, 5],
        "bos_token_id": 3,
        "tokenizer_class": "T5Tokenizer",
        "prefix": "summarize: ",
        "task_specific_params": {"summarization": {"num_beams": 4}},
        "quantization_config": {"quant_method": "torchao"},
        "output_hidden_states": True,
        "id2label": {0: "no", 1: "yes", 2: "perhaps"},
        "problem_type": "regression",
    }
    for kind in (T5Config, STMoEConfig):
        kind(**told).save_pretrained(tmp_path)
        loaded = kind.from_pretrained(tmp_path)
        assert {name: getattr(loaded, name) for name in told} == told
    STMoEConfig(eos_token_id=None).save_pretrained(tmp_path)
    assert STMoEConfig.from_pretrained(tmp_path).eos_token_id is None


ROUTERS = {
    "router_options": {"second_expert_policy": "all"},
    "decoder_router": "bias_balanced",
    "eval_capacity_factor": None,
    "expert_bias": "multiplicative",
}


@pytest.mark.parametrize(("name", "fields"), [("st-moe-base", ROUTERS), ("t5-1.1-small", {})])
def test_a_config_equals_what_is_read_back_of_it_and_no_other(name, fields, tmp_path):
    config = STMoEConfig.from_preset(name, eos_token_id=[1, 3], dtype="bfloat16", **fields)
    config.save_pretrained(tmp_path)
    copies = [
        STMoEConfig.from_pretrained(tmp_path),
        STMoEConfig.from_dict(config.to_dict()),
        STMoEConfig.from_dict(_fields_of(config)),
        copy.copy(config),
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
        config.replaced(),
    ]
    assert all(again == config for again in copies)
    assert config.replaced(dropout_rate=0.3) != config
    assert config != config.to_dict()


def test_a_field_that_is_set_to_another_type_is_refused_at_once():
    config = STMoEConfig()
    for name, value in (("is_encoder_decoder", "a"), ("hidden_size", 7.5)):
        field = config.attribute_map.get(name, name)
        with pytest.raises(ConfigError, match=f"{field} is {value!r}; expected"):
            setattr(config, name, value)
    assert config == STMoEConfig()


def test_fields_that_contradict_each_other_when_set_are_refused_by_the_model_and_at_save(tmp_path):
    config = STMoEConfig(**FIELDS)
    config.num_sparse_encoder_layers = 0
    config.num_sparse_decoder_layers = 0
    with pytest.raises(ConfigError, match="num_experts is"):
        STMoEForConditionalGeneration(config)
    with pytest.raises(ConfigError, match="num_experts is"):
        config.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_names_that_transformers_gives_to_fields_are_keywords():
    config = STMoEConfig(hidden_size=64, num_attention_heads=5)
    assert (config.d_model, config.num_heads) == (64, 5)


def test_an_attribute_that_was_set_loads_again_and_is_named(tmp_path):
    config = STMoEConfig()
    config.lab_tag, config.num_expert = "a", 5
    config.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"lab_tag \('a'\), num_expert \(5\)\. They are kept"):
        loaded = STMoEConfig.from_pretrained(tmp_path)
    assert (loaded.lab_tag, loaded.num_expert) == ("a", 5)
    with pytest.raises(ConfigError, match=r"no field 'num_exparts'.*Did you mean 'num_experts'"):
        config.replaced(num_exparts=5)


def _fields_of(config):
    return json.loads(config.to_json_string(use_diff=False))


VALID = {
    "st_moe": _fields_of(STMoEConfig(**FIELDS)),
    "t5": _fields_of(T5Config(vocab_size=131, d_model=29, num_layers=2)),
    "switch_transformers": _fields_of(
        SwitchTransformersConfig(vocab_size=131, d_model=29, num_layers=2)
    ),
}
SCALARS = [None, True, -1, 0, 1, 2**31, 10**18, 10**400, 0.5, float("nan"), float("inf")]
WORDS = ["no", "true", "relu", "gated-gelu", "float32", "float7", "switch", "expert_choice", "1"]
JSON = st.recursive(
    st.sampled_from([*SCALARS, *WORDS]) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)


@pytest.mark.slow
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_config_json_loads_and_saves_or_is_refused_by_the_name_of_a_field(tmp_path, data):
    kind = data.draw(st.sampled_from(list(VALID)))
    names = st.sampled_from(sorted(VALID[kind])) | st.sampled_from(
        ["lab_tag", "to_dict", "rope_theta", "__class__"]
    )
    changes = data.draw(st.dictionaries(names, JSON, min_size=1, max_size=2))
    missing = data.draw(st.sets(st.sampled_from(sorted(VALID[kind])), max_size=2))
    content = {
        name: value for name, value in {**VALID[kind], **changes}.items() if name not in missing
    }
    (tmp_path / "config.json").write_text(json.dumps(content))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = STMoEConfig.from_pretrained(tmp_path)
        except MoEError as error:
            known = {*content, *VALID["st_moe"], *VALID[kind], "JSON", "model of type", "outer "}
            known |= {"feed-forward layers", "layers in the", "transformers cannot"}
            assert any(name in str(error) for name in known), str(error)
            assert len(str(error)) < 1000
            return
        config.save_pretrained(tmp_path)
        again = STMoEConfig.from_pretrained(tmp_path)
    # Transformers does not write where a config comes from, nor default labels.
    before, after = config.to_dict(), again.to_dict()
    for name in ("_name_or_path", "id2label", "label2id"):
        before.pop(name, None)
        after.pop(name, None)
    assert json.dumps(after, sort_keys=True) == json.dumps(
        before, sort_keys=True
    )  # where NaN is equal to NaN
    assert again.num_parameters() > 0
