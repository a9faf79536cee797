"""Private names of transformers that the models rely on, and what breaks when one disappears."""

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerationMixin

from moe import STMoEConfig
from moe.models.transformers_private import PrivateConfigHooks, PrivateModelHooks, find_file

BREAKS = {
    (
        PreTrainedConfig,
        "_decode_special_floats",
    ): "infinite numbers in a config.json load as mappings",
    (PreTrainedConfig, "_dict_from_json_file"): "a torn config.json is reported in other words",
    (PreTrainedConfig, "_attn_implementation"): "attention is eager, whatever was asked for",
    (PreTrainedConfig, "_experts_implementation"): "experts_implementation changes nothing",
    (PreTrainedModel, "_check_and_adjust_attn_implementation"): "flash attention drops the bias",
    (PreTrainedModel, "_set_gradient_checkpointing"): "reentrant checkpointing loses gradients",
    (PreTrainedModel, "_load_pretrained_model"): "integers are read as weights",
    (PreTrainedModel, "_init_weights"): "weights that a checkpoint lacks are not initialised",
    (PreTrainedModel, "_get_files_timestamps"): "a push cannot tell new files",
    (PreTrainedModel, "_upload_modified_files"): "a push uploads nothing",
    (GenerationMixin, "_optimize_model_for_decode"): "decoding reads the weights of all experts",
    (GenerationMixin, "_get_static_cache_init_shape"): "static caches fail with tensor parallelism",
}
MISSING_IN_5_17 = {
    "_get_static_cache_init_shape",
    "_optimize_model_for_decode",
    "init_parallel_plans",
    "maybe_distribute_model",
}


def test_transformers_still_has_the_private_names_that_are_overridden_or_called():
    for (owner, name), consequence in BREAKS.items():
        assert hasattr(owner, name) or name in MISSING_IN_5_17, consequence


def test_every_private_hook_overrides_something():
    for hooks, owners in (
        (PrivateConfigHooks, (PreTrainedConfig,)),
        (PrivateModelHooks, (PreTrainedModel, GenerationMixin)),
    ):
        for name in vars(hooks):
            if name.startswith("__") or name == "_optimize_model_for_decode":
                continue
            assert any(hasattr(owner, name) for owner in owners) or name in MISSING_IN_5_17, name


def test_a_file_that_is_missing_is_none(tmp_path):
    (tmp_path / "there.json").write_text("{}")
    assert find_file(tmp_path, "there.json") == tmp_path / "there.json"
    assert find_file(tmp_path, "elsewhere.json") is None


def test_transformers_name_of_how_experts_are_run_sets_the_dispatch():
    config = STMoEConfig(experts_implementation="batched_mm")
    assert config.dispatch == "static"
    config._experts_implementation = {"": "grouped_mm"}
    assert config.dispatch == "ragged"
    assert "_experts_implementation" not in config.to_json_string(use_diff=False)
