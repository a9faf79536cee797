"""Warnings about a model: tokens dropped in evaluation, and experts that a quantiser skipped."""

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.logging import get_logger, warning_once

from moe.distributed.collectives import is_rank_zero
from moe.kernels.expert_weights import is_quantized
from moe.kernels.torch_private import is_plain
from moe.models.blocks import Stack
from moe.models.configuration import STMoEConfig
from moe.sparse.experts import Experts
from moe.sparse.layer import RouterOutput, SparseFeedForward

_LOGGER = get_logger(__name__)
_TOLERATED_FRACTION = 0.01


@dataclass(frozen=True)
class _DropMessage:
    """Message to the logger, equal for all drops of one model.

    transformers logs equal messages once, so each model gets its own warning.
    """

    model: weakref.ref[nn.Module]
    text: str = field(compare=False)

    def __str__(self) -> str:
        return self.text


def can_drop_tokens(model: PreTrainedModel) -> bool:
    """Returns whether a forward of `model` is evaluation with a capacity.

    In training the metrics report drops; in evaluation only a warning does.
    """
    return not model.training and model.config.eval_capacity_field is not None


def warn_of_drops(
    model: nn.Module, config: STMoEConfig, stack: Stack, routers: Sequence[RouterOutput]
) -> None:
    """Warns once for each model when a sparse layer dropped more than 1 % of the real tokens.

    It waits for the device, unless nothing can be dropped, as in decoding with a cache. Compiled
    graphs and CUDA graphs skip it, and only the first rank warns. Drops by an edit of the routing
    are intended and not reported.

    Args:
        model: Identifies the model.
        config: Config of the model.
        stack: The stack that ran.
        routers: Routers of one of its forward passes.
    """
    has_capacity = any(router.plan.capacity for router in routers)
    if _is_in_graph(routers) or not has_capacity or not is_rank_zero():
        return

    # All layers are read from the device at once.
    rows = []
    for router in routers:
        rows.append(torch.stack([router.stats.dropped_tokens, router.stats.num_tokens]))
    counts = torch.stack(rows)  # [layers, 2]
    if counts.is_meta or not is_plain(counts):
        return

    # Dropped tokens as a fraction of the real ones, in the layer that drops most.
    worst_fraction = 0.0
    for dropped_tokens, num_tokens in counts.tolist():
        worst_fraction = max(worst_fraction, dropped_tokens / max(1, num_tokens))
    if worst_fraction <= _TOLERATED_FRACTION or _is_edited(stack):
        return

    # The settings that drop nothing.
    stack_name = "decoder" if stack.decoder else "encoder"
    name = config.eval_capacity_field or ""
    remedy = "eval_capacity_factor=None"
    if name == "expert_capacity":
        remedy += ", expert_capacity=None"
    text = (
        f"A sparse layer of the {stack_name} dropped {100 * worst_fraction:.1f} % of the tokens in "
        f"evaluation ({name} {getattr(config, name)}: {routers[0].plan.capacity} slots an "
        f"expert); from_pretrained(..., {remedy}) drops none."
    )
    warning_once(_LOGGER, _DropMessage(weakref.ref(model), text))


def _is_in_graph(routers: Sequence[RouterOutput]) -> bool:
    """Returns whether the current call is being compiled or captured into a CUDA graph."""
    is_cuda = any(router.router_logits.is_cuda for router in routers)
    is_captured = is_cuda and torch.cuda.is_current_stream_capturing()
    return is_captured or torch.compiler.is_compiling()


def _is_edited(stack: Stack) -> bool:
    """Returns whether the plans of a sparse layer are edited; see `moe.sparse.editing`."""
    modules = stack.modules()
    layers = [module for module in modules if isinstance(module, SparseFeedForward)]
    return any(layer.plan_edits for layer in layers)


def warn_of_plain_experts(model: PreTrainedModel) -> None:
    """Warns when a quantiser of transformers skipped experts of a newly loaded model.

    Quantisers replace linear modules, but experts are stacked parameters: nearly all of a large
    model.
    """
    if getattr(model, "hf_quantizer", None) is None:
        return
    total = model.num_parameters()  # bitsandbytes has two numbers of 4 bits in an element
    plain = 0
    for module in model.modules():
        if isinstance(module, Experts):
            for weight in module.parameters():
                is_plain_weight = weight.is_floating_point() and not is_quantized(weight)
                plain += weight.numel() if is_plain_weight else 0

    if not plain:
        return
    warnings.warn(
        f"The stacked experts were not quantized: {plain:,} of {total:,} parameters ({plain / total:.0%}). Quantize "
        "them first by `stmoe quantize`, and load its folder with the same quantization_config. torchao quantizes them "
        "in a loaded model: quantize_(model, FqnToConfig({'re:.*_proj': config}), filter_fn=None).",
        stacklevel=3,
    )
