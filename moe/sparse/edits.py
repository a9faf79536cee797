"""Edits of a plan: drop, reroute or swap experts.

Comes after editing.py, which puts them between the router's plan and its dispatch.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moe.checks import check_integer
from moe.sparse.editing import LayerEdit, PlanEdit
from moe.sparse.layer import SparseFeedForward
from moe.sparse.plan import DispatchPlan, RouterScores, router_scores
from moe.sparse.router import Router


@dataclass(frozen=True)
class _ExpertsEdit(LayerEdit):
    """An edit of some experts.

    Attributes:
        experts: Numbers of the experts, from 0.
    """

    experts: tuple[int, ...]

    def __init__(self, *experts: int) -> None:
        object.__setattr__(self, "experts", experts)

    def for_layer(self, layer: SparseFeedForward) -> PlanEdit:
        """Returns the edit for one layer, which must have these experts."""
        most = layer.config.num_experts - 1
        for expert in self.experts:
            check_integer(
                "expert", expert, least=0, most=most, reason="the last expert of the layer"
            )
        return partial(self.edit, layer)

    @abstractmethod
    def edit(
        self, layer: SparseFeedForward, scores: RouterScores, plan: DispatchPlan
    ) -> DispatchPlan:
        """Returns the plan after the edit."""


class DropExperts(_ExpertsEdit):
    """The experts output nothing, and all other weights stay: as if the experts were full.

    Example:
        with edit_routing(model, {("decoder", 0): DropExperts(2, 5)}):
            loss = model(**batch).loss
    """

    def edit(
        self, layer: SparseFeedForward, scores: RouterScores, plan: DispatchPlan
    ) -> DispatchPlan:
        """Returns the plan in which no choice of the experts is accepted."""
        experts = torch.tensor(self.experts, device=plan.expert_index.device)
        return drop_choices(plan, torch.isin(plan.expert_index, experts))


class RerouteExperts(_ExpertsEdit):
    """The experts cannot be chosen: their tokens choose again among the others, as after pruning.

    The weights are the router's for the remaining experts. If fewer are left than a token chooses,
    it has fewer.
    """

    def edit(
        self, layer: SparseFeedForward, scores: RouterScores, plan: DispatchPlan
    ) -> DispatchPlan:
        """Returns the plan of the router without the experts."""
        barred = torch.zeros_like(scores.logits, dtype=torch.bool)  # [G, S, E]
        barred[..., list(self.experts)] = True
        return choose_again(layer.router, scores, plan, barred)


class SwapExperts(_ExpertsEdit):
    """Tokens of each of two experts go to the other one, with the weights that they had."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(first, second)

    def edit(
        self, layer: SparseFeedForward, scores: RouterScores, plan: DispatchPlan
    ) -> DispatchPlan:
        """Returns the plan with the two experts exchanged."""
        first, second = self.experts
        swapped = plan.expert_index.clone()
        swapped[plan.expert_index == first] = second
        swapped[plan.expert_index == second] = first
        return plan._replace(expert_index=swapped)


def drop_choices(plan: DispatchPlan, dropped: Tensor) -> DispatchPlan:
    """Returns the plan in which some choices <bool>[G, S, K] are not accepted; everything else stays."""
    return plan._replace(
        accepted=plan.accepted & ~dropped,
        combine_weight=plan.combine_weight.masked_fill(dropped, 0),
    )


def choose_again(
    router: Router, scores: RouterScores, plan: DispatchPlan, barred: Tensor
) -> DispatchPlan:
    """Returns the plan that a router makes when some experts are unavailable to some tokens.

    Experts that choose their tokens themselves still do, but output nothing for those tokens.

    Args:
        router: Router of the layer.
        scores: <float32>[G, S, E] of each kind.
        plan: The plan of those scores; says whether there is a capacity.
        barred: <bool>[G, S, E] experts that a token cannot have.
    """
    # The lowest finite logit, so that no difference is NaN. Experts that have it already, e.g. those
    # of other prefixes, stay unavailable.
    lowest = torch.finfo(scores.logits.dtype).min
    barred = barred | (scores.logits == lowest)
    masked = router_scores(scores.logits.masked_fill(barred, lowest))

    # Choose again, with barred experts below all others, even with a bias. If too few experts are
    # left, barred ones are chosen too, and dropped below.
    below_all = masked.probs.masked_fill(barred, lowest)  # [G, S, E]
    has_capacity = plan.capacity is not None
    assigned = router.assign(
        masked._replace(probs=below_all), plan.token_mask, drop_tokens=has_capacity
    )

    # Weights of the remaining choices, as if the others did not exist.
    is_left = ~barred.gather(-1, assigned.expert_index)  # [G, S, K]
    left = assigned._replace(accepted=assigned.accepted & is_left)
    return left._replace(combine_weight=router.combine_weight(masked, left))
