"""Keywords and attributes of an STMoEConfig that are no fields of it.

transformers defines some for every model; a config.json may have others, which are kept and change
nothing; in code an unknown keyword is an error. The config is taken as a PreTrainedConfig, for its
class calls these functions.
"""

import difflib
import json
import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig

from moe.checks import check, check_flag, check_integer, shown
from moe.errors import ConfigError, did_you_mean
from moe.sparse.router_options import router_options_by_name

_MAX_LABELS = 2**20

_KEPT_BY_TRANSFORMERS = {
    "add_cross_attention",
    "cross_attention_hidden_size",
    "finetuning_task",
    "gradient_checkpointing",
    "is_decoder",
    "keys_to_ignore_at_inference",
    "prefix",
    "pruned_heads",
    "quantization_config",
    "sep_token_id",
    "task_specific_params",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tie_last_hidden_states",
    "tokenizer_class",
    "torchscript",
    "use_bfloat16",
}
"""Keywords that transformers defines for every model and keeps as attributes."""

_READ_BY_TRANSFORMERS = {
    "_attn_implementation",
    "_commit_hash",
    "_name_or_path",
    "attn_implementation",
    "auto_map",
    "experts_implementation",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "per_layer_config",
    "quantization_config",
    "torch_dtype",
}

_WRITTEN_BY_TRANSFORMERS = ("distributed_config", "quantization_config")
_TEXTS = ("finetuning_task", "prefix", "tokenizer_class")
_MAPPINGS = ("auto_map", "task_specific_params")
_IMPLEMENTATIONS = ("_attn_implementation", "attn_implementation", "experts_implementation")
_OPTIONAL_FLAGS = (
    "add_cross_attention",
    "gradient_checkpointing",
    "output_attentions",
    "tf_legacy_loss",
    "tie_last_hidden_states",
    "torchscript",
    "use_bfloat16",
)
_ONLY_EMPTY = {
    "is_decoder": "the model has both stacks",
    "per_layer_config": "all blocks have the same sizes",
    "pruned_heads": "all blocks have the same heads",
    "tie_encoder_decoder": "the stacks have weights of their own",
}


def check_keywords(config: PreTrainedConfig, kwargs: dict[str, Any]) -> None:
    """Checks the keywords that are given beyond the fields of a config.

    A config.json may have fields of its own, as those of T5 do; the version of transformers in it
    tells it from keywords in code.

    Args:
        config: Whose fields are set already.
        kwargs: Everything else that was given; other names of our fields are taken out.

    Raises:
        ConfigError: When a keyword is unknown and of no config.json, hides a method, or has a value
            that is wrong.
    """
    # Other models' names of our fields, such as hidden_size.
    for alias in config.attribute_map:
        if alias in kwargs:
            setattr(config, alias, kwargs.pop(alias))

    # In code an unknown keyword is a mistake, in a file a field of another version or library.
    known = _known_to_transformers()
    unknown = [name for name in kwargs if name not in known]
    for name in unknown:
        if config.transformers_version is None:
            _refuse_unknown(config, name, kwargs[name])
        _refuse_hiding(config, name)

    if unknown:
        descriptions = []
        for name in unknown:
            suggestion = _suggest_misspelt(config, name)
            descriptions.append(f"{name} ({shown(kwargs[name])}){suggestion}")
        warnings.warn(
            "The config has fields that STMoEConfig does not read: "
            f"{', '.join(descriptions)}. They are kept as attributes and change nothing.",
            stacklevel=2,
        )
    _check_common(config, kwargs)


def check_names(config: PreTrainedConfig, settings: Mapping[str, Any]) -> None:
    """Raises a ConfigError for a setting that neither the config nor transformers has."""
    known = _known_to_transformers() | set(_field_names(config)) | set(config.attribute_map)
    for name in settings:
        if name not in known:
            _refuse_unknown(config, name, settings[name])


def _known_to_transformers() -> set[str]:
    """Returns the keywords of every config of transformers."""
    of_generation = set(GenerationConfig._get_default_generation_params())
    return _READ_BY_TRANSFORMERS | _KEPT_BY_TRANSFORMERS | of_generation


def _field_names(config: PreTrainedConfig) -> list[str]:
    return [item.name for item in fields(config)]


