"""What a router did, as sums and counts that add up exactly over batches, micro-batches, layers and ranks."""

from typing import NamedTuple

import torch
from torch import Tensor

from moe.sparse.losses import RouterLosses
from moe.sparse.plan import DispatchPlan


class RouterStats(NamedTuple):
    """Sums and counts over the real tokens of one layer; see `summarize` for the numbers that people read.

    Attributes:
        expert_load: <float32>[E] places that asked for each expert, before capacity.
        accepted_load: <float32>[E] places that got a slot.
        num_slots: <float32>[] slots there were; without a capacity, the slots that were used.
        num_tokens: <float32>[] real tokens.
        dropped_tokens: <float32>[] tokens that reached no expert.
        dropped_by_place: <float32>[K] places that asked for a slot and got none.
        entropy_sum: <float32>[] entropy of the router's probabilities in nats, over tokens.
        confidence_sum: <float32>[] combine weights of the accepted places.
        load_balance_sum: <float32>[] see `RouterLosses`, with the three below.
        num_groups: <float32>[]
        router_z_sum: <float32>[]
    """

    expert_load: Tensor
    accepted_load: Tensor
    num_slots: Tensor
    num_tokens: Tensor
    dropped_tokens: Tensor
    dropped_by_place: Tensor
    entropy_sum: Tensor
    confidence_sum: Tensor
    load_balance_sum: Tensor
    num_groups: Tensor
    router_z_sum: Tensor


@torch.no_grad()
def router_stats(router_logits: Tensor, plan: DispatchPlan, losses: RouterLosses) -> RouterStats:
    """Returns the statistics of one layer, without gradient and without a host synchronisation.

    Args:
        router_logits: <float32>[G, S, E].
        plan: The plan made of them.
        losses: The losses of the same plan.
    """
    dtype, (groups, _, num_experts) = router_logits.dtype, router_logits.shape
    accepted_load = _count_experts(plan.expert_index, plan.accepted, num_experts, dtype)
    log_probs = router_logits.log_softmax(dim=-1)
    if plan.capacity is None:
        num_slots = accepted_load.sum()
    else:
        num_slots = torch.full_like(losses.num_tokens, groups * num_experts * plan.capacity)
    entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
    return RouterStats(
        expert_load=_count_experts(plan.expert_index, plan.wanted, num_experts, dtype),
        accepted_load=accepted_load,
        num_slots=num_slots,
        num_tokens=losses.num_tokens,
        dropped_tokens=(plan.token_mask & ~plan.accepted.any(dim=-1)).sum().to(dtype),
        dropped_by_place=(plan.wanted & ~plan.accepted).sum(dim=(0, 1)).to(dtype),
        entropy_sum=(entropy * plan.token_mask).sum(),
        confidence_sum=plan.combine_weight.sum(),
        load_balance_sum=losses.load_balance_sum.detach(),
        num_groups=losses.num_groups,
        router_z_sum=losses.router_z_sum.detach(),
    )


def _count_experts(expert_index: Tensor, counted: Tensor, num_experts: int, dtype: torch.dtype) -> Tensor:
    """Returns <dtype>[E]: how often each expert stands in <int64>[G, S, K] where `counted`."""
    counts = torch.zeros(num_experts, dtype=dtype, device=expert_index.device)
    return counts.index_add(0, expert_index.flatten(), counted.flatten().to(dtype))


def add_stats(a: RouterStats, b: RouterStats) -> RouterStats:
    """Returns the statistics of both together; they must have the same E and K."""
    return RouterStats(*(x + y for x, y in zip(a, b, strict=True)))


def summarize(stats: RouterStats) -> dict[str, float]:
    """Returns the numbers that people read.

    Returns:
        `load_balance_loss` and `router_z_loss` (unweighted means), `fraction_dropped` (tokens that reached no
        expert), `entropy` (nats, mean over tokens), `load_cv` (standard deviation over mean of the expert load
        before capacity), `max_over_mean` of the same load, `dead_experts` (that no token asked for),
        `expert_usage` (filled slots over slots), `confidence` (mean combine weight of an accepted place).
    """
    load, tokens = stats.expert_load, float(stats.num_tokens) or 1.0
    mean = float(load.mean()) or 1.0
    return {
        "load_balance_loss": float(stats.load_balance_sum) / (float(stats.num_groups) or 1.0),
        "router_z_loss": float(stats.router_z_sum) / tokens,
        "fraction_dropped": float(stats.dropped_tokens) / tokens,
        "entropy": float(stats.entropy_sum) / tokens,
        "load_cv": float(load.std(correction=0)) / mean,
        "max_over_mean": float(load.max()) / mean,
        "dead_experts": float((load == 0).sum()),
        "expert_usage": float(stats.accepted_load.sum()) / (float(stats.num_slots) or 1.0),
        "confidence": float(stats.confidence_sum) / (float(stats.accepted_load.sum()) or 1.0),
    }
