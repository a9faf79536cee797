"""Private names of transformers that the models rely on, and what breaks when one disappears."""

from transformers import PreTrainedConfig, PreTrainedModel, conversion_mapping, core_model_loading

from moe.models.transformers_private import PrivateConfigHooks, PrivateModelHooks, find_file

BREAKS = {
    (
        PreTrainedConfig,
        "_decode_special_floats",
    ): "infinite numbers in a config.json load as mappings",
    (PreTrainedConfig, "_dict_from_json_file"): "a torn config.json is reported in other words",
    (PreTrainedConfig, "_attn_implementation"): "attention is eager, whatever was asked for",
    (PreTrainedModel, "_check_and_adjust_attn_implementation"): "flash attention drops the bias",
    (PreTrainedModel, "_set_gradient_checkpointing"): "reentrant checkpointing loses gradients",
    (PreTrainedModel, "_load_pretrained_model"): "integers are read as weights",
    (PreTrainedModel, "get_init_context"): "bitsandbytes replaces no linear layer",
    (PreTrainedModel, "gather_sharded_state_dict_for_save"): "quantized experts cannot be saved",
    (PreTrainedModel, "_init_weights"): "weights that a checkpoint lacks are not initialised",
    (PreTrainedModel, "_get_files_timestamps"): "a push cannot tell new files",
    (conversion_mapping, "get_model_conversion_mapping"): "T5Gemma 2 cannot be converted",
    (core_model_loading, "rename_source_key"): "T5Gemma 2 cannot be converted",
    (PreTrainedModel, "_upload_modified_files"): "a push uploads nothing",
}


def test_transformers_still_has_the_private_names_that_are_overridden_or_called():
    for (owner, name), consequence in BREAKS.items():
        assert hasattr(owner, name), consequence


def test_every_private_hook_overrides_something():
    pairs = ((PrivateConfigHooks, PreTrainedConfig), (PrivateModelHooks, PreTrainedModel))
    for hooks, overridden in pairs:
        for name in vars(hooks):
            assert hasattr(overridden, name) or name.startswith("__"), name


def test_a_file_that_is_missing_is_none(tmp_path):
    (tmp_path / "there.json").write_text("{}")
    assert find_file(tmp_path, "there.json") == tmp_path / "there.json"
    assert find_file(tmp_path, "elsewhere.json") is None
