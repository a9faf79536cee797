"""Interventions on an expert that show its contribution: drop, reroute.

Each applies to the choices of an expert, or to as many random ones; `ablate` runs them over all experts.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from einops import rearrange
from torch import Tensor
from transformers import PreTrainedModel

from moe.sparse.adapters import unwrapped
from moe.sparse.editing import LayerEdit, LayerKey, PlanEdit, edit_routing
from moe.sparse.edits import RerouteExperts, choose_again, drop_choices
from moe.sparse.layer import SparseFeedForward
from moe.sparse.plan import DispatchPlan, RouterScores

# ---------------------------------------------------------------------------
# Choices

ChoiceMask = Callable[[DispatchPlan], Tensor]
"""A function of a plan that returns <bool>[G, S, K]: some of its accepted choices."""


def choices_of(expert: int) -> ChoiceMask:
    """Returns the function that finds the accepted choices of one expert."""

    def find(plan: DispatchPlan) -> Tensor:
        return plan.accepted & (plan.expert_index == expert)

    return find


def as_many_at_random(expert: int, *, num_sequences: int, seed: int) -> ChoiceMask:
    """Returns the function that draws as many accepted choices as an expert has, in each sequence.

    The draw is from the choices of all experts. One seed gives every expert of a layer the same random order of
    choices, and a larger expert takes more of them: all experts are compared with the same random tokens, regardless of
    their loads.

    Args:
        expert: Number of the expert, from 0.
        num_sequences: Sequences of the batch that plans will be of, B.
        seed: Seed of the random order.
    """
    own_choices = choices_of(expert)

    def by_sequence(x: Tensor) -> Tensor:
        # Groups are of whole sequences, one after the other.
        flat = rearrange(x, "g s k -> (g s k)")
        return flat.unflatten(0, (num_sequences, -1))  # [B, L * K]

    def draw(plan: DispatchPlan) -> Tensor:
        # Number of draws in each sequence.
        accepted = by_sequence(plan.accepted)
        is_own = by_sequence(own_choices(plan))
        num_wanted = is_own.sum(dim=1, keepdim=True)  # [B, 1]

        # A random number for each choice, drawn on the CPU so that all devices draw alike.
        generator = torch.Generator().manual_seed(seed)
        shape = accepted.shape
        lot = torch.rand(shape, generator=generator, dtype=torch.float64)
        lot = lot.to(accepted.device)

        # Numbers are below 1: choices that are not accepted come after all others.
        lot = lot.masked_fill(~accepted, 2)
        place = lot.argsort(dim=1).argsort(dim=1)  # [B, L * K]
        drawn = place < num_wanted
        return drawn.view_as(plan.accepted)

    return draw


# ---------------------------------------------------------------------------
# Interventions

Context = AbstractContextManager[None]
"""Inside it something is ablated."""


Intervention = Callable[[PreTrainedModel, LayerKey, ChoiceMask], Context]
"""A change to some accepted choices in a layer of a model, during evaluation."""


def drop(model: PreTrainedModel, key: LayerKey, choices: ChoiceMask) -> Context:
    """Sets the output to 0 and keeps all weights, as if the expert were full: shows its contribution."""

    def edit(_: RouterScores, plan: DispatchPlan) -> DispatchPlan:
        return drop_choices(plan, choices(plan))

    return edit_routing(model, {key: edit})


def reroute(model: PreTrainedModel, key: LayerKey, choices: ChoiceMask) -> Context:
    """Lets tokens choose again among the other experts, as after pruning: shows the cost of its loss.

    Without the expert the others' probabilities are larger. A router whose weights are plain
    probabilities then changes the weights of tokens that never chose it, too.
    """
    return edit_routing(model, {key: _RerouteChoices(choices)})


INTERVENTIONS: dict[str, Intervention] = {"drop": drop, "reroute": reroute}


def ablate_expert(intervention: str, model: PreTrainedModel, key: LayerKey, expert: int) -> Context:
    """Returns the context in which an intervention applies to all choices of an expert."""
    if intervention == "reroute":  # no token can choose it
        return edit_routing(model, {key: RerouteExperts(expert)})
    return INTERVENTIONS[intervention](model, key, choices_of(expert))


class _RerouteChoices(LayerEdit):
    """The tokens of the given choices choose again among the other experts."""

    def __init__(self, choices: ChoiceMask) -> None:
        self._choices = choices

    def for_layer(self, layer: SparseFeedForward) -> PlanEdit:
        def reroute(scores: RouterScores, plan: DispatchPlan) -> DispatchPlan:
            # From choices to the experts of each token.  [G, S, K] -> [G, S, E]
            choices = self._choices(plan)
            count = torch.zeros_like(scores.logits)
            count = count.scatter_add(-1, plan.expert_index, choices.to(count))
            barred = count > 0
            return choose_again(unwrapped(layer.router), scores, plan, barred)

        return reroute
