"""Scores and plan: which token takes which slot of which expert, and with which weight.

A router computes scores from the tokens and a plan from the scores; dispatch.py executes the plan.
Both are pure data, the same for every router.
"""

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

# Requests of a group up to which comparing all pairs takes fewer operations than sorting. Compiled
# graphs sort them always: they must support any number.
_FEW_REQUESTS = 32


class RouterScores(NamedTuple):
    """Scores of every expert for every token; float64 in a float64 model, float32 otherwise.

    Attributes:
        logits: <float32>[G, S, E] `router_logits`.
        probs: <float32>[G, S, E] `router_probs`, their softmax over experts.
    """

    logits: Tensor
    probs: Tensor


def router_scores(logits: Tensor) -> RouterScores:
    """Returns the scores for logits <float32>[G, S, E].

    The exponential of a log-softmax would be cheaper; but its rounding would break ties between
    tokens that are equal in a softmax.
    """
    return RouterScores(logits=logits, probs=logits.softmax(dim=-1))


class DispatchPlan(NamedTuple):
    """The routing of every token of every group.

    A token has K choices: with token choice its K experts, best first; with expert choice one for
    each expert. A choice is requested or not, and a requested choice is accepted or refused.

    Attributes:
        expert_index: <int64>[G, S, K] expert of each choice.
        slot: <int64>[G, S, K] slot of that expert in the group; meaningful where accepted, if there
            is a capacity.
        accepted: <bool>[G, S, K] whether the choice got a slot; never for padding.
        combine_weight: <float32 or float64>[G, S, K] weight of the expert's output; 0 where not
            accepted.
        requested: <bool>[G, S, K] whether the choice requests a slot, before capacity; where experts choose, whether it
            was accepted.
        token_mask: <bool>[G, S] real tokens; False is padding.
        capacity: Slots of an expert in a group, C; None if every expert has slots for all tokens,
            even for a token that an edit assigned to it twice.
    """

    expert_index: Tensor
    slot: Tensor
    accepted: Tensor
    combine_weight: Tensor
    requested: Tensor
    token_mask: Tensor
    capacity: int | None


