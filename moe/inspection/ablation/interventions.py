"""What is done to an expert to see what it is for: drop, reroute, mean, swap.

Comes after `choices` and `mean_output`; `ablation` runs them over all experts.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe.inspection.ablation.choices import ChoiceMask, choices_of
from moe.inspection.ablation.mean_output import replace_by_mean
from moe.registry import Registry
from moe.sparse.editing import LayerEdit, LayerKey, PlanEdit, edit_routing
from moe.sparse.edits import RerouteExperts, choose_again, drop_choices
from moe.sparse.layer import SparseFeedForward
from moe.sparse.plan import DispatchPlan, RouterScores

Context = AbstractContextManager[None]
"""Inside it something is ablated."""


class AblatedLayer(NamedTuple):
    """A sparse layer, and what an intervention may need to know of it.

    Attributes:
        module: The model that it is in.
        key: Its name.
        mean_output: <any float>[E, D] mean output of each expert.
        peer: <int64>[E] another expert for each, by default the one of nearest load.
    """

    module: nn.Module
    key: LayerKey
    mean_output: Tensor
    peer: Tensor


class Intervention(ABC):
    """Something that is done to an expert at evaluation; registered in INTERVENTIONS."""

    @abstractmethod
    def to_choices(self, layer: AblatedLayer, choices: ChoiceMask) -> Context:
        """Returns the context in which it is done to some accepted choices."""

    def to_expert(self, layer: AblatedLayer, expert: int) -> Context:
        """Returns the context in which it is done to an expert: to all choices of it."""
        return self.to_choices(layer, choices_of(expert))


INTERVENTIONS: Registry[Intervention] = Registry("intervention")


class Drop(Intervention):
    """The output is 0 and all weights stay, as when the expert is full: what it contributes."""

    def to_choices(self, layer: AblatedLayer, choices: ChoiceMask) -> Context:
        """Returns the context in which choices are dropped."""

        def drop(_: RouterScores, plan: DispatchPlan) -> DispatchPlan:
            dropped = choices(plan)
            return drop_choices(plan, dropped)

        return edit_routing(layer.module, {layer.key: drop})


class Reroute(Intervention):
    """Tokens choose again among the other experts, as after pruning: what its loss costs.

    Without the expert the others' probabilities are larger. A router whose weights are plain
    probabilities then changes the weights of tokens that never chose it, too.
    """

    def to_choices(self, layer: AblatedLayer, choices: ChoiceMask) -> Context:
        """Returns the context in which tokens choose again without the expert of each choice."""
        edit = _RerouteChoices(choices)
        return edit_routing(layer.module, {layer.key: edit})

    def to_expert(self, layer: AblatedLayer, expert: int) -> Context:
        """Returns the context in which no token can choose the expert."""
        edit = RerouteExperts(expert)
        return edit_routing(layer.module, {layer.key: edit})


class Mean(Intervention):
    """The output is its mean over calibration batches: what it tells tokens apart by."""

    def to_choices(self, layer: AblatedLayer, choices: ChoiceMask) -> Context:
        """Returns the context in which the outputs of choices are the means of their experts."""
        mean_output = layer.mean_output
        return replace_by_mean(layer.module, layer.key, choices, mean_output)


class Swap(Intervention):
    """The tokens go to the expert's peer, with the weights that they had: whether it is special.

    The peer's own tokens stay where they are, so that nothing but the expert is ablated;
    `moe.sparse.edits.SwapExperts` exchanges two experts.
    """

    def to_choices(self, layer: AblatedLayer, choices: ChoiceMask) -> Context:
        """Returns the context in which choices go to the peers of their experts."""

        def swap(_: RouterScores, plan: DispatchPlan) -> DispatchPlan:
            moved = choices(plan)
            return _move_choices(plan, moved, layer.peer)

        return edit_routing(layer.module, {layer.key: swap})


# Whoever adds one has it in all tables and commands.
INTERVENTIONS.add("drop", Drop())
INTERVENTIONS.add("reroute", Reroute())
INTERVENTIONS.add("mean", Mean())
INTERVENTIONS.add("swap", Swap())


class _RerouteChoices(LayerEdit):
    """Tokens of some choices choose again, without the experts of those choices."""

    def __init__(self, choices: ChoiceMask) -> None:
        self._choices = choices

    def for_layer(self, layer: SparseFeedForward) -> PlanEdit:
        def reroute(scores: RouterScores, plan: DispatchPlan) -> DispatchPlan:
            # From choices to the experts of each token.  [G, S, K] -> [G, S, E]
            choices = self._choices(plan)
            count = torch.zeros_like(scores.logits)
            count = count.scatter_add(-1, plan.expert_index, choices.to(count))
            barred = count > 0
            return choose_again(layer.router, scores, plan, barred)

        return reroute


def _move_choices(plan: DispatchPlan, moved: Tensor, peer: Tensor) -> DispatchPlan:
    """Returns the plan in which some choices <bool>[G, S, K] go to the peers <int64>[E]."""
    # The other choices keep their experts, and nothing is dropped.
    index = plan.expert_index
    peer = peer.to(index.device)
    return plan._replace(expert_index=torch.where(moved, peer[index], index))  # [G, S, K]
