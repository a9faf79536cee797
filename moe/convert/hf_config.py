"""The config.json of transformers' T5 and Switch, and ours: every field is mapped, explained or
refused.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

from huggingface_hub.errors import StrictDataclassError
from transformers import GenerationConfig, PreTrainedConfig, SwitchTransformersConfig, T5Config

from moe.checks import check, check_choice, check_flag, check_integer, check_number, is_kind, shown
from moe.errors import ConfigError
from moe.models.configuration_checks import check_size

Family = Literal["t5", "switch_transformers"]
FAMILIES: Mapping[Family, type[Any]] = {
    "t5": T5Config,
    "switch_transformers": SwitchTransformersConfig,
}
ARCHITECTURES: Mapping[Family, str] = {
    "t5": "T5ForConditionalGeneration",
    "switch_transformers": "SwitchTransformersForConditionalGeneration",
}

_SAME = (
    "vocab_size",
    "d_model",
    "d_kv",
    "d_ff",
    "num_layers",
    "num_decoder_layers",
    "num_heads",
    "relative_attention_num_buckets",
    "relative_attention_max_distance",
    "layer_norm_epsilon",
    "dropout_rate",
    "use_cache",
    "pad_token_id",
)
"""Fields of the same name and meaning."""

_INTEGERS = set(_SAME) - {"layer_norm_epsilon", "dropout_rate", "use_cache", "pad_token_id"}
_SWITCH_INTEGERS = (
    *("num_experts", "num_selected_experts", "expert_capacity"),
    *(
        "num_sparse_encoder_layers",
        "num_sparse_decoder_layers",
        "encoder_sparse_step",
        "decoder_sparse_step",
    ),
)
_FLAGS = (
    *(
        "is_encoder_decoder",
        "is_gated_act",
        "router_bias",
        "scale_decoder_outputs",
        "tie_word_embeddings",
    ),
    "use_cache",
)
_NUMBERS = (
    *("dropout_rate", "layer_norm_epsilon", "initializer_factor"),
    *("router_jitter_noise", "router_aux_loss_coef", "router_z_loss_coef"),
)
_TEXTS = ("feed_forward_proj", "dense_act_fn", "router_type")
_TOKEN_IDS = ("pad_token_id", "eos_token_id", "decoder_start_token_id")
_GATED_GELU = ("gated-gelu", "gated-gelu_new", "gated-gelu_pytorch_tanh")

_READ = {
    *_SAME,
    "eos_token_id",
    "decoder_start_token_id",
    "tie_word_embeddings",
    "initializer_factor",
    "feed_forward_proj",
    "is_gated_act",
    "dense_act_fn",
    "scale_decoder_outputs",
    "dtype",
    "torch_dtype",
    "num_experts",
    "num_selected_experts",
    "expert_capacity",
    "num_sparse_encoder_layers",
    "num_sparse_decoder_layers",
    "encoder_sparse_step",
    "decoder_sparse_step",
    "router_bias",
    "router_type",
    "router_jitter_noise",
    "router_aux_loss_coef",
    "router_z_loss_coef",
}

EXPLAINED: Mapping[str, str] = {
    "add_router_probs": "transformers does not read it",
    "classifier_dropout": "is of a classifier's head",
    "gradient_checkpointing": "is a setting of training",
    "n_positions": "relative positions have no such limit",
    "output_past": "transformers does not read it",
    "router_dtype": "routing is always in float32",
    "router_ignore_padding_tokens": "transformers does not read it, and padding is never routed here",
}
"""Fields that say nothing about what the model computes, with the reason."""

_CARRIED = (
    "bos_token_id",
    "finetuning_task",
    "id2label",
    "label2id",
    "prefix",
    "problem_type",
    "task_specific_params",
    "tokenizer_class",
)
"""Fields for the callers of a model, which ours has under the same names."""

_CHANGING = {
    "attn_logit_softcapping",
    "encoder_attention_type",
    "final_logit_softcapping",
    "global_block_size",
    "layer_types",
    "local_radius",
    "mlp_layer_types",
    "num_key_value_heads",
    "per_layer_config",
    "pruned_heads",
    "quantization_config",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "scalable_attention",
    "sliding_window",
    "tie_encoder_decoder",
}
"""Fields of other models that change what is computed, or how weights are stored, unless they are empty."""

_OF_TRANSFORMERS = set(PreTrainedConfig().to_dict()) | {
    "_attn_implementation",
    "_name_or_path",
    "_num_labels",
    "add_cross_attention",
    "auto_map",
    "cross_attention_hidden_size",
    "is_decoder",
    "is_encoder_decoder",
    "keys_to_ignore_at_inference",
    "model_type",
    "num_labels",
    "return_dict",
    "sep_token_id",
    "torchscript",
    "tf_legacy_loss",
    "use_bfloat16",
    "xla_device",
    *T5Config.attribute_map,
    *GenerationConfig._get_default_generation_params(),
}


def family_of(raw: Mapping[str, Any]) -> Family | None:
    """Returns whose config.json this is; None for ours and for what names no model.

    Raises:
        ConfigError: When it is of a model that is no T5 and no Switch.
    """
    kind = raw.get("model_type")
    if kind in (None, "st_moe"):
        return None
    if kind not in list(FAMILIES):
        raise ConfigError(
            f"config.json is of a model of type {shown(kind)}; expected st_moe, or {' or '.join(FAMILIES)}, which are "
            "converted. Load it with its own class."
        )
    return kind


def own_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of STMoEConfig that compute what the config.json `raw` of a T5 or Switch
    model says.

    It is read by transformers' own class, so that defaults and what follows from other fields are
    that class's. Fields that nothing is known of, which that class does not read either, are among
    the result.

    Raises:
        ConfigError: When it has a value of another type, or one that this library cannot represent.
    """
    family = family_of(raw)
    assert family is not None, "the caller has looked"
    for name in sorted(_CHANGING & raw.keys()):
        if raw[name]:
            raise ConfigError(
                f"config.json of type {family!r} has {name} {shown(raw[name])}, which changes what the model computes "
                "and cannot be represented here. Load it with its own class."
            )
    theirs = _their_config(raw, family)

    # What both have.
    fields = {name: getattr(theirs, name) for name in _SAME}
    fields["eos_token_id"] = _one_id(theirs.eos_token_id)
    start = getattr(theirs, "decoder_start_token_id", None)
    fields["decoder_start_token_id"] = fields["pad_token_id"] if start is None else start
    fields["feed_forward_proj"] = _feed_forward(theirs, raw.get("feed_forward_proj"))
    check_number(
        "initializer_factor",
        theirs.initializer_factor,
        above=0,
        most=1e15,
        reason="weights are float32",
    )
    fields["initializer_scale"] = (
        float(theirs.initializer_factor) ** 2
    )  # of the variance, not of the deviation
    fields["z_loss_weight"] = 0.0
    fields["tie_word_embeddings"] = (
        theirs.scale_decoder_outputs if family == "t5" else theirs.tie_word_embeddings
    )
    fields["dtype"] = raw.get("torch_dtype") if raw.get("dtype") is None else raw["dtype"]
    fields["architectures"] = raw.get("architectures")

    # What is for callers, and what nothing is known of.
    known = _READ | _OF_TRANSFORMERS | _CHANGING | set(EXPLAINED)
    for name in raw:
        if name in _CARRIED or name not in known:
            fields[name] = raw[name]
    return fields if family == "t5" else {**fields, **_sparse_fields(theirs)}


