"""What must hold of an STMoEConfig; whatever does not is one message with the field, its value and
what to do.
"""

import copy
import difflib
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, NamedTuple, get_args

import torch
from transformers import GenerationConfig, PreTrainedConfig

from moe.checks import check, check_choice, check_flag, check_integer, check_number, shown
from moe.errors import ConfigError, did_you_mean
from moe.sparse.router import check_causal, load_routers, router_options_by_name

FeedForward = Literal["gated-gelu", "relu"]
Reduction = Literal["sum", "mean"]
SparsePosition = Literal["last", "second"]

_CHOICES = {
    "feed_forward_proj": FeedForward,
    "router_loss_reduction": Reduction,
    "sparse_position": SparsePosition,
}


class _Bounds(NamedTuple):
    """Smallest and largest value of an integer, and why there is a largest."""

    least: int
    most: int
    reason: str


_WIDE = "no larger tensor fits into memory"
_DEEP = "blocks are built one by one; the deepest published Transformers have 1,000"

_SIZES = {
    "vocab_size": _Bounds(1, 2**26, _WIDE),
    "d_model": _Bounds(1, 2**20, _WIDE),
    "d_kv": _Bounds(1, 2**20, _WIDE),
    "d_ff": _Bounds(1, 2**24, _WIDE),
    "num_layers": _Bounds(1, 1024, _DEEP),
    "num_decoder_layers": _Bounds(1, 1024, _DEEP),
    "num_heads": _Bounds(1, 2**16, _WIDE),
    "relative_attention_num_buckets": _Bounds(1, 2**16, _WIDE),
    "relative_attention_max_distance": _Bounds(1, 2**31, "positions are 32-bit numbers"),
    "num_experts": _Bounds(0, 2**20, "each has weights of its own"),
    "num_sparse_encoder_layers": _Bounds(0, 1024, _DEEP),
    "num_sparse_decoder_layers": _Bounds(0, 1024, _DEEP),
    "num_selected_experts": _Bounds(1, 2**20, "as many experts are possible"),
    "group_size": _Bounds(1, 2**31, "tokens are counted by 32-bit numbers"),
    "min_expert_capacity": _Bounds(0, 2**31, "tokens are counted by 32-bit numbers"),
    "expert_capacity": _Bounds(1, 2**31, "tokens are counted by 32-bit numbers"),
}

_FLAGS = ("tie_word_embeddings", "sparse_dense_stacking", "output_router_logits", "use_cache")

_MOST_PARAMETERS = 10**14
_MOST_LABELS = 2**20

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
"""What transformers defines for every model and keeps as an attribute."""

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

_TEXTS = ("finetuning_task", "prefix", "tokenizer_class")
_MAPPINGS = ("auto_map", "task_specific_params")
_OPTIONAL_FLAGS = (
    *("add_cross_attention", "gradient_checkpointing", "output_attentions", "tf_legacy_loss"),
    *("tie_last_hidden_states", "torchscript", "use_bfloat16"),
)
_ONLY_EMPTY = {
    "is_decoder": "the model has both stacks",
    "per_layer_config": "all blocks have the same sizes",
    "pruned_heads": "all blocks have the same heads",
    "tie_encoder_decoder": "the stacks have weights of their own",
}


# ---------------------------------------------------------------------------
# Keywords


def check_keywords(config: PreTrainedConfig, kwargs: dict[str, Any]) -> None:
    """Checks what is given beyond the fields of a config, which are set already.

    A config.json, which is told by the version of transformers in it, may have fields of its own,
    as those of T5 do.

    Args:
        config: Whose fields are set.
        kwargs: Everything else that was given.

    Raises:
        ConfigError: When a keyword is unknown and of no config.json, hides a method, or has a value
            that is wrong.
    """
    for theirs in [name for name in config.attribute_map if name in kwargs]:
        setattr(config, theirs, kwargs.pop(theirs))

    unknown = [name for name in kwargs if name not in _known_to_transformers()]
    for name in unknown:
        if config.transformers_version is None:
            _refuse_unknown(config, name, kwargs[name])
        _refuse_hiding(config, name)
    if unknown:
        named = ", ".join(
            f"{name} ({shown(kwargs[name])}){_misspelt(config, name)}" for name in unknown
        )
        warnings.warn(
            f"The config has fields that STMoEConfig does not read: {named}. They are kept as attributes and change "
            "nothing.",
            stacklevel=2,
        )
    _check_common(config, kwargs)


