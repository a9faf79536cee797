"""The warning of a model that drops tokens in evaluation."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.logging import get_logger, warning_once

from moe.distributed.collectives import is_rank_zero
from moe.models.blocks import Stack
from moe.models.configuration import STMoEConfig
from moe.sparse.layer import RouterOutput, SparseFeedForward

_LOGGER = get_logger(__name__)
_TOLERATED_FRACTION = 0.01


@dataclass(frozen=True)
class _DropMessage:
    """Message to the logger, equal for all drops of one model.

    transformers logs equal messages once, so that each model is warned of once, whatever the text.
    """

    model: weakref.ref[nn.Module]
    text: str = field(compare=False)

    def __str__(self) -> str:
        return self.text


def can_drop_tokens(model: PreTrainedModel) -> bool:
    """Returns whether a forward of `model` is evaluation with a capacity.

    In training the metrics report the drops; in evaluation nothing but a warning does.
    """
    return not model.training and model.config.eval_capacity_field is not None


def warn_of_drops(
    model: nn.Module, config: STMoEConfig, stack: Stack, routers: Sequence[RouterOutput]
) -> None:
    """Warns once for each model when a sparse layer dropped more than 1 % of the real tokens.

    It waits for the device, unless nothing could be dropped, as in decoding with a cache. Compiled
    graphs and CUDA graphs leave it out, and of several ranks the first one warns. What an edit of
    the routing drops is wanted, and no capacity is to blame.

    Args:
        model: Tells models apart.
        config: Of the model.
        stack: The stack that ran.
        routers: Of one forward of it.
    """
    has_capacity = any(router.plan.capacity for router in routers)
    if _is_in_graph(routers) or not has_capacity or not is_rank_zero():
        return

    # All layers are read from the device at once.
    rows = []
    for router in routers:
        rows.append(torch.stack([router.stats.dropped_tokens, router.stats.num_tokens]))
    counts = torch.stack(rows)  # [layers, 2]

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
    """Returns whether a graph is being made of what runs now, by a compiler or of CUDA's kernels."""
    is_cuda = any(router.router_logits.is_cuda for router in routers)
    is_captured = is_cuda and torch.cuda.is_current_stream_capturing()
    return is_captured or torch.compiler.is_compiling()


def _is_edited(stack: Stack) -> bool:
    """Returns whether somebody edits the plans of a sparse layer; see `moe.sparse.editing`."""
    modules = stack.modules()
    layers = [module for module in modules if isinstance(module, SparseFeedForward)]
    return any(layer.plan_edits for layer in layers)
