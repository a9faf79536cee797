"""Maps the config.json of transformers' T5, mT5, umT5 and Switch to ours and back, field by field."""

import math
from collections.abc import Mapping
from textwrap import shorten
from typing import Any, Literal, cast

from transformers import (
    GenerationConfig,
    MT5Config,
    PreTrainedConfig,
    SwitchTransformersConfig,
    T5Config,
    UMT5Config,
)

from moe.checks import check_integer, check_number, is_kind, shown
from moe.errors import ConfigError
from moe.models.configuration import STMoEConfig
from moe.models.configuration_checks import SIZES

Family = Literal["t5", "mt5", "umt5", "switch_transformers"]
FAMILIES: Mapping[Family, type[Any]] = {
    "t5": T5Config,
    "mt5": MT5Config,
    "umt5": UMT5Config,
    "switch_transformers": SwitchTransformersConfig,
}

_SAME_FIELDS = (*SIZES, "layer_norm_epsilon", "dropout_rate", "use_cache", "pad_token_id")
"""Fields of the same name and meaning in T5, Switch and ours."""

_LEGACY_FIELDS = {
    "_attn_implementation",
    "_num_labels",
    "add_cross_attention",
    "auto_map",
    "cross_attention_hidden_size",
    "keys_to_ignore_at_inference",
    "num_labels",
    "sep_token_id",
    "tf_legacy_loss",
    "torch_dtype",
    "torchscript",
    "use_bfloat16",
    "xla_device",
}
"""Fields that earlier versions of transformers wrote for every model, without meaning here."""

IGNORED_FIELDS: Mapping[str, str] = {
    "add_router_probs": "transformers does not read it",
    "classifier_dropout": "belongs to the head of a classifier",
    "gradient_checkpointing": "is a setting of training",
    "n_positions": "relative positions have no such limit",
    "output_past": "transformers does not read it",
    "router_dtype": "routing is always in float32",
    "router_ignore_padding_tokens": "transformers does not read it, and padding is never routed here",
    "scalable_attention": "transformers does not read it",
}
"""Fields without effect on what the model computes, with the reason."""

_CARRIED_FIELDS = (
    "bos_token_id",
    "finetuning_task",
    "id2label",
    "label2id",
    "prefix",
    "problem_type",
    "task_specific_params",
    "tokenizer_class",
)
"""Fields for the callers of a model, with the same names in ours."""

_UNREPRESENTABLE_FIELDS = ("pruned_heads", "quantization_config", "tie_encoder_decoder")
"""Fields that change what is computed, or how weights are stored, unless they are empty."""


# ---------------------------------------------------------------------------
# From transformers' to ours


def hf_family(raw_config: Mapping[str, Any]) -> Family:
    """Returns which family a config.json is of; it must be of one of them."""
    family = raw_config["model_type"]
    assert family in FAMILIES, f"the caller has looked: {family!r}"
    return cast(Family, family)