def check_names(config: PreTrainedConfig, settings: Mapping[str, Any]) -> None:
    """Raises a ConfigError for the name of a setting that neither the config nor transformers has."""
    known = (
        _known_to_transformers()
        | {item.name for item in fields(config)}
        | set(config.attribute_map)
    )
    for name in settings:
        if name not in known:
            _refuse_unknown(config, name, settings[name])


def _known_to_transformers() -> set[str]:
    """Returns the keywords of every config of transformers."""
    return (
        _READ_BY_TRANSFORMERS
        | _KEPT_BY_TRANSFORMERS
        | set(GenerationConfig._get_default_generation_params())
    )


def _refuse_unknown(config: PreTrainedConfig, name: str, value: object) -> None:
    """Raises a ConfigError for a keyword that nobody knows, with the place or the name that was
    meant.
    """
    options = router_options_by_name()
    if name in options:
        raise ConfigError(
            f"STMoEConfig has no field {name!r} (value {shown(value)}): it is an option of "
            f"{', '.join(options[name])}. Give it inside router_options or decoder_router_options."
        )
    raise ConfigError(
        f"STMoEConfig has no field {name!r} (value {shown(value)}).{_nearest(config, name)} "
        "Remove it or correct its name."
    )


def _misspelt(config: PreTrainedConfig, name: str) -> str:
    """Returns a question for the field whose name is one letter or two away, or an empty text."""
    close = difflib.get_close_matches(
        name, [item.name for item in fields(config)], n=1, cutoff=0.85
    )
    return f" Did you mean {close[0]!r}?" if close else ""


def _nearest(config: PreTrainedConfig, name: str) -> str:
    """Returns a question for the field that was meant, or an empty text."""
    return did_you_mean(name, [item.name for item in fields(config)])


def _refuse_hiding(config: PreTrainedConfig, name: str) -> None:
    """Raises a ConfigError when an attribute would hide a method or property of the config."""
    settable = (
        name.startswith("base_model_") or name in _KEPT_BY_TRANSFORMERS | _READ_BY_TRANSFORMERS
    )
    is_field = any(item.name == name for item in fields(config))
    if hasattr(type(config), name) and not is_field and not settable:
        raise ConfigError(
            f"{name} cannot be a field of a config.json: STMoEConfig has something of that name. Rename it."
        )


def _check_common(config: PreTrainedConfig, kwargs: Mapping[str, Any]) -> None:
    """Checks the settings that transformers defines for every model."""
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
    for name in ("_attn_implementation", "attn_implementation", "experts_implementation"):
        value = kwargs.get(name)
        check(value is None or isinstance(value, str | Mapping), name, value, "a name, e.g. eager")

    quantization = kwargs.get("quantization_config")
    holds = (
        quantization is None
        or isinstance(quantization, Mapping)
        or hasattr(quantization, "to_dict")
    )
    check(
        holds, "quantization_config", quantization, "a configuration of transformers, or its fields"
    )
    labels = kwargs.get("num_labels")
    reason = "each gets a name"
    check_integer(
        "num_labels", labels, least=1, most=_MOST_LABELS, reason=reason, optional="null for two"
    )
    _check_dtype("torch_dtype", kwargs.get("torch_dtype"))
    if labels == 1 or (isinstance(config.id2label, Mapping) and len(config.id2label) == 1):
        expected = "another with one label, e.g. regression"
        check(
            config.problem_type != "single_label_classification",
            "problem_type",
            config.problem_type,
            expected,
        )


def _check_dtype(name: str, value: object) -> None:
    """Raises a ConfigError unless a dtype is None or of floating point, as torch's or by its name."""
    dtype = getattr(torch, value, None) if isinstance(value, str) else value
    holds = value is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
    check(
        holds, name, value, "the name of a floating-point dtype of torch, e.g. float32 or bfloat16"
    )


# ---------------------------------------------------------------------------
# Fields


