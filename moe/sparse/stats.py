"""What a router did, as sums and counts that add up exactly over batches, micro-batches, layers and
ranks.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe.distributed.collectives import sum_each_over_ranks
from moe.sparse.losses import RouterLosses
from moe.sparse.plan import DispatchPlan
from moe.sparse.scores import RouterScores

_REPORTED = (
    "load_balance_loss",
    "router_z_loss",
    "fraction_dropped",
    "entropy",
    "load_cv",
    "max_over_mean",
    "dead_experts",
)


class RouterStats(NamedTuple):
    """Sums and counts over the real tokens of one layer; see `summarize` for the numbers that
    people read.

    Counts are integers and sums float64, so that no token is lost in a long run.

    Attributes:
        expert_load: <int64>[E] places that asked for each expert, before capacity.
        accepted_load: <int64>[E] places that got a slot.
        num_slots: <int64>[] slots there were; without a capacity, the slots that were used.
        num_tokens: <int64>[] real tokens.
        num_positions: <int64>[] tokens with their padding.
        dropped_tokens: <int64>[] tokens that reached no expert.
        dropped_by_place: <int64>[K] places that asked for a slot and got none.
        second_expert_tokens: <int64>[] tokens that reached two or more experts.
        entropy_sum: <float64>[] entropy of the router's probabilities in nats, over tokens.
        confidence_sum: <float64>[] combine weights of the accepted places.
        load_balance_sum: <float64>[] see `RouterLosses`, with the three below.
        load_balance_count: <float64>[]
        router_z_sum: <float64>[]
        router_z_count: <float64>[]
    """

    expert_load: Tensor
    accepted_load: Tensor
    num_slots: Tensor
    num_tokens: Tensor
    num_positions: Tensor
    dropped_tokens: Tensor
    dropped_by_place: Tensor
    second_expert_tokens: Tensor
    entropy_sum: Tensor
    confidence_sum: Tensor
    load_balance_sum: Tensor
    load_balance_count: Tensor
    router_z_sum: Tensor
    router_z_count: Tensor


@torch.no_grad()
def router_stats(scores: RouterScores, plan: DispatchPlan, losses: RouterLosses) -> RouterStats:
    """Returns the statistics of one layer, without gradient and without a host synchronisation.

    Args:
        scores: Of the router.
        plan: The plan made of them.
        losses: The losses of the same plan.
    """
    groups, size, num_experts = scores.probs.shape
    accepted_load = _count_experts(plan.expert_index, plan.accepted, num_experts)
    reached = plan.accepted.sum(dim=-1)
    entropy = scores.log_normalizer - (scores.probs * scores.logits).sum(
        dim=-1
    )  # which autocast does not round
    if plan.capacity is None:
        num_slots = accepted_load.sum()
    else:
        num_slots = torch.full_like(accepted_load[0], groups * num_experts * plan.capacity)
    return RouterStats(
        expert_load=_count_experts(plan.expert_index, plan.wanted, num_experts),
        accepted_load=accepted_load,
        num_slots=num_slots,
        num_tokens=plan.token_mask.sum(),
        num_positions=torch.full_like(accepted_load[0], groups * size),
        dropped_tokens=(plan.token_mask & (reached == 0)).sum(),
        dropped_by_place=(plan.wanted & ~plan.accepted).sum(dim=(0, 1)),
        second_expert_tokens=(reached > 1).sum(),
        entropy_sum=(entropy.double() * plan.token_mask).sum(),
        confidence_sum=plan.combine_weight.sum(dtype=torch.float64),
        load_balance_sum=losses.load_balance_sum.detach().double(),
        load_balance_count=losses.load_balance_count.detach().double(),
        router_z_sum=losses.router_z_sum.detach().double(),
        router_z_count=losses.router_z_count.detach().double(),
    )


def _count_experts(expert_index: Tensor, counted: Tensor, num_experts: int) -> Tensor:
    """Returns <int64>[E]: how often each expert stands in <int64>[G, S, K] where `counted`."""
    counts = expert_index.new_zeros(num_experts)
    return counts.scatter_add(0, expert_index.flatten(), counted.flatten().long())


def add_stats(a: RouterStats, b: RouterStats) -> RouterStats:
    """Returns the statistics of both together; they must have the same E and K."""
    return RouterStats(*(x + y for x, y in zip(a, b, strict=True)))


def sum_stats(stats: RouterStats, group: ProcessGroup | None = None) -> RouterStats:
    """Returns the statistics of all ranks of `group` together, the same on each; None for all
    ranks.
    """
    return RouterStats(*sum_each_over_ranks(stats, group))


def summarize(stats: RouterStats) -> dict[str, float]:
    """Returns the numbers that people read.

    Returns:
        `load_balance_loss` and `router_z_loss` (unweighted means), `fraction_dropped` (tokens that
        reached no expert), `fraction_dropped_choice_1` to `_K` (places that asked and got no slot,
        of all tokens), `fraction_padding` (of all positions), `second_expert_rate` (tokens that
        reached two or more experts), `entropy` (nats, mean over tokens), `load_cv` (standard
        deviation over mean of the expert load before capacity), `max_over_mean` of the same load,
        `dead_experts` (that no token asked for), `expert_usage` (filled slots over slots),
        `confidence` (mean combine weight of an accepted place).
    """
    load, tokens = stats.expert_load.double(), float(stats.num_tokens) or 1.0
    mean = float(load.mean()) or 1.0
    dropped = {
        f"fraction_dropped_choice_{place}": count / tokens
        for place, count in enumerate(stats.dropped_by_place.tolist(), start=1)
    }
    return {
        "load_balance_loss": float(stats.load_balance_sum)
        / (float(stats.load_balance_count) or 1.0),
        "router_z_loss": float(stats.router_z_sum) / (float(stats.router_z_count) or 1.0),
        "fraction_dropped": float(stats.dropped_tokens) / tokens,
        **dropped,
        "fraction_padding": 1 - float(stats.num_tokens) / (float(stats.num_positions) or 1.0),
        "second_expert_rate": float(stats.second_expert_tokens) / tokens,
        "entropy": float(stats.entropy_sum) / tokens,
        "load_cv": float(load.std(correction=0)) / mean,
        "max_over_mean": float(load.max()) / mean,
        "dead_experts": float((load == 0).sum()),
        "expert_usage": float(stats.accepted_load.sum()) / (float(stats.num_slots) or 1.0),
        "confidence": float(stats.confidence_sum) / (float(stats.accepted_load.sum()) or 1.0),
    }


def router_values(stack: str, stats: RouterStats) -> dict[str, float]:
    """Returns `router/{stack}/...`: those numbers of a stack's routers that every training run
    reports.

    Args:
        stack: `encoder` or `decoder`.
        stats: Added up over the layers of the stack.
    """
    summary = summarize(stats)
    return {f"router/{stack}/{name}": summary[name] for name in _REPORTED}