def _refuse_unknown(config: PreTrainedConfig, name: str, value: object) -> None:
    """Raises a ConfigError for an unknown keyword, with the name that was probably meant."""
    # Options of a router are often given beside it.
    routers_by_option = router_options_by_name()
    if name in routers_by_option:
        raise ConfigError(
            f"STMoEConfig has no field {name!r} (value {shown(value)}): it is an option of "
            f"{', '.join(routers_by_option[name])}. Give it inside router_options or "
            "decoder_router_options."
        )
    suggestion = did_you_mean(name, _field_names(config))
    raise ConfigError(
        f"STMoEConfig has no field {name!r} (value {shown(value)}).{suggestion} "
        "Remove it or correct its name."
    )


def _suggest_misspelt(config: PreTrainedConfig, name: str) -> str:
    """Returns a question for the field whose name is one letter or two away, or an empty text."""
    close = difflib.get_close_matches(name, _field_names(config), n=1, cutoff=0.85)
    return f" Did you mean {close[0]!r}?" if close else ""


def _refuse_hiding(config: PreTrainedConfig, name: str) -> None:
    """Raises a ConfigError when an attribute would hide a method or property of the config."""
    of_transformers = name in _KEPT_BY_TRANSFORMERS | _READ_BY_TRANSFORMERS
    is_plan = name.startswith("base_model_") and name != "base_model_tp_plan"
    settable = of_transformers or is_plan or name in _field_names(config)
    if hasattr(type(config), name) and not settable:
        raise ConfigError(
            f"{name} cannot be a field of a config.json: STMoEConfig has something of that "
            "name. Rename it."
        )


def _check_common(config: PreTrainedConfig, kwargs: Mapping[str, Any]) -> None:
    """Checks the keywords that transformers defines for every model."""
    for name in _TEXTS:
        value = kwargs.get(name)
        check(value is None or isinstance(value, str), name, value, "a text")
    for name in _MAPPINGS:
        value = kwargs.get(name)
        check(value is None or isinstance(value, Mapping), name, value, "a mapping")
    for name in _OPTIONAL_FLAGS:
        if kwargs.get(name) is not None:
            check_flag(name, kwargs[name])
    for name, reason in _ONLY_EMPTY.items():
        check(not kwargs.get(name), name, kwargs.get(name), f"nothing here: {reason}")
    for name in _IMPLEMENTATIONS:
        value = kwargs.get(name)
        check(value is None or isinstance(value, str | Mapping), name, value, "a name, e.g. eager")
    check_dtype("torch_dtype", kwargs.get("torch_dtype"))

    # transformers accepts its own class or the fields of it.
    quantization = kwargs.get("quantization_config")
    is_config = isinstance(quantization, Mapping) or hasattr(quantization, "to_dict")
    check(
        quantization is None or is_config,
        "quantization_config",
        quantization,
        "a configuration of transformers, or its fields",
    )

    # A classifier with one label has nothing to choose from.
    num_labels = kwargs.get("num_labels")
    check_integer(
        "num_labels",
        num_labels,
        least=1,
        most=_MAX_LABELS,
        reason="each gets a name",
        optional="null for two",
    )
    names_one = isinstance(config.id2label, Mapping) and len(config.id2label) == 1
    if num_labels == 1 or names_one:
        check(
            config.problem_type != "single_label_classification",
            "problem_type",
            config.problem_type,
            "another with one label, e.g. regression",
        )


def check_dtype(name: str, value: object) -> None:
    """Raises a ConfigError unless a dtype is None or of floating point, as torch's or by name."""
    dtype = getattr(torch, value, None) if isinstance(value, str) else value
    is_floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    expected = "the name of a floating-point dtype of torch, e.g. float32 or bfloat16"
    check(value is None or is_floating, name, value, expected)


def check_savable(config: PreTrainedConfig) -> None:
    """Checks that the attributes of a config can be written, and load again.

    Raises:
        ConfigError: When an attribute has the name of a method, or a value that JSON does not have.
    """
    for name, value in vars(config).items():
        if not name.startswith("_"):
            _refuse_hiding(config, name)

        # What transformers writes in a form of its own, or leaves out.
        is_written = name in _WRITTEN_BY_TRANSFORMERS and hasattr(value, "to_dict")
        if name == "dtype" or is_written:
            continue

        try:
            json.dumps(PreTrainedConfig._encode_special_floats(value))
        except (TypeError, ValueError, RecursionError) as failure:
            raise ConfigError(
                f"{name} of the config is {shown(value)}, which config.json cannot hold "
                f"({failure}). Set it to plain numbers, texts, lists or mappings, or delete it "
                "before saving."
            ) from failure