def check_config(config: PreTrainedConfig) -> None:
    """Raises a ConfigError for a value that is out of range or contradicts another."""
    _check_inherited(config)
    for name in _SIZES:
        check_size(name, getattr(config, name))
    for name in _FLAGS:
        check_flag(name, getattr(config, name))
    check(
        config.is_encoder_decoder is True,
        "is_encoder_decoder",
        config.is_encoder_decoder,
        "true: the model is an encoder and a decoder; STMoEEncoderModel is the encoder alone",
    )
    for name, choices in _CHOICES.items():
        check_choice(name, getattr(config, name), get_args(choices))
    _check_numbers(config)
    _check_token_ids(config)
    _check_positions(config)
    _check_sparse_layers(config)

    count = config.num_parameters()
    if count > _MOST_PARAMETERS:
        raise ConfigError(
            f"The model has {count:,} parameters; expected at most {_MOST_PARAMETERS:,} (400 TB in float32). Lower "
            "vocab_size, d_model, d_ff, num_layers or num_experts."
        )


def check_source(source: object) -> None:
    """Raises a ConfigError for what can be neither a folder nor a name of the hub."""
    text = str(source) if isinstance(source, str | os.PathLike) else ""
    holds = bool(text.strip()) and "\0" not in text
    check(holds, "The source of the model", source, "a folder, or a name of the hub")


def check_size(name: str, value: object) -> None:
    """Raises a ConfigError unless a size of a model is an integer within its bounds.

    Args:
        name: Of a field of STMoEConfig that is an integer.
        value: What the user gave.
    """
    least, most, reason = _SIZES[name]
    optional = "None to follow the capacity factors" if name == "expert_capacity" else ""
    check_integer(name, value, least=least, most=most, reason=reason, optional=optional)


def check_savable(config: PreTrainedConfig) -> None:
    """Checks that what was set on a config can be written, and loads again.

    Raises:
        ConfigError: When an attribute has the name of a method, or a value that JSON does not have.
    """
    for name, value in vars(config).items():
        if not name.startswith("_"):
            _refuse_hiding(config, name)
        if name == "dtype" or (name == "quantization_config" and hasattr(value, "to_dict")):
            continue
        try:
            json.dumps(PreTrainedConfig._encode_special_floats(value))
        except (TypeError, ValueError, RecursionError) as failure:
            raise ConfigError(
                f"{name} of the config is {shown(value)}, which config.json cannot hold ({failure}). Set it to plain "
                "numbers, texts, lists or mappings, or delete it before saving."
            ) from failure


def _check_inherited(config: PreTrainedConfig) -> None:
    """Checks the fields that every config of transformers has."""
    _check_dtype("dtype", config.dtype)
    check_integer("chunk_size_feed_forward", config.chunk_size_feed_forward, least=0)
    for name in ("output_hidden_states", "return_dict"):
        if getattr(config, name) is not None:
            check_flag(name, getattr(config, name))
    if config.problem_type is not None:
        kinds = ("regression", "single_label_classification", "multi_label_classification")
        check_choice("problem_type", config.problem_type, kinds)
    version = config.transformers_version
    check(version is None or isinstance(version, str), "transformers_version", version, "a text")

    classes = config.architectures
    holds = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
    check(classes is None or holds, "architectures", classes, "a list of names of classes")
    for name, numbers_are in (("id2label", "keys"), ("label2id", "values")):
        labels = getattr(config, name)
        holds = isinstance(labels, Mapping) and all(map(_is_number, getattr(labels, numbers_are)()))
        check(
            labels is None or holds,
            name,
            labels,
            f"a mapping whose {numbers_are} are the labels' numbers",
        )


def _is_number(value: object) -> bool:
    """Returns whether a value is an integer, or the text of one as keys of JSON are."""
    return isinstance(value, int) or (
        isinstance(value, str) and value.isdecimal() and len(value) < 10
    )


def _check_numbers(config: PreTrainedConfig) -> None:
    """Checks rates, weights and scales."""
    for name in ("dropout_rate", "label_smoothing"):
        check_number(name, getattr(config, name), least=0, below=1)
    check_number(
        "expert_dropout_rate",
        config.expert_dropout_rate,
        least=0,
        below=1,
        optional="None for dropout_rate",
    )

    for name in ("capacity_factor", "eval_capacity_factor"):
        check_number(name, getattr(config, name), above=0, optional="None to drop no token")
    std = config.router_initializer_std
    check_number(
        "router_initializer_std", std, least=0, optional="None to draw the gate like the experts"
    )

    largest = {"most": 1e30, "reason": "its product with a loss is a float32"}
    for name in ("load_balance_loss_weight", "router_z_loss_weight", "z_loss_weight"):
        check_number(name, getattr(config, name), least=0, **largest)
    for name in ("layer_norm_epsilon", "initializer_scale"):
        check_number(name, getattr(config, name), above=0, most=1e30, reason="weights are float32")