def from_hf_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of STMoEConfig for a model that computes the same as a model of a family.

    Its config.json is read by transformers' own class, which sets defaults and derived fields. The
    result includes unknown fields, which that class does not read either.

    Args:
        raw: Content of the config.json.

    Raises:
        ConfigError: When it has a value of another type, or one that this library cannot represent.
    """
    family = hf_family(raw)
    # Empty values of these have no effect.
    for name in _UNREPRESENTABLE_FIELDS:
        if raw.get(name):
            raise ConfigError(
                f"config.json of type {family!r} has {name} {shown(raw[name])}, which changes "
                "what the model computes and cannot be represented here. Load it with its own "
                "class."
            )

    hf_class = FAMILIES[family]
    model_fields = {*vars(hf_class()), "is_gated_act", "num_selected_experts", "router_type"}
    hf_config = read_hf_config(hf_class, {name: raw[name] for name in model_fields & raw.keys()})

    # The backbone.
    fields = {name: getattr(hf_config, name) for name in _SAME_FIELDS}
    fields["feed_forward_proj"] = _feed_forward_proj(hf_config)
    fields["z_loss_weight"] = 0.0

    # Theirs scales the deviation, ours the variance.
    factor = hf_config.initializer_factor
    check_number("initializer_factor", factor, above=0, most=1e15)
    fields["initializer_scale"] = float(factor) ** 2

    # Only a scaled head is tied here; `open_hf_checkpoint` unties one that is stored with other numbers.
    fields["tie_word_embeddings"] = hf_config.tie_word_embeddings
    if family != "switch_transformers":
        is_scaled = _scales_outputs(raw, family)
        fields["scale_decoder_outputs"] = is_scaled
        fields["tie_word_embeddings"] = is_scaled and raw.get("tie_word_embeddings") is not False
        fields["relative_bias_in_every_block"] = family == "umt5"

    # Special tokens; the end token may be in a list.
    ends = hf_config.eos_token_id
    fields["eos_token_id"] = ends[0] if isinstance(ends, list) and len(ends) == 1 else ends
    start = raw.get("decoder_start_token_id")
    fields["decoder_start_token_id"] = fields["pad_token_id"] if start is None else start

    # transformers 5 has another name for the dtype than earlier versions.
    fields["dtype"] = raw.get("torch_dtype") if raw.get("dtype") is None else raw["dtype"]
    fields["architectures"] = raw.get("architectures")

    # Fields for callers, and unknown ones.
    known = model_fields | vars(GenerationConfig()).keys() | PreTrainedConfig().to_dict().keys()
    known |= T5Config.attribute_map.keys() | _LEGACY_FIELDS
    known |= {*_UNREPRESENTABLE_FIELDS, *IGNORED_FIELDS}
    for name in raw:
        if name in _CARRIED_FIELDS or name not in known:
            fields[name] = raw[name]

    if family == "switch_transformers":
        fields |= _sparse_fields(hf_config)
    return fields


def read_hf_config(hf_class: type[Any], raw: Mapping[str, Any]) -> Any:
    """Returns fields of a config.json as a class of transformers reads them, with its defaults.

    Raises:
        ConfigError: When it cannot read them.
    """
    # JSON has one kind of number, but their classes accept no integer for a float.
    read = dict(raw)
    try:
        for name, field in hf_class.__dataclass_fields__.items():
            if field.type is float and is_kind(read.get(name), int):
                read[name] = float(read[name])
        return hf_class.from_dict(read)
    except Exception as failure:
        reason = shorten(str(failure.__cause__ or failure), 500, placeholder=" ...")
        raise ConfigError(
            f"transformers cannot read config.json of type {hf_class.model_type!r}: {reason}"
        ) from failure


def is_written_tied(raw: Mapping[str, Any], family: Family) -> bool:
    """Returns whether transformers 5 wrote a config.json of T5: as tied, whatever the model is."""
    if family == "t5":
        return "scale_decoder_outputs" in raw
    version = str(raw.get("transformers_version") or "")
    return family != "switch_transformers" and version >= "5"


def _scales_outputs(raw: Mapping[str, Any], family: Family) -> bool:
    """Returns whether a T5 scales the input of its head by d_model^-0.5.

    Source:
        transformers 4.57.6: as the tie flag says, which is False by default in mT5 alone. Version 5
        writes `scale_decoder_outputs`, or nothing for mT5 and umT5, which it does not scale; see
        docs/guides/convert.md.
    """
    if raw.get("scale_decoder_outputs") is not None:
        return raw["scale_decoder_outputs"]
    if family != "t5" and is_written_tied(raw, family):
        return False
    return raw.get("tie_word_embeddings", family != "mt5") is not False


def _feed_forward_proj(hf_config: Any) -> str:
    """Returns our name of the feed-forward layer that transformers computes.

    Raises:
        ConfigError: When there is none.
    """
    gated = getattr(hf_config, "is_gated_act", False)
    activation = hf_config.dense_act_fn
    # T5 1.0 and Switch.
    if not gated and activation == "relu":
        return "relu"

    # T5 1.1 and its descendants; both are the tanh approximation. UL2.
    if gated and activation in ("gelu_new", "gelu_pytorch_tanh"):
        return "gated-gelu"
    if gated and activation in ("silu", "swish"):
        return "gated-silu"

    kind = "gated" if gated else "plain"
    raise ConfigError(
        f"config.json has {kind} feed-forward layers with the activation {activation!r}; "
        "expected plain ones with relu (T5 1.0, Switch) or gated ones with gelu_new (T5 1.1, "
        "flan) or silu (UL2). A model with others cannot be represented here."
    )


def _sparse_fields(hf_config: SwitchTransformersConfig) -> dict[str, Any]:
    """Returns the fields of a Switch model that a T5 does not have."""
    only_values = {"router_bias": False, "num_selected_experts": 1, "router_type": "tokens_masked"}
    for name, expected in only_values.items():
        value = getattr(hf_config, name, expected)
        if value != expected:
            raise ConfigError(
                f"config.json has {name} {value!r}; expected {expected!r}. Other Switch models "
                "cannot be represented."
            )

    # Their class places sparse layers by the step, and ignores their number.
    num_encoder = _count_sparse_layers(hf_config, "encoder", hf_config.num_layers)
    num_decoder = _count_sparse_layers(hf_config, "decoder", hf_config.num_decoder_layers)

    # Without noise the router takes the argmax.
    router_options: dict[str, Any] = {"policy": "argmax"}
    if hf_config.router_jitter_noise:
        router_options = {"policy": "input_jitter", "jitter": hf_config.router_jitter_noise}
    return {
        "num_sparse_encoder_layers": num_encoder,
        "num_sparse_decoder_layers": num_decoder,
        "num_experts": hf_config.num_experts if num_encoder or num_decoder else 0,
        "sparse_position": "second",
        "num_selected_experts": 1,
        "router": "switch",
        "router_options": router_options,
        "expert_capacity": hf_config.expert_capacity,
        "convention": "switch",
        "load_balance_loss_weight": hf_config.router_aux_loss_coef,
        "router_z_loss_weight": hf_config.router_z_loss_coef,
    }


def _count_sparse_layers(
    hf_config: SwitchTransformersConfig, stack: str, num_layers: int | None
) -> int:
    """Returns how many sparse layers transformers builds in a stack, regardless of config.json.

    Raises:
        ConfigError: When they do not divide the stack into equal stretches.
    """
    assert num_layers is not None, "their class fills it"
    step = getattr(hf_config, f"{stack}_sparse_step")
    check_integer(f"{stack}_sparse_step", step, least=0)
    num_sparse = 0
    if step > 0:
        num_sparse = len(range(min(1, step - 1), num_layers, step))

    if num_sparse and (num_layers % num_sparse or num_layers // num_sparse != step):
        raise ConfigError(
            f"config.json has {num_layers} layers in the {stack}, of which every {step}th from the second on is "
            f"sparse: {num_sparse}. Such a model cannot be represented here, where the sparse layers must divide "
            "the stack into equal groups."
        )
    return num_sparse


# ---------------------------------------------------------------------------
# From ours to transformers'


def to_hf_config(config: STMoEConfig, family: Family) -> dict[str, Any]:
    """Returns the config.json of a T5, umT5 or Switch model that computes the same as our model.

    Args:
        config: Config of our model.
        family: `t5` (umT5 if every block has a table of relative positions) or `switch_transformers`.

    Raises:
        ConfigError: When there is no such model; gives every reason.
    """
    if family == "t5":
        obstacles = [f"it has {config.num_experts} experts"] if config.num_experts else []
        if config.relative_bias_in_every_block:
            family = "umt5"
            if config.scale_decoder_outputs != config.tie_word_embeddings:
                obstacles.append("scale_decoder_outputs and tie_word_embeddings differ")
    else:
        obstacles = _switch_obstacles(config)
    if obstacles:
        raise ConfigError(
            f"The model cannot be written as {family!r}, whose class in transformers does not support it: "
            f"{'; '.join(obstacles)}. Keep it in our format, or give settings that such a model has, e.g. --set "
            "expert_capacity=64 convention=switch."
        )

    # Fields of the backbone, and those for callers.
    class_name = FAMILIES[family].__name__.replace("Config", "ForConditionalGeneration")
    fields = {name: getattr(config, name) for name in _SAME_FIELDS}
    fields |= {
        "architectures": [class_name],
        "model_type": family,
        "eos_token_id": config.eos_token_id,
        "decoder_start_token_id": config.decoder_start_token_id,
        "is_encoder_decoder": True,
        "initializer_factor": math.sqrt(config.initializer_scale),
        "tie_word_embeddings": config.tie_word_embeddings,
        "dense_act_fn": config.activation.replace("gelu_pytorch_tanh", "gelu_new"),
        "feed_forward_proj": config.feed_forward_proj,
        "is_gated_act": config.gated,
    }
    for name in _CARRIED_FIELDS:
        if getattr(config, name, None) is not None:
            fields[name] = getattr(config, name)

    if family == "switch_transformers":
        fields |= _hf_sparse_fields(config)
    elif config.scale_decoder_outputs != config.tie_word_embeddings:
        fields["scale_decoder_outputs"] = config.scale_decoder_outputs
    return fields


def _hf_sparse_fields(config: STMoEConfig) -> dict[str, Any]:
    """Returns the fields of a Switch model that a T5 does not have."""
    # Encoder and decoder have the same options, but one of them may be dense.
    decoder = not config.num_sparse_encoder_layers
    options = config.sparse_config(decoder=decoder).router_options
    jitter = 0.0
    if options.get("policy", "input_jitter") == "input_jitter":
        jitter = options.get("jitter", 0.01)

    return {
        "encoder_sparse_step": _sparse_step(config, decoder=False),
        "decoder_sparse_step": _sparse_step(config, decoder=True),
        "num_experts": config.num_experts,
        "num_selected_experts": 1,
        "num_sparse_encoder_layers": config.num_sparse_encoder_layers,
        "num_sparse_decoder_layers": config.num_sparse_decoder_layers,
        "expert_capacity": config.expert_capacity,
        "router_bias": False,
        "router_dtype": "float32",
        "router_jitter_noise": jitter,
        "router_type": "tokens_masked",
        "router_aux_loss_coef": config.load_balance_loss_weight,
        "router_z_loss_coef": config.router_z_loss_weight,
    }


def _sparse_step(config: STMoEConfig, *, decoder: bool) -> int:
    """Returns the length of the stretches with one sparse layer; 0 for a dense stack."""
    num_layers, num_sparse = config.stack_sizes(decoder)
    return num_layers // num_sparse if num_sparse else 0


def _switch_obstacles(config: STMoEConfig) -> list[str]:
    """Returns why a model cannot be written as a Switch."""
    if config.num_experts == 0:
        return ["it has no experts (write it as t5)"]

    obstacles = _router_obstacles(config)
    if config.rules.capacity_scope != "sequence":
        obstacles.append(f"convention is {config.convention!r}, not 'switch'")
    if config.expert_capacity is None:
        obstacles.append("expert_capacity is None: its capacity is a number of slots")
    only_values = {
        "feed_forward_proj": "relu",
        "relative_bias_in_every_block": False,
        "num_selected_experts": 1,
        "num_shared_experts": 0,
        "prefix_experts": None,
        "router_input": "hidden",
        "sparse_dense_stacking": False,
        "expert_bias": "none",
        "expert_d_ff": None,
        "scale_decoder_outputs": config.tie_word_embeddings,
        "encoder_experts": None,
        "decoder_experts": None,
    }
    for name, expected in only_values.items():
        if getattr(config, name) != expected:
            obstacles.append(f"{name} is {getattr(config, name)!r}, not {expected!r}")

    # In stretches of one or two blocks, the last block is also the second.
    longest = max(_sparse_step(config, decoder=False), _sparse_step(config, decoder=True))
    if config.sparse_position != "second" and longest > 2:
        obstacles.append(f"sparse_position is {config.sparse_position!r}, not 'second'")
    return obstacles


def _router_obstacles(config: STMoEConfig) -> list[str]:
    """Returns why the routers of a model differ from a Switch's routers."""
    layers = config.all_sparse_configs()
    routers = sorted({layer.router for layer in layers})
    if routers != ["switch"]:
        return [f"the router is {' and '.join(routers)}, not switch"]

    policies = {layer.router_options.get("policy", "input_jitter") for layer in layers}
    obstacles = []
    if not policies <= {"input_jitter", "argmax"}:
        obstacles.append(
            f"the router's policy is {' and '.join(sorted(policies))}, not input_jitter or argmax"
        )
    if layers[0].router_options != layers[-1].router_options:
        obstacles.append("router_options of encoder and decoder differ")
    return obstacles
