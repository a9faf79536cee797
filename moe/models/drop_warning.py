"""The warning of a model that loses tokens in evaluation."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.logging import get_logger, warning_once

from moe.distributed.collectives import is_rank_zero
from moe.models.configuration import STMoEConfig
from moe.sparse.layer import RouterOutput

_LOGGER = get_logger(__name__)
_TOLERATED = 0.01


@dataclass(frozen=True)
class _Drops:
    """What the logger is given: equal for one model whatever the text, so that it is said once for
    each model.
    """

    model: weakref.ref[nn.Module]
    text: str = field(compare=False)

    def __str__(self) -> str:
        return self.text


def may_drop(model: PreTrainedModel) -> bool:
    """Returns whether a forward of `model` is evaluation with a capacity, of whose drops only
    statistics tell.
    """
    return not model.training and model.config.eval_limit is not None


def warn_of_drops(
    model: nn.Module, config: STMoEConfig, stack: str, routers: Sequence[RouterOutput]
) -> None:
    """Warns once for each `model` when a sparse layer left more than 1 % of the real tokens without
    an expert.

    It waits for the device, unless nothing could be dropped, as in decoding with a cache; a
    compiled graph leaves it out, and of several ranks the first speaks.

    Args:
        model: Tells models apart.
        config: Of the model.
        stack: `encoder` or `decoder`.
        routers: Of one forward of that stack.
    """
    if (
        torch.compiler.is_compiling()
        or not any(router.plan.capacity for router in routers)
        or not is_rank_zero()
    ):
        return
    counts = torch.stack(
        [torch.stack([router.stats.dropped_tokens, router.stats.num_tokens]) for router in routers]
    )
    share = max(dropped / max(1, tokens) for dropped, tokens in counts.tolist())
    if share > _TOLERATED:
        limit = config.eval_limit or ""
        without = "eval_capacity_factor=None" + (
            ", expert_capacity=None" if limit == "expert_capacity" else ""
        )
        text = (
            f"A sparse layer of the {stack} dropped {100 * share:.1f} % of the tokens in evaluation ({limit} "
            f"{getattr(config, limit)}: {routers[0].plan.capacity} slots an expert); "
            f"from_pretrained(..., {without}) drops none."
        )
        warning_once(_LOGGER, _Drops(weakref.ref(model), text))
