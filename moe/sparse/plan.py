"""The plan: which token takes which slot of which expert, with which weight; dispatch.py carries it out."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class DispatchPlan(NamedTuple):
    """Where every token of every group goes; pure data, the same for every router.

    Attributes:
        expert_index: <int64>[G, S, K] expert of each place, best first.
        slot: <int64>[G, S, K] row in that expert's buffer of the group; meaningful where accepted.
        accepted: <bool>[G, S, K] whether the place got a slot; never for padding.
        combine_weight: <float32 or float64>[G, S, K] weight of the expert's output; 0 where not accepted.
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


def assign_slots(expert_index: Tensor, wanted: Tensor, num_experts: int, capacity: int | None) -> tuple[Tensor, Tensor]:
    """Returns the slot of every place and whether it was accepted.

    All first places are served before any second place, and tokens in the order of the sequence, so that a decoder
    cannot learn of later tokens from what was dropped.

    Args:
        expert_index: <int64>[G, S, K] chosen experts.
        wanted: <bool>[G, S, K] places that ask for a slot.
        num_experts: E.
        capacity: Slots of an expert in a group, C; None serves everybody.

    Returns:
        slot <int64>[G, S, K] and accepted <bool>[G, S, K].

    Source:
        ST-MoE (arXiv:2202.08906) appendix D; Mesh-TensorFlow transformer/moe.py at a32810e, `_top_n_gating`.
    """
    taken = expert_index.new_zeros(expert_index.shape[0], 1, num_experts)
    slots, accepts = [], []
    for place_index, place_wanted in zip(expert_index.unbind(-1), wanted.unbind(-1), strict=True):
        asks = F.one_hot(place_index, num_experts) * place_wanted[..., None]
        position = asks.cumsum(dim=1) - asks + taken
        slot = position.gather(-1, place_index[..., None]).squeeze(-1)
        accepted = place_wanted if capacity is None else place_wanted & (slot < capacity)
        taken = taken + (asks * accepted[..., None]).sum(dim=1, keepdim=True)
        slots.append(slot)
        accepts.append(accepted)
    return torch.stack(slots, dim=-1), torch.stack(accepts, dim=-1)
