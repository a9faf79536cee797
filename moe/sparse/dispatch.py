"""Dispatch: tokens to slots; combine: slots to tokens. Between the two, experts.py."""

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from moe.sparse.plan import DispatchPlan


class ExpertRows(NamedTuple):
    """The accepted places as rows sorted by expert; no row stands for an empty slot.

    Attributes:
        rows: <any float>[N, D] tokens, or outputs of the experts.
        counts: Rows of each expert, E integers that add up to N.
        place: <int64>[N] index of each row's place in the flattened [G, S, K].
    """

    rows: Tensor
    counts: list[int]
    place: Tensor


def dispatch(tokens: Tensor, plan: DispatchPlan, num_experts: int) -> ExpertRows:
    """Returns the tokens as rows by expert.

    Args:
        tokens: <any float>[G, S, D].
        plan: Where they go.
        num_experts: E.
    """
    num_places = plan.expert_index.shape[-1]
    expert = plan.expert_index.masked_fill(~plan.accepted, num_experts).flatten()
    counts = torch.bincount(expert, minlength=num_experts + 1)[:num_experts].tolist()
    place = expert.argsort(stable=True)[: sum(counts)]
    rows = rearrange(tokens, "g s d -> (g s) d").index_select(0, place // num_places)
    return ExpertRows(rows, counts, place)


def combine(outputs: ExpertRows, plan: DispatchPlan) -> Tensor:
    """Returns every token's weighted sum over its accepted places; zeros where there is none.

    Args:
        outputs: What the experts made of the rows of `dispatch`.
        plan: The plan of that dispatch.

    Returns:
        <dtype of the rows>[G, S, D].
    """
    groups, size, num_places = plan.expert_index.shape
    weight = plan.combine_weight.flatten().index_select(0, outputs.place).to(outputs.rows.dtype)
    y = outputs.rows.new_zeros(groups * size, outputs.rows.shape[-1])
    y = y.index_add(0, outputs.place // num_places, outputs.rows * weight[:, None])
    return rearrange(y, "(g s) d -> g s d", g=groups)