def _their_config(raw: Mapping[str, Any], family: Family) -> Any:
    """Returns the configuration of transformers that a config.json says.

    Raises:
        ConfigError: When a value is of another type than that class has, or no model could be so
            large.
    """
    for name in sorted(_INTEGERS & raw.keys()):
        if (
            name != "num_decoder_layers" or raw[name] is not None
        ):  # null: as many as the encoder has
            check_size(name, raw[name])
    for name in _SWITCH_INTEGERS:
        if family == "switch_transformers" and name in raw:
            check_integer(
                name, raw[name], least=0, most=2**31, reason="layers and tokens are counted by it"
            )

    for name in _FLAGS:
        if name in raw:
            check_flag(name, raw[name])
    for name in _TEXTS:
        check(isinstance(raw.get(name, ""), str), name, raw.get(name), "a text")
    if "feed_forward_proj" in raw:
        check_choice("feed_forward_proj", raw["feed_forward_proj"], ("relu", *_GATED_GELU))
    for name in _TOKEN_IDS:
        several = name == "eos_token_id" and isinstance(raw.get(name), list)
        ids = raw[name] if several else [raw.get(name)]
        holds = all(token_id is None or is_kind(token_id, int) for token_id in ids)
        check(holds, name, raw.get(name), "the id of a token, or null")

    # JSON has one kind of number; their classes take no integer where a fraction may stand.
    read = {name: value for name, value in raw.items() if name in _READ - {"dtype", "torch_dtype"}}
    for name in _NUMBERS:
        if name in read:
            check_number(name, read[name])
            read[name] = float(read[name])
    try:
        theirs = FAMILIES[family].from_dict(read)
    except (StrictDataclassError, ValueError, TypeError, AttributeError, LookupError) as failure:
        reason = " ".join(str(failure).split())
        raise ConfigError(
            f"config.json is no {family!r} that transformers can read: {reason}"
        ) from failure
    return theirs


