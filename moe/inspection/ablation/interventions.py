"""Interventions on an expert that show its contribution: drop, reroute, mean, swap.

Each applies to the choices of an expert, or to as many random ones; `ablate` runs them over all experts.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe.sparse.editing import (
    LayerEdit,
    LayerKey,
    PlanEdit,
    check_layer,
    edit_routing,
    sparse_layers,
)
from moe.sparse.edits import RerouteExperts, choose_again, drop_choices
from moe.sparse.layer import RouterOutput, SparseFeedForward
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


class AblatedLayer(NamedTuple):
    """A sparse layer with the statistics that interventions need.

    Attributes:
        module: The model that it is in.
        key: Its name.
        mean_output: <any float>[E, D] mean output of each expert.
        peer: <int64>[E] another expert for each, by default the one of nearest load.
    """

    module: PreTrainedModel
    key: LayerKey
    mean_output: Tensor
    peer: Tensor


Intervention = Callable[[AblatedLayer, ChoiceMask], Context]
"""A change to the accepted choices of an expert, or to as many random ones, during evaluation."""


def drop(layer: AblatedLayer, choices: ChoiceMask) -> Context:
    """Sets the output to 0 and keeps all weights, as if the expert were full: shows its contribution."""

    def edit(_: RouterScores, plan: DispatchPlan) -> DispatchPlan:
        return drop_choices(plan, choices(plan))

    return edit_routing(layer.module, {layer.key: edit})


def reroute(layer: AblatedLayer, choices: ChoiceMask) -> Context:
    """Lets tokens choose again among the other experts, as after pruning: shows the cost of its loss.

    Without the expert the others' probabilities are larger. A router whose weights are plain
    probabilities then changes the weights of tokens that never chose it, too.
    """
    return edit_routing(layer.module, {layer.key: _RerouteChoices(choices)})


def mean(layer: AblatedLayer, choices: ChoiceMask) -> Context:
    """Replaces the output by its mean over the batches: shows how it distinguishes tokens."""
    return replace_by_mean(layer.module, layer.key, choices, layer.mean_output)


def swap(layer: AblatedLayer, choices: ChoiceMask) -> Context:
    """Sends the tokens to the expert's peer with unchanged weights: shows whether it is special.

    The peer's own tokens stay where they are, so that nothing but the expert is ablated;
    `moe.sparse.edits.SwapExperts` exchanges two experts.
    """

    def edit(_: RouterScores, plan: DispatchPlan) -> DispatchPlan:
        # The other choices keep their experts, and nothing is dropped.
        index = plan.expert_index  # [G, S, K]
        peer = layer.peer.to(index.device)
        return plan._replace(expert_index=torch.where(choices(plan), peer[index], index))

    return edit_routing(layer.module, {layer.key: edit})


INTERVENTIONS: dict[str, Intervention] = {
    "drop": drop,
    "reroute": reroute,
    "mean": mean,
    "swap": swap,
}


def ablate_expert(intervention: str, layer: AblatedLayer, expert: int) -> Context:
    """Returns the context in which an intervention applies to all choices of an expert."""
    if intervention == "reroute":  # no token can choose it
        return edit_routing(layer.module, {layer.key: RerouteExperts(expert)})
    return INTERVENTIONS[intervention](layer, choices_of(expert))


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
            return choose_again(layer.router, scores, plan, barred)

        return reroute


# ---------------------------------------------------------------------------
# Outputs replaced by their mean


@contextmanager
def replace_by_mean(
    module: nn.Module, key: LayerKey, choices: ChoiceMask, mean_output: Tensor
) -> Iterator[None]:
    """Replaces the outputs of some choices by the mean outputs of their experts inside the block.

    The weights stay. In the reported plan these choices are dropped.

    Example:
        with replace_by_mean(model, ("encoder", 0), choices_of(3), measures.mean_output):
            loss = model(**batch).loss

    Args:
        module: A model with sparse layers.
        key: Name of the layer.
        choices: Finds the choices.
        mean_output: <any float>[E, D] mean output of each expert, before its weight.

    Raises:
        ConfigError: When the module has no such layer.
    """
    layers = sparse_layers(module)
    check_layer(key, layers, module)
    layer = layers[key]

    assert mean_output.shape == (layer.config.num_experts, layer.config.d_model), "a mean each"
    added = Tensor()

    def drop(scores: RouterScores, plan: DispatchPlan) -> DispatchPlan:
        # The weight of each choice that is replaced, by expert, times the expert's mean.
        nonlocal added
        replaced = choices(plan)
        weight = plan.combine_weight * replaced  # [G, S, K]
        by_expert = weight.new_zeros(scores.probs.shape)  # [G, S, E]
        by_expert = by_expert.scatter_add(-1, plan.expert_index, weight)
        added = by_expert @ mean_output.to(weight)  # [G, S, D]
        return drop_choices(plan, replaced)

    def add(
        layer: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, RouterOutput | None]
    ) -> tuple[Tensor, RouterOutput | None]:
        y, router_output = output  # [B, L, D]
        return y + added.to(y.dtype).view_as(y), router_output

    # The edit comes first in a forward pass, the hook last.
    with edit_routing(module, {key: drop}), layer.register_forward_hook(add):
        yield
