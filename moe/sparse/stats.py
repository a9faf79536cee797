"""Statistics of a router, as sums and counts.

They add up exactly over batches, micro-batches, layers and ranks; `summary` computes readable means
and shares from them. Comes after losses.py; layer.py returns them.
"""

import functools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from moe.distributed.collectives import sum_each_over_ranks
from moe.sparse.losses import RouterLosses
from moe.sparse.plan import DispatchPlan, RouterScores


class RouterStats(NamedTuple):
    """Sums and counts over the real tokens of one layer; `summary` gives readable numbers.

    `a + b` adds those of two batches, `RouterStats.sum` those of several layers, `all_reduce` those
    of all ranks. Counts are integers and sums float64, so that no token is lost in a long run.

    Attributes:
        expert_load: <int64>[E] choices that requested each expert, before capacity.
        accepted_load: <int64>[E] choices that got a slot.
        num_slots: <int64>[] slots there were; without a capacity, the slots that were used.
        num_tokens: <int64>[] real tokens.
        num_positions: <int64>[] tokens with their padding.
        dropped_tokens: <int64>[] tokens that reached no expert.
        dropped_by_choice: <int64>[K] choices that requested a slot and got none.
        second_expert_tokens: <int64>[] tokens that reached two or more experts.
        entropy_sum: <float64>[] entropy of the router's probabilities in nats, over tokens.
        confidence_sum: <float64>[] combine weights of the accepted choices.
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
    dropped_by_choice: Tensor
    second_expert_tokens: Tensor
    entropy_sum: Tensor
    confidence_sum: Tensor
    load_balance_sum: Tensor
    load_balance_count: Tensor
    router_z_sum: Tensor
    router_z_count: Tensor

    def __add__(self, other: "RouterStats") -> "RouterStats":  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the statistics of both together, not a longer tuple; they must have the same E and K."""
        return RouterStats(*(a + b for a, b in zip(self, other, strict=True)))

    @staticmethod
    def sum(layers: Iterable["RouterStats"]) -> "RouterStats":
        """Returns the statistics of one or more layers together; a token counts once for each layer.

        Layers with different numbers of experts have no common load: `expert_load` is then empty,
        and `accepted_load` is the sum over experts. In `dropped_by_choice`, a layer with fewer
        choices counts 0 for the others.
        """
        layers = list(layers)
        num_choices = max(layer.dropped_by_choice.numel() for layer in layers)
        is_equal = len({layer.expert_load.numel() for layer in layers}) == 1

        alike = []
        for layer in layers:
            num_missing = num_choices - layer.dropped_by_choice.numel()
            by_choice = F.pad(layer.dropped_by_choice, (0, num_missing))
            layer = layer._replace(dropped_by_choice=by_choice)
            if not is_equal:
                accepted = layer.accepted_load.sum(dim=0, keepdim=True)
                layer = layer._replace(expert_load=layer.expert_load[:0], accepted_load=accepted)
            alike.append(layer)
        return functools.reduce(operator.add, alike)

    @staticmethod
    def unflatten(numbers: Sequence[Tensor]) -> "list[RouterStats]":
        """Returns the statistics of several layers, given the fields <any>[...] of all in a row."""
        num_fields = len(RouterStats._fields)
        starts = range(0, len(numbers), num_fields)
        return [RouterStats(*numbers[start : start + num_fields]) for start in starts]

    def all_reduce(self, group: ProcessGroup | None = None) -> "RouterStats":
        """Returns the statistics of the ranks of `group` together, the same on each; None for all."""
        return RouterStats(*sum_each_over_ranks(self, group))

    def summary(self) -> dict[str, float]:
        """Returns readable numbers.

        Returns:
            `load_balance_loss` and `router_z_loss` (unweighted means), `fraction_dropped` (tokens that
            reached no expert), `fraction_dropped_choice_1` to `_K` (choices that requested a slot and
            got none, of all tokens), `fraction_padding` (of all positions), `second_expert_rate`
            (tokens that reached two or more experts), `entropy` (nats, mean over tokens), `load_cv`
            (standard deviation over mean of the expert load before capacity), `max_over_mean` of the
            same load, `dead_experts` (that no token requested), `expert_usage` (filled slots over
            slots), `confidence` (mean combine weight of an accepted choice). Load statistics are NaN
            where layers with different numbers of experts were added.
        """
        # If nothing was counted, shares are divided by 1 instead of 0.
        load = self.expert_load.double()  # [E]
        dead_experts = float((load == 0).sum())
        if not load.numel():
            load = load.new_full((1,), math.nan)
            dead_experts = math.nan
        mean_load = float(load.mean()) or 1.0
        num_tokens = float(self.num_tokens) or 1.0
        num_accepted = float(self.accepted_load.sum())

        # One share for each choice, counted from 1.
        dropped_by_choice: dict[str, float] = {}
        for choice, count in enumerate(self.dropped_by_choice.tolist(), start=1):
            dropped_by_choice[f"fraction_dropped_choice_{choice}"] = count / num_tokens

        return {
            "load_balance_loss": _ratio(self.load_balance_sum, self.load_balance_count),
            "router_z_loss": _ratio(self.router_z_sum, self.router_z_count),
            "fraction_dropped": float(self.dropped_tokens) / num_tokens,
            **dropped_by_choice,
            "fraction_padding": 1 - _ratio(self.num_tokens, self.num_positions),
            "second_expert_rate": float(self.second_expert_tokens) / num_tokens,
            "entropy": float(self.entropy_sum) / num_tokens,
            "load_cv": float(load.std(correction=0)) / mean_load,
            "max_over_mean": float(load.max()) / mean_load,
            "dead_experts": dead_experts,
            "expert_usage": num_accepted / (float(self.num_slots) or 1.0),
            "confidence": float(self.confidence_sum) / (num_accepted or 1.0),
        }

    @staticmethod
    def max_violations(layers: Sequence["RouterStats"]) -> dict[str, float]:
        """Returns `max_vio_p50` and `max_vio_p95`: the median and 95th percentile of MaxVio over layers.

        MaxVio of a layer is the largest expert load over the mean load, less 1: 0 is uniform.

        Args:
            layers: Statistics of each layer; at least one.

        Source:
            Auxiliary-Loss-Free Load Balancing (arXiv:2408.15664) §4.1.
        """
        violations = torch.tensor([stats.summary()["max_over_mean"] - 1 for stats in layers])
        quantiles = torch.quantile(violations, torch.tensor([0.5, 0.95]))
        return {"max_vio_p50": float(quantiles[0]), "max_vio_p95": float(quantiles[1])}


