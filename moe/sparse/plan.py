"""The plan: which token takes which slot of which expert, with which weight; dispatch.py carries it
out.
"""

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor


class DispatchPlan(NamedTuple):
    """Where every token of every group goes; pure data, the same for every router.

    A token has K places: with token choice its K experts, best first; with expert choice one for
    each expert.

    Attributes:
        expert_index: <int64>[G, S, K] expert of each place.
        slot: <int64>[G, S, K] row in that expert's buffer of the group; meaningful where accepted.
        accepted: <bool>[G, S, K] whether the place got a slot; never for padding.
        combine_weight: <float32 or float64>[G, S, K] weight of the expert's output; 0 where not
            accepted.
        wanted: <bool>[G, S, K] whether the place asked for a slot, before capacity.
        token_mask: <bool>[G, S] real tokens; False is padding.
        capacity: Slots of an expert in a group, C; None when every expert has room for all tokens.
    """

    expert_index: Tensor
    slot: Tensor
    accepted: Tensor
    combine_weight: Tensor
    wanted: Tensor
    token_mask: Tensor
    capacity: int | None


def assign_slots(
    expert_index: Tensor,
    wanted: Tensor,
    num_experts: int,
    capacity: int | None,
    priority: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the slot of every place and whether it was accepted.

    All first places are served before any second place, and tokens in the order of the sequence, so
    that what a decoder drops of the first places tells nothing of later tokens. A second place can
    be lost to the first place of a
    later token: that is the paper's rule, and an incremental decoder, which drops nothing, is free
    of it.

    Args:
        expert_index: <int64>[G, S, K] chosen experts.
        wanted: <bool>[G, S, K] places that ask for a slot.
        num_experts: E.
        capacity: Slots of an expert in a group, C; None serves everybody.
        priority: <float>[G, S] serves tokens of larger values first instead; of equals the earlier.
            Not for a decoder.

    Returns:
        slot <int64>[G, S, K] and accepted <bool>[G, S, K].

    Source:
        ST-MoE (arXiv:2202.08906) appendix D; Mesh-TensorFlow transformer/moe.py at a32810e,
        `_top_n_gating`. The
        rank of a place among all that ask for its expert is its slot: whoever asks after a refusal
        finds the expert full.
    """
    served = None
    if priority is not None:
        served = priority.argsort(dim=1, descending=True, stable=True)[..., None].expand_as(
            expert_index
        )
        expert_index, wanted = expert_index.gather(1, served), wanted.gather(1, served)
    by_place = rearrange(expert_index, "g s k -> g (k s)"), rearrange(wanted, "g s k -> g (k s)")
    slot = rearrange(
        queue_position(*by_place, num_experts), "g (k s) -> g s k", k=expert_index.shape[2]
    )
    accepted = wanted if capacity is None else wanted & (slot < capacity)
    if served is not None:
        slot = torch.empty_like(slot).scatter(1, served, slot)
        accepted = torch.empty_like(accepted).scatter(1, served, accepted)
    return slot, accepted


def queue_position(expert_index: Tensor, wanted: Tensor, num_experts: int) -> Tensor:
    """Returns how many of the earlier ones in the group ask for the same expert.

    Args:
        expert_index: <int64>[G, N] experts.
        wanted: <bool>[G, N] who asks.
        num_experts: E.

    Returns:
        <int64>[G, N]; meaningful where wanted.
    """
    groups, size = expert_index.shape
    queue = expert_index + torch.arange(groups, device=expert_index.device)[:, None] * num_experts
    queue = queue.masked_fill(~wanted, groups * num_experts).flatten()
    length = queue.new_zeros(groups * num_experts + 1).scatter_add(0, queue, torch.ones_like(queue))
    order = queue.argsort(stable=True)
    start = (length.cumsum(0) - length).index_select(0, queue.index_select(0, order))
    rank = torch.arange(groups * size, device=queue.device) - start
    return torch.empty_like(rank).scatter(0, order, rank).reshape(groups, size)