def _one_id(eos: object) -> object:
    """Returns the id of the end token, which may stand in a list."""
    return eos[0] if isinstance(eos, list) and len(eos) == 1 else eos


def _feed_forward(theirs: Any, named: str | None) -> str:
    """Returns our name of a feed-forward layer.

    Args:
        theirs: The configuration of transformers, which computes by `is_gated_act` and
            `dense_act_fn`.
        named: What config.json calls it; None when it does not.

    Raises:
        ConfigError: When we have none, or the name is of another layer.
    """
    gated, activation = getattr(theirs, "is_gated_act", False), theirs.dense_act_fn
    kind = "gated" if gated else "plain"
    computed = f"{kind} feed-forward layers with {activation}, by is_gated_act and dense_act_fn"
    if not gated and activation == "relu":
        check(
            named in (None, "relu"), "feed_forward_proj", named, f"'relu': the model has {computed}"
        )
        return "relu"
    if gated and activation in ("gelu_new", "gelu_pytorch_tanh"):
        check(
            named in (None, *_GATED_GELU),
            "feed_forward_proj",
            named,
            f"'gated-gelu': the model has {computed}",
        )
        return "gated-gelu"
    raise ConfigError(
        f"config.json has {'gated' if gated else 'plain'} feed-forward layers with the activation {activation!r}; "
        "expected plain ones with relu (T5 1.0, Switch) or gated ones with gelu_new (T5 1.1, flan). A model with "
        "others cannot be represented here."
    )


def _sparse_fields(theirs: SwitchTransformersConfig) -> dict[str, Any]:
    """Returns what a Switch model has beyond a T5."""
    for name, expected in (
        ("router_bias", False),
        ("num_selected_experts", 1),
        ("router_type", "tokens_masked"),
    ):
        value = getattr(theirs, name, expected)
        if value != expected:
            raise ConfigError(
                f"config.json has {name} {value!r}; expected {expected!r}. Other Switch models cannot be represented."
            )
    jitter = theirs.router_jitter_noise
    layers = {
        f"num_sparse_{stack}_layers": _count_sparse(theirs, stack, number)
        for stack, number in (
            ("encoder", theirs.num_layers),
            ("decoder", theirs.num_decoder_layers),
        )
    }
    return {
        **layers,
        "num_experts": theirs.num_experts if any(layers.values()) else 0,
        "sparse_position": "second",
        "num_selected_experts": 1,
        "router": "switch",
        "router_options": {"policy": "input_jitter", "jitter": jitter}
        if jitter
        else {"policy": "argmax"},
        "expert_capacity": theirs.expert_capacity,
        "capacity_scope": "sequence",
        "load_balance_loss_weight": theirs.router_aux_loss_coef,
        "router_z_loss_weight": theirs.router_z_loss_coef,
        "router_loss_reduction": "mean",
    }


