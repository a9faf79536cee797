"""Low-rank adapters (LoRA) of experts and attention: a configuration for PEFT."""

from typing import Any

from torch import nn
from transformers import GenerationMixin

from moe.errors import ConfigError
from moe.sparse.experts import PROJECTIONS, Experts


def lora_config(
    model: nn.Module,
    *,
    experts: bool = True,
    attention: bool = True,
    rank: int = 8,
    alpha: float = 16,
    **options: Any,
) -> Any:
    """Returns a `peft.LoraConfig` whose adapters all attach to parameters of `model`.

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
        from moe.models.expert_lora import ExpertLoraConfig, LoraConfig, check_options
    except ImportError as error:
        raise ConfigError(
            "lora_config needs peft. Install it with `pip install 'stmoe[finetune]'`."
        ) from error

    # PEFT finds modules and parameters by the ends of their names: two parts, since another layer may
    # call its projection the same. The projections of nn.MultiheadAttention are not called.
    widths: dict[str, dict[str, int]] = {"experts": {}, "attention": {}}
    for path, module in model.named_modules():
        owner = path.rpartition(".")[2]
        if hasattr(module, "get_base_layer"):
            raise ConfigError(
                f"lora_config got a {type(model).__name__} with adapters; expected one without adapters. Call it "
                "before get_peft_model, or after merge_and_unload."
            )
        if isinstance(module, Experts):
            for name in PROJECTIONS & module._parameters.keys():
                widths["experts"][f"{owner}.{name}"] = min(module.get_parameter(name).shape[1:])
        is_attention = type(module).__name__.endswith("Attention")
        if is_attention and not isinstance(module, nn.MultiheadAttention):
            for name, child in module.named_children():
                if isinstance(child, nn.Linear):
                    smallest = min(child.in_features, child.out_features)
                    widths["attention"][f"{owner}.{name}"] = smallest

    # All that is wanted must be there, and wide enough.
    wanted = {"experts": experts, "attention": attention}
    for kind in [kind for kind, is_wanted in wanted.items() if is_wanted]:
        if not widths[kind]:
            raise ConfigError(
                f"lora_config got {kind}=True, but this {type(model).__name__} has no {kind} that it can adapt. "
                f"Pass {kind}=False."
            )
        narrowest = min(widths[kind], key=widths[kind].__getitem__)
        if rank > widths[kind][narrowest]:
            raise ConfigError(
                f"lora_config got rank={rank}; expected at most {widths[kind][narrowest]}, the width of {narrowest}."
            )
    if experts:
        check_options(options)

    # The kind of model tells PEFT which of its classes to load adapters with; that for encoder-decoders
    # gives them `input_ids`.
    of_text = isinstance(model, GenerationMixin) and model.main_input_name == "input_ids"
    if of_text and getattr(model.config, "is_encoder_decoder", False):
        options = {"task_type": "SEQ_2_SEQ_LM", **options}
    config_class = ExpertLoraConfig if experts else LoraConfig
    return config_class(
        r=rank,
        lora_alpha=alpha,  # pyright: ignore[reportArgumentType]  # a factor; peft says int
        target_modules=sorted(widths["attention"]) if attention else None,
        target_parameters=sorted(widths["experts"]) if experts else None,
        **options,
    )
