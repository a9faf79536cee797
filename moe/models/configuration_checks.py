"""Validation of an STMoEConfig: types by `@strict`, unknown keywords, bounds, and contradictions.

The functions take a PreTrainedConfig, since STMoEConfig imports this module.
"""

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import (
    StrictDataclassClassValidationError,
    StrictDataclassFieldValidationError,
)
from transformers import GenerationConfig, PreTrainedConfig

from moe.checks import check, check_integer, check_number, describe_type, shown
from moe.errors import CheckpointError, ConfigError, did_you_mean
from moe.sparse.all_routers import load_routers
from moe.sparse.config import SparseConfig

C = TypeVar("C", bound=type[PreTrainedConfig])

SIZES = (
    "vocab_size",
    "d_model",
    "d_kv",
    "d_ff",
    "num_layers",
    "num_decoder_layers",
    "num_heads",
    "relative_attention_num_buckets",
    "relative_attention_max_distance",
)
"""Fields that are at least 1."""

CARRIED_KEYWORDS = (
    "_commit_hash",
    "_name_or_path",
    "auto_map",
    "finetuning_task",
    "prefix",
    "quantization_config",
    "task_specific_params",
    "tokenizer_class",
)
"""Keywords that pipelines, tokenizers and quantizers read from a config, but no class declares."""

_REMOVED_FIELDS = ("encoder_expert_maps", "decoder_expert_maps")


# ---------------------------------------------------------------------------
# Types


def strict_config(config_class: C) -> C:
    """Returns the class with transformers' `@strict`, whose errors become ConfigErrors.

    Each field is checked against its annotation whenever it is set; `validate_*` methods run at the
    end of the constructor, in `validate` and in `save_pretrained`.
    """
    validated: Any = strict(config_class)
    strict_setattr = validated.__setattr__
    strict_validate = validated.validate

    def set_field(self: Any, name: str, value: object) -> None:
        name = self.attribute_map.get(name, name)
        try:
            strict_setattr(self, name, value)
        except StrictDataclassFieldValidationError as error:
            expected = describe_type(validated.__dataclass_fields__[name].type)
            raise ConfigError(f"{name} is {shown(value)}; expected {expected}.") from error

    def validate(self: Any) -> None:
        try:
            strict_validate(self)
        except StrictDataclassClassValidationError as error:
            cause = error.__cause__
            raise cause if isinstance(cause, ConfigError) else ConfigError(str(cause)) from error

    validated.__setattr__ = set_field
    validated.validate = validate
    return validated


# ---------------------------------------------------------------------------
# Keywords


def drop_removed_fields(keywords: dict[str, Any]) -> None:
    """Removes fields of earlier versions, which a config.json may have as null.

    Raises:
        ConfigError: When one is not null.
    """
    expected = "None: models with merged experts load up to commit f5fe3075 alone"
    for name in _REMOVED_FIELDS:
        check(keywords.get(name) is None, name, keywords.get(name), expected)
        keywords.pop(name, None)


def check_keywords(config: PreTrainedConfig, keywords: Mapping[str, Any]) -> None:
    """Checks the keywords beyond the fields of a config.

    In code, an unknown keyword is a mistake. A config.json, recognized by its transformers version,
    may contain fields of another library: they are kept, with a warning.

    Raises:
        ConfigError: When a keyword is unknown, or would hide a method of the config.
    """
    unknown = keywords.keys() - _keywords_of_transformers()
    hiding = {name for name in unknown if hasattr(type(config), name)}
    refuse_unknown(config, unknown if config.transformers_version is None else hiding)
    if unknown:
        described = ", ".join(f"{name} ({shown(keywords[name])})" for name in sorted(unknown))
        warnings.warn(
            f"The config has fields that STMoEConfig does not read: {described}. They are kept as attributes but have "
            "no effect.",
            stacklevel=2,
        )


def check_settings(config: PreTrainedConfig, settings: Iterable[str]) -> None:
    """Raises a ConfigError for a setting unknown to both the config and transformers."""
    known = _keywords_of_transformers() | {*_field_names(config), *config.attribute_map}
    refuse_unknown(config, set(settings) - known)


def refuse_unknown(config: PreTrainedConfig, unknown: set[str]) -> None:
    """Raises a ConfigError for the first unknown keyword, with the closest name."""
    for name in sorted(unknown):
        raise ConfigError(
            f"STMoEConfig has no field {name!r}.{did_you_mean(name, _field_names(config))} Remove "
            "it or correct its name."
        )


def _keywords_of_transformers() -> set[str]:
    """Returns the keywords that transformers' constructor reads for every model."""
    # Fields and properties; `_attn_implementation` is set by the keyword attn_implementation.
    names = {*CARRIED_KEYWORDS, *vars(GenerationConfig())}
    for name in dir(PreTrainedConfig):
        if not name.startswith("__") and not callable(getattr(PreTrainedConfig, name)):
            names |= {name, name.removeprefix("_")}
    return names


def _field_names(config: PreTrainedConfig) -> list[str]:
    return [field.name for field in fields(config)]


# ---------------------------------------------------------------------------
# Bounds and contradictions


