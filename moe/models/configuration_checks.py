"""Checks of an STMoEConfig: bounds of its fields, and fields that contradict each other.

Each failed check is one message with the field, its value and what to do. The functions take the
config as a PreTrainedConfig: its class calls them, and they know nothing of it but its fields.
"""

import copy
import os
from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

from transformers import PreTrainedConfig

from moe.checks import check, check_choice, check_flag, check_integer, check_number, shown
from moe.errors import ConfigError
from moe.models.configuration_keywords import check_dtype
from moe.sparse.all_routers import load_routers
from moe.sparse.router_options import check_causal

FeedForward = Literal["gated-gelu", "relu"]
Reduction = Literal["sum", "mean"]
SparsePosition = Literal["last", "second"]


# ---------------------------------------------------------------------------
# Bounds of our fields


class _Bounds(NamedTuple):
    """Smallest and largest value of an integer, and why there is a largest."""

    least: int
    most: int
    reason: str


_MEMORY = "no larger tensor fits into memory"
_DEPTH = "blocks are built one by one; the deepest published Transformers have 1,000"
_INT32 = "tokens are counted by 32-bit numbers"

_SIZES = {
    "vocab_size": _Bounds(1, 2**26, _MEMORY),
    "d_model": _Bounds(1, 2**20, _MEMORY),
    "d_kv": _Bounds(1, 2**20, _MEMORY),
    "d_ff": _Bounds(1, 2**24, _MEMORY),
    "num_layers": _Bounds(1, 1024, _DEPTH),
    "num_decoder_layers": _Bounds(1, 1024, _DEPTH),
    "num_heads": _Bounds(1, 2**16, _MEMORY),
    "relative_attention_num_buckets": _Bounds(1, 2**16, _MEMORY),
    "relative_attention_max_distance": _Bounds(1, 2**31, "positions are 32-bit numbers"),
    "num_experts": _Bounds(0, 2**20, "each has weights of its own"),
    "num_sparse_encoder_layers": _Bounds(0, 1024, _DEPTH),
    "num_sparse_decoder_layers": _Bounds(0, 1024, _DEPTH),
    "num_selected_experts": _Bounds(1, 2**20, "as many experts are possible"),
    "group_size": _Bounds(1, 2**31, _INT32),
    "min_expert_capacity": _Bounds(0, 2**31, _INT32),
    "expert_capacity": _Bounds(1, 2**31, _INT32),
}

_FLAGS = (
    "is_encoder_decoder",
    "tie_word_embeddings",
    "sparse_dense_stacking",
    "output_router_logits",
    "use_cache",
)

_CHOICES = {
    "feed_forward_proj": FeedForward,
    "router_loss_reduction": Reduction,
    "sparse_position": SparsePosition,
}

_MAX_PARAMETERS = 10**14
_MAX_WEIGHT = 1e30
_PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")


# ---------------------------------------------------------------------------
# Fields


def check_config(config: PreTrainedConfig) -> None:
    """Raises a ConfigError for a value that is out of range or contradicts another.

    Args:
        config: An STMoEConfig.
    """
    # Each field by itself.
    _check_inherited(config)
    for name in _SIZES:
        check_size(name, getattr(config, name))
    for name in _FLAGS:
        check_flag(name, getattr(config, name))
    for name, choices in _CHOICES.items():
        check_choice(name, getattr(config, name), get_args(choices))
    _check_numbers(config)
    _check_token_ids(config)

    # Fields against each other.
    _check_positions(config)
    _check_sparse_layers(config)

    # Sizes that are fine one by one may be too large together.
    num_parameters = config.num_parameters()
    if num_parameters > _MAX_PARAMETERS:
        raise ConfigError(
            f"The model has {num_parameters:,} parameters; expected at most "
            f"{_MAX_PARAMETERS:,} (400 TB in float32). Lower vocab_size, d_model, d_ff, "
            "num_layers or num_experts."
        )