def _check_token_ids(config: PreTrainedConfig) -> None:
    """Checks the ids of special tokens, of which the end token may have several."""
    ids = {
        "pad_token_id": config.pad_token_id,
        "decoder_start_token_id": config.decoder_start_token_id,
    }
    if config.bos_token_id is not None:
        ids["bos_token_id"] = config.bos_token_id
    for name, value in ids.items():
        check(
            _is_token_id(value, config),
            name,
            value,
            f"a token id below vocab_size, {config.vocab_size}",
        )

    ends = config.eos_token_id
    expected = f"a token id below vocab_size, {config.vocab_size}, a list of them, or None"
    if isinstance(ends, list):
        holds = len(ends) > 0 and all(_is_token_id(end, config) for end in ends)
    else:
        holds = ends is None or _is_token_id(ends, config)
    check(holds, "eos_token_id", ends, expected)


def _is_token_id(value: object, config: PreTrainedConfig) -> bool:
    """Returns whether a value is the id of a token."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < config.vocab_size


def _check_positions(config: PreTrainedConfig) -> None:
    """Raises a ConfigError when the relative position buckets cannot be laid out."""
    buckets, distance = (
        config.relative_attention_num_buckets,
        config.relative_attention_max_distance,
    )
    check(
        buckets >= 4 and buckets % 4 == 0,
        "relative_attention_num_buckets",
        buckets,
        "a multiple of 4",
    )
    expected = f"more than half of relative_attention_num_buckets, {buckets // 2}"
    check(distance > buckets // 2, "relative_attention_max_distance", distance, expected)


def _check_sparse_layers(config: PreTrainedConfig) -> None:
    """Raises a ConfigError when the numbers of experts, layers and sparse layers contradict each
    other.
    """
    sparse_layers = config.num_sparse_encoder_layers + config.num_sparse_decoder_layers
    if (config.num_experts == 0) != (sparse_layers == 0):
        raise ConfigError(
            f"num_experts is {config.num_experts}, but num_sparse_encoder_layers + num_sparse_decoder_layers is "
            f"{sparse_layers}. A dense model has 0 of both, a sparse one at least 1 of each: set the other."
        )
    _check_routers(config)
    for name in ("decoder_router", "decoder_router_options"):
        if not config.num_sparse_decoder_layers and getattr(config, name) is not None:
            raise ConfigError(
                f"{name} is {shown(getattr(config, name))}, but the decoder has no sparse layer that could use it. "
                "Leave it out, or set num_sparse_decoder_layers."
            )
    for decoder, stack in ((False, "encoder"), (True, "decoder")):
        layers, sparse = config.stack_sizes(decoder)
        if sparse and layers % sparse:
            fitting = [n for n in range(1, layers + 1) if layers % n == 0]
            raise ConfigError(
                f"num_sparse_{stack}_layers is {sparse}, which does not divide the {layers} blocks of the "
                f"{stack}. Choose one of {fitting}."
            )
        if sparse:
            if decoder and config.decoder_router is None:
                check_causal(config.router, "Set decoder_router to")
            config.sparse_config(decoder=decoder)
    if not sparse_layers:
        _check_unused(config)


def _check_routers(config: PreTrainedConfig) -> None:
    """Checks the names of routers and the form of their options."""
    for name in ("router", "decoder_router"):
        router = getattr(config, name)
        if name == "decoder_router" and router is None:
            continue
        check(isinstance(router, str), name, router, "the name of a router")
        load_routers().get(router)
    for name in ("router_options", "decoder_router_options"):
        options = getattr(config, name)
        holds = isinstance(options, Mapping) and all(isinstance(option, str) for option in options)
        check(options is None or holds, name, options, "a mapping of the router's option names")


def _check_unused(config: PreTrainedConfig) -> None:
    """Checks the settings of sparse layers in a model that has none: somebody may add experts to
    it.
    """
    sparse = copy.copy(config)
    sparse.num_experts = 1
    sparse.num_selected_experts = 1
    sparse.router = "token_choice"
    sparse.router_options = None
    sparse.sparse_config(decoder=False)