def _count_sparse(theirs: SwitchTransformersConfig, stack: str, layers: int | None) -> int:
    """Returns how many sparse layers transformers builds in a stack, whatever config.json says of
    their number.

    Raises:
        ConfigError: When they do not stand in equal stretches.
    """
    assert layers is not None, "their class fills it"
    step = getattr(theirs, f"{stack}_sparse_step")
    sparse = sum(block % step == 1 or step == 1 for block in range(layers)) if step > 0 else 0
    if sparse and (layers % sparse or layers // sparse != step):
        raise ConfigError(
            f"config.json has {layers} layers in the {stack}, of which every {step}th from the second on is sparse: "
            f"{sparse}. Such a model cannot be represented here, where sparse layers stand in equal stretches."
        )
    return sparse


def their_fields(config: Any, family: Family) -> dict[str, Any]:
    """Returns the config.json of a T5 or Switch model that computes what a model of ours does.

    Args:
        config: An STMoEConfig.
        family: Whose.

    Raises:
        ConfigError: When there is no such model; gives every reason.
    """
    if reasons := [reason for holds, reason in _demands(config, family) if not holds]:
        raise ConfigError(
            f"The model cannot be written as {family!r}, whose class in transformers has no place for it: "
            f"{'; '.join(reasons)}. Keep it in our format, or give settings that such a model has, e.g. --set "
            "expert_capacity=64 capacity_scope=sequence."
        )
    fields = {name: getattr(config, name) for name in _SAME}
    gated = config.feed_forward_proj == "gated-gelu"
    fields |= {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "eos_token_id": config.eos_token_id,
        "decoder_start_token_id": config.decoder_start_token_id,
        "is_encoder_decoder": True,
        "initializer_factor": math.sqrt(config.initializer_scale),
        "tie_word_embeddings": config.tie_word_embeddings,
        "dense_act_fn": "gelu_new" if gated else "relu",
        "feed_forward_proj": config.feed_forward_proj,
        "is_gated_act": gated,
    }
    for name in _CARRIED:
        if getattr(config, name, None) is not None:
            fields[name] = getattr(config, name)
    if family == "t5":
        return fields
    options = config.sparse_config(decoder=not config.num_sparse_encoder_layers).router_options
    jitters = options.get("policy", "input_jitter") == "input_jitter"
    steps = {
        f"{stack}_sparse_step": layers // sparse if sparse else 0
        for stack, (layers, sparse) in (
            ("encoder", config.stack_sizes(False)),
            ("decoder", config.stack_sizes(True)),
        )
    }
    return fields | {
        **steps,
        "num_experts": config.num_experts,
        "num_selected_experts": 1,
        "num_sparse_encoder_layers": config.num_sparse_encoder_layers,
        "num_sparse_decoder_layers": config.num_sparse_decoder_layers,
        "expert_capacity": config.expert_capacity,
        "router_bias": False,
        "router_dtype": "float32",
        "router_jitter_noise": options.get("jitter", 0.01) if jitters else 0.0,
        "router_type": "tokens_masked",
        "router_aux_loss_coef": config.load_balance_loss_weight,
        "router_z_loss_coef": config.router_z_loss_weight,
    }


def _demands(config: Any, family: Family) -> list[tuple[bool, str]]:
    """Returns what must hold of a model to be written as one of `family`, and what is wrong when it
    does not.
    """
    if family == "t5":
        return [(config.num_experts == 0, f"it has {config.num_experts} experts")]
    if config.num_experts == 0:
        return [(False, "it has no experts (write it as t5)")]
    stacks = [decoder for decoder in (False, True) if config.stack_sizes(decoder)[1]]
    layers = [config.sparse_config(decoder=decoder) for decoder in stacks]
    routers = sorted({layer.router for layer in layers})
    policies = sorted({layer.router_options.get("policy", "input_jitter") for layer in layers})
    stretches = [layers // sparse for layers, sparse in map(config.stack_sizes, stacks)]
    second = config.sparse_position == "second" or max(stretches) <= 2  # where both are one block
    return [
        (
            config.feed_forward_proj == "relu",
            f"feed_forward_proj is {config.feed_forward_proj!r}, not 'relu'",
        ),
        (
            config.num_selected_experts == 1,
            f"num_selected_experts is {config.num_selected_experts}, not 1",
        ),
        (routers == ["switch"], f"the router is {' and '.join(routers)}, not switch"),
        (
            routers != ["switch"] or set(policies) <= {"input_jitter", "argmax"},
            f"the router's policy is {' and '.join(policies)}, not input_jitter or argmax",
        ),
        (
            routers != ["switch"]
            or all(layer.router_options == layers[0].router_options for layer in layers),
            "router_options of encoder and decoder differ",
        ),
        (config.router_input == "hidden", f"router_input is {config.router_input!r}, not 'hidden'"),
        (not config.sparse_dense_stacking, "sparse_dense_stacking is on"),
        (config.expert_bias == "none", f"expert_bias is {config.expert_bias!r}, not 'none'"),
        (
            config.expert_capacity is not None,
            "expert_capacity is None: its capacity is a number of slots",
        ),
        (
            config.capacity_scope == "sequence",
            f"capacity_scope is {config.capacity_scope!r}, not 'sequence'",
        ),
        (second, f"sparse_position is {config.sparse_position!r}, not 'second'"),
    ]