def check_has_decoder(config: PreTrainedConfig) -> None:
    """Raises a ConfigError for the config of an encoder alone, given to a model with a decoder."""
    check(
        config.is_encoder_decoder,
        "is_encoder_decoder",
        config.is_encoder_decoder,
        "true: the model is an encoder and a decoder; STMoEEncoderModel is the encoder alone",
    )


def check_source(source: object) -> None:
    """Raises a ConfigError for a value that can be neither a folder nor a name of the hub."""
    text = str(source) if isinstance(source, str | os.PathLike) else ""
    is_name = bool(text.strip()) and "\0" not in text
    check(is_name, "The source of the model", source, "a folder, or a name of the hub")


def check_size(name: str, value: object) -> None:
    """Raises a ConfigError unless a size of a model is an integer within its bounds.

    Args:
        name: Of a field of STMoEConfig that is an integer.
        value: Value that the user gave.
    """
    bounds = _SIZES[name]
    optional = "None to follow the capacity factors" if name == "expert_capacity" else ""
    check_integer(
        name, value, least=bounds.least, most=bounds.most, reason=bounds.reason, optional=optional
    )


def _check_inherited(config: PreTrainedConfig) -> None:
    """Checks the fields that every config of transformers has."""
    check_dtype("dtype", config.dtype)
    check_integer("chunk_size_feed_forward", config.chunk_size_feed_forward, least=0)
    for name in ("output_hidden_states", "return_dict"):
        if getattr(config, name) is not None:
            check_flag(name, getattr(config, name))
    if config.problem_type is not None:
        check_choice("problem_type", config.problem_type, _PROBLEM_TYPES)

    version = config.transformers_version
    check(version is None or isinstance(version, str), "transformers_version", version, "a text")

    classes = config.architectures
    are_names = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
    expected = "a list of names of classes"
    check(classes is None or are_names, "architectures", classes, expected)

    # The numbers of labels are texts in JSON, where they are keys.
    labels = config.id2label
    are_numbered = isinstance(labels, Mapping) and all(map(_is_number, labels.keys()))
    expected = "a mapping whose keys are the labels' numbers"
    check(labels is None or are_numbered, "id2label", labels, expected)

    labels = config.label2id
    are_numbered = isinstance(labels, Mapping) and all(map(_is_number, labels.values()))
    expected = "a mapping whose values are the labels' numbers"
    check(labels is None or are_numbered, "label2id", labels, expected)


def _is_number(value: object) -> bool:
    """Returns whether a value is an integer, or the text of one as keys of JSON are."""
    if isinstance(value, str):
        return value.isdecimal() and len(value) < 10
    return isinstance(value, int)


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

    for name in ("load_balance_loss_weight", "router_z_loss_weight", "z_loss_weight"):
        check_number(
            name,
            getattr(config, name),
            least=0,
            most=_MAX_WEIGHT,
            reason="its product with a loss is a float32",
        )
    for name in ("layer_norm_epsilon", "initializer_scale"):
        check_number(
            name, getattr(config, name), above=0, most=_MAX_WEIGHT, reason="weights are float32"
        )
    unknown = "None when unknown"
    check_number("noise_density", config.noise_density, above=0, below=1, optional=unknown)
    check_number("mean_noise_span_length", config.mean_noise_span_length, least=1, optional=unknown)
    check_number(
        "router_initializer_std",
        config.router_initializer_std,
        least=0,
        optional="None to draw the gate like the experts",
    )


def _check_token_ids(config: PreTrainedConfig) -> None:
    """Checks the ids of special tokens, of which the end token may have several."""
    expected = f"a token id below vocab_size, {config.vocab_size}"
    for name in ("pad_token_id", "decoder_start_token_id", "bos_token_id"):
        value = getattr(config, name)
        if name == "bos_token_id" and value is None:
            continue
        check(_is_token_id(value, config.vocab_size), name, value, expected)

    ends = config.eos_token_id
    if isinstance(ends, list):
        are_ids = len(ends) > 0 and all(_is_token_id(end, config.vocab_size) for end in ends)
    else:
        are_ids = ends is None or _is_token_id(ends, config.vocab_size)
    check(are_ids, "eos_token_id", ends, f"{expected}, a list of them, or None")