def assign_slots(
    expert_index: Tensor,
    requested: Tensor,
    num_experts: int,
    capacity: int | None,
    priority: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the slot of every choice and whether it was accepted.

    All first choices are served before any second choice, and tokens in the order of the sequence,
    so that dropped first choices in a decoder do not depend on later tokens. A second choice can be
    lost to the first choice of a later token: that is the paper's rule, and does not affect an
    incremental decoder, which drops nothing.

    Args:
        expert_index: <int64>[G, S, K] chosen experts.
        requested: <bool>[G, S, K] choices that request a slot.
        num_experts: Experts, E.
        capacity: Slots of an expert in a group, C; None accepts every request.
        priority: <float>[G, S] serves tokens with larger values first instead, and earlier tokens first among equals.
            Not for a decoder.

    Returns:
        slot <int64>[G, S, K], the positions of the tokens without a capacity, and accepted
        <bool>[G, S, K].

    Source:
        ST-MoE (arXiv:2202.08906) appendix D; Mesh-TensorFlow transformer/moe.py at a32810e,
        `_top_n_gating`. Differs: no; a choice's position in the queue of its expert is its slot,
        since every later request after a refusal finds the expert full.
    """
    # Nobody queues at an expert with a slot for every token.
    if capacity is None:
        return token_slots(expert_index), requested

    # Put the tokens in the order in which they are served.
    serving_order = None
    if priority is not None:
        serving_order = priority.argsort(dim=1, descending=True, stable=True)  # [G, S]
        serving_order = serving_order[..., None].expand_as(expert_index)  # [G, S, K]
        expert_index = expert_index.gather(1, serving_order)
        requested = requested.gather(1, serving_order)

    # Queue up at the experts: the first choices of all tokens, then all second choices, ...
    num_choices = expert_index.shape[2]
    queueing_expert = rearrange(expert_index, "g s k -> g (k s)")  # [G, K * S]
    queueing = rearrange(requested, "g s k -> g (k s)")
    position = queue_position(queueing_expert, queueing, num_experts)
    slot = rearrange(position, "g (k s) -> g s k", k=num_choices)  # [G, S, K]

    # An expert accepts the first C of its queue.
    accepted = requested & (slot < capacity)

    # Back to the order of the sequence.
    if serving_order is not None:
        slot = torch.empty_like(slot).scatter(1, serving_order, slot)
        accepted = torch.empty_like(accepted).scatter(1, serving_order, accepted)
    return slot, accepted


def token_slots(expert_index: Tensor) -> Tensor:
    """Returns the slots <int64>[G, S, K] of experts with a slot for every token: its position."""
    position = torch.arange(expert_index.shape[1], device=expert_index.device)
    return position[:, None].expand_as(expert_index)


def reassign_slots(plan: DispatchPlan, num_experts: int) -> DispatchPlan:
    """Returns an edited plan with slots that no two accepted choices share.

    Choices queue at their experts in the order of the slots they had: first choices before second
    ones and earlier tokens first where those are equal. Every accepted choice stays accepted. If an
    expert has more of them than slots, the capacity becomes None, and slots are those of
    `token_slots`; compiled graphs, which cannot count them, always have None.

    Args:
        plan: Experts and acceptance as they should be; its slots only give the order.
        num_experts: Experts, E.
    """
    if plan.capacity is None or torch.compiler.is_compiling():
        return _without_capacity(plan)

    # Serve lower slots first.
    expert_index = rearrange(plan.expert_index, "g s k -> g (k s)")  # [G, K * S]
    accepted = rearrange(plan.accepted, "g s k -> g (k s)")
    order = rearrange(plan.slot, "g s k -> g (k s)").argsort(stable=True)
    position = queue_position(expert_index.gather(1, order), accepted.gather(1, order), num_experts)

    # Back to the order of the choices.
    position = torch.empty_like(position).scatter(1, order, position)
    slot = rearrange(position, "g (k s) -> g s k", k=plan.slot.shape[2])  # [G, S, K]

    is_beyond = plan.accepted & (slot >= plan.capacity)
    if bool(is_beyond.any()):
        return _without_capacity(plan)
    return plan._replace(slot=slot.where(plan.accepted, plan.slot))


def _without_capacity(plan: DispatchPlan) -> DispatchPlan:
    return plan._replace(slot=token_slots(plan.expert_index), capacity=None)


def queue_position(expert_index: Tensor, requested: Tensor, num_experts: int) -> Tensor:
    """Returns how many earlier requests of the group are for the same expert.

    A stable sort groups the requests of each queue; the position is the distance from the queue's
    first. No mask [G, R, E] is built. A few requests are compared with each other.

    Args:
        expert_index: <int64>[G, R] experts; R requests of a group, e.g. K * S.
        requested: <bool>[G, R] whether there is a request.
        num_experts: Experts, E.

    Returns:
        <int64>[G, R] positions from 0; meaningful where requested.
    """
    num_groups, num_requests = expert_index.shape
    if not torch.compiler.is_compiling() and num_requests <= _FEW_REQUESTS:
        is_same = expert_index[:, :, None] == expert_index[:, None, :]  # [G, R, R]
        is_ahead = (is_same & requested[:, None, :]).tril(diagonal=-1)
        return is_ahead.sum(dim=-1)

    num_queues = num_groups * num_experts
    device = expert_index.device

    # One queue for each expert of each group, and one more for those who request nothing.
    first_queue = torch.arange(0, num_queues, num_experts, device=device)[:, None]  # [G, 1]
    queue = (expert_index + first_queue).masked_fill_(~requested, num_queues).flatten()  # [G * R]

    # Sort by queue, the earlier first; a queue starts where its number first occurs.
    sorted_queue, order = queue.sort(stable=True)  # [G * R]
    start = torch.searchsorted(sorted_queue, sorted_queue)

    # Position in the queue, and back to the order of the requests.
    position = torch.arange(num_groups * num_requests, device=device) - start  # [G * R]
    position = torch.empty_like(position).scatter_(0, order, position)
    return position.reshape(num_groups, num_requests)
