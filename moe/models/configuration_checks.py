"""Validation of an STMoEConfig: types by `@strict`, unknown keywords, bounds, and contradictions.

The functions take a PreTrainedConfig, since STMoEConfig imports this module.
"""

import difflib
import numbers
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
from moe.sparse.router_options import check_causal, router_options_by_name

C = TypeVar("C", bound=type[PreTrainedConfig])

LARGEST_SIZES = {
    "vocab_size": 2**26,
    "d_model": 2**20,
    "d_kv": 2**20,
    "d_ff": 2**24,
    "num_layers": 1024,
    "num_decoder_layers": 1024,
    "num_heads": 2**16,
    "relative_attention_num_buckets": 2**16,
    "relative_attention_max_distance": 2**31,
}
"""Larger values are typing errors, and would exhaust memory before anything else fails."""

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
_MAX_LABELS = 2**20
_MAX_WEIGHT = 1e30


# ---------------------------------------------------------------------------
# Types


def strict_config(config_class: C) -> C:
    """Returns the class with transformers' `@strict`, whose errors become ConfigErrors.

    Each field is checked against its annotation whenever it is set; `validate_*` methods run at the
    end of the constructor, in `validate` and in `save_pretrained`. Numbers of numpy become Python's.
    """
    validated: Any = strict(config_class)
    strict_setattr = validated.__setattr__
    strict_validate = validated.validate

    def set_field(self: Any, name: str, value: object) -> None:
        name = self.attribute_map.get(name, name)
        try:
            strict_setattr(self, name, _plain_value(value))
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


def _plain_value(value: Any) -> Any:
    """Returns a value in JSON's types: numpy's numbers as Python's, and mappings as a copy."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, int):
        return float(value)
    if isinstance(value, Mapping):
        return dict(value)
    return value


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
        descriptions = []
        for name in sorted(unknown):
            close = difflib.get_close_matches(name, _field_names(config), n=1, cutoff=0.85)
            suggestion = f" Did you mean {close[0]!r}?" if close else ""
            descriptions.append(f"{name} ({shown(keywords[name])}){suggestion}")
        warnings.warn(
            f"The config has fields that STMoEConfig does not read: {', '.join(descriptions)}. They are kept as "
            "attributes but have no effect.",
            stacklevel=2,
        )
    # transformers names each label, so that a wrong number would fill the memory.
    check_integer(
        "num_labels", keywords.get("num_labels"), least=1, most=_MAX_LABELS, optional="None for two"
    )
    quantization = keywords.get("quantization_config")
    is_record = quantization is None or isinstance(quantization, Mapping)
    is_record = is_record or hasattr(quantization, "to_dict")
    check(is_record, "quantization_config", quantization, "a mapping of a quantizer's settings")


def check_settings(config: PreTrainedConfig, settings: Iterable[str]) -> None:
    """Raises a ConfigError for a setting unknown to both the config and transformers."""
    known = _keywords_of_transformers() | {*_field_names(config), *config.attribute_map}
    refuse_unknown(config, set(settings) - known)


def refuse_unknown(config: PreTrainedConfig, unknown: set[str]) -> None:
    """Raises a ConfigError for the first unknown keyword, with the closest name."""
    for name in sorted(unknown):
        # Options of a router are often passed as keywords by mistake.
        routers = router_options_by_name().get(name)
        if routers:
            raise ConfigError(
                f"STMoEConfig has no field {name!r}: it is an option of {', '.join(routers)}. Pass "
                "it in router_options or decoder_router_options."
            )
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
    for name, largest in LARGEST_SIZES.items():
        check_integer(name, getattr(config, name), least=1, most=largest)
    largest = LARGEST_SIZES["d_ff"]
    follow = "None for d_ff"
    check_integer("expert_d_ff", config.expert_d_ff, least=1, most=largest, optional=follow)
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
        check_number(name, getattr(config, name), least=0, most=_MAX_WEIGHT)
    for name in ("layer_norm_epsilon", "initializer_scale"):
        check_number(name, getattr(config, name), above=0, most=_MAX_WEIGHT)

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
    for name in ("num_experts", "num_sparse_encoder_layers", "num_sparse_decoder_layers"):
        check_integer(name, getattr(config, name), least=0)
    num_sparse = config.num_sparse_encoder_layers + config.num_sparse_decoder_layers
    if (config.num_experts == 0) != (num_sparse == 0):
        raise ConfigError(
            f"num_experts is {shown(config.num_experts)}, but num_sparse_encoder_layers + "
            f"num_sparse_decoder_layers is {shown(num_sparse)}. A dense model has 0 of both, a sparse "
            "one at least 1 of each: set the other."
        )

    for name in ("router", "decoder_router"):
        router = getattr(config, name)
        try:
            if router is not None:
                load_routers().get(router)
        except ConfigError as error:
            raise ConfigError(f"{name} is {router!r}. {error}") from error

    # A router has no effect in a decoder without sparse layers.
    for name in ("decoder_router", "decoder_router_options"):
        value = getattr(config, name)
        if value is not None and not config.num_sparse_decoder_layers:
            raise ConfigError(
                f"{name} is {shown(value)}, but the decoder has no sparse layer that could use "
                "it. Leave it out, or set num_sparse_decoder_layers."
            )

    # The encoder's router may need tokens that a decoder has not seen yet.
    if config.num_sparse_decoder_layers and config.decoder_router is None:
        check_causal(config.router, "Set decoder_router to")
    for stack, decoder in (("encoder", False), ("decoder", True)):
        num_layers, num_sparse = config.stack_sizes(decoder)
        if num_sparse and num_layers % num_sparse:
            divisors = [number for number in range(1, num_layers + 1) if num_layers % number == 0]
            raise ConfigError(
                f"num_sparse_{stack}_layers is {num_sparse}, which does not divide the "
                f"{num_layers} blocks of the {stack}. Choose one of {divisors}."
            )

    _check_layer_experts(config)

    # Counting the parameters validates the settings of sparse layers.
    config.num_parameters()


def _check_layer_experts(config: PreTrainedConfig) -> None:
    """Checks the numbers of experts of layers that differ in them."""
    least = config.num_selected_experts
    numbers: list[int] = []
    for stack, decoder in (("encoder", False), ("decoder", True)):
        name = f"{stack}_experts"
        layer_experts = config.layer_experts(decoder=decoder)
        _, num_sparse = config.stack_sizes(decoder)
        expected = f"a number for each of the {num_sparse} sparse layers of the {stack}"
        check(len(layer_experts) == num_sparse, name, layer_experts, expected)
        expected = f"numbers of at least num_selected_experts, {least}"
        is_large = getattr(config, name) is None or min(layer_experts) >= least
        check(is_large, name, layer_experts, expected)
        numbers += layer_experts

    largest = max(numbers, default=0)
    expected = f"{shown(largest)}, the largest number of encoder_experts and decoder_experts"
    check(config.num_experts == largest, "num_experts", config.num_experts, expected)


def refuse_quantized(
    config: PreTrainedConfig, purpose: str, source: os.PathLike[str] | str = "MODEL"
) -> None:
    """Raises a ConfigError when the experts of a model are quantized.

    Args:
        config: Config of the model.
        purpose: What needs experts of floats, as the end of a sentence.
        source: Folder or hub name of the model.
    """
    if config.expert_quantization is not None:
        raise ConfigError(
            f"The experts are quantized to {config.expert_quantization['bits']} bits, and only experts of floats "
            f"can be {purpose}. Dequantize the model first: stmoe convert --from {source} --to FOLDER."
        )
