"""Dispatch: tokens to rows of their experts; combine: rows to tokens. Between the two, experts.py.

Rows are either sorted by expert, exactly the accepted ones (`sort_rows`), or stand in fixed slots
(`dispatch_slots`, `combine_slots`); both carry out the same plan.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from moe.sparse.plan import DispatchPlan


class ExpertRows(NamedTuple):
    """The accepted places as rows sorted by expert; no row stands for an empty slot or a dropped
    token.

    Attributes:
        counts: <int64>[E] rows of each expert; they add up to N.
        token: <int64>[N] token of each row, in the flattened [G, S].
        weight: <float32>[N] combine weight of each row.
        by_token: <int64>[N] the rows in the order of their tokens.
        token_start: <int64>[G * S] where each token's rows begin in `by_token`.
    """

    counts: Tensor
    token: Tensor
    weight: Tensor
    by_token: Tensor
    token_start: Tensor


def sort_rows(plan: DispatchPlan, num_experts: int) -> ExpertRows:
    """Returns which token each row of each expert is; rows are selected before they are sorted.

    Args:
        plan: Where tokens go.
        num_experts: E.
    """
    accepted = plan.accepted.flatten(0, 1)
    place = accepted.flatten().nonzero().squeeze(-1)
    expert = plan.expert_index.flatten().index_select(0, place)
    order = expert.argsort(stable=True)
    by_token = torch.empty_like(order).scatter(
        0, order, torch.arange(order.numel(), device=order.device)
    )
    place = place.index_select(0, order)
    rows_of_token = accepted.sum(dim=-1)
    return ExpertRows(
        counts=torch.bincount(expert, minlength=num_experts),
        token=place // accepted.shape[-1],
        weight=plan.combine_weight.flatten().index_select(0, place),
        by_token=by_token,
        token_start=rows_of_token.cumsum(0) - rows_of_token,
    )


class Slots(NamedTuple):
    """A plan as fixed slots: every expert has as many as the groups have together, empty or not.

    Attributes:
        token: <int64>[E, G * C] token of each slot, in the flattened [G, S]; G * S, which is none,
            for an empty one.
        weight: <float32>[E, G * C] combine weight; 0 for an empty slot.
    """

    token: Tensor
    weight: Tensor


def fill_slots(plan: DispatchPlan, num_experts: int) -> Slots:
    """Returns who stands in each slot; no shape depends on the tokens, and the device is never
    waited for.

    Args:
        plan: Where tokens go; without a capacity every expert has a slot for every token.
        num_experts: E.
    """
    groups, size, _ = plan.expert_index.shape
    capacity = size if plan.capacity is None else plan.capacity
    group = torch.arange(groups, device=plan.slot.device)[:, None, None]
    index = (plan.expert_index * groups + group) * capacity + plan.slot
    nowhere = num_experts * groups * capacity
    index = index.masked_fill(~plan.accepted, nowhere).flatten()
    token = (
        torch.arange(groups * size, device=index.device)[:, None]
        .expand(-1, plan.slot.shape[-1])
        .flatten()
    )
    token = token.new_full((nowhere + 1,), groups * size).scatter(0, index, token)
    weight = plan.combine_weight.new_zeros(nowhere + 1).scatter(
        0, index, plan.combine_weight.flatten()
    )
    by_expert = "(e n) -> e n"
    return Slots(*(rearrange(x[:nowhere], by_expert, e=num_experts) for x in (token, weight)))


def dispatch_slots(tokens: Tensor, slots: Slots) -> Tensor:
    """Returns the buffers of the experts <any float>[E, G * C, D] for tokens <any float>[G * S, D].

    An empty slot holds zeros, not some token's row: 0 times a row that is not finite, or overflows
    there, is NaN.
    """
    rows = F.pad(tokens, (0, 0, 0, 1)).index_select(0, slots.token.flatten())
    return rearrange(rows, "(e n) d -> e n d", e=slots.token.shape[0])


def combine_slots(outputs: Tensor, slots: Slots, num_tokens: int) -> Tensor:
    """Returns every token's weighted sum over its slots <any float>[G * S, D]; zeros where there is
    none.

    Args:
        outputs: <any float>[E, G * C, D] of the experts.
        slots: Of the dispatch.
        num_tokens: G * S.
    """
    rows = rearrange(outputs * slots.weight[..., None].to(outputs.dtype), "e n d -> (e n) d")
    return rows.new_zeros(num_tokens + 1, rows.shape[-1]).index_add(0, slots.token.flatten(), rows)[
        :num_tokens
    ]
