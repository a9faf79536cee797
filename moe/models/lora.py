"""Low-rank adapters (LoRA) of experts and attention: a configuration for PEFT."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import GenerationMixin

from moe.errors import ConfigError
from moe.sparse.experts import PROJECTIONS, Experts

if TYPE_CHECKING:
    from peft import LoraConfig


def lora_config(
    model: nn.Module,
    *,
    experts: bool = True,
    attention: bool = True,
    rank: int = 8,
    alpha: float = 16,
    **options: Any,
) -> LoraConfig:
    """Returns a PEFT configuration whose adapters all attach to parameters of `model`.

    PEFT's own `target_modules="all-linear"` attaches nothing to the experts, without a warning: they are stacked
    parameters, not linear modules, and are listed in `target_parameters`. An adapter of experts is one A and one B of
    `rank` for each expert; B starts at zero, so that attaching changes no output. A sparse layer computes it inside
    the products of its experts, at little more than the cost of frozen experts.

    Example:
        model = peft.get_peft_model(model, moe.lora_config(model))
        ...train...
        model.save_pretrained(folder)                     # the adapters alone
        model = model.merge_and_unload()                  # a plain model again

    Args:
        model: A model with sparse layers, whole and without adapters: of this library, a host, or one of
            `replace_feed_forward`.
        experts: Whether every expert of every sparse layer gets adapters, on both of its products.
        attention: Whether all linear maps of attention layers get them.
        rank: Inner width; more trains more parameters.
        alpha: The adapters' product is scaled by alpha / rank.
        options: Further fields of `peft.LoraConfig`. With `lora_dropout`, the file that PEFT saves says 0: it refuses
            to load another rate for experts, and dropout is of training only.

    Raises:
        ConfigError: When peft is not installed, the model has no experts or has adapters, the rank exceeds
            a width, or an option is not supported for experts.
        TypeError: When an option is unknown to peft or given by the arguments above.
    """
    try:
        from peft import LoraConfig

        from moe.models.expert_lora import ExpertLoraConfig, check_options
    except ImportError as error:
        raise ConfigError(
            "lora_config needs peft. Install it with `pip install 'stmoe[finetune]'`."
        ) from error

    # PEFT finds modules and parameters by the ends of their names: two parts, since another layer may
    # call its projection the same. The projections of nn.MultiheadAttention are not called.
    projections: set[str] = set()
    expert_weights: set[str] = set()
    widths: dict[str, int] = {}
    for path, module in model.named_modules():
        owner = path.rpartition(".")[2]
        if hasattr(module, "get_base_layer"):
            raise ConfigError(
                f"lora_config got a {type(model).__name__} with adapters; expected one without adapters. Call it "
                "before get_peft_model, or after merge_and_unload."
            )
        if experts and isinstance(module, Experts):
            for name in PROJECTIONS & module._parameters.keys():
                expert_weights.add(f"{owner}.{name}")
                widths[f"{path}.{name}"] = min(module.get_parameter(name).shape[1:])
        is_attention = type(module).__name__.endswith("Attention")
        if attention and is_attention and not isinstance(module, nn.MultiheadAttention):
            for name, child in module.named_children():
                if isinstance(child, nn.Linear):
                    projections.add(f"{owner}.{name}")
                    widths[f"{path}.{name}"] = min(child.in_features, child.out_features)

    if experts and not expert_weights:
        raise ConfigError(
            "lora_config got experts=True, but the model is dense. Pass experts=False."
        )
    if attention and not projections:
        raise ConfigError(
            f"lora_config got attention=True, but no attention of this {type(model).__name__} calls linear "
            "modules. Pass attention=False."
        )
    if not widths:
        raise ConfigError(
            "lora_config got experts=False and attention=False; expected one of them."
        )
    narrowest = min(widths, key=widths.__getitem__)
    if rank > widths[narrowest]:
        raise ConfigError(
            f"lora_config got rank={rank}; expected at most {widths[narrowest]}, the width of {narrowest}."
        )
    if experts:
        check_options(options)

    # The kind of model tells PEFT which of its classes to load adapters with.
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if isinstance(model, GenerationMixin) and is_encoder_decoder:
        options = {"task_type": "SEQ_2_SEQ_LM", **options}
    config_class = ExpertLoraConfig if experts else LoraConfig
    return config_class(
        r=rank,
        lora_alpha=alpha,  # pyright: ignore[reportArgumentType]  # a factor; peft says int
        target_modules=sorted(projections) or None,
        target_parameters=sorted(expert_weights) or None,
        **options,
    )