def check_source(source: object) -> None:
    """Raises for a value that is neither a folder nor a hub name.

    Raises:
        ConfigError: When it is no text, or empty.
        CheckpointError: When it is the path of a folder that does not exist.
    """
    text = str(source) if isinstance(source, str | os.PathLike) else ""
    check(bool(text.strip()), "The source of the model", source, "a folder, or a name of the hub")
    is_path = text.startswith(("/", ".", "~")) or text.count("/") > 1
    if is_path and not Path(text).exists():
        raise CheckpointError(
            f"There is no folder {text}. Give one with a checkpoint, or a name of the hub."
        )


def check_sizes(config: PreTrainedConfig) -> None:
    """Checks the sizes of the backbone, and that the relative position buckets can be laid out."""
    for name in SIZES:
        check_integer(name, getattr(config, name), least=1)
    check_integer("expert_d_ff", config.expert_d_ff, least=1, optional="None for d_ff")
    check_dtype(config.dtype)
    classes = config.architectures
    check(classes is None or isinstance(classes, list), "architectures", classes, "a list of names")

    # Each direction has half of the buckets, and half of those hold single distances.
    num_buckets = config.relative_attention_num_buckets
    check(num_buckets % 4 == 0, "relative_attention_num_buckets", num_buckets, "a multiple of 4")
    max_distance = config.relative_attention_max_distance
    check(
        max_distance > num_buckets // 2,
        "relative_attention_max_distance",
        max_distance,
        f"more than half of relative_attention_num_buckets, {num_buckets // 2}",
    )


def check_dtype(dtype: object) -> None:
    """Raises a ConfigError unless a dtype is None or of floating point, as torch's or by name."""
    torch_dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    is_floating = isinstance(torch_dtype, torch.dtype) and torch_dtype.is_floating_point
    expected = "the name of a floating-point dtype of torch, e.g. float32 or bfloat16"
    check(dtype is None or is_floating, "dtype", dtype, expected)


def check_rates(config: PreTrainedConfig) -> None:
    """Checks the rates, weights and scales outside of sparse layers."""
    for name in ("dropout_rate", "label_smoothing"):
        check_number(name, getattr(config, name), least=0, below=1)
    for name in ("load_balance_loss_weight", "router_z_loss_weight", "z_loss_weight"):
        check_number(name, getattr(config, name), least=0)
    for name in ("layer_norm_epsilon", "initializer_scale"):
        check_number(name, getattr(config, name), above=0)

    unknown = "None when unknown"
    check_number("noise_density", config.noise_density, above=0, below=1, optional=unknown)
    check_number("mean_noise_span_length", config.mean_noise_span_length, least=1, optional=unknown)


def check_token_ids(config: PreTrainedConfig) -> None:
    """Checks that the ids of special tokens are in the vocabulary."""
    expected = f"a token id below vocab_size, {config.vocab_size}"
    for name in ("pad_token_id", "decoder_start_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(config, name)
        ids = value if isinstance(value, list) else [value]
        are_ids = len(ids) > 0 and all(0 <= i < config.vocab_size for i in ids if i is not None)
        check(are_ids, name, value, expected)


def check_sparse_layers(config: PreTrainedConfig) -> None:
    """Raises a ConfigError when numbers of experts, layers and sparse layers contradict."""
    check_integer("num_experts", config.num_experts, least=0)
    for stack, decoder in (("encoder", False), ("decoder", True)):
        name = f"num_sparse_{stack}_layers"
        num_layers, num_sparse = config.stack_sizes(decoder)
        check_integer(name, num_sparse, least=0)
        divides = not num_sparse or num_layers % num_sparse == 0
        check(
            divides, name, num_sparse, f"0 or a divisor of the {num_layers} blocks of the {stack}"
        )

        # Layers of a stack may differ in their experts.
        name = f"{stack}_experts"
        layer_experts = config.layer_experts(decoder=decoder)
        expected = f"a number for each of the {num_sparse} sparse layers of the {stack}"
        check(len(layer_experts) == num_sparse, name, layer_experts, expected)

    # A dense model has neither experts nor sparse layers.
    numbers = config.layer_experts(decoder=False) + config.layer_experts(decoder=True)
    expected = f"{max(numbers, default=0)}, the largest number of experts of a sparse layer, or 0 without any"
    check(
        config.num_experts == max(numbers, default=0), "num_experts", config.num_experts, expected
    )
    is_sparse = config.num_experts > 0 or not numbers
    check(is_sparse, "num_experts", config.num_experts, "at least 1 where there are sparse layers")

    # Also of a dense model, which may be given experts.
    for router in (config.router, config.decoder_router or config.router):
        load_routers().get(router)
    config.all_sparse_configs()


def refuse_quantized(
    config: PreTrainedConfig | SparseConfig, purpose: str, source: os.PathLike[str] | str = "MODEL"
) -> None:
    """Raises a ConfigError when the experts of a model are quantized.

    Args:
        config: Config of the model.
        purpose: What needs experts of floats, as the end of a sentence.
        source: Folder or hub name of the model.
    """
    quantization = getattr(config, "expert_quantization", None)  # dense hosts have none
    if quantization is not None:
        raise ConfigError(
            f"The experts are quantized to {quantization['bits']} bits, and only experts of floats "
            f"can be {purpose}. Dequantize the model first: stmoe convert --from {source} --to FOLDER."
        )