def _is_token_id(value: object, vocab_size: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size


def _check_positions(config: PreTrainedConfig) -> None:
    """Raises a ConfigError when the relative position buckets cannot be laid out."""
    num_buckets = config.relative_attention_num_buckets
    max_distance = config.relative_attention_max_distance

    # Half of them is for each direction, and half of those for single distances.
    check(
        num_buckets >= 4 and num_buckets % 4 == 0,
        "relative_attention_num_buckets",
        num_buckets,
        "a multiple of 4",
    )
    expected = f"more than half of relative_attention_num_buckets, {num_buckets // 2}"
    is_beyond = max_distance > num_buckets // 2
    check(is_beyond, "relative_attention_max_distance", max_distance, expected)


# ---------------------------------------------------------------------------
# Sparse layers


def _check_sparse_layers(config: PreTrainedConfig) -> None:
    """Raises a ConfigError when numbers of experts, layers and sparse layers contradict."""
    num_sparse = config.num_sparse_encoder_layers + config.num_sparse_decoder_layers
    if (config.num_experts == 0) != (num_sparse == 0):
        raise ConfigError(
            f"num_experts is {config.num_experts}, but num_sparse_encoder_layers + "
            f"num_sparse_decoder_layers is {num_sparse}. A dense model has 0 of both, a sparse "
            "one at least 1 of each: set the other."
        )

    # A router of a decoder that has no sparse layer would do nothing.
    _check_routers(config)
    for name in ("decoder_router", "decoder_router_options"):
        value = getattr(config, name)
        if value is not None and not config.num_sparse_decoder_layers:
            raise ConfigError(
                f"{name} is {shown(value)}, but the decoder has no sparse layer that could use "
                "it. Leave it out, or set num_sparse_decoder_layers."
            )

    _check_stack(config, "encoder", decoder=False)
    _check_stack(config, "decoder", decoder=True)
    if not num_sparse:
        _check_unused(config)


def _check_stack(config: PreTrainedConfig, stack: str, *, decoder: bool) -> None:
    """Raises a ConfigError when the sparse layers of a stack cannot be laid out or built."""
    num_layers, num_sparse = config.stack_sizes(decoder)
    if not num_sparse:
        return

    if num_layers % num_sparse:
        divisors = [number for number in range(1, num_layers + 1) if num_layers % number == 0]
        raise ConfigError(
            f"num_sparse_{stack}_layers is {num_sparse}, which does not divide the "
            f"{num_layers} blocks of the {stack}. Choose one of {divisors}."
        )
    # The encoder's router may need tokens that a decoder has not seen yet.
    if decoder and config.decoder_router is None:
        check_causal(config.router, "Set decoder_router to")

    # The settings of a layer check themselves.
    config.sparse_config(decoder=decoder)


def _check_routers(config: PreTrainedConfig) -> None:
    """Checks the names of routers and the form of their options."""
    for name in ("router", "decoder_router"):
        router = getattr(config, name)
        if name == "decoder_router" and router is None:
            continue
        check(isinstance(router, str), name, router, "the name of a router")
        try:
            load_routers().get(router)
        except ConfigError as error:
            raise ConfigError(f"{name} is {router!r}. {error}") from error

    for name in ("router_options", "decoder_router_options"):
        options = getattr(config, name)
        are_named = isinstance(options, Mapping) and all(isinstance(key, str) for key in options)
        expected = "a mapping of the router's option names"
        check(options is None or are_named, name, options, expected)


def _check_unused(config: PreTrainedConfig) -> None:
    """Checks the sparse settings of a dense model: somebody may add experts to it."""
    sparse = copy.copy(config)
    sparse.num_experts = 1
    sparse.num_selected_experts = 1
    sparse.router = "token_choice"
    sparse.router_options = None
    sparse.sparse_config(decoder=False)