@torch.no_grad()
def router_stats(scores: RouterScores, plan: DispatchPlan, losses: RouterLosses) -> RouterStats:
    """Returns the statistics of one layer, without gradient and without waiting for the device.

    Args:
        scores: <float32>[G, S, E] of the router.
        plan: The resulting plan.
        losses: The losses of the same plan.
    """
    # Choices of each expert, and first, second, ... choices: requested and accepted.
    num_groups, _, num_experts = scores.probs.shape
    choices = torch.stack([plan.requested, plan.accepted]).long()  # [2, G, S, K]
    expert_index = plan.expert_index.flatten().expand(2, -1)  # [2, T * K]
    loads = choices.new_zeros(2, num_experts)
    loads = loads.scatter_add_(1, expert_index, choices.flatten(1))
    expert_load, accepted_load = loads.unbind()  # [E]
    requested, accepted = choices.sum(dim=(1, 2)).unbind()  # [K]

    # Tokens that reached at least one expert, and two; all positions reached at least none.
    experts_reached = choices[1].sum(dim=-1)  # [G, S]
    least = torch.arange(3, device=experts_reached.device)[:, None, None]
    num_positions, used_tokens, second_expert_tokens = (
        (experts_reached >= least).sum(dim=(1, 2)).unbind()
    )
    num_tokens = plan.token_mask.sum()

    # Entropy in nats: -sum_i p_i log p_i, without padding.
    entropy = torch.special.entr(scores.probs * plan.token_mask[..., None])  # [G, S, E]

    # Without a capacity there are as many slots as are used.
    if plan.capacity is None:
        num_slots = accepted_load.sum()
    else:
        slots_of_all = num_groups * num_experts * plan.capacity
        num_slots = torch.full_like(accepted_load[0], slots_of_all)

    # Sum and count of both losses.
    load_balance_sum, load_balance_count, router_z_sum, router_z_count = (
        torch.stack(losses[:4]).double().unbind()
    )

    return RouterStats(
        expert_load=expert_load,
        accepted_load=accepted_load,
        num_slots=num_slots,
        num_tokens=num_tokens,
        num_positions=num_positions,
        dropped_tokens=num_tokens - used_tokens,
        dropped_by_choice=requested - accepted,
        second_expert_tokens=second_expert_tokens,
        entropy_sum=entropy.sum(dtype=torch.float64),
        confidence_sum=plan.combine_weight.sum(dtype=torch.float64),
        load_balance_sum=load_balance_sum,
        load_balance_count=load_balance_count,
        router_z_sum=router_z_sum,
        router_z_count=router_z_count,
    )


def _ratio(total: Tensor, count: Tensor) -> float:
    """Returns total <any>[] over count <any>[]; the total if nothing was counted."""
    return float(total) / (float(count) or 1.0)
