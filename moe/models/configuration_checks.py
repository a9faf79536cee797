"""What must hold of an STMoEConfig; whatever does not is one message with the field, its value and what to do."""

from typing import TYPE_CHECKING, Any, Literal, get_args

from transformers import GenerationConfig

from moe.checks import is_kind
from moe.errors import ConfigError, did_you_mean
from moe.sparse.router import check_causal, load_routers, router_options_by_name

if TYPE_CHECKING:
    from moe.models.configuration import STMoEConfig

FeedForward = Literal["gated-gelu", "relu"]
Reduction = Literal["sum", "mean"]
SparsePosition = Literal["last", "second"]

_CHOICES = {"feed_forward_proj": FeedForward, "router_loss_reduction": Reduction, "sparse_position": SparsePosition}

_POSITIVE_INTEGERS = (
    "vocab_size",
    "d_model",
    "d_kv",
    "d_ff",
    "num_layers",
    "num_decoder_layers",
    "num_heads",
    "relative_attention_num_buckets",
    "relative_attention_max_distance",
    "num_selected_experts",
    "group_size",
)

_ACCEPTED_BY_TRANSFORMERS = {
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


def refuse_unknown(kind: "type[STMoEConfig]", kwargs: dict[str, Any]) -> None:
    """Raises a ConfigError for a keyword that neither `kind` nor transformers knows."""
    known = _ACCEPTED_BY_TRANSFORMERS | set(GenerationConfig._get_default_generation_params())
    for name in kwargs:
        if name not in known:
            fields = list(kind.__dataclass_fields__)
            if name in (options := router_options_by_name()):
                raise ConfigError(
                    f"STMoEConfig has no field {name!r} (value {kwargs[name]!r}): it is an option of "
                    f"{', '.join(options[name])}. Give it inside router_options or decoder_router_options."
                )
            raise ConfigError(
                f"STMoEConfig has no field {name!r} (value {kwargs[name]!r}).{did_you_mean(name, fields)} "
                "Remove it or correct its name."
            )


def check_config(config: "STMoEConfig") -> None:
    """Raises a ConfigError for a value that is out of range or contradicts another."""
    for name in _POSITIVE_INTEGERS:
        _expect(config, name, _is_integer(getattr(config, name), least=1), "an integer of at least 1")
    for name in (
        "num_experts",
        "num_sparse_encoder_layers",
        "num_sparse_decoder_layers",
        "min_expert_capacity",
    ):
        _expect(config, name, _is_integer(getattr(config, name), least=0), "an integer of at least 0")
    for name in ("dropout_rate", "expert_dropout_rate", "label_smoothing"):
        if name == "expert_dropout_rate" and config.expert_dropout_rate is None:
            continue
        rate = getattr(config, name)
        _expect(config, name, is_kind(rate, float) and 0 <= rate < 1, "a number with 0 <= rate < 1")
    for name in ("load_balance_loss_weight", "router_z_loss_weight", "z_loss_weight"):
        value = getattr(config, name)
        _expect(config, name, is_kind(value, float) and value >= 0, "a number of at least 0")
    for name in ("layer_norm_epsilon", "initializer_scale"):
        value = getattr(config, name)
        _expect(config, name, is_kind(value, float) and value > 0, "a number above 0")
    for name, choices in _CHOICES.items():
        known = get_args(choices)
        _expect(config, name, getattr(config, name) in known, f"one of {', '.join(known)}")
    for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id"):
        value = getattr(config, name)
        holds = _is_integer(value, least=0) and value < config.vocab_size
        _expect(config, name, holds, f"a token id below vocab_size, {config.vocab_size}")
    _check_positions(config)
    _check_sparse_layers(config)


def _check_positions(config: "STMoEConfig") -> None:
    """Raises a ConfigError when the relative position buckets cannot be laid out."""
    buckets, distance = config.relative_attention_num_buckets, config.relative_attention_max_distance
    _expect(config, "relative_attention_num_buckets", buckets >= 4 and buckets % 4 == 0, "a multiple of 4")
    _expect(
        config,
        "relative_attention_max_distance",
        distance > buckets // 2,
        f"more than half of relative_attention_num_buckets, {buckets // 2}",
    )


def _check_sparse_layers(config: "STMoEConfig") -> None:
    """Raises a ConfigError when the numbers of experts, layers and sparse layers contradict each other."""
    sparse_layers = config.num_sparse_encoder_layers + config.num_sparse_decoder_layers
    if (config.num_experts == 0) != (sparse_layers == 0):
        raise ConfigError(
            f"num_experts is {config.num_experts}, but num_sparse_encoder_layers + num_sparse_decoder_layers is "
            f"{sparse_layers}. A dense model has 0 of both, a sparse one at least 1 of each: set the other."
        )
    for name in (config.router, config.decoder_router):
        if name is not None:
            load_routers().get(name)
    for name in ("decoder_router", "decoder_router_options"):
        if not config.num_sparse_decoder_layers and getattr(config, name) is not None:
            raise ConfigError(
                f"{name} is {getattr(config, name)!r}, but the decoder has no sparse layer that could use it. Leave "
                "it out, or set num_sparse_decoder_layers."
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


def _expect(config: "STMoEConfig", name: str, holds: bool, expected: str) -> None:
    """Raises a ConfigError that names field, value and expectation, unless `holds`."""
    if not holds:
        raise ConfigError(f"STMoEConfig: {name} is {getattr(config, name)!r}; expected {expected}.")


def _is_integer(value: object, *, least: int) -> bool:
    """Returns whether `value` is an integer, not a bool, of at least `least`."""
    return isinstance(value, int) and is_kind(value, int) and value >= least
