"""Choices that an intervention is about: those of one expert, or as many at random.

Comes before `interventions`.
"""

from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor

from moe.sparse.plan import DispatchPlan

ChoiceMask = Callable[[DispatchPlan], Tensor]
"""A function of a plan that returns <bool>[G, S, K]: some of its accepted choices."""


def choices_of(expert: int) -> ChoiceMask:
    """Returns the function that finds the accepted choices of one expert."""

    def find(plan: DispatchPlan) -> Tensor:
        return plan.accepted & (plan.expert_index == expert)

    return find


def as_many_at_random(expert: int, *, num_sequences: int, seed: int) -> ChoiceMask:
    """Returns the function that draws as many accepted choices as an expert has, in each sequence.

    The draw is from the choices of all experts. One seed gives every expert of a layer the same
    lot, of which a larger expert takes more: so experts are compared to the same random tokens, and
    their numbers play no part.

    Args:
        expert: Number of the expert, from 0.
        num_sequences: Sequences of the batch that plans will be of, B.
        seed: Of the lot.
    """
    own_choices = choices_of(expert)

    def by_sequence(x: Tensor) -> Tensor:
        # Groups are of whole sequences, one after the other.
        flat = rearrange(x, "g s k -> (g s k)")
        return flat.unflatten(0, (num_sequences, -1))  # [B, L * K]

    def draw(plan: DispatchPlan) -> Tensor:
        # How many to draw in each sequence.
        accepted = by_sequence(plan.accepted)
        own = by_sequence(own_choices(plan))
        num_wanted = own.sum(dim=1, keepdim=True)  # [B, 1]

        # A lot for each choice, drawn on the CPU so that all devices draw alike.
        generator = torch.Generator().manual_seed(seed)
        shape = accepted.shape
        lot = torch.rand(shape, generator=generator, dtype=torch.float64)
        lot = lot.to(accepted.device)

        # Lots are below 1: choices that are not accepted stand behind all others.
        lot = lot.masked_fill(~accepted, 2)
        place = lot.argsort(dim=1).argsort(dim=1)  # [B, L * K]
        drawn = place < num_wanted
        return drawn.view_as(plan.accepted)

    return draw
